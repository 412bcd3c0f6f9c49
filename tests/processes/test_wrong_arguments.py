"""What is no covariance, features, layers or prior is refused in one line, before anything is computed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dropbayes.processes import (
    Deep,
    ReLU,
    exact_process,
    finite_rank_process,
    network_evidence,
    network_prior_draws,
    prior_draws,
    process_of,
    softmax_process,
    theory_report,
    tuned_covariance,
)

X, Y = torch.linspace(-1, 1, 5, dtype=torch.float64)[:, None], torch.zeros(5, dtype=torch.float64)
NET = nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
CALLS: dict[str, list[Callable[[Any], object]]] = {
    "covariance": [
        lambda wrong: exact_process(wrong, X, Y, precision=1.0),
        lambda wrong: tuned_covariance(wrong, X, Y, precision=1.0),
        lambda wrong: prior_draws(wrong, X, n_draws=2),
        lambda wrong: softmax_process(wrong, X, torch.tensor([0, 1, 0, 1, 0])),
    ],
    "features": [lambda wrong: finite_rank_process(wrong, X, Y, precision=1.0)],
    "layers": [
        Deep,
        lambda wrong: network_evidence(wrong, X, Y, width=3, precision=1.0),
        lambda wrong: network_prior_draws(wrong, X, widths=[3], n_draws=2),
    ],
    "prior": [lambda wrong: process_of(NET, wrong), lambda wrong: theory_report(NET, X.float(), wrong, 5)],
}


@pytest.mark.parametrize(
    "wrong", ["relu", ReLU, None, NET, lambda x: x], ids=["text", "class", "none", "net", "function"]
)
@pytest.mark.parametrize(("argument", "call"), [(name, call) for name, calls in CALLS.items() for call in calls])
def test_what_is_of_another_class_is_named_with_its_argument(argument, call, wrong):
    with pytest.raises((TypeError, ValueError), match=rf"^`{argument}` must be .*; got "):
        call(wrong)


def test_a_precision_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match=r"`precision` .* must be positive .*; got 'high'"):
        exact_process(ReLU(), X, Y, precision="high")


def test_draws_of_a_prior_are_counted_and_have_a_width_for_each_layer():
    with pytest.raises(ValueError, match="`n_draws` must be a whole number, at least 1; got 0"):
        network_prior_draws([ReLU()], X, widths=[3], n_draws=0)
    with pytest.raises(ValueError, match="`widths` must be one positive width for each of the 1 layers; got 3"):
        network_prior_draws([ReLU()], X, widths=3, n_draws=2)
