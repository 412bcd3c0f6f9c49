"""Tests of the theory read off a network."""

import pytest
import torch
from torch import nn

from dropbayes.layers import Linear, MixtureNoise, Prior, keep_probs, kl_coefficients
from dropbayes.layers.conversion import add_dropout
from dropbayes.likelihoods import Gaussian
from dropbayes.processes import process_of
from dropbayes.processes.theory import theory_report, variance_ratio
from dropbayes.training import Optimization, fit

PRIOR = Prior(length_scale=2.0, hidden_length_scale="fan_in")


def readings(net, x):
    return {weight.name: weight.reading for weight in theory_report(net, x, PRIOR, 50).weights}


def test_dropped_weights_are_bayesian_and_the_others_map():
    net = nn.Sequential(
        nn.Linear(2, 4),
        nn.LayerNorm(4),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(4, 3),
        nn.ReLU(),
        Linear(3, 1, noise=MixtureNoise(2)),
    )
    report = theory_report(net, torch.zeros(2, 2), Prior(per_layer={"0.weight": 0.0}), 50)
    assert {w.name: w.reading for w in report.weights} == {
        "0.weight": "flat",
        "4.weight": "Bayesian",
        "6.weight": "Bayesian",
    }
    assert report.is_variational and report.without_prior == ("1.weight", "1.bias")
    assert "every site is a draw of some q(W)" in str(report)


def test_the_reported_decay_is_half_the_coefficient_of_the_bound():
    net, x = (
        nn.Sequential(nn.Dropout(0.3), nn.Linear(3, 5), nn.ReLU(), nn.Dropout(0.1), nn.Linear(5, 1)),
        torch.zeros(1, 3),
    )
    for applies_to in ("active", "stored"):
        prior = Prior(length_scale=2.0, hidden_length_scale="fan_in", applies_to=applies_to)
        coefficients = kl_coefficients(net, prior=prior, keep_probs=keep_probs(net, x))
        for weight in theory_report(net, x, prior, 50, precision=4.0).weights:
            assert weight.weight_decay == pytest.approx(coefficients[weight.name] / (2 * 50 * 4.0))


@pytest.mark.parametrize(
    ("net", "x", "reason"),
    [
        (
            nn.Sequential(nn.Dropout(0.1), nn.Conv2d(2, 3, 3)),
            torch.zeros(2, 2, 5, 5),
            "differs from position to position",
        ),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1)), torch.zeros(2, 3), "multiplies no weight's input"),
        (
            nn.LSTM(3, 4, num_layers=2, dropout=0.2, batch_first=True),
            torch.zeros(2, 5, 3),
            "drawn anew at every position",
        ),
    ],
)
def test_what_is_a_draw_of_no_q_is_named(net, x, reason):
    report = theory_report(net, x, PRIOR, 50)
    assert [why for _, why in report.outside] and all(reason in why for _, why in report.outside)
    assert not report.is_variational


def test_a_converted_network_is_variational_throughout():
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4), nn.ReLU(), nn.Linear(4, 1))
    report = theory_report(add_dropout(net, 0.2), torch.zeros(2, 2, 5, 5), PRIOR, 50)
    assert report.is_variational and {w.reading for w in report.weights} == {"Bayesian"}
    assert "no weight is random: MAP" in str(theory_report(net, torch.zeros(2, 2, 5, 5), PRIOR, 50))


def test_a_weight_used_twice_with_a_mask_each_time_is_outside():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.step = nn.Dropout(0.2), nn.Linear(3, 3)

        def forward(self, x):
            return self.step(self.drop(torch.tanh(self.step(self.drop(x)))))

    report = theory_report(Loop(), torch.zeros(2, 3), PRIOR, 50)
    assert len(report.outside) == 2 and "used more than once" in report.outside[0][1]


def test_the_variances_of_a_network_and_of_its_process_are_set_side_by_side():
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 20)[:, None]
    y = torch.sin(2 * x)
    net = nn.Sequential(nn.Linear(1, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 1))
    prior = Prior(length_scale=1.0, hidden_length_scale="fan_in")
    fit(
        net,
        x,
        y,
        likelihood=Gaussian(50.0),
        prior=prior,
        epochs=30,
        device="cpu",
        optimization=Optimization(learning_rate=0.01),
    )
    compared = variance_ratio(net, process_of(net, prior), (x, y), torch.tensor([[0.0], [3.0]]), precision=50.0)
    assert compared.process[1] > 10 * compared.process[0]  # the process doubts where there are no data
    torch.testing.assert_close(compared.ratio, compared.network / compared.process)
    assert (compared.network > 0).all()
