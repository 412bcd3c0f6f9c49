"""Tests of the verdict on Monte Carlo dropout."""

import math

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.predictive.verdict import check
from tests.predictive.small_problem import numbers, trained


def test_the_numbers_of_a_verdict_are_those_of_evaluate():
    (x, y), net = numbers(), trained()
    verdict = check(net, x, y, likelihood=db.Gaussian(precision=8.0), n_draws=60)
    result = db.evaluate(net, x, y, likelihood=db.Gaussian(precision=8.0), n_draws=60)
    assert verdict.log_likelihood == pytest.approx(result.log_likelihood, abs=1e-5)
    with torch.no_grad():
        plain = torch.distributions.Normal(net(x), 8.0**-0.5).log_prob(y).mean()
    assert verdict.plain_log_likelihood == pytest.approx(float(plain), abs=1e-5)
    assert verdict.gain == pytest.approx(result.log_likelihood - float(plain), abs=1e-5)


@pytest.mark.parametrize("judge", [db.check, db.tune_dropout])
@pytest.mark.parametrize("likelihood", ["gaussian", db.Gaussian, [db.Gaussian(1.0)]])
def test_what_is_no_likelihood_is_refused_by_name(judge, likelihood):
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1))
    with pytest.raises(TypeError, match="`likelihood` must be one of dropbayes' likelihoods"):
        judge(net, torch.ones(8, 2), torch.ones(8, 1), likelihood=likelihood)


def test_without_a_likelihood_the_noise_fits_and_coverage_is_right():
    (x, y), net = numbers(2000), trained()
    verdict = check(net, x, y, n_draws=50)
    assert all(abs(observed - claimed) < 0.04 for claimed, observed in verdict.coverage.items())
    with torch.no_grad():
        variance = float((net(x) - y).square().mean())
    assert verdict.plain_log_likelihood == pytest.approx(-0.5 * math.log(2 * math.pi * math.e * variance), abs=1e-3)


def test_a_spread_that_knows_the_errors_ranks_them_and_a_blind_one_does_not():
    class Knowing(nn.Module):
        def __init__(self, blind):
            super().__init__()
            self.dropout, self.blind = nn.Dropout(0.5), blind

        def forward(self, x):
            width = x[:, 1:2].abs() if self.blind else x[:, :1].abs()
            return (self.dropout(torch.ones_like(x[:, :1])) - 1) * width

    source = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 2, generator=source)
    y = x[:, :1].abs() * torch.randn(2000, 1, generator=source).sign()
    knowing, blind = (check(Knowing(blind), x, y, likelihood=db.Gaussian(precision=1.0)) for blind in (False, True))
    assert knowing.ranking > 0.95
    assert abs(blind.ranking) < 0.1
    assert any("does not rank" in sentence for sentence in blind.advice)


@pytest.mark.slow
def test_an_ensemble_is_worth_as_many_networks_as_reach_the_same():
    (x, y), members = numbers(), [trained(seed, drop_prob=0.0) for seed in range(4)]
    verdict = check(trained(), x, y, members=members)
    scores = verdict.ensemble_log_likelihoods
    assert len(scores) == 4 and scores[3] > scores[0]
    size = verdict.ensemble_equivalent
    if math.isinf(size):
        assert verdict.log_likelihood > max(scores)
    else:
        assert scores[max(0, math.ceil(size) - 2)] - 1e-9 <= max(verdict.log_likelihood, scores[0])


def test_classes_are_judged_by_their_probabilities():
    (x, y), net = numbers(), trained(n_outputs=2)
    verdict = check(net, x, (y[:, 0] > 0).long())
    result = db.evaluate(net, x, (y[:, 0] > 0).long(), likelihood=db.Categorical())
    assert verdict.log_likelihood == pytest.approx(result.log_likelihood, abs=1e-5)
    assert verdict.calibration_error is not None and not verdict.coverage
    assert 0 < verdict.ranking <= 1


def test_the_network_is_left_as_it_was():
    net = trained().train()
    net[1].eval()
    before = [module.training for module in net.modules()]
    check(net, *numbers(50))
    assert [module.training for module in net.modules()] == before


def test_a_verdict_reads_as_a_table_in_a_terminal_and_in_a_notebook():
    verdict = check(trained(), *numbers())
    text, html = str(verdict), verdict._repr_html_()
    for part in ("ranking of errors", "coverage of 95%", "300 rows"):
        assert part in text and part in html
    assert all(len(line) <= 120 for line in text.splitlines())


