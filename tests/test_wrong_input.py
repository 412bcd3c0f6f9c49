"""Every public function that judges: refusal of what is wrong, acceptance of what is right, and weights of rows."""

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dropbayes import calibration, conformal, decisions, scores
from tests.judging_calls import CALLS, public_functions


def test_every_public_function_is_called_here():
    missing = public_functions() - {one.public for one in CALLS.values()}
    assert not missing, sorted(f.__qualname__ for f in missing)


@pytest.mark.parametrize("name", CALLS)
def test_the_right_arguments_are_accepted(name):
    one = CALLS[name]
    one()
    one(**{key: value.numpy() for key, value in one.arguments.items()})


# ------------------------------------------------------------------------------------------------- wrong input


def with_nan(value: torch.Tensor) -> torch.Tensor:
    values = value.double().clone()
    values[(-1,) * values.dim()] = math.nan
    return values


VALUES: dict[str, Callable[[torch.Tensor], Any]] = {
    "NaN": with_nan,
    "text": lambda value: np.full(tuple(value.shape), "a"),
    "complex numbers": lambda value: value.to(torch.complex128),
    "nothing": lambda value: value[:0],
    "None": lambda value: None,
    "a sparse tensor": lambda value: value.double().to_sparse(),
    "a tensor without values": lambda value: value.to("meta"),
}
SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "a column": lambda value: value[..., None],
    "an axis more": lambda value: value[None],
    "a row more": lambda value: torch.cat([value, value[-1:]]),
    "a number": lambda value: value.flatten()[0],
}
# The right answer: a row of unknown uncertainty is handed over; nothing given, nothing asked.
RIGHT = {("log-likelihood of classes", "y", "complex numbers"), ("cascade", "uncertainty", "NaN"),
         ("defers", "uncertainty", "NaN"), ("defers", "uncertainty", "nothing"),
         ("adaptive_scores", "uniform", "None"), ("adaptive_label_scores", "uniform", "None"),
         ("adaptive_conformal_sets", "uniform", "None"), ("float_tensor", "array", "NaN"),
         ("float_tensor", "array", "nothing")}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_wrong_values_and_shapes_are_an_error_that_names_an_argument(name):
    one = CALLS[name]
    for argument, value in one.judged.items():
        for change, change_of in (VALUES | SHAPES).items():
            if not one.accepts(argument, change) and (name, argument, change) not in RIGHT:
                with pytest.raises((ValueError, TypeError), match=r"`\w+`"):
                    pytest.fail(f"{argument}, {change}: {one(**{argument: change_of(value)})}")


@pytest.mark.parametrize("name", [name for name, one in CALLS.items() if one.settings])
def test_wrong_numbers_are_an_error_that_names_an_argument(name):
    one = CALLS[name]
    for setting in one.settings:
        for wrong in (math.nan, "a", [1.0, 2.0], -1 if setting not in ("best", "threshold", "seed") else math.nan):
            with pytest.raises((ValueError, TypeError), match=r"`\w+`"):
                pytest.fail(f"{setting}={wrong}: {one(**{setting: wrong})}")


ANY_VALUES = st.one_of(  # without those of which the sum of a few is infinite
    st.floats(-1e307, 1e307), st.sampled_from([0.0, 1.0, 0.5, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300])
)
ANY_ARRAYS = st.one_of(
    arrays.arrays(np.float64, arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5), elements=ANY_VALUES),
    arrays.arrays(st.sampled_from([np.int64, np.bool_, np.float32, np.complex64]), arrays.array_shapes(min_dims=0, max_dims=3, max_side=5)),
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(name for name, one in CALLS.items() if one.judged)), st.data())
def test_any_array_is_refused_by_name_or_answered_without_nan(name, data):
    one = CALLS[name]
    argument = data.draw(st.sampled_from(sorted(one.judged)))
    other = data.draw(ANY_ARRAYS)
    try:
        answer = one(**{argument: other})
    except (ValueError, TypeError) as error:
        assert "`" in str(error), error
        return
    if name != "float_tensor":
        assert not any(math.isnan(value) for value in numbers_in(answer)), (argument, other, answer)


def numbers_in(answer: Any) -> list[float]:
    """Every number in an answer, whatever it is made of."""
    if dataclasses.is_dataclass(answer):
        answer = [getattr(answer, entry.name) for entry in dataclasses.fields(answer)]
    if isinstance(answer, torch.Tensor):
        return answer.detach().double().flatten().tolist()
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, (list, tuple)):
        return [number for part in answer for number in numbers_in(part)]
    return [float(answer)] if isinstance(answer, (int, float)) else []


# ----------------------------------------------------------------------------------------------------- weights

WEIGHT = torch.tensor([2, 1, 0, 3, 2])
# Arguments that hold no row of the set that is weighted.
NEW = {
    ("empirical_percentile", "uncertainty"),
    ("relative_uncertainty", "uncertainty"),
    ("group_thresholds", "new_groups"),
    ("conformal_distribution", "mean"),
    ("conformal_distribution", "std"),
}
WEIGHTED = [name for name, one in CALLS.items() if "sample_weight" in inspect.signature(one.function).parameters]


def test_every_function_that_takes_weights_is_called_here():
    takes = {f.__name__ for f in public_functions() if "sample_weight" in inspect.signature(f).parameters}
    assert takes <= set(WEIGHTED)


@pytest.mark.parametrize("name", WEIGHTED)
def test_a_row_of_weight_two_counts_as_two_and_one_of_weight_zero_not_at_all(name):
    one = CALLS[name]
    rows = {key: value for key, value in one.arguments.items() if (name, key) not in NEW}
    axis = {key: 1 if key.endswith("draws") else 0 for key in rows}
    weight = WEIGHT.repeat(max(value.shape[axis[key]] for key, value in rows.items()) // len(WEIGHT))
    repeated = {key: value.repeat_interleave(weight, axis[key]) for key, value in rows.items()}
    ours, theirs = one(sample_weight=weight.double()), one(**repeated)
    np.testing.assert_allclose(comparable(ours), comparable(theirs), rtol=1e-5, atol=1e-7)


def comparable(answer: Any) -> list[float]:
    """The numbers of an answer that do not depend on how many rows it is drawn through."""
    if isinstance(answer, calibration.ReliabilityCurve):  # its count is the effective number of rows
        return numbers_in((answer.claimed, answer.observed))
    if isinstance(answer, conformal.ConformalDistribution):
        return numbers_in((answer.quantile(0.6), answer.interval(0.7), answer.distribution(answer.mean + 0.1)))
    if isinstance(answer, scores.RiskCoverage):
        return numbers_in((answer.area, answer.oracle_area))
    if isinstance(answer, decisions.CascadeFrontier):  # one point for each level that occurs
        return sorted({round(value, 9) for value in numbers_in((answer.cost, answer.loss))})
    return numbers_in(answer)


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("wrong", [-WEIGHT, 0 * WEIGHT, WEIGHT[:4], WEIGHT[:, None], WEIGHT * math.nan], ids=str)
def test_weights_that_are_none_are_refused(name, wrong):
    with pytest.raises(ValueError, match=r"`(sample_)?weight`|`rows`"):
        CALLS[name](sample_weight=wrong)
