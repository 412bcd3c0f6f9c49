"""Predictions by the linear method: many outputs, likelihoods, inputs of all forms, refusals."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.linear import Linear, covariance
from dropbayes.predictive import outputs_by
from tests.sampling.zoo.specimens import Module


def wide(n_outputs=40):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Dropout(0.2), nn.Linear(30, 30), nn.ReLU(), nn.Dropout(0.2),
                        nn.Linear(30, n_outputs))  # fmt: skip
    return net, torch.randn(6, 3)


def test_the_covariance_has_the_variance_on_its_diagonal():
    net, x = wide(3)
    diagonal = covariance(net, x).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(diagonal.float(), db.predict(net, x, method="linear").epistemic)


def test_probes_estimate_the_variance_and_say_so():
    net, x = wide()
    exact = db.predict(net, x, method="linear")
    probed = db.predict(net, x, method=Linear(max_outputs=10, n_probes=4096))
    assert probed.method == "linear, 4096 probes" and torch.equal(probed.mean, exact.mean)
    torch.testing.assert_close(probed.std, exact.std, rtol=0.06, atol=0)


def test_the_largest_outputs_alone_have_their_variance_and_the_method_says_so():
    net, x = wide()
    exact, some = db.predict(net, x, method="linear"), db.predict(net, x, method=Linear(5, "largest"))
    assert some.method == "linear, the largest 5 of 40 outputs" and torch.equal(some.mean, exact.mean)
    chosen = exact.mean.topk(5).indices
    torch.testing.assert_close(some.epistemic.gather(1, chosen), exact.epistemic.gather(1, chosen))
    assert (some.epistemic > 0).sum() == 5 * len(x)


@pytest.mark.parametrize("above", ["probes", "largest"])
def test_classes_above_the_limit_have_nearly_the_same_probabilities(above):
    net, x = wide()
    exact = db.predict(net, x, method="linear", likelihood=db.Categorical())
    method = Linear(max_outputs=30, above=above, n_probes=2048)
    found = db.predict(net, x, method=method, likelihood=db.Categorical())
    torch.testing.assert_close(found.mean, exact.mean, atol=3e-3, rtol=0)
    torch.testing.assert_close(found.entropy, exact.entropy, atol=0.02, rtol=0)


def test_a_likelihood_reads_the_logits_of_the_linear_network_under_its_masks():
    """The network is linear in its masks, so that many draws are the truth."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Dropout(0.3), nn.Linear(50, 4)), 3 * torch.randn(6, 3)
    linear = db.predict(net, x, method="linear", likelihood=db.Categorical())
    drawn = db.predict(net, x, n_draws=10_000, likelihood=db.Categorical())
    for name in ("mean", "epistemic", "expected_entropy", "mutual_information"):
        torch.testing.assert_close(getattr(linear, name), getattr(drawn, name), atol=5e-3, rtol=0)


