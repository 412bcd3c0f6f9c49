"""Arrays of other libraries become tensors, or one clear error."""

import numpy as np
import pandas as pd
import pytest
import torch

from dropbayes.runtime.arrays import round_digits, to_tensor


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


def test_truth_values_and_whole_numbers_keep_their_kind():
    assert to_tensor(pd.Series([True, False])).dtype == torch.bool
    assert to_tensor([1, 2]).dtype == torch.int64


@pytest.mark.parametrize(
    "array", [["a", "b"], [[1], [2, 3]], [1 + 2j], [None, 1.0], np.array(["2020-01-01"], dtype="datetime64[D]")]
)
def test_what_is_no_real_number_is_refused_by_name(array):
    with pytest.raises(TypeError, match="`weight` must be a tensor or an array of numbers; got "):
        to_tensor(array, name="weight")


def test_digits_are_significant_ones_and_other_kinds_are_left_alone():
    values = np.array([[1 / 3, 2e-30 / 3], [np.inf, -123456.789]])
    rounded = round_digits(values, digits=4)
    np.testing.assert_allclose(rounded, values, rtol=5e-4)
    assert rounded[1, 1] == -123500.0
    assert round_digits(np.array(["a"])).tolist() == ["a"]