def test_outcomes_of_another_shape_are_refused():
    x, y = numbers(20)
    with pytest.raises(ValueError, match="`y` must have one outcome"):
        check(trained(), x, y[:10])
    with pytest.raises(ValueError, match="`y` must have the shape"):
        check(trained(), x, torch.cat([y, y], 1))
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 6), nn.Unflatten(1, (2, 3)))
    with pytest.raises(ValueError, match=r"`y` must have the shape \(20, 2, 3\) .* got \(20, 3, 2\)"):
        check(net, torch.randn(20, 2), torch.randn(20, 3, 2))  # as many numbers, in other places


def test_what_is_no_list_of_networks_is_refused():
    with pytest.raises(TypeError, match="`members` must be a list of networks"):
        check(trained(), *numbers(20), members=trained())


def test_the_linear_method_is_compared_where_there_are_derivatives():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    verdict = db.check(net, torch.randn(50, 2), torch.randn(50, 1))
    assert verdict.linear.ratio == pytest.approx(1, abs=0.2) and "linear method" in str(verdict)
    rounded = nn.Sequential(net, Rounded())
    assert db.check(rounded, torch.randn(50, 2), torch.randn(50, 1)).linear is None


class Rounded(nn.Module):
    """Has no derivative."""

    def forward(self, x):
        return (100 * x.detach()).round() / 100


def test_a_network_that_returns_its_logits_in_a_record_is_judged_by_them():
    class Logits(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, input_ids):
            return {"logits": self.net(input_ids)}

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    wrapped = db.check(Logits(net), {"input_ids": x}, y, n_draws=10)
    assert wrapped.log_likelihood == db.check(net, x, y, n_draws=10).log_likelihood
    assert db.tune_dropout(Logits(net), {"input_ids": x}, y, n_draws=10).drop_probs.keys() <= {"net.2"}


def test_a_verdict_on_fractions_of_labels_ranks_shares_of_rows():
    net, x = trained(), torch.randn(60, 2)
    y = (torch.rand(60, 1) < 0.5).float()
    soft, hard = (check(net, x, labels, likelihood=db.Bernoulli()) for labels in (0.8 * y + 0.1, y))
    assert soft.random_area == pytest.approx(0.9 * hard.random_area + 0.1 * (1 - hard.random_area))


@pytest.mark.slow
def test_few_rows_of_a_calibrated_network_are_not_called_miscalibrated():
    verdicts = [check(trained(), *numbers(25, seed=seed), likelihood=db.Gaussian(precision=10.0)) for seed in range(6)]
    advised = sum("calibrate them" in " ".join(verdict.advice) for verdict in verdicts)
    assert advised <= 1  # the noise is as stated: a gap of coverage is the scatter of 25 rows
    one = check(trained(), *numbers(1), likelihood=db.Gaussian(precision=10.0), n_draws=1)
    assert str(one).startswith("Monte Carlo dropout on 1 row, 1 draw\n")


def test_a_network_that_gives_nan_is_refused_with_the_reason():
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    nn.init.constant_(net[2].bias, math.nan)
    for judge in (db.check, db.tune_dropout):
        with pytest.raises(ValueError, match="`net` gave NaN or infinite outputs"):
            judge(net, torch.zeros(8, 2), torch.zeros(8, 1))


@pytest.mark.parametrize("judge", [check, db.tune_dropout])
def test_a_loader_is_judged_as_its_rows_together(judge):
    net, (x, y) = trained(), numbers(60)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=25)
    assert str(judge(net, loader, n_draws=10)) == str(judge(net, x, y, n_draws=10))
    with pytest.raises(TypeError, match="leave `y`"):
        judge(net, loader, y)


def test_batches_that_do_not_fit_together_are_refused_with_the_rule():
    loader = [(torch.zeros(2, 3), torch.zeros(2)), (torch.zeros(2, 4), torch.zeros(2))]
    with pytest.raises(ValueError, match=r"batches can be joined.*pad texts"):
        check(nn.Linear(3, 1), torch.utils.data.DataLoader(loader, batch_size=None))
    with pytest.raises(TypeError, match=r"`y` must hold the outcomes unless"):
        check(nn.Linear(3, 1), torch.zeros(2, 3))
