"""Whole runs of `fit`."""

import copy
import inspect
import math
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.training import EarlyStopping, Objective, Optimization, Progress, fit, kl_divergence
from tests.training.toys import network, toy


def test_a_run_depends_on_its_seed_and_leaves_the_callers_randomness_alone():
    x, y = toy()
    runs = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        net = network()
        fit(net, x, y, likelihood=db.Gaussian(4.0), epochs=3, batch_size=16, seed=seed, device="cpu")
        assert torch.equal(before, torch.get_rng_state())
        runs.append(net[0].weight.detach().clone())
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("precision", [4, torch.tensor(4), torch.tensor([4])], ids=["int", "tensor", "by output"])
def test_a_precision_may_be_a_whole_number(precision):
    x, y = toy()
    losses = [fit(network(), x, y, likelihood=db.Gaussian(tau), epochs=2).loss for tau in (4.0, precision)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        {"likelihood": db.Gaussian(torch.tensor(4.0, requires_grad=True))},
        {"prior": db.Prior(length_scale=torch.tensor(1.0, requires_grad=True).exp())},
        {"prior": db.Prior(per_layer={"0": nn.Parameter(torch.tensor(1.0))})},
    ],
    ids=["precision", "length-scale", "length-scale of a layer"],
)
def test_a_tensor_that_would_wait_for_its_gradient_in_vain_is_refused(given):
    with pytest.raises(ValueError, match=f"`{next(iter(given))}` must hold no tensor that requires a gradient"):
        fit(network(), *toy(), **{"likelihood": db.Gaussian(4.0)} | given, epochs=1)


def test_a_precision_that_is_a_parameter_of_the_network_or_that_fit_learns_is_taken():
    net = network()
    net.tau = nn.Parameter(torch.tensor(4.0))
    fit(net, *toy(), likelihood=db.Gaussian(net.tau), epochs=2)
    assert net.tau != 4.0
    start = torch.tensor(4.0, requires_grad=True)
    history = fit(network(), *toy(), likelihood=db.Gaussian(start), objective=Objective(learn_precision=True), epochs=2)
    assert history.precision[-1] != 4.0 and start.grad is None


def test_a_network_that_draws_from_python_and_numpy_repeats_its_run_and_is_resumed(tmp_path):
    class Jittered(nn.Sequential):
        def forward(self, x):
            return super().forward(x + 0.1 * random.random() + 0.1 * float(np.random.randn()))

    def weights(epochs, checkpoint=None):
        before = random.getstate(), np.random.get_state()[1:3]
        net = Jittered(*network())
        fit(net, *toy(), likelihood=db.Gaussian(4.0), epochs=epochs, checkpoint=checkpoint, device="cpu")
        after = random.getstate(), np.random.get_state()[1:3]
        assert before[0] == after[0] and np.array_equal(before[1][0], after[1][0]) and before[1][1] == after[1][1]
        return net[0].weight

    once = weights(2)
    random.random(), np.random.rand()
    weights(1, tmp_path / "run")
    assert torch.equal(once, weights(2)) and torch.equal(once, weights(2, tmp_path / "run"))


def test_runs_in_threads_are_those_of_their_seeds():
    def train(net, seed):
        fit(net, *toy(), likelihood=db.Gaussian(4.0), epochs=8, batch_size=8, seed=seed, device="cpu")
        return net[0].weight

    first, second = ([network() for _ in range(3)] for _ in range(2))  # whose weights are drawn from torch's generator
    alone = list(map(train, first, range(3)))
    with ThreadPoolExecutor(3) as pool:
        assert all(map(torch.equal, alone, pool.map(train, second, range(3))))


def test_early_stopping_returns_to_the_best_held_out_epoch():
    x, y = toy(24)
    y = y + torch.randn(24, 1, generator=torch.Generator().manual_seed(2))  # noise to overfit
    net = network()
    weights = []

    def remember(state: Progress) -> None:
        weights.append(state.net[0].weight.detach().clone())

    history = fit(
        net,
        x[:12],
        y[:12],
        likelihood=db.Gaussian(4.0),
        epochs=500,
        callbacks=[remember],
        device="cpu",
        optimization=Optimization(learning_rate=0.05),
        stopping=EarlyStopping((x[12:], y[12:]), patience=5),
    )
    assert history.stopped == "patience"
    assert history.best_epoch == history.log_likelihood.index(max(history.log_likelihood)) + 1
    assert len(history.loss) == history.best_epoch + 5
    assert torch.equal(net[0].weight, weights[history.best_epoch - 1])


