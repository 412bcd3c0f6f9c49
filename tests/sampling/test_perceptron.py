"""The direct path of perceptrons against the general one."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.sampling.perceptron import as_perceptron
from tests.sampling.zoo import Module

NETS = {
    "input and hidden": [nn.Dropout(0.2), nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)],
    "hidden only": [nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2)],
    "deep": [nn.Linear(3, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 8, bias=False), nn.SELU(), nn.Dropout(0.5), nn.Linear(8, 2)],
    "dropout last": [nn.Linear(3, 8), nn.Sigmoid(), nn.Dropout(0.3), nn.Linear(8, 2), nn.Dropout(0.1)],
    "twice": [nn.Dropout(0.2), nn.Dropout(0.3), nn.Linear(3, 4), nn.LeakyReLU(0.1), nn.Dropout(0.0), nn.Linear(4, 1)],
}  # fmt: skip


def pair(name):
    torch.manual_seed(0)
    net = nn.Sequential(*NETS[name]).eval()
    return net, Module(lambda m, x: m.inner(x), inner=net)


@pytest.mark.parametrize("masks", ["shared", "row"])
@pytest.mark.parametrize("name", NETS)
def test_draws_are_those_of_the_general_path(name, masks):
    net, general = pair(name)
    x = torch.randn(70, 3)
    torch.testing.assert_close(db.draws(net, x, n_draws=17, masks=masks), db.draws(general, x, n_draws=17, masks=masks))


@pytest.mark.parametrize("masks", ["shared", "row"])
@pytest.mark.parametrize("name", NETS)
def test_moments_are_those_of_the_general_path(name, masks):
    net, general = pair(name)
    x = torch.randn(20, 3)
    ours, theirs = db.predict(net, x, n_draws=30, masks=masks), db.predict(general, x, n_draws=30, masks=masks)
    assert "direct" in ours.method or ours.method == "exact"
    assert "direct" not in theirs.method
    torch.testing.assert_close(ours.mean, theirs.mean)
    torch.testing.assert_close(ours.variance, theirs.variance)


def test_no_network_is_taken_for_a_perceptron_while_the_whole_process_has_hooks():
    net, x = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), torch.zeros(3, 2)
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert as_perceptron(net, x) is None
    finally:
        handle.remove()
    assert as_perceptron(net, x) is not None


def test_networks_that_do_more_are_not_taken_for_perceptrons():
    x = torch.zeros(3, 2)
    assert as_perceptron(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), x) is None
    assert as_perceptron(nn.Sequential(nn.Dropout(0.1)), x) is None
    hooked = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    hooked[0].register_forward_hook(lambda *_: None)
    assert as_perceptron(hooked, x) is None
    frozen = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    frozen[1].train = lambda mode=True: frozen[1]  # a mode that nobody switches
    assert as_perceptron(frozen, x) is None

    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    assert as_perceptron(nn.Sequential(Own(2, 2), nn.Dropout(0.1)), x) is None


@pytest.mark.parametrize("kind", [nn.Sequential, nn.Linear, nn.Dropout, nn.Tanh])
def test_a_class_whose_forward_was_replaced_is_no_part_of_a_perceptron(kind, monkeypatch):
    net, x = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Dropout(0.1)), torch.zeros(3, 2)
    assert as_perceptron(net, x) is not None
    monkeypatch.setattr(kind, "forward", lambda self, x: x)
    assert as_perceptron(net, x) is None


def test_weights_changed_behind_autograds_back_are_noticed():
    net = nn.Sequential(nn.Dropout(0.2), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    x = torch.ones(1, 3)
    before = db.predict(net, x).mean
    net[1].weight.data.mul_(2)
    net[3].bias.data.add_(10)
    after = db.predict(net, x).mean
    torch.testing.assert_close(after, db.predict(Module(lambda m, v: m.inner(v), inner=net), x).mean)
    assert (after - before).abs() > 5


@pytest.mark.parametrize("first", [True, False])
def test_rows_that_need_not_be_exact_differ_by_rounding_only(first):
    torch.manual_seed(0)
    layers = [
        nn.Linear(3, 300),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(300, 256),
        nn.Tanh(),
        nn.Dropout(0.3),
        nn.Linear(256, 2),
    ]
    net = nn.Sequential(*([nn.Dropout(0.4)] if first else []), *layers).eval()
    x = torch.randn(9, 3)
    free = db.predict(net, x, n_draws=12, sampling=db.Sampling(batch_invariant=False), keep_draws=True)
    torch.testing.assert_close(free.draws, db.draws(net, x, n_draws=12), rtol=1e-4, atol=1e-5)


def test_layers_that_do_nothing_leave_the_moments_exact():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Dropout(0.3), nn.Linear(6, 2)).eval(), torch.randn(4, 3)
    ours = db.predict(nn.Sequential(*net[:3], nn.Identity(), net[3], nn.Identity()).eval(), x)
    assert ours.method == "exact"
    assert torch.equal(ours.epistemic, db.predict(net, x).epistemic)


@pytest.mark.parametrize("activation", [nn.Identity(), nn.ReLU()])
def test_exact_moments_are_those_of_all_masks(activation):
    # One site before the last layer of 6 units: the 64 masks can be enumerated with their probabilities.
    torch.manual_seed(0)
    drop_prob = 0.3
    net = nn.Sequential(nn.Linear(2, 6), activation, nn.Dropout(drop_prob), nn.Linear(6, 2)).double().eval()
    x = torch.randn(3, 2, dtype=torch.float64)
    hidden = activation(net[0](x))
    outputs, weights = [], []
    for keep in itertools.product((0.0, 1.0), repeat=6):
        mask = torch.tensor(keep, dtype=torch.float64)
        outputs.append(net[3](hidden * mask / (1 - drop_prob)))
        weights.append((1 - drop_prob) ** sum(keep) * drop_prob ** (6 - sum(keep)))
    weight = torch.tensor(weights, dtype=torch.float64)[:, None, None]
    mean = (torch.stack(outputs) * weight).sum(0)
    variance = (torch.stack(outputs).square() * weight).sum(0) - mean.square()
    prediction = db.predict(net, x)
    assert prediction.method == "exact" and prediction.n_draws == 0
    torch.testing.assert_close(prediction.mean, mean.detach())
    torch.testing.assert_close(prediction.epistemic, variance.detach())


@pytest.mark.slow
def test_what_somebody_put_in_the_place_of_torchs_own_is_called(monkeypatch):
    net, x, dropout, called = pair("hidden only")[0], torch.randn(4, 3), F.dropout, nn.Module.__call__
    plain = db.predict(net, x)

    def rarely(input, p=0.5, training=True, inplace=False):
        return dropout(input, p / 3, training, inplace)

    def doubled(self, *args):
        return called(self, *args) * (2 if isinstance(self, nn.Linear) else 1)

    with monkeypatch.context() as patch:
        patch.setattr(F, "dropout", rarely)
        # Exact: p / (1 - p) times a sum of squares.
        torch.testing.assert_close(db.predict(net, x).variance, plain.variance * (0.1 / 0.9) / (0.3 / 0.7))
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", doubled)
        torch.testing.assert_close(db.predict(net, x, n_draws=2000).mean, net(x), rtol=0.05, atol=0.05)
    torch.testing.assert_close(db.predict(net, x).mean, plain.mean)


def test_a_name_that_the_network_does_not_take_is_no_input():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1)), torch.ones(5, 3)
    assert torch.equal(db.predict(net, {"input": x}).mean, db.predict(net, x).mean)
    with pytest.raises(TypeError, match=r"argument 'input' .* must be Tensor, not dict"):
        db.predict(net, {"inputs": x})
