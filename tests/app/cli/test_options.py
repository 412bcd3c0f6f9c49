"""Tests of what the texts of options are read as."""

import pytest
import typer

from dropbayes.app.cli.options import (
    delimiter_character,
    drop_probabilities,
    hidden_widths,
    numbers,
    weight_decays,
)


def test_numbers_are_divided_by_commas():
    assert numbers("0.1,2") == [0.1, 2.0]
    for text in ("", "a", "1,,2", "inf", "nan"):
        with pytest.raises(typer.BadParameter, match="must be a number"):
            numbers(text)


def test_widths_are_whole_and_positive():
    assert hidden_widths("50,20") == (50, 20) and hidden_widths("auto") == "auto"
    for text in ("0", "1.5", "-3"):
        with pytest.raises(typer.BadParameter, match="must be widths of layers"):
            hidden_widths(text)


def test_a_space_to_search_is_a_word_a_number_or_a_list():
    assert drop_probabilities("search") == "search"
    assert drop_probabilities("0.5") == 0.5
    assert weight_decays("0.5,2") == [0.5, 2.0]
    with pytest.raises(typer.BadParameter, match=r"must lie in \[0, 1\)"):
        drop_probabilities("1")


def test_a_tab_can_be_written_in_three_ways():
    assert {delimiter_character(text) for text in ("\t", "\\t", "tab")} == {"\t"}
    with pytest.raises(typer.BadParameter, match="one plain character"):
        delimiter_character(";;")
