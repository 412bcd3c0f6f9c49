"""Predictions: closed forms, integrated layers, automatic draws, loaders."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

import dropbayes as db
from dropbayes.runtime.progress import ProgressBar
from dropbayes.sampling import Sampling, UncertaintyWarning
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.plan import make_plan
from tests.sampling.zoo import Module, build


def perceptron(drop_prob=0.2, width=50, outputs=1, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Dropout(drop_prob), nn.Linear(6, width), nn.ReLU(), nn.Dropout(drop_prob), nn.Linear(width, outputs)
    ).eval()


@pytest.mark.parametrize("sampler", ["stratified", "independent"])
def test_a_linear_network_has_its_closed_form_mean_and_variance(sampler):
    # Two layers with nothing between: y = w2 (z2 / k) ∘ (W1 (z1 / k) ∘ x); the moments follow from those of the masks.
    torch.manual_seed(0)
    drop_prob, keep = 0.3, 0.7
    net = nn.Sequential(
        nn.Dropout(drop_prob), nn.Linear(3, 4, bias=False), nn.Dropout(drop_prob), nn.Linear(4, 1, bias=False)
    ).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    first, second = net[1].weight.detach(), net[3].weight.detach()[0]
    odds = drop_prob / keep
    hidden = x @ first.t()
    hidden_covariance = torch.einsum("hi,ni,gi->nhg", first, x**2, first) * odds
    second_moment = hidden_covariance + hidden[:, :, None] * hidden[:, None, :]
    scaled = second_moment * (1 + odds * torch.eye(4, dtype=torch.float64))
    variance = torch.einsum("h,nhg,g->n", second, scaled, second) - (hidden @ second) ** 2
    prediction = db.predict(net, x, n_draws=100_000, sampling=db.Sampling(sampler=sampler, integrate_last_layer=False))
    torch.testing.assert_close(prediction.mean[:, 0], hidden @ second, rtol=0, atol=float(0.01 * variance.sqrt().min()))
    torch.testing.assert_close(prediction.epistemic[:, 0], variance, rtol=0.01, atol=0)
    integrated = db.predict(net, x, n_draws=20_000, sampling=db.Sampling(sampler=sampler))
    assert "integrated" in integrated.method
    torch.testing.assert_close(integrated.epistemic[:, 0], variance, rtol=0.02, atol=0)


@pytest.mark.parametrize("mapped", [False, True])
def test_integrating_the_last_layer_keeps_the_moments_and_loses_noise(mapped):
    net = perceptron()
    net = Module(lambda m, v: m.inner(v), inner=net) if mapped else net
    x = torch.randn(10, 6)
    truth = db.predict(net, x, n_draws=20_000, sampling=db.Sampling(integrate_last_layer=False))
    errors = {}
    for analytic in (True, False):
        means = torch.stack(
            [
                db.predict(net, x, n_draws=50, seed=s, sampling=db.Sampling(integrate_last_layer=analytic)).mean
                for s in range(1, 21)
            ]
        )
        errors[analytic] = float((means - truth.mean).square().mean())
    assert errors[True] < errors[False] / 2
    variance = torch.stack([db.predict(net, x, n_draws=50, seed=s).epistemic for s in range(1, 21)]).mean(0)
    torch.testing.assert_close(variance, truth.epistemic, rtol=0.1, atol=0)


@pytest.mark.parametrize("drop_prob, gain", [(0.5, 3), (0.2, 7), (0.05, 20)])
def test_stratified_means_are_worth_many_more_independent_draws(drop_prob, gain):
    net, x = perceptron(drop_prob), torch.randn(8, 6)
    truth = db.predict(net, x, n_draws=20_000).mean
    errors = {}
    for sampler in ("stratified", "independent"):
        means = [
            db.predict(
                net, x, n_draws=100, seed=seed, sampling=db.Sampling(sampler=sampler, integrate_last_layer=False)
            ).mean
            for seed in range(1, 21)
        ]
        errors[sampler] = float((torch.stack(means) - truth).square().mean())
    assert errors["independent"] > gain * errors["stratified"]


def test_automatic_draws_reach_the_tolerance_and_say_so():
    net, x = perceptron(0.5), torch.randn(30, 6)
    truth = db.predict(net, x, n_draws=20_000).mean
    prediction = db.predict(net, x, n_draws="auto", sampling=db.Sampling(tolerance=0.01))
    ratio = prediction.standard_error / prediction.std
    assert (ratio <= 0.01).all() and prediction.draws_used.min() >= 8 * 32
    assert prediction.n_draws == int(prediction.draws_used.max())
    z = (prediction.mean - truth) / prediction.standard_error
    assert z.abs().max() < 6 and 0.3 < float(z.square().mean()) < 3  # the error claimed is the error made
    coarse = db.predict(net, x, n_draws="auto", sampling=db.Sampling(tolerance=0.2))
    assert coarse.n_draws < prediction.n_draws


def test_automatic_draws_of_a_row_do_not_depend_on_its_neighbours():
    net, x = perceptron(0.5), torch.randn(30, 6)
    whole = db.predict(net, x, n_draws="auto", sampling=db.Sampling(tolerance=0.02, integrate_last_layer=False))
    alone = db.predict(net, x[11:12], n_draws="auto", sampling=db.Sampling(tolerance=0.02, integrate_last_layer=False))
    assert torch.equal(alone.mean[0], whole.mean[11]) and alone.draws_used[0] == whole.draws_used[11]


def test_automatic_draws_stop_at_the_maximum():
    sampling = db.Sampling(tolerance=1e-9, max_draws=320)
    prediction = db.predict(perceptron(0.5), torch.randn(3, 6), n_draws="auto", sampling=sampling)
    assert prediction.n_draws == 320 and (prediction.standard_error > 0).all()
    with pytest.raises(ValueError, match="`max_draws` must be a whole number, at least 64"):
        db.Sampling(max_draws=10)


def test_automatic_draws_count_the_rows_that_are_done(monkeypatch):
    counted = []
    monkeypatch.setattr(ProgressBar, "advance", lambda bar, count=1: counted.append(count))
    sampling = db.Sampling(tolerance=0.02, integrate_last_layer=False)
    prediction = db.predict(perceptron(0.5), torch.randn(30, 6), n_draws="auto", sampling=sampling)
    assert sum(counted) == 30 and len(counted) >= len(prediction.draws_used.unique())


@pytest.mark.parametrize("name", ["dropout_only_before_last_layer", "in_place_result_ignored"])
def test_no_draws_are_spent_where_the_moments_are_exact(name):
    net, x = build(name)
    prediction, other = (
        db.predict(net, x, n_draws="auto", seed=seed, sampling=db.Sampling(tolerance=1e-9)) for seed in (0, 1)
    )
    assert prediction.method == "exact" and prediction.n_draws == 0
    assert torch.equal(prediction.std, other.std)  # of any seed


def test_a_loader_gives_the_prediction_of_its_rows():
    net, x = perceptron(), torch.randn(23, 6)
    whole = db.predict(net, x, n_draws=20)
    streamed = db.predict(net, DataLoader(TensorDataset(x), batch_size=5), n_draws=20, progress=False)
    assert torch.equal(streamed.mean, whole.mean) and torch.equal(streamed.std, whole.std)
    own = db.predict(net, x, n_draws=20, masks="row")
    streamed_own = db.predict(net, DataLoader(TensorDataset(x), batch_size=5), n_draws=20, masks="row", progress=False)
    torch.testing.assert_close(streamed_own.mean, own.mean)


def test_a_loader_of_dicts_serves_a_hugging_face_model():
    net, x = build("bert_sdpa")
    rows = [{name: value[i] for name, value in x.items()} for i in range(3)]
    whole = db.predict(net, x, n_draws=4)
    streamed = db.predict(net, DataLoader(rows, batch_size=2), n_draws=4, progress=False)
    torch.testing.assert_close(streamed.mean.logits, whole.mean.logits)  # type: ignore[attr-defined]


def test_class_predictions_carry_their_information():
    net, x = perceptron(0.5, outputs=3), torch.randn(9, 6)
    p = db.predict(net, x, likelihood=db.Categorical(), n_draws=50)
    torch.testing.assert_close(p.mean.sum(-1), torch.ones(9))
    assert (p.mutual_information >= 0).all() and (p.mutual_information <= p.entropy).all()
    assert (p.entropy <= math.log(3)).all() and ((p.variation_ratio >= 0) & (p.variation_ratio < 2 / 3 + 1e-6)).all()
    probabilities = db.draws(net, x, n_draws=50).softmax(-1)
    torch.testing.assert_close(p.mean, probabilities.mean(0))
    torch.testing.assert_close(p.epistemic, probabilities.var(0, correction=0), rtol=1e-4, atol=1e-6)


def test_quantiles_and_draws_come_in_the_networks_structure():
    net, x = build("tuple_in_named_tuple_out")
    p = db.predict(net, x, n_draws=30, quantiles=[0.25, 0.75], keep_draws=True)
    assert p.draws.mean.shape == (30, 4, 3) and p.quantiles.spread.shape == (2, 4, 3)
    expected = p.draws.mean.quantile(torch.tensor([0.25, 0.75]), dim=0)
    torch.testing.assert_close(p.quantiles.mean, expected)


def test_sequence_first_results_have_rows_where_the_network_has_them():
    net, x = build("lstm_sequence_first")
    p = db.predict(net, x, n_draws=5, sampling=db.Sampling(row_axis=1))
    assert p.mean.shape == (*x.shape[:2], 5)
    states, x = build("lstm_with_states")
    mean = db.predict(states, x, n_draws=5).mean
    assert mean[0].shape == (4, 6, 5) and mean[1][0].shape == (3, 4, 5)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"n_draws": "many"}, TypeError, "`n_draws` must be a whole number or .auto."),
        ({"n_draws": "auto", "keep_draws": True}, ValueError, "its own number of draws"),
        ({"likelihood": 3}, TypeError, "`likelihood` must be one of"),
        ({"quantiles": [0.0]}, ValueError, "`quantiles`"),
        ({"likelihood": db.HeteroscedasticGaussian()}, ValueError, "even last axis"),
    ],
)
def test_bad_wishes_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        db.predict(perceptron(), torch.ones(2, 6), **arguments)


def test_where_a_unit_is_off_the_linear_method_does_not_say_that_draws_agree():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 1))
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[1.0, -1.0]]))
        net[1].bias.fill_(-0.5)  # off where both inputs are kept, on where the second is dropped
    x = torch.ones(1, 2)
    assert db.predict(net, x).epistemic > 0
    with pytest.warns(UncertaintyWarning, match="^to first order the output does not change.* is 0"):
        assert db.predict(net, x, method="linear").epistemic == 0


def test_a_likelihood_needs_one_tensor():
    net, x = build("tuple_in_named_tuple_out")
    with pytest.raises(ValueError, match="needs an output of one tensor, or one called `logits`; the network gives 2"):
        db.predict(net, x, likelihood=db.Gaussian(precision=1.0))


def test_networks_that_give_nan_are_named():
    net = perceptron()
    with pytest.raises(ValueError, match="`net` gave NaN"):
        db.predict(net, torch.full((2, 6), float("nan")))


@pytest.mark.parametrize("name", ["dropout_mlp", "transformer_encoder", "lstm", "dropout2d"])
@pytest.mark.parametrize("n_draws", [10, 1000, 1_000_000])
def test_working_memory_is_bounded_whatever_the_number_of_draws(name, n_draws):
    net, x = build(name)
    limit = 2**20
    plan = make_plan(
        net,
        as_inputs(x),
        keys=Sampling().keys(n_draws, 0),
        masks="shared",
        sampling=db.Sampling(max_bytes=limit),
    )
    rows = plan.block_rows if plan.direct is None else plan.product_rows  # a perceptron's blocks are evaluated in parts
    assert rows * plan.chunk_draws * plan.profile.suffix_bytes <= limit


@pytest.mark.parametrize("n_draws", [20, "auto"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_outputs_that_are_not_numbers_are_refused(bad, n_draws):
    net = nn.Sequential(nn.Dropout(0.3), nn.Linear(2, 4), nn.ReLU(), nn.Dropout(0.3), nn.Linear(4, 3))
    with torch.no_grad():
        net[4].bias[1] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        db.predict(net, torch.ones(5, 2), n_draws=n_draws)


def test_a_loader_of_pairs_and_an_array_are_read_as_the_tensor_they_hold():
    net, x = perceptron(), torch.randn(12, 6)
    expected = db.predict(net, x, n_draws=10).mean
    pairs = DataLoader(TensorDataset(x, torch.zeros(12, 1)), batch_size=5)
    assert torch.equal(db.predict(net, pairs, n_draws=10, progress=False).mean, expected)
    for array in (x.numpy(), x.double().numpy()):  # numpy's own dtype is float64
        torch.testing.assert_close(db.predict(net, array, n_draws=10).mean, expected)


@pytest.mark.parametrize("drop_prob", [0.0, None])
def test_a_network_without_dropout_is_refused_with_the_remedy(drop_prob):
    layers = [nn.Linear(4, 2), nn.Linear(2, 1)] if drop_prob is None else [nn.Dropout(drop_prob), nn.Linear(4, 1)]
    with pytest.raises(ValueError, match=r"no dropout that is switched on.*add_dropout"):
        db.predict(nn.Sequential(*layers), torch.randn(3, 4))


# Ensembles and batches that are one row each -------------------------------------------------------------------------


def test_an_ensemble_is_predicted_over_the_draws_of_all_its_networks():
    nets = [perceptron(outputs=3, seed=seed) for seed in range(3)]
    x = torch.randn(70, 6)
    options = {"n_draws": 20, "likelihood": db.Categorical(), "quantiles": (0.1, 0.9)}
    prediction = db.predict(nets, DataLoader(x, batch_size=32), keep_draws=True, **options)
    draws = torch.cat([db.draws(net, x, n_draws=20) for net in nets])
    assert torch.equal(prediction.draws, draws)
    probabilities = draws.double().softmax(-1)
    torch.testing.assert_close(prediction.mean.double(), probabilities.mean(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(prediction.epistemic.double(), probabilities.var(0, correction=0), atol=1e-6, rtol=0)
    votes = torch.nn.functional.one_hot(draws.argmax(-1), 3).sum(0).amax(-1)
    torch.testing.assert_close(prediction.variation_ratio, 1 - votes / 60, atol=1e-6, rtol=0)
    assert prediction.n_draws == 60
    assert torch.equal(db.predict(nn.ModuleList(nets), x, **options).quantiles, prediction.quantiles)


def test_an_ensemble_of_one_is_its_network():
    net, x = perceptron(), torch.randn(9, 6)
    assert torch.equal(db.predict([net], x).epistemic, db.predict(net, x).epistemic)


def test_an_ensemble_needs_networks_of_one_output_and_a_number_of_draws():
    x = torch.randn(4, 6)
    with pytest.raises(ValueError, match="networks of one shape of output"):
        db.predict([perceptron(), perceptron(outputs=2)], x)
    for wrong in ({"n_draws": "auto"}, {"method": "linear"}):
        with pytest.raises(ValueError, match="`net` must be a network, or a list"):
            db.predict([perceptron(), perceptron(seed=1)], x, **wrong)
    with pytest.raises(ValueError, match="got 0 networks"):
        db.predict([], x)


class Pair:
    """Two rows that depend on each other, in an object that only its network understands."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Pair(self.x.to(device))


class OfPairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, pair):
        return self.net(pair.x - pair.x.mean(0))


def test_objects_that_a_network_takes_whole_are_one_row_each_and_their_outputs_follow_each_other():
    net, pairs = OfPairs(), [Pair(torch.randn(2, 6)) for _ in range(3)]
    whole = Sampling(row_axis=None)
    loader = DataLoader(pairs, batch_size=1, collate_fn=lambda items: items[0])
    prediction = db.predict(net, loader, sampling=whole, keep_draws=True, n_draws=10)
    alone = [db.predict(net, pair, sampling=whole, keep_draws=True, n_draws=10) for pair in pairs]
    assert torch.equal(prediction.mean, torch.cat([one.mean for one in alone]))
    assert torch.equal(prediction.draws, torch.cat([one.draws for one in alone], 1))
    with pytest.raises(TypeError, match=r"got Pair.*row_axis=None"):
        db.predict(net, pairs[0])


class Head(nn.Module):
    """A perceptron that the direct path does not know."""

    def __init__(self, drop_prob):
        super().__init__()
        self.inner, self.returned = perceptron(drop_prob), "tensor"

    def forward(self, x):
        y = self.inner(x)
        return y if self.returned == "tensor" else {"y": y, "twice": 2 * y}


CHANGES = {
    "a drop probability": lambda net: setattr(net.inner[0], "p", 0.6),
    "dropout switched on": lambda net: [setattr(net.inner[at], "p", 0.3) for at in (0, 3)],
    "a layer replaced": lambda net: net.inner.__setitem__(1, nn.Linear(6, 50)),
    "a wider output": lambda net: net.inner.__setitem__(4, nn.Linear(50, 3)),
    "another structure of the output": lambda net: setattr(net, "returned", "dict"),
    "dropout gone": lambda net: [net.inner.__setitem__(at, nn.Identity()) for at in (0, 3)],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_network_that_changed_is_seen_while_a_device_works_on_it(change, monkeypatch):
    # A GPU begins with the network that was inspected; the answer is that of a network seen for the first time.
    monkeypatch.setattr("dropbayes.predictive.moments._works_ahead", lambda _: True)
    net, x = Head(0.0 if "on" in change.split() else 0.2), torch.randn(5, 6)

    def outcome(net):
        try:
            prediction = db.predict(net, x, n_draws=20)
        except ValueError as error:
            return str(error)
        return prediction.mean, prediction.variance, prediction.method

    outcome(net)
    CHANGES[change](net)
    told = outcome(net)
    fresh = copy.deepcopy(net)
    for found, expected in zip(tree_leaves(told), tree_leaves(outcome(fresh)), strict=True):
        assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
    assert ("random" in told) == (change == "dropout gone")
