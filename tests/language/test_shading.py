"""Tests of shaded tokens: nothing of a text acts as markup or controls a terminal, and shades follow the numbers."""

import html
import io
import math
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from dropbayes.language import ShadedText

HOSTILE = [
    "<script>alert(1)</script>",
    ' " onmouseover="x',
    "&amp;",
    "[bold]",
    "\x1b[31mred",
    "\u202etxt",
    "\n",
    "\t日本",
]


class Reader(HTMLParser):
    """The elements of a page and its text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


def test_a_text_is_not_markup():
    page = Reader(ShadedText(HOSTILE, [0.1] * len(HOSTILE), label='<b> "entropy"').html())
    assert {tag for tag, _ in page.elements} == {"div", "span"}
    assert {key for _, attributes in page.elements for key in attributes} == {"style", "title"}
    assert "<script>alert(1)</script>" in page.text and "&amp;" in page.text and '<b> "entropy"' in page.text


def test_a_terminal_is_not_controlled_by_a_text():
    shaded = ShadedText(HOSTILE, [0.1] * len(HOSTILE))
    out = io.StringIO()
    shaded.print(file=out, force_terminal=True, color_system="truecolor", width=200)
    bare = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert "\x1b" not in bare and "\u202e" not in bare and "[bold]" in bare and "\ufffd[31mred" in bare
    assert "\x1b" not in str(shaded)


def opacities(shaded):
    return [
        float(found)
        for found in re.findall(r'span style="background:rgba\(\d+,\d+,\d+,([\d.]+)\);border', shaded.html())
    ]


def test_the_shade_is_proportional_to_the_number():
    shaded = ShadedText(["a", "b", "c", "d"], [0.1, 0.2, 0.4, math.nan])
    assert opacities(shaded) == pytest.approx([0.15, 0.3, 0.6])
    assert opacities(ShadedText(["a"], [0.2], maximum=0.8)) == pytest.approx([0.15])
    assert opacities(ShadedText(["a", "b"], [0.0, 0.0])) == []


def test_numbers_beyond_the_scale_have_the_darkest_shade():
    assert ShadedText(["a", "b"], [3.0, 1.0], maximum=2.0).shares() == [1.0, 0.5]


def test_the_text_is_whole_in_every_form():
    tokens, values = ["The", " <unk>", " end", ".\n"], [0, 0.3, 0.1, 0.0]
    shaded = ShadedText(tokens, values, label="entropy")
    assert "".join(tokens) in html.unescape(re.sub(r"<[^>]*>", "", shaded.html()))
    assert shaded.__rich__().plain.startswith("".join(tokens))
    assert str(shaded).startswith("The [<unk>: 0.3] end.\n")
    assert "0 to 0.3" in str(shaded) and repr(shaded) == "ShadedText(4 tokens, entropy up to 0.3)"


def test_without_colours_the_numbers_are_written():
    out = io.StringIO()
    ShadedText(["a", " b"], [0.0, 0.5]).print(file=out, width=80)
    assert out.getvalue() == "a [b: 0.5]\nuncertainty from 0 to 0.5; marked from 0.25 on\n"


def test_the_terminals_shades_grow_with_the_number():
    out = io.StringIO()
    spans = ShadedText(list("abcde"), [0, 1, 2, 3, 4]).__rich__().spans
    assert len({str(span.style) for span in spans if span.end <= 5}) == 4
    Console(file=out, force_terminal=True, color_system="truecolor").print(ShadedText(["a"], [1.0]))
    assert "\x1b[1;38;2;17;17;17;48;2;255;106;0ma" in out.getvalue()


@pytest.mark.parametrize(
    ("tokens", "values", "options", "message"),
    [
        ("abc", [1, 2, 3], {}, "`tokens` must be a sequence of strings"),
        (["a"], [1.0, 2.0], {}, "a number for each of the 1 tokens"),
        (["a"], [-1.0], {}, "finite and zero or more"),
        (["a"], [math.inf], {}, "finite and zero or more"),
        (["a"], [1.0], {"maximum": 0.0}, "`maximum` must be a positive number"),
    ],
)
def test_bad_input_is_refused(tokens, values, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ShadedText(tokens, values, **options)
