"""Cases that share one cause: a few are tried at every change, all of them by `make test-slow`."""

import pytest


def slow_except(cases, *quick):
    """The cases for `parametrize`, those not among `quick` marked as slow."""
    assert set(quick) <= set(cases), set(quick) - set(cases)
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]
