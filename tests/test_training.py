"""Tests of `fit`: the objective it descends, and checkpoints under real kills."""

import copy
import json
import pathlib
import subprocess
import sys

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.likelihoods import Categorical, Gaussian
from dropbayes.objective import negative_elbo
from dropbayes.precision import Prior
from dropbayes.training import InverseDecay, Progress, fit
from dropbayes.weight_layers import parameter_groups

SOURCE = pathlib.Path(__file__).parent.parent / "src"


def toy(n: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 2, generator=torch.Generator().manual_seed(0))
    return x, x[:, :1].sin() + 0.1 * torch.randn(n, 1, generator=torch.Generator().manual_seed(1))


def network(drop_prob: float = 0.1, seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(drop_prob), nn.Linear(16, 1))


def test_inverse_decay_is_the_papers_policy():
    assert InverseDecay(gamma=1e-4, power=0.25)(0) == 1
    assert InverseDecay(gamma=0.5, power=2.0)(2) == pytest.approx((1 + 0.5 * 2) ** -2)


def test_full_batch_sgd_is_gradient_descent_on_the_negative_elbo_over_tau():
    x, y = toy()
    likelihood, prior = db.Gaussian(precision=7.0), Prior(length_scale=3.0, bias_length_scale=0.5)
    ours, theirs = network(0.0).double(), network(0.0).double()
    x, y = x.double(), y.double()
    policy = InverseDecay(gamma=0.1, power=0.5)
    fit(
        ours, x, y, likelihood=likelihood, prior=prior, epochs=5, batch_size=64, optimizer="sgd",
        learning_rate=0.05, momentum=0.8, schedule=policy, device="cpu",
    )  # fmt: skip
    velocity = [torch.zeros_like(p) for p in theirs.parameters()]
    for iteration in range(5):
        loss = negative_elbo(theirs, theirs(x), y, likelihood=likelihood, prior=prior, n_data=64) / 7.0
        gradients = torch.autograd.grad(loss, list(theirs.parameters()))
        with torch.no_grad():
            for p, v, g in zip(theirs.parameters(), velocity, gradients, strict=True):
                v.mul_(0.8).add_(g)
                p -= 0.05 * policy(iteration) * v
    for ours_p, theirs_p in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours_p, theirs_p, rtol=1e-6, atol=1e-9)


