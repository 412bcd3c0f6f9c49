"""Tests of `dropbayes page`."""

import json

from dropbayes.app.page import page_html
from tests.command_line import check, run


def test_the_page_is_written_as_one_file(tmp_path):
    result = run("page", "--out", tmp_path / "page.html")
    assert (result.code, result.text.strip()) == (0, str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page_html()


def test_the_page_is_told_as_json(tmp_path):
    result = run("page", "--out", tmp_path / "page.html", "--json")
    assert json.loads(result.text) == {"page": str(tmp_path / "page.html")}


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    check(run("page", "--out", tmp_path / "none" / "page.html"), 1, "the folder '.*none' does not exist")
