"""Tests of the efforts."""

from dropbayes.estimators.parameters import EFFORTS


def network_steps(effort):
    """The steps of one network that a search of five folds and the final training take."""
    shares = sum(share for _, _, share in effort.candidates) + effort.n_finalists
    return (5 * shares + effort.n_networks) * effort.steps


def test_each_effort_is_several_times_the_one_before():
    quick, standard, best = (network_steps(EFFORTS[name]) for name in ("quick", "standard", "best"))
    assert 3 * quick < standard and 10 * standard < best


def test_every_candidate_is_a_drop_probability_and_a_share_of_the_steps():
    for effort in EFFORTS.values():
        assert all(0 <= inputs <= units < 0.5 and 0 < share <= 1 for inputs, units, share in effort.candidates)
