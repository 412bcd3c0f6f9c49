"""Scores of a network against outcomes, recomputed from its draws."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropbayes as db
from dropbayes.predictive.evaluation import checked_targets, fitted_noise, score_draws
from dropbayes.predictive.scoring import core_scores


def network(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, outputs)).eval()


@pytest.mark.parametrize("outputs", [1, 3])
def test_log_likelihood_is_the_logsumexp_over_draws(outputs):
    # [GG16, eq:predictive_dist_reg] for D outputs, written out.
    net, x, tau = network(outputs), torch.randn(11, 4), 2.5
    y = torch.randn(11, outputs)
    ours = db.evaluate(net, x, y, likelihood=db.Gaussian(precision=tau), n_draws=64, masks="shared")
    draws = db.draws(net, x, n_draws=64).double()
    squares = (y - draws).square().sum(-1)
    expected = torch.logsumexp(-0.5 * tau * squares, 0) - math.log(64) + 0.5 * outputs * math.log(tau / (2 * math.pi))
    torch.testing.assert_close(ours.log_likelihoods, expected, rtol=1e-5, atol=1e-6)
    assert ours.log_likelihood == pytest.approx(float(expected.mean()), rel=1e-6)
    assert ours.rmse == pytest.approx(float((y - draws.mean(0)).square().mean().sqrt()), rel=1e-5)


@pytest.mark.parametrize("method", ["linear", "moments"])
def test_methods_without_draws_score_the_gaussian_of_the_outputs(method):
    net, x, y, tau = network(), torch.randn(11, 4), torch.randn(11, 1), 2.5
    exact = db.predict(net, x, likelihood=db.Gaussian(precision=tau))  # one site, before the last layer
    expected = torch.distributions.Normal(exact.mean, exact.std).log_prob(y)[:, 0].double()
    ours = db.evaluate(net, x, y, likelihood=db.Gaussian(precision=tau), method=method)
    torch.testing.assert_close(ours.log_likelihoods, expected, rtol=1e-2, atol=1e-2)
    assert (ours.n_draws, ours.method) == (0, method) and method in str(ours)


def test_coverage_counts_outcomes_inside_the_interval():
    net, x = network(), torch.randn(400, 4)
    prediction = db.predict(
        net,
        x,
        n_draws=100,
        likelihood=db.Gaussian(precision=9.0),
        masks="row",
        sampling=db.Sampling(integrate_last_layer=False),
    )
    y = prediction.mean + prediction.std * torch.randn(400, 1)
    ours = db.evaluate(net, x, y, likelihood=db.Gaussian(precision=9.0), n_draws=100)
    for level in (50, 80, 95):
        error = math.sqrt(level * (100 - level) / 400) / 10
        assert abs(100 * getattr(ours, f"coverage_{level}") - level) < 400 * error


def test_class_scores_are_those_of_scikit_learn():
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    net, x = network(3), torch.randn(50, 4)
    y = torch.randint(0, 3, (50,))
    ours = db.evaluate(net, x, y, likelihood=db.Categorical(), n_draws=40, masks="shared")
    probabilities = db.draws(net, x, n_draws=40).double().softmax(-1).mean(0)
    assert ours.log_likelihood == pytest.approx(
        -sklearn_metrics.log_loss(y, probabilities.numpy(), labels=[0, 1, 2]), rel=1e-5
    )
    assert ours.accuracy == pytest.approx(float((probabilities.argmax(-1) == y).double().mean()))
    one_hot = torch.nn.functional.one_hot(y, 3)
    assert ours.brier == pytest.approx(float((probabilities - one_hot).square().sum(-1).mean()), rel=1e-5)
    assert 0 <= ours.calibration_error <= 1


def test_a_loader_of_pairs_gives_the_scores_of_its_rows():
    net, x, y = network(), torch.randn(21, 4), torch.randn(21, 1)
    whole = db.evaluate(net, x, y, likelihood=db.Gaussian(precision=1.0), n_draws=30)
    streamed = db.evaluate(
        net,
        DataLoader(TensorDataset(x, y), batch_size=4),
        likelihood=db.Gaussian(precision=1.0),
        n_draws=30,
        progress=False,
    )
    assert streamed.log_likelihood == pytest.approx(whole.log_likelihood, rel=1e-6)
    assert "log-likelihood" in str(whole) and "21 rows, 30 draws" in str(whole)
    one = db.evaluate(net, x[:1], y[:1], likelihood=db.Gaussian(precision=1.0), n_draws=1)
    assert str(one).startswith("1 row, 1 draw\n")


@pytest.mark.parametrize("given", [{"y": torch.zeros(5, 1)}, {"sample_weight": torch.ones(5)}])
def test_outcomes_and_weights_beside_a_loader_are_refused_before_a_pass(given):
    net = network()
    net.register_forward_hook(lambda *_: pytest.fail("the network ran"))
    loader = DataLoader(TensorDataset(torch.randn(5, 4), torch.randn(5, 1)))
    with pytest.raises(TypeError, match="whose batches hold the outcomes: leave `y` and `sample_weight` out"):
        db.evaluate(net, loader, likelihood=db.Gaussian(1.0), progress=False, **given)


def test_unequal_rows_and_missing_outcomes_are_refused():
    net, x = network(), torch.randn(5, 4)
    likelihood = db.Gaussian(precision=1.0)
    with pytest.raises(ValueError, match="`y` must have one entry per row"):
        db.evaluate(net, x, torch.zeros(4, 1), likelihood=likelihood)
    with pytest.raises(ValueError, match="`y` must have the shape"):
        db.evaluate(net, x, torch.zeros(5), likelihood=likelihood)
    with pytest.raises(TypeError, match="`y` must hold the outcomes"):
        db.evaluate(net, x, likelihood=likelihood)
    with pytest.raises(TypeError, match="`likelihood` must say"):
        db.evaluate(net, x, torch.zeros(5, 1), likelihood=None)
    with pytest.raises(TypeError, match="pairs"):
        db.evaluate(net, DataLoader(TensorDataset(x)), likelihood=likelihood, progress=False)
    with pytest.raises(ValueError, match="at least one batch"):
        db.evaluate(net, DataLoader([]), likelihood=likelihood, progress=False)
    with pytest.raises(AttributeError, match="an evaluation has"):
        _ = db.evaluate(net, x, torch.zeros(5, 1), likelihood=likelihood).accuracy


def test_coverage_is_that_of_the_mixture_of_draws():
    from dropbayes.predictive.mixtures import Mixture

    net, x, y = network(), torch.randn(60, 4), 2 * torch.randn(60, 1)
    ours = db.evaluate(net, x, y, likelihood=db.Gaussian(precision=9.0), n_draws=40, masks="shared")
    mixture = Mixture(db.draws(net, x, n_draws=40).double().squeeze(-1), torch.tensor(1 / 3))
    for level in (50, 80, 95):
        low, high = (mixture.quantile(0.5 + sign * level / 200) for sign in (-1, 1))
        inside = ((low <= y[:, 0]) & (y[:, 0] <= high)).double().mean().item()
        assert getattr(ours, f"coverage_{level}") == pytest.approx(inside)
    assert ours.sharpness == pytest.approx(mixture.variance.mean().sqrt().item(), rel=1e-5)


@pytest.mark.parametrize("classes", [False, True])
def test_a_row_of_weight_two_counts_as_two_in_every_score(classes):
    net, x, weight = network(3), torch.randn(12, 4), torch.arange(12) % 3
    y = torch.arange(12) % 3 if classes else torch.randn(12, 3)
    rows = torch.repeat_interleave(torch.arange(12), weight)
    options = {"likelihood": db.Categorical() if classes else db.Gaussian(2.0), "n_draws": 20, "masks": "shared"}
    ours = db.evaluate(net, x, y, sample_weight=weight, **options)
    theirs = db.evaluate(net, x[rows], y[rows], **options)
    assert ours.scores == pytest.approx(theirs.scores)
    assert ours.log_likelihood == pytest.approx(theirs.log_likelihood)


def test_outcomes_that_cannot_be_scored_are_refused():
    net, x = network(), torch.randn(4, 4)
    options = {"likelihood": db.Gaussian(1.0), "n_draws": 5}
    with pytest.raises(ValueError, match="`y` must be finite"):
        db.evaluate(net, x, torch.full((4, 1), math.nan), **options)
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="`net` gave NaN or infinite outputs"):
            db.evaluate(net, x * value, torch.zeros(4, 1), **options)
    with pytest.raises(ValueError, match="`y` must"):
        db.evaluate(net, x, torch.zeros(4), **options)
    with pytest.raises(ValueError, match="`sample_weight` must"):
        db.evaluate(net, x, torch.zeros(4, 1), sample_weight=-torch.ones(4), **options)
    with pytest.raises(ValueError, match="`y` must hold class labels from 0 to 2"):
        db.evaluate(network(3), x, torch.tensor([0, 1, 2, 3]), likelihood=db.Categorical(), n_draws=5)


def test_an_evaluation_shows_itself_in_one_line():
    result = db.evaluate(network(), torch.randn(4, 4), torch.zeros(4, 1), likelihood=db.Gaussian(1.0), n_draws=5)
    assert repr(result).startswith("Evaluation(4 rows, log_likelihood -")
    assert len(repr(result)) < 120 and "tensor" not in repr(result)
    one = db.evaluate(network(), torch.randn(1, 4), torch.zeros(1, 1), likelihood=db.Gaussian(1.0), n_draws=5)
    assert repr(one).startswith("Evaluation(1 row, ")


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3))
        self.number, self.kind = nn.Linear(16, 1), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.body(x)
        return {"number": self.number(hidden), "kind": self.kind(hidden)}


def test_each_output_is_scored_by_its_own_likelihood_and_all_together():
    torch.manual_seed(0)
    net, x = TwoHeads(), torch.randn(21, 4)
    y = {"number": torch.randn(21, 1), "kind": torch.randint(0, 3, (21,))}
    likelihoods = {"number": db.Gaussian(2.0), "kind": db.Categorical()}
    options = {"n_draws": 30, "masks": "shared"}
    both = db.evaluate(net, x, y, likelihood=likelihoods, **options)
    drawn = db.draws(net, x, n_draws=30)
    densities = [likelihoods[name].for_output(2).log_density(drawn[name].double(), y[name]) for name in y]
    expected = sum(densities).logsumexp(0) - math.log(30)  # the draws tie the outputs together
    torch.testing.assert_close(both.log_likelihoods, expected, rtol=1e-5, atol=1e-6)
    assert both.scores["number.rmse"] == pytest.approx(
        float((y["number"] - drawn["number"].mean(0)).square().mean().sqrt()), rel=1e-5
    )
    assert both.scores["kind.accuracy"] == pytest.approx(
        (drawn["kind"].softmax(-1).mean(0).argmax(-1) == y["kind"]).float().mean()
    )
    assert "kind.log likelihood" in str(both)
    loaded = DataLoader([(x[i], {name: value[i] for name, value in y.items()}) for i in range(21)], batch_size=5)
    streamed = db.evaluate(net, loaded, likelihood=likelihoods, progress=False, **options)
    assert streamed.scores == pytest.approx(both.scores)
    one = db.evaluate(net, x, {**y, "number": None}, likelihood={**likelihoods, "number": None}, **options)
    assert one.log_likelihood == pytest.approx(both.scores["kind.log_likelihood"], abs=1e-6)
    with pytest.raises(ValueError, match="`y` must have an entry for each output"):
        db.evaluate(net, x, y["kind"], likelihood=likelihoods)


def test_an_evaluation_is_a_picture():
    pytest.importorskip("matplotlib").use("Agg")
    torch.manual_seed(0)
    result = db.evaluate(network(), torch.randn(40, 4), torch.randn(40, 1), likelihood=db.Gaussian(1.0), n_draws=5)
    (curve,) = [line for line in result.plot().lines if line.get_gid() == "curve"]
    assert curve.get_ydata().tolist() == pytest.approx(result.reliability.observed.tolist())


def test_the_labels_of_maps_are_counted():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Dropout(0.5))
    x, y = torch.randn(2, 1, 4, 5), torch.randint(0, 3, (2, 4, 5))
    result = db.evaluate(net, x, y, likelihood=db.Categorical(), n_draws=20, masks="shared")
    probabilities = db.draws(net, x, n_draws=20).softmax(2).mean(0)
    assert result.accuracy == pytest.approx(float((probabilities.argmax(1) == y).double().mean()))
    assert result.n_outcomes == 40 and str(result).startswith("2 rows of 40 outcomes, 20 draws")


def test_whole_numbers_and_several_columns_are_classes():
    logits, y = torch.zeros(3, 4), torch.tensor([0, 1, 2])
    assert checked_targets(y, logits, None)[1] == db.Categorical(class_axis=-1)
    assert checked_targets(y.float()[:, None], logits[:, :1], None)[1] is None
    assert checked_targets(y, logits, db.Categorical())[1] == db.Categorical(class_axis=-1)
    assert checked_targets(y, logits[:, :1], db.Bernoulli())[1] == db.Bernoulli()


@pytest.mark.parametrize("y", [torch.eye(3).long(), torch.eye(3), torch.tensor([[True], [False], [True]])])
def test_zeros_and_ones_are_not_taken_for_numbers(y):
    outputs = torch.zeros(y.shape)
    with pytest.raises(ValueError, match=r"0 and 1 alone: Bernoulli\(\) of labels.* one-hot rows are y.argmax\(1\)"):
        checked_targets(y, outputs, None)
    assert checked_targets(y, outputs, db.Gaussian(1.0))[1] == db.Gaussian(1.0)
    assert checked_targets(y, outputs, db.Bernoulli())[1] == db.Bernoulli()


def test_a_method_that_evaluate_does_not_have_is_not_offered():
    net, x, y = network(), torch.randn(4, 4), torch.zeros(4, 1)
    for method in ("controlled", "exact"):
        with pytest.raises(ValueError, match=f'must be one of "sampling", "linear", "moments"; got \'{method}\''):
            db.evaluate(net, x, y, likelihood=db.Gaussian(1.0), method=method)
    with pytest.raises(ValueError, match='"moments" or "controlled"; got'):
        db.predict(net, x, method="exact")


def test_the_fitted_noise_is_the_maximum_of_the_likelihood():
    torch.manual_seed(0)
    draws, y = 0.3 * torch.randn(20, 500, 1), torch.randn(500, 1)
    fitted = score_draws(draws, y, None)[0].mean()
    for precision in (0.5, 0.9, 1.1, 2.0):
        assert score_draws(draws, y, db.Gaussian(precision))[0].mean() <= fitted + 1e-9


def test_one_draw_of_known_noise_has_the_scores_of_its_gaussian():
    location, y = torch.tensor([[[0.0], [0.0], [1.0]]]), torch.tensor([[0.0], [3.0], [1.5]])
    log_likelihood, outcomes = score_draws(location, y, db.Gaussian(precision=4.0))
    density = torch.distributions.Normal(location[0].double(), 0.5).log_prob(y.double())[:, 0]
    torch.testing.assert_close(log_likelihood, density)
    torch.testing.assert_close(outcomes.loss(), torch.tensor([0.0, 3.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(outcomes.uncertainty(), torch.full((3,), 0.25, dtype=torch.float64))
    found = core_scores(outcomes)
    assert [found[f"coverage_{p}"] for p in (50, 80, 95)] == pytest.approx([1 / 3, 2 / 3, 2 / 3])


def test_classes_have_the_entropy_and_the_density_of_the_mean_probabilities():
    probabilities = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.5, 0.5], [0.6, 0.4]]], dtype=torch.float64)
    y, mean = torch.tensor([0, 0]), torch.tensor([[0.7, 0.3], [0.4, 0.6]], dtype=torch.float64)
    log_likelihood, outcomes = score_draws(probabilities.log(), y, db.Categorical(class_axis=-1))
    torch.testing.assert_close(log_likelihood, mean[:, 0].log())
    torch.testing.assert_close(outcomes.uncertainty(), torch.distributions.Categorical(mean).entropy())
    assert outcomes.loss().tolist() == [0.0, 1.0]
    assert core_scores(outcomes)["calibration_error"] == pytest.approx((0.3 + 0.6) / 2)


@pytest.mark.parametrize("kind", [bool, np.uint8, np.uint16, np.uint64])
def test_truth_values_and_whole_numbers_of_any_kind_are_outcomes(kind):
    net, classes, x = network(), nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2)), torch.randn(6, 4)
    y = np.array([0, 1, 1, 0, 1, 0])
    for model, likelihood, shape in (
        (net, db.Gaussian(1.0), (6, 1)),
        (net, db.Poisson(), (6, 1)),
        (classes, db.Categorical(), (6,)),
    ):
        expected, found = (
            db.evaluate(model, x, one.reshape(shape), likelihood=likelihood, n_draws=5) for one in (y, y.astype(kind))
        )
        assert found.log_likelihood == expected.log_likelihood and found.scores == expected.scores
        db.fit(model, x, y.astype(kind).reshape(shape), likelihood=likelihood, epochs=1, device="cpu")
    assert db.check(net, x, y.astype(kind), likelihood=db.Poisson(), n_draws=5).n_rows == 6


@pytest.mark.parametrize(
    ("y", "message"), [(["a"] * 3, "numbers"), ([np.nan] * 3, "`y` must be finite"), (1.0, "each of the 3 rows")]
)
def test_outcomes_that_are_no_numbers_are_refused(y, message):
    with pytest.raises((TypeError, ValueError), match=message):
        checked_targets(y, torch.zeros(3, 1), None)


def test_a_missing_outcome_is_refused():
    with pytest.raises(ValueError, match="one outcome for each of the 3 rows"):
        checked_targets([1, 2], torch.zeros(3, 1), None)


def test_the_noise_of_a_map_is_that_of_all_its_pixels_and_of_a_row_that_of_each_output():
    torch.manual_seed(0)
    outcomes = torch.randn(500, 3, 4, dtype=torch.float64) * torch.tensor([0.5, 1.0, 2.0])[:, None]
    pixels, plain = fitted_noise(torch.zeros(1, 500, 3, 4), outcomes), torch.zeros(1, 500, 3)
    assert pixels.precision == pytest.approx(3 / (0.25 + 1 + 4), rel=0.05)
    assert pixels.log_density(torch.zeros(500, 3, 4), outcomes).shape == (500,)
    outputs = fitted_noise(plain, outcomes[..., 0]).precision
    torch.testing.assert_close(outputs, torch.tensor([4.0, 1.0, 0.25]).double(), rtol=0.15, atol=0)


def test_a_fraction_of_a_label_is_a_share_of_a_row():
    net, x, y = network(), torch.randn(40, 4), torch.randint(0, 2, (40, 1)).float()
    soft = db.evaluate(net, x, 0.8 * y + 0.1, likelihood=db.Bernoulli())
    rows, labels = x.repeat(2, 1), torch.cat([y, 1 - y])
    weight = torch.cat([torch.full((40,), 0.9), torch.full((40,), 0.1)])
    draws = db.draws(net, x, n_draws=100, masks="row")
    p = draws.double().sigmoid().mean(0)
    hit = ((p > 0.5) == (y > 0.5)).double().mean()
    assert soft.accuracy == pytest.approx(float(0.9 * hit + 0.1 * (1 - hit)))
    brier = 2 * (0.9 * (p - y).square() + 0.1 * (p - 1 + y).square()).mean()
    assert soft.brier == pytest.approx(float(brier), rel=1e-5)
    twice = db.evaluate(net, rows, labels, likelihood=db.Bernoulli(), sample_weight=weight, masks="shared")
    once = db.evaluate(net, x, 0.8 * y + 0.1, likelihood=db.Bernoulli(), masks="shared")
    assert once.scores == pytest.approx(twice.scores)


@pytest.mark.parametrize("unit", [1e-12, 1.0, 1e12])
def test_the_fitted_noise_has_the_unit_of_the_outcomes(unit):
    source = torch.Generator().manual_seed(0)
    y, draws = (unit * torch.randn(*shape, generator=source, dtype=torch.float64) for shape in ((200, 1), (30, 200, 1)))
    fitted = fitted_noise(draws, y).precision * unit**2
    assert fitted == pytest.approx(fitted_noise(draws / unit, y / unit).precision, rel=1e-3)
