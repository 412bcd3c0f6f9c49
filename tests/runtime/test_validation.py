"""Tests of the validation of arguments."""

import importlib
import math

import numpy as np
import pandas as pd
import pytest
import torch

from dropbayes.runtime import validation
from dropbayes.runtime.validation import (
    check_choice,
    check_count,
    check_keep_prob,
    check_n_data,
    check_positive,
    check_probability,
    class_labels,
    class_probabilities,
    events,
    finite_tensor,
    float_tensor,
    matching_tensors,
    row_values,
    row_weights,
    to_tensor,
)


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_number_that_is_not_positive_is_refused_by_name(value):
    with pytest.raises(ValueError, match=rf"`precision` must be a positive finite number; got {value}"):
        check_positive("precision", value)


def test_zero_is_allowed_where_it_is_said_to_be():
    check_positive("length_scale", 0.0, allow_zero=True)


def test_a_drop_probability_in_place_of_a_keep_probability_is_explained():
    with pytest.raises(ValueError, match=r"one minus the `p` of torch.nn.Dropout"):
        check_keep_prob(0.0)


def test_a_choice_that_is_none_is_refused_with_those_that_are():
    check_choice("masks", "row", ("shared", "row"))
    with pytest.raises(ValueError, match="`masks` must be one of 'shared', 'row'; got \\['row'\\]"):
        check_choice("masks", ["row"], {"shared": 1, "row": 2})


def test_half_a_row_is_refused():
    with pytest.raises(ValueError, match="`n_data` must be at least 1"):
        check_n_data(0.5)


@pytest.mark.parametrize("value", [0, 1, -0.1, math.nan, "0.9", None, True])
def test_a_level_lies_strictly_between_zero_and_one(value):
    with pytest.raises(ValueError, match="`level` must lie strictly between 0 and 1"):
        check_probability("level", value)


def test_a_fraction_may_be_zero_or_one():
    check_probability("fraction", 0, closed=True)
    check_probability("fraction", np.float32(1), closed=True)


@pytest.mark.parametrize("value", [0, 11, 2.5, 3.0, True, "3"])
def test_a_count_is_a_whole_number_in_its_range(value):
    with pytest.raises(ValueError, match="`n_bins` must be a whole number, between 1 and 10"):
        check_count("n_bins", value, at_most=10)
    check_count("n_bins", np.int64(10), at_most=10)


def test_arrays_become_floating_tensors_of_at_least_single_precision():
    assert float_tensor(np.array([1, 2])).dtype == torch.float64
    assert float_tensor(torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
    assert float_tensor([0.5, 1]).tolist() == [0.5, 1.0]
    with pytest.raises(TypeError, match="`y` must be a tensor or an array of numbers; got list"):
        float_tensor(["a"], name="y")
    with pytest.raises(ValueError, match="`y` must hold real numbers"):
        float_tensor(torch.ones(1, dtype=torch.complex64), name="y")


def test_a_tensor_keeps_its_gradient_and_a_read_only_array_is_copied():
    leaf = torch.ones(2, requires_grad=True)
    finite_tensor("mean", leaf).sum().backward()
    assert leaf.grad.tolist() == [1, 1]
    array = np.ones(2)
    array.flags.writeable = False
    float_tensor(array)[0] = 5
    assert array[0] == 1


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (torch.ones(0, 2), "must not be empty"),
        (torch.tensor([[math.nan, 1.0]]), "must be finite; 1 of 2 values"),
        (torch.tensor([[math.inf, 1.0]]), "must be finite"),
        (torch.ones(2), r"must be \[draw, row\]; got shape \(2,\)"),
        (torch.ones(2, 2, 2), r"must be \[draw, row\]"),
    ],
)
def test_empty_non_finite_and_misshaped_arrays_are_refused(array, message):
    with pytest.raises(ValueError, match=message):
        finite_tensor("draws", array, axes="[draw, row]")


def test_an_ellipsis_stands_for_any_further_axes():
    assert finite_tensor("y", torch.ones(2, 3, 4), axes="[row, ...]").shape == (2, 3, 4)
    assert finite_tensor("y", torch.full((2,), math.inf), axes="[row, ...]", infinite=True).isinf().all()


def test_as_many_values_as_rows():
    assert row_values("loss", [1, 2], n_rows=2).tolist() == [1, 2]
    with pytest.raises(ValueError, match="`loss` must have one value per row; got 2 for 3 rows"):
        row_values("loss", [1, 2], n_rows=3)


def test_a_column_against_a_vector_is_refused_and_dtypes_are_promoted():
    with pytest.raises(ValueError, match=r"`mean` and `y` must have one shape.*got mean \(4, 1\), y \(4,\)"):
        matching_tensors({"mean": torch.ones(4, 1), "y": torch.ones(4)})
    mean, y = matching_tensors({"draws": torch.ones(3, 4), "y": torch.ones(4).double()}, draws="draws")
    assert mean.dtype == y.dtype == torch.float64


