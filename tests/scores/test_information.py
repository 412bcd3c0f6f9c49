"""Information quantities against identities, brute force over joint labels, and scipy."""

import itertools
import math

import numpy as np
import pytest
import scipy.stats
import torch

import dropbayes as db
from dropbayes import information as info


def random_draws(*shape, seed=0, sharpness=2.0):
    logits = sharpness * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return logits.softmax(-1)


def enumerated_joint_information(draws):
    """I[y_1..y_B; ω] by listing every joint label: the definition, with no chain rule."""
    n_draws, n_rows, n_classes = draws.shape
    entropy = 0.0
    for labels in itertools.product(range(n_classes), repeat=n_rows):
        probability = np.mean([np.prod([draws[t, b, c] for b, c in enumerate(labels)]) for t in range(n_draws)])
        entropy -= probability * math.log(probability)
    return entropy - sum(scipy.stats.entropy(draws[:, b], axis=-1).mean() for b in range(n_rows))


def test_entropy_agrees_with_scipy():
    draws = random_draws(7, 5, 4)
    np.testing.assert_allclose(info.entropy(draws), scipy.stats.entropy(draws.numpy(), axis=-1), rtol=1e-12)


def test_predictive_entropy_is_expected_entropy_plus_mutual_information():
    draws = random_draws(50, 20, 6)
    torch.testing.assert_close(
        info.predictive_entropy(draws),
        info.expected_entropy(draws) + info.mutual_information(draws),
        rtol=1e-12,
        atol=1e-14,
    )


def test_mutual_information_of_certain_and_contrary_draws_is_log_of_their_number():
    draws = torch.eye(5, dtype=torch.float64)[:, None]  # draw t is sure of class t: p is 0 or 1 everywhere
    for quantity, value in (
        (info.predictive_entropy, math.log(5)),
        (info.expected_entropy, 0.0),
        (info.mutual_information, math.log(5)),
        (info.variation_ratio, 0.8),
    ):
        torch.testing.assert_close(quantity(draws), torch.tensor([value], dtype=torch.float64))


def test_mutual_information_is_zero_when_draws_agree():
    draws = random_draws(1, 30, 10).repeat(7, 1, 1)
    assert info.mutual_information(draws).max() < 1e-30  # a difference of entropies would leave 1e-16


