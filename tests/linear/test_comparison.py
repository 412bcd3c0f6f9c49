"""The linear method against draws, on networks where it is known to be right and to be wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.linear import check_linear
from tests.sampling.zoo import build
from tests.sampling.zoo.specimens import Module


def test_it_agrees_where_it_is_exact():
    net = nn.Sequential(nn.Linear(3, 50), nn.ReLU(), nn.Dropout(0.3), nn.Linear(50, 2))
    found = check_linear(net, torch.randn(100, 3), n_draws=200)
    assert found.agrees and found.ratio == pytest.approx(1, abs=0.03) and found.rank_correlation > 0.9
    assert found.low > 0.85 and found.high < 1.15 and found.mean_error < 0.1
    assert str(found).endswith('method="linear" will do')


def test_it_does_not_where_the_mean_is_far_off():
    net = Module(lambda m, x: 5 * (F.dropout(x, 0.5, m.training).mean(1, keepdim=True) - 1).square())
    found = check_linear(net, torch.ones(20, 50) + 0.1 * torch.randn(20, 50))
    assert not found.agrees and str(found).endswith('use method="sampling"') and "30 draws" in str(found)


def test_the_figures_are_those_of_the_two_predictions():
    net, x = build("transformer_sequence_first")
    found = check_linear(net, x, sampling=db.Sampling(row_axis=1), n_draws=50)
    linear = db.predict(net, x, method="linear", sampling=db.Sampling(row_axis=1))
    drawn = db.draws(net, x, n_draws=50, masks="row", sampling=db.Sampling(row_axis=1))
    ratio = (linear.std / drawn.std(0)).flatten()
    assert [found.low, found.ratio, found.high] == pytest.approx(
        ratio.quantile(torch.tensor([0.1, 0.5, 0.9])).tolist(), rel=1e-4
    )
    assert found.mean_error == pytest.approx(
        float(((linear.mean - drawn.mean(0)).abs() / drawn.std(0)).median()), rel=1e-3
    )


def relaxed(temperature):
    """A concrete gate: at the mean of its random numbers it is flat, the more the colder it is."""

    def forward(m, x):
        u = torch.rand_like(x)
        dropped = torch.sigmoid((torch.logit(torch.tensor(0.3)) + torch.logit(u)) / temperature)
        return m.head(x * (1 - dropped) / 0.7)

    torch.manual_seed(0)
    return Module(forward, head=nn.Linear(3, 3))


HARD = Module(lambda m, x: m.head(F.gumbel_softmax(m.head(x), hard=True)), head=nn.Linear(3, 3))


@pytest.mark.parametrize("net", [relaxed(0.1), HARD], ids=["concrete", "hard gumbel"])
@pytest.mark.parametrize("ask", [lambda *a: db.predict(*a, method="linear"), db.explain], ids=["predict", "explain"])
def test_random_numbers_that_a_network_bends_are_warned_of(net, ask):
    for _ in range(2):  # also when it is known
        with pytest.warns(UserWarning, match=r"own random numbers \(rand\).*standard deviation of 40 draws"):
            ask(net, torch.randn(20, 3))


@pytest.mark.parametrize("n_rows", [1, 20])
def test_random_numbers_that_are_nearly_linear_are_not(n_rows):
    net = Module(lambda m, x: m.head(x * torch.exp(0.1 * torch.randn_like(x))), head=nn.Linear(3, 3))
    assert float(db.predict(net, torch.randn(n_rows, 3), method="linear").std.min()) > 0