@pytest.mark.parametrize("weight", [[1, -1], [0, 0], [1, math.inf], [1, 1, 1], [[1], [1]]])
def test_weights_are_finite_one_per_row_and_never_negative(weight):
    with pytest.raises(ValueError, match="`sample_weight` must"):
        row_weights(np.array(weight), 2, like=torch.ones(1))
    assert row_weights(None, 2, like=torch.ones(1)).tolist() == [1, 1]
    assert row_weights(np.array([0, 2.5]), 2, like=torch.ones(1)).tolist() == [0, 2.5]


def test_logits_are_no_probabilities_and_half_precision_ones_are():
    with pytest.raises(ValueError, match=r"`p` must be probabilities.*Apply softmax"):
        class_probabilities("p", torch.tensor([[2.0, -1.0]]))
    half = torch.randn(5, 1000).softmax(-1).bfloat16()
    assert class_probabilities("p", half).dtype == torch.float32


@pytest.mark.parametrize("labels", [[0, 1], [0, 1, 3], [0, 1, -1], [0.0, 1.0, 2.0], [[0], [1], [2]]])
def test_labels_are_class_indices_one_per_row(labels):
    with pytest.raises(ValueError, match="`labels` must"):
        class_labels(np.array(labels), n_rows=3, n_classes=3)
    assert class_labels(np.array([0, 2, 1], dtype=np.uint8), n_rows=3, n_classes=3).tolist() == [0, 2, 1]


def test_events_are_booleans_or_zeros_and_ones():
    assert events("wrong", [0, 1.0], n_rows=2).tolist() == [False, True]
    for bad in ([0, 2], [0.5, 1], [True], [[True, False]]):
        with pytest.raises(ValueError, match="`wrong` must hold true or false"):
            events("wrong", bad, n_rows=2)


def test_everything_public_is_documented():
    own = [f for f in vars(validation).values() if getattr(f, "__module__", "") == validation.__name__]
    assert len(own) > 10 and all(f.__doc__ or f.__name__.startswith(("check_", "_")) for f in own)


def test_rows_are_repeated_a_whole_number_of_times():
    columns = torch.arange(3.0), torch.eye(3)
    repeated = validation.repeated_rows([2.0, 0.0, 1.0], *columns)
    assert all(torch.equal(after, before[[0, 0, 2]]) for after, before in zip(repeated, columns, strict=True))
    with pytest.raises(ValueError, match="`sample_weight` must hold whole numbers here"):
        validation.repeated_rows([0.5, 1.0], torch.ones(2))
    with pytest.raises(ValueError, match="`sample_weight` must add up to at most"):
        validation.repeated_rows([1e12, 1.0], torch.ones(2))


@pytest.mark.parametrize("seed", [1.0, True, "a", None])
def test_a_seed_is_a_whole_number(seed):
    with pytest.raises(TypeError, match="`seed` must be a whole number"):
        validation.random_generator(seed)


@pytest.mark.parametrize(("extra", "way"), [(None, "no_such_package"), ("plot", r"-e '\.\[plot\]' in a clone")])
def test_a_missing_package_is_named_with_what_needs_it(extra, way):
    said = f"a picture needs no_such_package, which is not installed: pip install {way}"
    with pytest.raises(ModuleNotFoundError, match=said), validation.needed_for("a picture", extra=extra):
        importlib.import_module("no_such_package.part")


def test_a_tensor_is_returned_as_it_is():
    x = torch.ones(2, requires_grad=True)
    assert to_tensor(x) is x


def test_a_read_only_array_is_copied():
    x = np.arange(3.0)
    x.flags.writeable = False
    tensor = to_tensor(x)
    tensor[0] = 5.0
    assert x[0] == 0 and tensor.tolist() == [5, 1, 2]


@pytest.mark.parametrize(
    "array",
    [
        [[1, 2], [3, 4]],
        np.array([[1, 2], [3, 4]], order="F"),
        np.array([[1, 2], [3, 4]], dtype=">f4"),
        np.array([[4, 3], [2, 1]])[::-1, ::-1],
        pd.DataFrame({"a": [1, 3], "b": [2, 4]}),
        pd.DataFrame({"a": pd.array([1, 3], dtype="Int64"), "b": [2.0, 4.0]}),
    ],
    ids=["list", "column order", "byte order", "negative strides", "frame", "nullable frame"],
)
def test_every_layout_gives_the_same_numbers(array):
    assert to_tensor(array).tolist() == [[1, 2], [3, 4]]


def test_values_under_a_mask_are_not_read_as_numbers():
    with pytest.raises(TypeError, match=r"`y` must be .* with 1 masked values\. Leave those rows out"):
        to_tensor(np.ma.masked_greater([1.0, 999.0], 900), name="y")
    assert to_tensor(np.ma.masked_greater([1.0, 2.0], 900)).tolist() == [1, 2]


def test_truth_values_and_whole_numbers_keep_their_kind():
    assert to_tensor(pd.Series([True, False])).dtype == torch.bool
    assert to_tensor([1, 2]).dtype == torch.int64


@pytest.mark.parametrize(
    "array", [["a", "b"], [[1], [2, 3]], [1 + 2j], [None, 1.0], np.array(["2020-01-01"], dtype="datetime64[D]")]
)
def test_what_is_no_real_number_is_refused_by_name(array):
    with pytest.raises(TypeError, match="`weight` must be a tensor or an array of numbers; got "):
        to_tensor(array, name="weight")