def test_mutual_information_keeps_its_digits_when_draws_almost_agree():
    # For p ± δ the information is δ²/2 Σ 1/p_c to leading order; the entropies are of order one.
    delta = 1e-7
    p = torch.tensor([0.3, 0.7], dtype=torch.float64)
    shift = torch.tensor([delta, -delta], dtype=torch.float64)
    draws = torch.stack([p + shift, p - shift])[:, None]
    expected = 0.5 * delta**2 * (1 / p).sum()
    torch.testing.assert_close(info.mutual_information(draws)[0], expected, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("sharpness", [1.0, 10.0, 40.0, 200.0])
def test_single_precision_agrees_with_double_however_saturated_the_probabilities(sharpness):
    draws = random_draws(20, 50, 4, sharpness=sharpness)  # at 40, many are 1e-20 beside 1; at 200, exactly 0
    for quantity in (info.predictive_entropy, info.expected_entropy, info.mutual_information):
        exact = quantity(draws)
        torch.testing.assert_close(quantity(draws.float()).double(), exact, rtol=1e-5, atol=1e-6)
    difference = info.predictive_entropy(draws) - info.expected_entropy(draws)
    torch.testing.assert_close(info.mutual_information(draws), difference, rtol=1e-10, atol=1e-13)


def test_a_class_that_no_draw_considers_changes_nothing():
    draws = random_draws(9, 4, 3)
    padded = torch.cat([draws, torch.zeros(9, 4, 1, dtype=torch.float64)], -1)
    for quantity in (
        info.predictive_entropy,
        info.expected_entropy,
        info.mutual_information,
        info.variation_ratio,
        info.joint_mutual_information,
    ):
        torch.testing.assert_close(quantity(padded), quantity(draws), rtol=1e-12, atol=1e-14)


def test_variation_ratio_agrees_with_the_mode_of_the_votes():
    draws = random_draws(31, 12, 5)
    votes = draws.argmax(-1)
    expected = 1 - (votes == votes.mode(0).values).double().mean(0)
    torch.testing.assert_close(info.variation_ratio(draws), expected)


@pytest.mark.parametrize(("n_rows", "n_classes"), [(1, 4), (2, 3), (4, 3)])
def test_joint_information_agrees_with_enumeration(n_rows, n_classes):
    draws = random_draws(6, n_rows, n_classes)
    expected = enumerated_joint_information(draws.numpy())
    assert info.joint_mutual_information(draws).item() == pytest.approx(expected, rel=1e-10)


def test_joint_information_of_one_row_is_its_mutual_information():
    draws = random_draws(11, 1, 6)
    torch.testing.assert_close(info.joint_mutual_information(draws), info.mutual_information(draws)[0])


def test_joint_information_counts_a_duplicate_of_a_sure_row_once_and_independent_rows_twice():
    sure = torch.eye(2, dtype=torch.float64)
    duplicated = sure[:, None].repeat(1, 2, 1)
    crossed = torch.stack([sure[[0, 0, 1, 1]], sure[[0, 1, 0, 1]]], 1)  # two bits of the function, one each
    assert info.joint_mutual_information(duplicated).item() == pytest.approx(math.log(2))
    assert info.joint_mutual_information(crossed).item() == pytest.approx(2 * math.log(2))


def test_joint_information_lies_between_the_best_row_and_the_sum_and_below_log_draws():
    draws = random_draws(8, 6, 3, sharpness=4.0)
    joint, each = info.joint_mutual_information(draws), info.mutual_information(draws)
    assert each.max() < joint < each.sum()
    assert joint <= math.log(8)


def test_sampled_joint_information_is_within_four_standard_errors_of_the_exact():
    draws = random_draws(12, 6, 3)
    exact = info.joint_mutual_information(draws).item()  # 3^6 = 729 outcomes
    sampled = [info.joint_mutual_information(draws, max_outcomes=60, seed=seed).item() for seed in range(60)]
    standard_error = np.std(sampled, ddof=1) / math.sqrt(60)
    assert standard_error < 0.02
    assert abs(np.mean(sampled) - exact) < 4 * standard_error


def test_joint_information_of_a_large_batch_stays_finite_and_bounded():
    draws = random_draws(20, 60, 10)  # 10^60 joint labels
    value = info.joint_mutual_information(draws, max_outcomes=500)
    assert 0.9 * math.log(20) < value <= math.log(20) + 1e-9


def test_permuting_draws_row_by_row_breaks_the_joint_information():
    # What row masks would do: the marginals stay, the joint does not. Shared masks are needed.
    draws = random_draws(200, 1, 2, sharpness=6.0).repeat(1, 2, 1)
    order = torch.randperm(200, generator=torch.Generator().manual_seed(1))
    shuffled = torch.stack([draws[:, 0], draws[order, 1]], 1)
    torch.testing.assert_close(info.mutual_information(shuffled), info.mutual_information(draws))
    assert info.joint_mutual_information(shuffled) > 1.3 * info.joint_mutual_information(draws)


def test_numpy_arrays_are_accepted_and_tensors_returned():
    array = random_draws(5, 4, 3).numpy()
    array.setflags(write=False)
    torch.testing.assert_close(info.mutual_information(array[::-1]), info.mutual_information(torch.tensor(array)))


@pytest.mark.parametrize("bad", [torch.randn(4, 3, 2), torch.ones(3, 2, 2)])
def test_logits_are_refused_with_the_remedy(bad):
    with pytest.raises(ValueError, match=r"`probability_draws` must be probabilities.*softmax"):
        info.mutual_information(bad)


def test_predictions_of_a_network_report_the_information_of_its_draws():
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)
    ).double()
    x = 3 * torch.randn(20, 3, dtype=torch.float64)
    draws = db.draws(net, x, n_draws=30, seed=1).softmax(-1)
    prediction = db.predict(net, x, n_draws=30, seed=1, likelihood=db.Categorical())
    for ours, theirs in (
        (info.predictive_entropy, prediction.entropy),
        (info.expected_entropy, prediction.expected_entropy),
        (info.mutual_information, prediction.mutual_information),
        (info.variation_ratio, prediction.variation_ratio),
    ):
        torch.testing.assert_close(ours(draws), theirs, rtol=1e-8, atol=1e-10)


def test_nan_is_refused():
    with pytest.raises(ValueError, match="`probability_draws` must be finite"):
        info.mutual_information(torch.full((2, 2, 2), float("nan")))


def test_the_gradient_of_the_mutual_information_is_finite_and_right_at_saturated_softmaxes():
    logits = torch.tensor([[[200.0, 0.0]], [[0.0, 0.3]]], requires_grad=True)
    info.mutual_information(logits.softmax(-1)).sum().backward()
    assert logits.grad.isfinite().all()
    moderate = torch.tensor([[[2.0, 0.0]], [[0.0, 0.3]]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: info.mutual_information(z.softmax(-1)), moderate)


def test_no_joint_labels_to_enumerate_is_refused():
    with pytest.raises(ValueError, match="`max_outcomes` must be a whole number, at least 1"):
        info.joint_mutual_information(torch.full((2, 2, 2), 0.5), max_outcomes=0)
