"""Tests of the verdict on Monte Carlo dropout and of the choice of a drop probability."""

import math

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.predictive.verdict import check, choose_dropout


def network(seed=0, *, drop_prob=0.1, n_outputs=1):
    torch.manual_seed(seed)
    layers = [nn.Linear(2, 40), nn.ReLU(), *([nn.Dropout(drop_prob)] if drop_prob else []), nn.Linear(40, n_outputs)]
    return nn.Sequential(*layers)


def numbers(n=300, *, seed=1):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=source)
    return x, x[:, :1] + 0.3 * torch.randn(n, 1, generator=source)


def trained(seed=0, *, drop_prob=0.1, n_outputs=1):
    net, (x, y) = network(seed, drop_prob=drop_prob, n_outputs=n_outputs), numbers(seed=0)
    target = (y[:, 0] > 0).long() if n_outputs > 1 else y
    loss = nn.CrossEntropyLoss() if n_outputs > 1 else nn.MSELoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        loss(net(x), target).backward()
        optimizer.step()
    return net.eval()


def test_the_numbers_of_a_verdict_are_those_of_evaluate():
    (x, y), net = numbers(), trained()
    verdict = check(net, x, y, likelihood=db.Gaussian(precision=8.0), n_draws=60)
    result = db.evaluate(net, x, y, likelihood=db.Gaussian(precision=8.0), n_draws=60)
    assert verdict.log_likelihood == pytest.approx(result.log_likelihood, abs=1e-5)
    with torch.no_grad():
        plain = torch.distributions.Normal(net(x), 8.0**-0.5).log_prob(y).mean()
    assert verdict.plain_log_likelihood == pytest.approx(float(plain), abs=1e-5)
    assert verdict.gain == pytest.approx(result.log_likelihood - float(plain), abs=1e-5)


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


def test_the_chosen_probability_is_the_largest_within_the_tolerance():
    (x, y), net = numbers(1000), trained(drop_prob=0.0)
    choice = choose_dropout(net, x, y, tolerance=0.05)
    within = [p for p, score in choice.tried.items() if score >= choice.plain_log_likelihood - 0.05]
    assert choice.drop_prob == max(within)
    assert choice.log_likelihood == choice.tried[choice.drop_prob]
    wider = choose_dropout(net, x, y, tolerance=10.0)
    assert wider.drop_prob == 0.3
    assert db.sites(choice.network, x)[0].drop_prob == pytest.approx(choice.drop_prob)


def test_when_no_probability_is_within_the_tolerance_it_says_so():
    x = torch.linspace(-1, 1, 200)[:, None].expand(-1, 2).contiguous()
    net = nn.Sequential(nn.Linear(2, 1))
    with torch.no_grad():
        net[0].weight[:], net[0].bias[:] = 50.0, 0.0
        y = net(x) + 0.01 * torch.randn(200, 1)
    choice = choose_dropout(net, x, y, tolerance=0.01)
    assert choice.drop_prob == 0 and choice.network is net and not choice.helps
    assert "no drop probability" in str(choice)


def test_layers_chosen_apart_keep_the_tolerance_and_drop_at_least_as_much():
    (x, y), net = numbers(500), trained(drop_prob=0.0)
    one, apart = (choose_dropout(net, x, y, tolerance=0.1, per_layer=each) for each in (False, True))
    assert min(apart.drop_prob.values()) >= one.drop_prob
    assert apart.log_likelihood >= apart.plain_log_likelihood - 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"tolerance": -1}, "`tolerance` must be"), ({"drop_probs": [1.0]}, "`drop_probs` must hold")],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose_dropout(trained(drop_prob=0.0), *numbers(20), **arguments)


def test_outcomes_of_another_shape_are_refused():
    x, y = numbers(20)
    with pytest.raises(ValueError, match="`y` must have one outcome"):
        check(trained(), x, y[:10])
    with pytest.raises(ValueError, match="`y` must have the shape"):
        check(trained(), x, torch.cat([y, y], 1))
