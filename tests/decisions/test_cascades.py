"""Tests of `decisions.cascades`."""

import pytest
import torch

import dropbayes as db
from dropbayes import decisions, scores
from tests import small_networks
from tests.decisions.samples import uniform


def test_frontier_agrees_with_running_the_cascade_at_every_threshold():
    uncertainty = uniform(40).mul(10).round() / 10  # with ties
    cheap_loss, costly_loss = uniform(40, seed=1), uniform(40, seed=2)
    frontier = decisions.cascade_frontier(uncertainty, cheap_loss, costly_loss, cheap_cost=2.0, costly_cost=7.0)
    for index in range(len(frontier.loss)):
        point = frontier[index]
        run = decisions.cascade(
            torch.arange(40),
            lambda rows: (cheap_loss[rows], uncertainty[rows]),
            costly=lambda rows: costly_loss[rows],
            threshold=point.threshold,
        )
        assert point.loss == pytest.approx(run.output.mean().item())
        assert point.cost == pytest.approx(2 + 7 * run.escalated.double().mean().item())
    assert frontier[0].loss == pytest.approx(cheap_loss.mean().item())
    assert frontier[-1].loss == pytest.approx(costly_loss.mean().item())


def test_cascade_shows_the_costly_network_the_uncertain_rows_only():
    seen = []
    decisions.cascade(
        torch.arange(6.0),
        lambda x: (x, x / 6),
        costly=lambda x: seen.extend(x.tolist()) or x,
        threshold=0.5,
    )
    assert seen == [4.0, 5.0]


@pytest.mark.slow
def test_cascade_on_digits_reaches_the_large_network_at_under_half_its_cost(digits):
    x, y, _ = digits
    cheap_net = small_networks.trained(
        small_networks.network(64, 24, 10, drop_prob=0.2, seed=1), x[:600], y[:600], steps=400
    )
    costly_net = small_networks.trained(
        small_networks.network(64, 256, 256, 10, drop_prob=0.5, seed=2), x[:600], y[:600], steps=400
    )

    def cheap(rows):
        prediction = db.predict(cheap_net, rows, n_draws=20, likelihood=db.Categorical())
        return prediction.mean, prediction.entropy

    def costly(rows):
        return db.predict(costly_net, rows, n_draws=50, likelihood=db.Categorical()).mean

    def multiplications(net, n_draws):
        return n_draws * sum(weight.numel() for weight in net.parameters() if weight.dim() == 2)

    costs = {"cheap_cost": multiplications(cheap_net, 20), "costly_cost": multiplications(costly_net, 50)}
    held_out, new = slice(600, 1200), slice(1200, None)
    probabilities, uncertainty = cheap(x[held_out])
    losses = [(p.argmax(-1) != y[held_out]).double() for p in (probabilities, costly(x[held_out]))]
    point = decisions.cascade_frontier(uncertainty, *losses, **costs).cheapest_within(0.0025)

    answer = decisions.cascade(x[new], cheap, costly=costly, threshold=point.threshold)
    accuracy = {
        "cheap": scores.accuracy(cheap(x[new])[0], y[new]),
        "costly": scores.accuracy(costly(x[new]), y[new]),
        "cascade": scores.accuracy(answer.output, y[new]),
    }
    share = costs["cheap_cost"] / costs["costly_cost"] + answer.escalated.double().mean().item()
    assert accuracy["costly"] > accuracy["cheap"] + 0.005
    assert accuracy["cascade"] > accuracy["costly"] - 0.005
    assert share < 0.5


def test_a_row_of_weight_two_counts_as_two_in_the_frontier():
    uncertainty, cheap, weight = uniform(12), (uniform(12, seed=1) < 0.5).double(), torch.arange(12) % 3
    rows = torch.repeat_interleave(torch.arange(12), weight)
    costs = {"cheap_cost": 1.0, "costly_cost": 5.0}
    ours = decisions.cascade_frontier(uncertainty, cheap, 0 * cheap, sample_weight=weight, **costs).cheapest_within(0.1)
    theirs = decisions.cascade_frontier(uncertainty[rows], cheap[rows], 0 * cheap[rows], **costs).cheapest_within(0.1)
    assert (ours.cost, ours.loss) == pytest.approx((theirs.cost, theirs.loss))


def test_a_costly_network_of_another_shape_is_refused():
    cheap = lambda x: (torch.zeros(len(x), 1), x[:, 0])  # noqa: E731
    with pytest.raises(ValueError, match="`costly` must return outputs of the cheap one's shape"):
        decisions.cascade(torch.ones(3, 2), cheap, costly=lambda x: x, threshold=0.0)