def test_a_callback_can_stop_the_run():
    x, y = toy()
    history = fit(
        network(), x, y, likelihood=db.Gaussian(4.0), epochs=50, callbacks=[lambda state: state.epoch == 3],
        device="cpu",
    )  # fmt: skip
    assert (len(history.loss), history.stopped) == (3, "callback")


class Filled(nn.Module):
    def forward(self, x):
        return x.nan_to_num()


def test_inputs_that_are_no_number_are_named():
    x, y = toy()
    x[3] = math.nan
    with pytest.raises(ValueError, match="`x` must not hold NaN that reaches the loss; 2 values are"):
        fit(network(), x, y, likelihood=db.Gaussian(4.0), epochs=2, device="cpu")
    reads_gaps = nn.Sequential(Filled(), network())
    assert math.isfinite(fit(reads_gaps, x, y, likelihood=db.Gaussian(4.0), epochs=2, device="cpu").loss[-1])


def test_a_diverging_run_stops_with_advice_and_keeps_the_last_finite_weights():
    x, y = toy()
    net = network()
    with pytest.raises(FloatingPointError, match=r"diverged in epoch .*learning_rate="):
        fit(
            net,
            x,
            y,
            likelihood=db.Gaussian(4.0),
            epochs=100,
            device="cpu",
            optimization=Optimization("sgd", learning_rate=1e6),
        )
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "`epochs` must be a whole number, at least 1"),
        ({"batch_size": 0.5}, "`batch_size` must be a whole number, at least 1"),
        ({"seed": -1}, "`seed` must be a whole number, at least 0; got -1"),
        ({"objective": Objective(alpha=2.0)}, r"`alpha` must lie in \[0, 1\]"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    x, y = toy()
    with pytest.raises(ValueError, match=message):
        fit(network(), x, y, likelihood=db.Gaussian(4.0), device="cpu", **settings)


@pytest.mark.parametrize(
    ("net", "settings", "message"),
    [
        (network(), {"callbacks": [3]}, r"`callbacks` must be a list of functions; got \[3\]"),
        (network(), {"callbacks": print}, "`callbacks` must be a list of functions"),
        (network(), {"checkpoint": 3}, "`checkpoint` must be a path or a record Checkpoint.*; got 3"),
        (torch.sin, {}, "`net` must be an nn.Module with parameters"),
        (network().requires_grad_(False), {}, "`net` must be .* parameters to train; got a Sequential"),
        (nn.Sequential(nn.Dropout(0.5)), {}, "`net` must be .* parameters"),
    ],
)
def test_what_cannot_be_trained_called_or_written_is_refused(net, settings, message):
    with pytest.raises(TypeError, match=message):
        fit(net, *toy(), likelihood=db.Gaussian(4.0), device="cpu", **settings)


@pytest.mark.parametrize("name", ["prior", "objective", "optimization", "stopping"])
def test_what_is_not_the_record_of_its_argument_is_refused(name):
    x, y = toy()
    with pytest.raises(TypeError, match=rf"`{name}` must be a record .*\(...\); got 0.5"):
        fit(network(), x, y, likelihood=db.Gaussian(4.0), device="cpu", **{name: 0.5})


def test_the_bar_is_silent_in_pipes(capfd):
    x, y = toy()
    fit(network(), x, y, likelihood=db.Gaussian(4.0), epochs=2, device="cpu")
    assert capfd.readouterr() == ("", "")
    fit(network(), x, y, likelihood=db.Gaussian(4.0), epochs=2, device="cpu", progress=True)
    assert "fit" in capfd.readouterr().err


def test_loss_falls_towards_the_noise():
    x, y = toy(300)
    net = network(0.02)
    fit(
        net,
        x,
        y,
        likelihood=db.Gaussian(100.0),
        epochs=60,
        batch_size=64,
        device="cpu",
        optimization=Optimization(learning_rate=0.01),
    )
    with torch.no_grad():
        error = float((net.eval()(x) - y).square().mean().sqrt())
    assert error < 0.2


def test_nan_among_held_out_targets_or_scores_is_an_error_not_the_end_of_patience():
    x, y = toy()
    nan = torch.full_like(y, float("nan"))
    with pytest.raises(ValueError, match="`y` must be finite"):
        fit(network(), x, y, likelihood=db.Gaussian(4.0), device="cpu", stopping=EarlyStopping((x, nan)))
    with pytest.raises(FloatingPointError, match="held-out log-likelihood is NaN in epoch 1"):
        fit(
            network(0.0),
            x,
            y,
            likelihood=db.Gaussian(4.0),
            device="cpu",
            stopping=EarlyStopping((nan.expand(64, 2), y)),
        )


def test_the_held_out_score_of_a_network_without_dropout_is_its_log_likelihood():
    x, y = toy()
    net = network(0.0)
    history = fit(net, x, y, likelihood=db.Gaussian(4.0), epochs=1, device="cpu", stopping=EarlyStopping((x, y)))
    expected = db.Gaussian(4.0).log_density(net(x), y).mean().item()
    assert history.log_likelihood[0] == pytest.approx(expected, rel=1e-5)


def test_runs_repeat_in_one_process_with_early_stopping():
    x, y = toy()
    runs = []
    for _ in range(3):
        net = network()
        history = fit(
            net,
            x[:32],
            y[:32],
            likelihood=db.Gaussian(4.0),
            epochs=25,
            device="cpu",
            optimization=Optimization(learning_rate=0.05),
            stopping=EarlyStopping((x[32:], y[32:]), patience=3),
        )
        runs.append((history, net[0].weight.detach().clone()))
    assert runs[0][0] == runs[1][0] == runs[2][0]
    assert torch.equal(runs[0][1], runs[2][1])


def test_fit_takes_its_keep_probabilities_from_where_dropout_is_used():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.fc1, self.fc2 = nn.Dropout(0.5), nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.fc2(self.drop(torch.tanh(self.fc1(x))))

    net, x, y = Net(), torch.randn(4, 2), torch.randn(4, 1)
    setting = {"likelihood": db.Gaussian(2.0), "epochs": 1, "device": "cpu", "seed": 3}
    setting["optimization"] = Optimization(learning_rate=1e-9)
    priors = [db.Prior(length_scale=30.0), db.Prior(length_scale=15.0)]
    losses = [fit(copy.deepcopy(net), x, y, prior=prior, **setting).loss[0] for prior in priors]
    used, registered = (
        [kl_divergence(net, prior=prior, keep_probs=kept).item() / 4 for prior in priors]
        for kept in ({"fc1": 1.0, "fc2": 0.5}, {"fc1": 0.5, "fc2": 1.0})
    )
    assert losses[0] - losses[1] == pytest.approx(used[0] - used[1], rel=1e-4)  # the misfit is the same
    assert losses[0] - losses[1] != pytest.approx(registered[0] - registered[1], rel=1e-2)


def test_fit_gives_every_layer_that_reads_the_input_its_length_scale():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.first = nn.Linear(3, 1), nn.Linear(2, 3)

        def forward(self, x):
            return self.out(torch.tanh(self.first(x)))

    net, x, y = Net(), torch.randn(4, 2), torch.randn(4, 1)
    setting = {"likelihood": db.Gaussian(2.0), "epochs": 1, "device": "cpu"}
    setting["optimization"] = Optimization(learning_rate=1e-9)
    traced = fit(copy.deepcopy(net), x, y, prior=db.Prior(30.0, 1.0, 0.1), **setting).loss
    named = fit(copy.deepcopy(net), x, y, prior=db.Prior(1.0, 1.0, None, {"first": 30.0, "out": 0.1}), **setting).loss
    assert traced == pytest.approx(named, rel=1e-6)


def test_fit_has_at_most_twelve_parameters_besides_records():
    records = {"prior", "objective", "optimization", "stopping", "checkpoint"}
    assert len(inspect.signature(fit).parameters.keys() - records) <= 12


def test_a_network_that_squeezes_its_rows_away_is_refused_with_the_remedy():
    class Squeezed(nn.Sequential):
        def forward(self, x):
            return super().forward(x).squeeze()

    x, y = toy()
    with pytest.raises(
        ValueError, match=r"no axis of rows for a single row: name what it squeezes, as in squeeze\(-1\)"
    ):
        fit(Squeezed(*network()), x, y[:, 0], likelihood=db.Gaussian(4.0), epochs=1, device="cpu")
