"""How the objective is optimised: schedules, optimisers, learning rates."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.layers import Prior, parameter_groups
from dropbayes.training import InverseDecay, Optimization, fit
from tests.training.toys import network, toy


def test_inverse_decay_is_the_papers_policy():
    assert InverseDecay(gamma=1e-4, power=0.25)(0) == 1
    assert InverseDecay(gamma=0.5, power=2.0)(2) == pytest.approx((1 + 0.5 * 2) ** -2)


def test_mode_and_given_optimiser_are_respected():
    x, y = toy()
    net = network().eval()
    net[1].train()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    fit(net, x, y, likelihood=db.Gaussian(4.0), epochs=2, device="cpu", optimization=Optimization(optimizer))
    assert [module.training for module in net] == [False, True, False, False]
    assert not net.training
    assert optimizer.state


def test_an_optimiser_of_another_network_is_refused_and_one_of_a_part_trains_that_part():
    x, y = toy()
    net, other = network(), network(seed=1)
    with pytest.raises(ValueError, match="`optimizer` must hold parameters of `net`; 4 of its 4"):
        fit(
            net,
            x,
            y,
            likelihood=db.Gaussian(4.0),
            device="cpu",
            optimization=Optimization(torch.optim.Adam(other.parameters())),
        )
    before = net[0].weight.clone()
    fit(
        net,
        x,
        y,
        likelihood=db.Gaussian(4.0),
        epochs=2,
        device="cpu",
        optimization=Optimization(torch.optim.SGD(net[3].parameters(), lr=0.1)),
    )
    assert torch.equal(net[0].weight, before)
    assert not torch.equal(net[3].weight, network()[3].weight)


def test_an_optimiser_that_decays_weights_itself_is_refused():
    x, y = toy()
    net = network()
    groups = parameter_groups(net, precision=4.0, prior=Prior(), n_data=64)
    adamw, sgd = torch.optim.AdamW(net.parameters()), torch.optim.SGD(groups, lr=0.1)
    for optimizer in (adamw, sgd, torch.optim.Adam(net.parameters(), weight_decay=0.1)):
        with pytest.raises(ValueError, match=r"`optimizer` must not decay weights.*weight_decay=0 and set `prior`"):
            fit(net, x, y, likelihood=db.Gaussian(4.0), epochs=1, device="cpu", optimization=Optimization(optimizer))
    fit(
        net,
        x,
        y,
        likelihood=db.Gaussian(4.0),
        epochs=1,
        device="cpu",
        optimization=Optimization(torch.optim.AdamW(net.parameters(), weight_decay=0)),
    )


def test_the_callers_learning_rate_is_left_as_it_was_and_the_same_optimiser_resumes(tmp_path):
    x, y = toy()
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    options = {"likelihood": db.Gaussian(4.0)}
    options["optimization"] = Optimization(optimizer, schedule=InverseDecay(gamma=1.0, power=1.0))
    history = fit(net, x, y, epochs=3, checkpoint=tmp_path / "c", device="cpu", **options)
    assert optimizer.param_groups[0]["lr"] == 0.1 > history.learning_rate[-1]
    again = fit(net, x, y, epochs=5, checkpoint=tmp_path / "c", device="cpu", **options)
    assert again.loss[:3] == history.loss and len(again.loss) == 5


@pytest.mark.parametrize(
    "settings",
    [{"optimizer": "lion"}, {"learning_rate": 0.0}, {"momentum": 2.0}, {"schedule": 0.1}],
)
def test_impossible_settings_are_refused_by_name(settings):
    with pytest.raises(ValueError, match=f"`{next(iter(settings))}` must"):
        Optimization(**settings)


@pytest.mark.parametrize("factor", [None, float("nan"), -1.0, "a"])
def test_a_schedule_that_gives_no_factor_is_refused_with_its_iteration(factor):
    optimization = Optimization(schedule=lambda iteration: factor if iteration else 1.0)
    with pytest.raises(ValueError, match=r"`schedule\(1\)` must be a finite number, zero or more; got"):
        fit(network(), *toy(), likelihood=db.Gaussian(4.0), optimization=optimization, epochs=2, device="cpu")


def test_an_optimiser_that_needs_a_closure_is_refused():
    net = network()
    optimization = Optimization(torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ValueError, match=r"`optimizer` must step by one gradient, without a closure; got LBFGS"):
        fit(net, *toy(), likelihood=db.Gaussian(4.0), optimization=optimization, epochs=1, device="cpu")


def test_a_last_batch_of_one_row_is_refused_in_words_where_batch_norm_cannot_take_it():
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
    x = torch.randn(9, 1)
    with pytest.raises(ValueError, match=r"`batch_size` must leave no batch of a single row.*; 9 rows leave one"):
        fit(net, x, x, likelihood=db.Gaussian(4.0), epochs=1, batch_size=8, device="cpu")
