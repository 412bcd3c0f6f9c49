"""Tests of the validation of arguments."""

import math

import pytest

from dropbayes.validation import check_keep_prob, check_n_data, check_positive


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_a_number_that_is_not_positive_is_refused_by_name(value):
    with pytest.raises(ValueError, match=rf"`precision` must be a positive finite number; got {value}"):
        check_positive("precision", value)


def test_zero_is_allowed_where_it_is_said_to_be():
    check_positive("length_scale", 0.0, allow_zero=True)


def test_a_drop_probability_in_place_of_a_keep_probability_is_explained():
    with pytest.raises(ValueError, match=r"one minus the `p` of torch.nn.Dropout"):
        check_keep_prob(0.0)


def test_half_a_row_is_refused():
    with pytest.raises(ValueError, match="`n_data` must be at least 1"):
        check_n_data(0.5)
