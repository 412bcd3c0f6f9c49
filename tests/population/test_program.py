"""Tests of the step: against torch's optimiser and the same network trained alone."""

from dataclasses import replace

import pytest
import torch

from dropbayes.population import Member, Task, train
from dropbayes.population.heads import HEADS
from dropbayes.population.program import Program, forward
from dropbayes.population.standardisation import stacked_table
from tests.population.samples import F64, log_likelihood, toy


def test_twenty_members_equal_the_same_networks_trained_alone():
    x, y = toy(160)
    tasks = [Task(x[: 100 + 17 * k], y[: 100 + 17 * k]) for k in range(3)]  # unequal sizes: padding and last batches
    members = [
        Member(
            task=i % 3,
            drop_prob=(0.0, 0.02 * i) if i % 2 else 0.1,
            precision=0.5 + i if i % 4 == 0 else None,
            weight_decay=10.0 ** -(2 + i % 5),
            learning_rate=1e-3 * (1 + i),
            epochs=5 + i % 4,
            seed=i,
        )
        for i in range(20)
    ]
    together = train(tasks, members, hidden=(10,), batch_size=32, **F64)
    for i, member in enumerate(members):
        alone = train(tasks, [member], hidden=(10,), batch_size=32, **F64)
        for ours, theirs in zip(together.weights + together.biases, alone.weights + alone.biases, strict=True):
            torch.testing.assert_close(ours[i], theirs[0], rtol=1e-9, atol=1e-12)


def test_learned_drop_probability_goes_to_a_half_when_only_the_entropy_counts():
    # A huge KL weight (tiny precision) leaves nothing but the entropy, which is greatest at one half.
    x, y = toy(40)
    member = Member(drop_prob=0.1, precision=1e-6, length_scale=1e-4, epochs=200, learning_rate=0.05)
    learned = train([Task(x, y)], [member], hidden=(10,), learn_drop_prob=True, **F64)
    torch.testing.assert_close(learned.drop_prob, torch.full((1, 2), 0.5, dtype=torch.float64), rtol=0, atol=0.02)


@pytest.mark.slow
def test_learned_drop_probability_falls_with_more_data():
    few, many = (toy(n, noise=0.05) for n in (40, 1000))
    member = Member(drop_prob=0.2, precision=100.0, learning_rate=0.01)
    small = train([Task(*few)], [replace(member, epochs=200)], batch_size=40, learn_drop_prob=True, **F64)
    large = train([Task(*many)], [replace(member, epochs=15)], batch_size=40, learn_drop_prob=True, **F64)
    assert large.drop_prob.sum() < small.drop_prob.sum()


def test_row_weights_count_rows_more_than_once():
    x, y = toy(24)
    weight = torch.tensor([1.0, 2.0]).repeat(12)
    weighted = Task(x, y, weight=weight)
    repeated = Task(torch.cat([x, x[1::2]]), torch.cat([y, y[1::2]]))
    members = [Member(task=t, drop_prob=0.0, weight_decay=1e-4, epochs=30, seed=1) for t in (0, 1)]
    population = train([weighted, repeated], members, hidden=(5,), batch_size=36, **F64)
    torch.testing.assert_close(population.weights[0][0], population.weights[0][1])


@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "categorical"])
def test_the_gradient_by_hand_is_that_of_autograd(activation, likelihood):
    x, y = toy(50)
    targets = (y > y.median()).long() if likelihood == "categorical" else y
    members = [Member(drop_prob=(0.0, 0.2, 0.1 * s), weight_decay=1e-2, seed=s) for s in range(3)]
    table = stacked_table([Task(x, targets)], HEADS[likelihood], torch.float64, start=None, n_classes=None)
    head, device = HEADS[likelihood], torch.device("cpu")
    program = Program(table, members, (7, 5), head, activation, 20, "constant", False, device, torch.float64)
    before = program.vector.clone().requires_grad_()
    positions = program.stack.rows.gather(1, program.chunk.positions[0].expand(3, -1))
    inputs, outcome, weight = (values[positions] for values in program.data)
    masks = []
    for layer, words in enumerate(program.chunk.words):
        mixed = torch.bitwise_xor(words[0], program.stack.member_words[layer])
        masks.append((mixed >= program.chunk.thresholds[0, layer]).double())
    parameters = program.views(before)  # the weights over their keep probabilities
    output = forward(parameters[:3], parameters[3:], inputs, masks, activation)
    misfit = -log_likelihood(likelihood, output, outcome)
    decayed = [w * p[:, None, None] for w, p in zip(parameters[:3], program.kept.unbind(1), strict=True)]
    loss = (misfit * weight).sum() / 20 + 1e-2 * sum(w.square().sum() for w in decayed)
    (expected,) = torch.autograd.grad(loss, before)
    program.run(0, 1)
    torch.testing.assert_close(program.gradient, expected)