def test_the_paper_loss_with_decay_in_the_optimiser_gives_the_same_network():
    # E + λ‖M‖² by parameter_groups [GG16, eq:L:dropout] against `fit`: two readings of one identity.
    x, y = (part.double() for part in toy())
    prior, tau = Prior(length_scale=2.0), 5.0
    ours, theirs = network(0.0).double(), network(0.0).double()
    fit(
        ours, x, y, likelihood=db.Gaussian(tau), prior=prior, epochs=4, batch_size=64, optimizer="sgd",
        learning_rate=0.1, momentum=0.0, device="cpu",
    )  # fmt: skip
    optimizer = torch.optim.SGD(parameter_groups(theirs, precision=tau, prior=prior, n_data=64), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        (0.5 * (theirs(x) - y).square().sum(1).mean()).backward()
        optimizer.step()
    torch.testing.assert_close(ours[0].weight, theirs[0].weight, rtol=1e-7, atol=1e-10)


def test_history_holds_the_negative_elbo():
    x, y = toy()
    net = network(0.0)
    likelihood, prior = db.Gaussian(4.0), Prior()
    with torch.no_grad():
        expected = float(negative_elbo(net, net(x), y, likelihood=likelihood, prior=prior, n_data=64))
    history = fit(net, x, y, likelihood=likelihood, prior=prior, epochs=1, batch_size=64, device="cpu")
    assert history.loss[0] == pytest.approx(expected, rel=1e-5)
    assert history.stopped == "epochs"


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


def test_mode_and_given_optimiser_are_respected():
    x, y = toy()
    net = network().eval()
    net[1].train()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    fit(net, x, y, likelihood=db.Gaussian(4.0), epochs=2, optimizer=optimizer, device="cpu")
    assert [module.training for module in net] == [False, True, False, False]
    assert not net.training
    assert optimizer.state


def test_row_weights_equal_repeated_rows():
    x, y = (part.double() for part in toy(20))
    weight = torch.tensor([1.0, 3.0]).repeat(10)
    rows = torch.cat([torch.arange(20), torch.arange(1, 20, 2), torch.arange(1, 20, 2)])
    weighted, repeated = network(0.0).double(), network(0.0).double()
    options = {"likelihood": db.Gaussian(4.0), "prior": Prior(length_scale=1e-9), "epochs": 10, "device": "cpu"}
    fit(weighted, x, y, weight=weight, **options)
    fit(repeated, x[rows], y[rows], **options)
    torch.testing.assert_close(weighted[0].weight, repeated[0].weight, rtol=1e-6, atol=1e-9)


def test_early_stopping_returns_to_the_best_held_out_epoch():
    x, y = toy(24)
    y = y + torch.randn(24, 1, generator=torch.Generator().manual_seed(2))  # noise to overfit
    net = network()
    weights = []

    def remember(state: Progress) -> None:
        weights.append(state.net[0].weight.detach().clone())

    history = fit(
        net, x[:12], y[:12], likelihood=db.Gaussian(4.0), held_out=(x[12:], y[12:]), epochs=500, patience=5,
        learning_rate=0.05, callbacks=[remember], device="cpu",
    )  # fmt: skip
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


def test_a_diverging_run_stops_with_advice_and_keeps_the_last_finite_weights():
    x, y = toy()
    net = network()
    with pytest.raises(FloatingPointError, match=r"diverged in epoch .*learning_rate="):
        fit(net, x, y, likelihood=db.Gaussian(4.0), optimizer="sgd", learning_rate=1e6, epochs=100, device="cpu")
    assert all(p.isfinite().all() for p in net.parameters())


def test_classification_and_dict_inputs_train():
    x, y = toy(200)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.layer = nn.Dropout(0.1), nn.Linear(2, 2)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.layer(self.drop(features))

    net, label = Named(), (y[:, 0] > 0).long()
    fit(net, {"features": x}, label, likelihood=db.Categorical(), epochs=60, learning_rate=0.05, device="cpu")
    assert (net.eval()(x).argmax(1) == label).float().mean() > 0.9


def test_mixed_precision_trains_float32_weights():
    x, y = toy()
    net = network()
    history = fit(
        net, x, y, likelihood=db.Gaussian(4.0), epochs=30, learning_rate=0.01, autocast=torch.bfloat16, device="cpu"
    )
    assert net[0].weight.dtype == torch.float32
    assert history.loss[-1] < history.loss[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "`epochs` must be at least 1"),
        ({"optimizer": "lion"}, "`optimizer` must be 'adam'"),
        ({"learning_rate": -1.0}, "`learning_rate` must be a positive"),
        ({"autocast": torch.float16}, "`autocast` must be None or torch.bfloat16"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    x, y = toy()
    with pytest.raises(ValueError, match=message):
        fit(network(), x, y, likelihood=db.Gaussian(4.0), device="cpu", **settings)


def test_the_bar_is_silent_in_pipes(capfd):
    x, y = toy()
    fit(network(), x, y, likelihood=db.Gaussian(4.0), epochs=2, device="cpu")
    assert capfd.readouterr() == ("", "")
    fit(network(), x, y, likelihood=db.Gaussian(4.0), epochs=2, device="cpu", progress=True)
    assert "fit" in capfd.readouterr().err


def test_a_checkpoint_of_another_run_is_refused_and_a_longer_run_continues(tmp_path):
    x, y = toy()
    path = tmp_path / "run.ckpt"
    short, long = network(), network()
    fit(short, x, y, likelihood=db.Gaussian(4.0), epochs=3, checkpoint=path, device="cpu")
    with pytest.raises(ValueError, match=r"`checkpoint` .* belongs to another run"):
        fit(network(), x, y, likelihood=db.Gaussian(4.0), epochs=3, checkpoint=path, seed=5, device="cpu")
    with pytest.raises(ValueError, match=r"`checkpoint` .* belongs to another run"):
        fit(network(), x + 1, y, likelihood=db.Gaussian(4.0), epochs=3, checkpoint=path, device="cpu")
    fit(short, x, y, likelihood=db.Gaussian(4.0), epochs=6, checkpoint=path, device="cpu")
    fit(long, x, y, likelihood=db.Gaussian(4.0), epochs=6, device="cpu")
    assert torch.equal(short[0].weight, long[0].weight)


KILLED = r"""
import json, os, random, signal, sys, time
import torch
from torch import nn
import dropbayes as db
from dropbayes.likelihoods import Categorical, Gaussian
from dropbayes.training import fit

torch.set_num_threads(1)
folder, kills = sys.argv[1], int(sys.argv[2])

def run(checkpoint):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Dropout(0.2), nn.Linear(30, 1))
    x, y = torch.randn(300, 4), torch.randn(300, 1)
    history = fit(net, x[:200], y[:200], likelihood=db.Gaussian(2.0), epochs=60, batch_size=32, patience=1000, seed=3,
                  held_out=(x[200:], y[200:]), n_draws=4, learning_rate=3e-3, checkpoint=checkpoint, device="cpu")
    torch.manual_seed(1)
    prediction = torch.stack([net(x) for _ in range(3)])
    return {"weights": [p.detach() for p in net.state_dict().values()], "prediction": prediction.detach(),
            "history": vars(history)}

def same(a, b):
    return (all(torch.equal(p, q) for p, q in zip(a["weights"], b["weights"], strict=True))
            and torch.equal(a["prediction"], b["prediction"]) and a["history"] == b["history"])

start = time.perf_counter()
whole = run(None)
duration = time.perf_counter() - start
path, done, chance, reached = os.path.join(folder, "run.ckpt"), 0, random.Random(0), set()
while True:
    child = os.fork()
    if child == 0:
        torch.save(run(path), os.path.join(folder, "result.pt"))
        os._exit(0)
    time.sleep(chance.uniform(0, 2 * duration / kills) if done < kills else 0)
    if done < kills:
        os.kill(child, signal.SIGKILL)
        done += os.waitpid(child, 0)[1] == signal.SIGKILL
        if os.path.exists(path):
            reached.add(len(torch.load(path)["history"]["loss"]))
        if os.path.exists(os.path.join(folder, "result.pt")) and done < kills:
            os.remove(os.path.join(folder, "result.pt")); os.remove(path)  # it finished too soon: begin again
    else:
        assert os.waitpid(child, 0)[1] == 0
        break
resumed = torch.load(os.path.join(folder, "result.pt"))
print(json.dumps({"kills": done, "same": same(whole, resumed), "epochs": len(resumed["history"]["loss"]),
                  "reached": len(reached)}))
"""


def test_twelve_kills_then_resume_give_bit_identical_weights_history_and_predictions(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "12"],
        capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout)
    assert outcome.pop("reached") >= 4  # the kills fell in different epochs
    assert outcome == {"kills": 12, "same": True, "epochs": 60}


def test_loss_falls_towards_the_noise():
    x, y = toy(300)
    net = network(0.02)
    fit(net, x, y, likelihood=db.Gaussian(100.0), epochs=150, learning_rate=0.01, batch_size=64, device="cpu")
    with torch.no_grad():
        error = float((net.eval()(x) - y).square().mean().sqrt())
    assert error < 0.2


def test_a_row_of_weight_two_counts_as_two_in_the_divergence_too():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    x, y = torch.randn(3, 2), torch.randn(3, 1)
    repeated = torch.tensor([0, 0, 1, 2])
    setting = {
        "likelihood": Gaussian(2.0),
        "prior": Prior(length_scale=2.0),
        "epochs": 1,
        "learning_rate": 1e-6,
        "device": "cpu",
    }
    weighted = fit(copy.deepcopy(net), x, y, weight=torch.tensor([2.0, 1.0, 1.0]), **setting)
    plain = fit(copy.deepcopy(net), x[repeated], y[repeated], **setting)
    assert weighted.loss == pytest.approx(plain.loss, rel=1e-5)


def test_a_learned_precision_ends_at_the_inverse_of_the_mean_squared_error(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(400, 2)
    y = x @ torch.tensor([[1.0], [-2.0]]) + 0.5 * torch.randn(400, 1)
    setting = {"likelihood": Gaussian(1.0), "prior": Prior(length_scale=0.01), "epochs": 200, "learning_rate": 0.1, "batch_size": 400,
               "learn_precision": True, "device": "cpu"}  # fmt: skip
    net = nn.Linear(2, 1)
    start = copy.deepcopy(net)
    history = fit(net, x, y, **setting)
    error = (net(x) - y).square().mean().item()
    assert history.precision[-1] == pytest.approx(1 / error, rel=0.02)
    assert len(history.precision) == 200 and history.precision[0] < history.precision[-1]
    # A run cut in two gives the same bits.
    fit(start, x, y, checkpoint=tmp_path / "run", **{**setting, "epochs": 80})
    resumed = fit(start, x, y, checkpoint=tmp_path / "run", **setting)
    assert resumed.precision == history.precision and torch.equal(start.weight, net.weight)


def test_a_precision_to_be_learned_needs_a_gaussian():
    with pytest.raises(ValueError, match="`learn_precision` needs a Gaussian"):
        fit(nn.Linear(2, 2), torch.zeros(3, 2), torch.zeros(3, dtype=torch.long), likelihood=Categorical(),
            learn_precision=True, epochs=1, device="cpu")  # fmt: skip


def test_fit_takes_its_keep_probabilities_from_where_dropout_is_used():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.fc1, self.fc2 = nn.Dropout(0.5), nn.Linear(2, 3), nn.Linear(3, 1)

        def forward(self, x):
            return self.fc2(self.drop(torch.tanh(self.fc1(x))))

    net, x, y = Net(), torch.randn(4, 2), torch.randn(4, 1)
    setting = {"likelihood": Gaussian(2.0), "epochs": 1, "learning_rate": 1e-9, "device": "cpu", "seed": 3}
    prior = Prior(length_scale=30.0)
    traced = fit(copy.deepcopy(net), x, y, prior=prior, **setting).loss
    told = fit(copy.deepcopy(net), x, y, prior=prior, keep_probs={"fc1": 1.0, "fc2": 0.5}, **setting).loss
    guessed = fit(copy.deepcopy(net), x, y, prior=prior, keep_probs={"fc1": 0.5, "fc2": 1.0}, **setting).loss
    assert traced == pytest.approx(told, rel=1e-6) and traced != pytest.approx(guessed, rel=1e-3)
