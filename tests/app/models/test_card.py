"""Tests of the card of a model."""

from markdown_it import MarkdownIt

from dropbayes.app.models.card import card, range_text
from dropbayes.estimators.columns import Column, Schema


def test_a_card_says_what_the_model_reads_and_how_it_came_about():
    schema = Schema((Column("size", "number", low=1.5, high=20.0), Column("city", "category", categories=("Oslo", "a|b"))),
                    "price", "regression", {"id": "an identifier"})  # fmt: skip
    origin = {"file": "houses.csv", "n_rows": 1200, "sha256": "ab" * 32, "command": "dropbayes fit houses.csv",
              "settings": {"n_draws": 50}, "scores": {"held-out log-likelihood": -1.23456}, "versions": {"torch": "2"},
              "calibration": {"method": "scale", "values": [0.9], "n_rows": 100, "file": "held.csv"}}  # fmt: skip
    text = card(schema, origin, name="m")
    for line in (
        "| size | number | 1.5 to 20 |", "| city | category | Oslo, a\\|b |", "| id | left out | an identifier |",
        "- data: houses.csv, 1,200 rows", f"- SHA-256 of the data: {'ab' * 32}", "- command: `dropbayes fit houses.csv`",
        "- scores: held-out log-likelihood -1.235", "- calibration: scale, factor 0.9, on 100 rows of held.csv",
        'model = db.load("m")',
    ):  # fmt: skip
        assert line in text.splitlines()


def test_ranges_are_read_in_their_own_units():
    assert range_text(Column("d", "date", low=0.0, high=18262.0)) == "1970-01-01 to 2020-01-01"
    assert range_text(Column("b", "boolean")) == "true or false"
    assert range_text(Column("n", "number")) == ""


def test_names_and_categories_are_no_markup():
    hostile = "<script>alert(1)</script> [x](javascript:1) `a` | b\n# c & d"
    schema = Schema((Column(hostile, "category", categories=(hostile,)),), hostile, "regression", {hostile: hostile})
    calibration = {"method": "isotonic", "values": [0.9], "n_rows": 100, "file": hostile}
    text = card(schema, {"file": hostile, "command": hostile, "calibration": calibration}, name='"\n# m')
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert "<script" not in html and "<a " not in html and html.count("<h1>") == 1
    assert html.count("<code") == 1  # the example of its use
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt; [x](javascript:1) `a` | b # c &amp; d") == 9