def test_steps_with_masks_and_relevance_are_those_of_torch():
    x, y = toy(50)
    relevance = torch.tensor([2.0, 1.0, 0.25], dtype=torch.float64)
    member = Member(drop_prob=(0.1, 0.3), weight_decay=1e-2, learning_rate=0.02, relevance=tuple(relevance.tolist()))
    table = stacked_table([Task(x, y)], HEADS["gaussian"], torch.float64, start=None, n_classes=None)
    head, device = HEADS["gaussian"], torch.device("cpu")
    program = Program(table, [member], (7,), head, "relu", 20, "constant", False, device, torch.float64)
    factors = 1 - program.stack.drop_prob[0]
    first, second, *biases = (values.clone() for values in program.parameters)
    theirs = [first * factors[0] / relevance[:, None], second * factors[1], *biases]
    theirs = [values.requires_grad_() for values in theirs]
    optimizer = torch.optim.Adam(theirs, lr=0.02)
    for step in range(40):
        words, own, below = program.chunk.words, program.stack.member_words, program.chunk.thresholds[step]
        masks = [(torch.bitwise_xor(words[i][step], own[i]) >= below[i]).double() / factors[i] for i in range(2)]
        rows = program.stack.rows[:, program.chunk.positions[step, 0]]
        inputs, outcome, weight = (values[rows] for values in program.data)
        output = forward(theirs[:2], theirs[2:], inputs * relevance, masks, "relu")
        misfit = (0.5 * (output - outcome).square().sum(-1) * weight).sum() / program.chunk.counts[step, 0]
        optimizer.zero_grad()
        (misfit + 1e-2 * sum(values.square().sum() for values in theirs[:2])).backward()
        optimizer.step()
    program.run(0, 40)
    expected = [theirs[0] * relevance[:, None], *theirs[1:]]
    for ours, values in zip(program.networks, expected, strict=False):
        torch.testing.assert_close(ours, values.detach(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("learned", [False, True])
def test_a_member_that_sees_two_inputs_is_the_network_of_two_inputs(learned):
    x, y = toy(60)
    member = Member(drop_prob=0.1 if learned else 0.0, weight_decay=1e-3, epochs=20, learning_rate=0.01)
    both = [replace(member, n_inputs=2), member]
    settings = {"hidden": (6,), "batch_size": 20, "learn_drop_prob": learned, **F64}
    seen = train([Task(x, y)], both, **settings)
    assert bool((seen.weights[0][0, 2] == 0).all()) and bool((seen.weights[0][1, 2] != 0).all())
    if not learned:  # masks belong to the units of the wider network
        alone = train([Task(x[:, :2], y)], [member], **settings)
        torch.testing.assert_close(seen.weights[0][0, :2], alone.weights[0][0])


@pytest.mark.parametrize("learned", [False, True])
def test_relevance_is_the_scale_on_which_an_input_is_learned(learned):
    x, y = toy(60)
    factor = torch.tensor([2.0, 1.0, 0.25], dtype=torch.float64)
    member = Member(drop_prob=0.1, weight_decay=1e-2, epochs=5, learning_rate=0.01)
    settings = {"hidden": (6,), "batch_size": 20, "learn_drop_prob": learned, **F64}
    start = train([Task(x, y)], [member], **settings)
    relevant = train([Task(x, y)], [replace(member, relevance=tuple(factor.tolist()))], start=start, **settings)
    first, *rest = start.weights
    scaled = replace(start, x_scale=start.x_scale / factor, weights=(first / factor[:, None], *rest))
    expected = train([Task(x, y)], [member], start=scaled, **settings)
    torch.testing.assert_close(relevant.weights[0], expected.weights[0] * factor[:, None])
    torch.testing.assert_close(relevant.weights[1], expected.weights[1])
    assert bool((relevant.x_scale == start.x_scale).all())


def test_members_that_share_a_learning_rate_take_the_steps_of_those_that_do_not():
    x, y = toy(60)
    member = Member(drop_prob=0.1, epochs=10, learning_rate=0.01)
    same = train([Task(x, y)], [member, replace(member, seed=1)], hidden=(6,), device="cpu")
    mixed = train([Task(x, y)], [member, replace(member, seed=1, learning_rate=0.02)], hidden=(6,), device="cpu")
    assert bool((same.weights[0][0] == mixed.weights[0][0]).all())


def test_a_number_of_inputs_that_a_task_has_not_is_refused():
    x, y = toy(30)
    with pytest.raises(ValueError, match="`n_inputs` must lie between 1 and 3"):
        train([Task(x, y)], [Member(n_inputs=4)], **F64)
    with pytest.raises(ValueError, match="`relevance` must hold a factor for each of 2 inputs; got 3"):
        train([Task(x, y)], [Member(n_inputs=2, relevance=(1.0, 1.0, 1.0))], **F64)
