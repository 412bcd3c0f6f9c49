"""Procedures of others under draws."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.guests import each_draw, one_draw, predict_through
from dropbayes.predictive import UncertaintyWarning


def network(drop_prob=0.5):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(drop_prob), nn.Linear(16, 3)).eval()


X = torch.linspace(-1, 1, 12).view(4, 3)


def test_a_recursion_runs_through_one_function_from_beginning_to_end():
    net = network()

    def path():
        state = X
        for _ in range(5):
            state = net(state)
        return state

    expected = []
    for index in range(4):
        draw, state = db.function_draw(network(), index, n_draws=4), X
        for _ in range(5):
            state = draw(state)
        expected.append(state)
    for ours, theirs in zip(each_draw(net, path, n_draws=4), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_the_moments_are_those_of_the_results():
    net = network()
    prediction = predict_through(
        net, lambda: {"sum": net(X).sum(), "row": net(X)[0].detach().numpy()}, n_draws=20, keep_draws=True, quantiles=(0.5,)
    )  # fmt: skip
    draws = db.draws(net, X, n_draws=20)
    torch.testing.assert_close(prediction.mean["row"], draws[:, 0].mean(0))
    torch.testing.assert_close(prediction.epistemic["row"], draws[:, 0].var(0, correction=0))
    torch.testing.assert_close(prediction.draws["row"], draws[:, 0])
    torch.testing.assert_close(prediction.quantiles["row"][0], draws[:, 0].quantile(0.5, 0))
    torch.testing.assert_close(prediction.mean["sum"], draws.sum((1, 2)).mean()[None])


def test_a_procedure_may_differentiate_and_its_prediction_holds_no_graph():
    net = network()

    def slope():
        x = X.clone().requires_grad_()
        energy = net(x).tanh().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return {"energy": energy, "force": force}

    prediction = predict_through(net, slope, n_draws=5, keep_draws=True, quantiles=(0.5,))
    for tree in (prediction.mean, prediction.epistemic, prediction.draws, prediction.quantiles):
        assert not tree["energy"].requires_grad and not tree["force"].requires_grad
    assert bool((prediction.epistemic["force"] > 0).any())


def test_positional_and_named_arguments_may_be_mixed():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x, scale=1.0, **others):
            return self.net(x) * scale + others.get("shift", 0.0)

    net = Scaled()
    with one_draw(net, 1, n_draws=4), torch.no_grad():
        output = net(X, scale=2.0, shift=1.0)
    torch.testing.assert_close(output, 2 * db.draws(net.net, X, n_draws=4)[1] + 1)


def test_hooks_run_once_and_a_forward_of_the_instance_is_kept():
    net = network()
    net.register_forward_hook(lambda module, args, output: output + 1)
    net.forward = lambda x: nn.Sequential.forward(net, x) * 2
    own = net.forward
    with one_draw(net, 0, n_draws=4), torch.no_grad():
        output = net(X)
        assert torch.equal(net.forward(X), output)
    assert net.forward is own
    torch.testing.assert_close(output, db.draws(net, X, n_draws=4)[0])


def test_a_network_that_is_never_called_and_one_that_raises_are_left_as_they_were():
    net = network()
    before = dict(vars(net))
    with pytest.raises(ValueError, match=r"`net` must be what the procedure calls.*Sequential was never called"):
        each_draw(net, lambda: net[3](torch.ones(1, 16)), n_draws=3)
    with pytest.raises(RuntimeError), one_draw(net):
        net(torch.ones(1, 7))
    assert vars(net) == before


def test_results_that_are_the_same_for_every_draw_are_warned_of():
    net = network()
    with pytest.warns(UncertaintyWarning, match="the epistemic variance is 0"):
        predict_through(net, lambda: net(X).detach() * 0, n_draws=3)


def test_nothing_random_is_refused():
    net = network(0.0)
    with pytest.raises(ValueError, match="must have dropout"):
        predict_through(net, lambda: net(X))


@pytest.mark.parametrize("through", [each_draw, predict_through])
def test_no_draws_at_all_are_refused(through):
    net = network()
    with pytest.raises(ValueError, match="`n_draws` must be a whole number, at least 1; got 0"):
        through(net, lambda: net(X), n_draws=0)


@pytest.mark.parametrize("number", [float, lambda value: value.numpy()[()]], ids=["float", "numpy"])
def test_numbers_among_the_results_are_averaged_too(number):
    net = network()
    found = predict_through(net, lambda: {"all": net(X).detach(), "first": number(net(X).detach()[0, 0])}, n_draws=5)
    torch.testing.assert_close(found.mean["first"].squeeze().float(), found.mean["all"][0, 0].float())


def test_one_draw_inside_another_of_the_same_network_is_refused():
    net = network()
    with one_draw(net, 0, n_draws=4):
        with pytest.raises(ValueError, match="one `one_draw` at a time"), one_draw(net, 1):
            pass
        output = net(X)
    assert torch.equal(output, db.function_draw(network(), 0, n_draws=4)(X))


@pytest.mark.parametrize("results", [lambda y, n: y[:n], lambda y, n: [y] * n, lambda y, n: {str(n): y}])
def test_results_that_differ_in_form_between_draws_are_refused(results):
    net, counts = network(), iter((1, 2))
    with pytest.raises(ValueError, match=r"`procedure` must give tensors of the same shapes.*Use `each_draw`"):
        predict_through(net, lambda: results(net(X).detach(), next(counts)), n_draws=2)
