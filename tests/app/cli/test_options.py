"""Tests of what the texts of options are read as."""

import pytest
import typer

from dropbayes.app.cli.options import delimiter_character, hidden_widths, numbers, search_space


def test_numbers_are_divided_by_commas():
    assert numbers("0.1,2", "--x") == [0.1, 2.0]
    for text in ("", "a", "1,,2", "inf", "nan"):
        with pytest.raises(typer.BadParameter, match="must be a number"):
            numbers(text, "--x")


def test_widths_are_whole_and_positive():
    assert hidden_widths("50,20") == (50, 20) and hidden_widths("auto") == "auto"
    for text in ("0", "1.5", "-3"):
        with pytest.raises(typer.BadParameter, match="must be widths of layers"):
            hidden_widths(text)


def test_a_space_to_search_is_a_word_a_number_or_a_list():
    assert search_space("search", "--x", probability=True) == "search"
    assert search_space("0.5", "--x", probability=True) == 0.5
    assert search_space("0.5,2", "--x", probability=False) == [0.5, 2.0]
    with pytest.raises(typer.BadParameter, match=r"must lie in \[0, 1\)"):
        search_space("1", "--x", probability=True)


def test_a_tab_can_be_written_in_three_ways():
    assert {delimiter_character(text) for text in ("\t", "\\t", "tab")} == {"\t"}
    with pytest.raises(typer.BadParameter, match="one plain character"):
        delimiter_character(";;")
