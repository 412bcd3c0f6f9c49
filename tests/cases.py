"""Cases that share one cause: a few are tried at every change, all of them by `make test-slow`."""

import pytest


def slow_except(cases, *quick):
    """The cases for `parametrize`, those not among `quick` marked as slow."""
    assert set(quick) <= set(cases), set(quick) - set(cases)
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def crossed(first, second):
    """All pairs for `parametrize`; those without the first case of either kind are marked as slow.

    So each case is quick once, where what the cases of one kind differ in does not meet what those of the other do.
    """
    first, second = list(first), list(second)
    return [
        pytest.param(one, other, marks=() if one is first[0] or other is second[0] else pytest.mark.slow)
        for one in first
        for other in second
    ]