def test_the_likelihood_of_few_inputs_that_are_seldom_dropped_is_that_of_their_masks():
    """The network is linear in its masks, and most often drops nothing: a Gaussian of its variance is far off."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Dropout(0.05), nn.Linear(3, 1)), 2 * torch.randn(50, 3)
    y, likelihood = net.eval()(x).detach(), db.Gaussian(precision=25.0)
    linear = db.evaluate(net, x, y, likelihood=likelihood, method="linear").log_likelihood
    drawn = db.evaluate(net, x, y, likelihood=likelihood, n_draws=5000, masks="shared").log_likelihood
    assert linear == pytest.approx(drawn, abs=0.02)
    variance = covariance(net, x)[:, 0] + 1 / 25
    assert drawn > float(-0.5 * (2 * torch.pi * variance).log().mean()) + 0.1


def test_a_mask_that_would_never_drop_among_the_points_has_its_variance():
    net, x = nn.Sequential(nn.Dropout(0.001), nn.Linear(3, 1)), torch.randn(5, 3)
    moments, points = (db.predict(net, x, method="linear", likelihood=one) for one in (None, db.Gaussian(1e9)))
    assert (moments.epistemic > 0).all()
    drawn = outputs_by("linear", net, x, n_draws=0, seed=0)
    torch.testing.assert_close(drawn.var(0, correction=0), moments.epistemic, rtol=1e-3, atol=0)
    torch.testing.assert_close(points.epistemic, moments.epistemic, rtol=1e-3, atol=0)


def test_gaussian_noise_is_added_and_a_predicted_one_is_averaged():
    net, x = wide(2)
    plain, noisy = (db.predict(net, x, method="linear", likelihood=one) for one in (None, db.Gaussian(precision=4.0)))
    torch.testing.assert_close(noisy.variance, plain.epistemic + 0.25)
    spread = db.predict(net, x, method="linear", likelihood=db.HeteroscedasticGaussian())
    torch.testing.assert_close(spread.epistemic, plain.epistemic[:, :1], rtol=1e-3, atol=0)
    # the mean of a log-normal variance
    expected = (plain.mean[:, 1:] + plain.epistemic[:, 1:] / 2).exp()
    torch.testing.assert_close(spread.aleatoric, expected, rtol=1e-2, atol=0)


def test_two_calls_have_the_same_bits_and_no_draws():
    net, x = wide(4)
    one, other = (db.predict(net, x, method="linear", likelihood=db.Categorical(), seed=seed) for seed in (0, 1))
    assert torch.equal(one.mean, other.mean) and torch.equal(one.epistemic, other.epistemic) and one.n_draws == 0
    assert repr(one).endswith("nats; linear)")


def test_a_loader_gives_what_its_rows_give_and_memory_may_be_small():
    net, x = wide(3)
    whole = db.predict(net, x, method="linear")
    loaded = db.predict(net, torch.utils.data.DataLoader(x, batch_size=4), method="linear", progress=False)
    torch.testing.assert_close(loaded.epistemic, whole.epistemic)
    torch.testing.assert_close(
        db.predict(net, x, method="linear", sampling=db.Sampling(max_bytes=1)).epistemic, whole.epistemic
    )


def test_complex_outputs_have_the_variance_of_both_parts():
    net = Module(lambda m, x: torch.complex(m.drop(x), 2 * m.drop(x)), drop=nn.Dropout(0.5))
    x = torch.randn(4, 3)
    prediction = db.predict(net, x, method="linear")
    torch.testing.assert_close(prediction.epistemic, 5 * x.square())
    assert prediction.mean.is_complex()


def test_low_precision_has_nearly_the_same_variance():
    net, x = wide(2)
    expected = db.predict(net, x, method="linear").std
    found = db.predict(net.bfloat16(), x.bfloat16(), method="linear").std
    assert 0.95 < float((found.float() / expected).median()) < 1.05


def test_an_output_without_dropout_has_variance_0():
    net = Module(lambda m, x: {"a": F.dropout(x, 0.5, m.training), "b": x + 1})
    prediction = db.predict(net, torch.ones(2, 3), method="linear")
    assert torch.equal(prediction.epistemic["a"], torch.ones(2, 3)) and not prediction.epistemic["b"].any()


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (lambda m, x: (m.drop(x) * 10).long(), "real numbers.*int64.*logits"),
        (lambda m, x: m.drop(x).detach(), "has none.*no_grad"),
        (lambda m, x: x, "add_dropout"),
    ],
    ids=["integers", "detached", "no dropout"],
)
def test_what_has_no_derivative_is_refused_with_a_remedy(forward, words):
    with pytest.raises(ValueError, match=words):
        db.predict(Module(forward, drop=nn.Dropout(0.5)), torch.randn(4, 3), method="linear")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"above": "all"}, "`above`"), ({"max_outputs": 0}, "`max_outputs`"), ({"n_probes": 3}, "`n_probes`")],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Linear(**options)


def test_a_covariance_of_too_many_outputs_is_refused():
    net, x = wide(200)
    with pytest.raises(ValueError, match="at most 128 numbers"):
        covariance(net, x)


NET = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1))


def test_an_unknown_method_is_refused():
    known = '`method` must be one of "sampling", "linear", "moments" or "controlled"; got \'laplace\''
    with pytest.raises(ValueError, match=known):
        db.predict(NET, torch.ones(2, 3), method="laplace")


@pytest.mark.parametrize("options", [{"quantiles": [0.5]}, {"keep_draws": True}])
def test_what_needs_draws_is_refused(options):
    with pytest.raises(ValueError, match="need draws"):
        db.predict(NET, torch.ones(2, 3), method="linear", **options)


@pytest.mark.parametrize("options", [{"positions": "tied"}, {"ignore_modules": "2"}])
def test_what_moments_cannot_do_is_refused(options):
    with pytest.raises(ValueError, match='need method="linear"'):
        db.predict(NET, torch.ones(2, 3), method="moments", sampling=db.Sampling(**options))


def test_the_covariance_between_rows_is_that_of_shared_masks():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    joint = covariance(net, x, between_rows=True)
    drawn = db.draws(net, x, n_draws=20_000).flatten(1)
    torch.testing.assert_close(joint.reshape(10, 10), drawn.T.cov(), rtol=0.1, atol=0.02 * float(joint.max()))
    torch.testing.assert_close(joint.diagonal(dim1=0, dim2=2).permute(2, 0, 1), covariance(net, x))


def test_a_slope_that_is_not_a_number_is_refused():
    class Filled(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.o = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True), nn.Linear(4, 1)

        def forward(self, x, hidden):
            return self.o(self.attention(x, x, x, key_padding_mask=hidden)[0].nan_to_num().mean(1))

    x, hidden = torch.randn(2, 3, 4), torch.tensor([[True] * 3, [False] * 3])  # the first row sees nothing
    assert db.predict(Filled().eval(), (x, hidden)).std[0].item() == 0
    with pytest.raises(ValueError, match="NaN or infinite outputs or slopes"):
        db.predict(Filled().eval(), (x, hidden), method="linear")
