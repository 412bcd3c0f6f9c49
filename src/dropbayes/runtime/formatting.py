"""Numbers, counts, names, scores and results as text."""

import html
import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of text: a title, the names of its columns if they have any, rows of cells, and sentences below."""

    title: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()
    align: str = ""  # for each column "<" or ">", the side on which its cells are flush; on the left beyond these
    notes: Sequence[str] = ()
    rule: bool = False  # whether a line is drawn below the names

    def text(self) -> str:
        rows = [self.head, *self.rows] if self.head else list(self.rows)
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        forms = [f"{side}{width}" for side, width in zip(self.align.ljust(len(widths), "<"), widths, strict=False)]
        lines = ["  ".join(map(format, row, forms)) for row in rows]
        if self.rule:
            lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join(line.rstrip() for line in ([self.title] if self.title else []) + [*lines, *self.notes])

    def html(self) -> str:
        """The table as a snippet of HTML, everything escaped."""

        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        head = f"<thead>{line(self.head, 'th')}</thead>" if self.head else ""
        body = "".join(line(row, "td") for row in self.rows)
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self.notes)
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>" + (f"<ul>{notes}</ul>" if notes else "")


class Printed:
    """A result that prints as a table, and is one in a notebook."""

    def table(self) -> Table:
        """The result as a table of text."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()


def printable_name(text: object, *, max_length: int = 80) -> str:
    r"""A name from the data as harmless text: no control characters, not empty, not too long.

    Line breaks become spaces; control characters and marks that turn the direction of writing are written out. The
    joiners of emoji and of some scripts stay. Nothing is escaped for HTML.
    """

    def visible(character: str) -> str:
        if character in "\t\n\r":
            return " "
        steers = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\u200c\u200d"
        return f"\\u{ord(character):04x}" if steers else character

    text, half = str(text), max_length // 2
    text = text if len(text) <= 4 * max_length else text[:max_length] + text[-max_length:]
    plain = "".join(map(visible, text)).strip() or "(empty)"
    # Both ends are shown: names often differ at the last one alone.
    return plain if len(plain) <= max_length else f"{plain[: max_length - half - 1]}…{plain[-half:]}"


def number(value: float, *, digits: int = 3) -> str:
    """The number with so many significant digits, at least those before the point."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    power = int(exponent)
    text = f"{value:,.{max(0, digits - 1 - power)}f}" if -4 <= power < 9 else f"{_without_zeros(mantissa)}e{power}"
    return text.replace("-", "−")


def plain_number(value: float, *, digits: int = 4) -> str:
    """The number for a terminal: signs of ASCII, no zeros at the end, exponents as Python writes them."""
    if not math.isfinite(value):
        return f"{value:g}"
    mantissa, _, exponent = number(value, digits=digits).replace("−", "-").partition("e")
    return _without_zeros(mantissa) + (f"e{int(exponent):+03d}" if exponent else "")


def _without_zeros(decimal: str) -> str:
    return decimal.rstrip("0").rstrip(".") if "." in decimal else decimal


def fixed_point(value: float, *, spread: float) -> str:
    """The number to a hundredth of the first digit of a spread, so that a column has the same decimals throughout."""
    if not (math.isfinite(spread) and spread > 0 and math.isfinite(value)):
        return number(value, digits=4)
    decimals = max(0, 2 - math.floor(math.log10(spread)))
    if decimals > 6 or abs(value) >= 1e9:
        return _without_zeros(number(value, digits=5))
    return f"{value:,.{decimals}f}".replace("-", "−")


def count(n: int, noun: str) -> str:
    """The count with its noun, in the plural except for one."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def percent(share: float) -> str:
    """The share in percent, with a digit after the point only where it matters."""
    if math.isnan(share):
        return "–"
    coarse = share in (0, 1) or 0.1 <= share <= 0.985 or share > 1
    return f"{100 * share:.{0 if coarse else 1}f} %"


def score_text(value: float, error: float | None = None, *, percent: bool = False) -> str:
    """The value of a score and its standard error, to as many digits as the error supports."""
    scale, unit = (100.0, " %") if percent else (1.0, "")
    value = scale * value
    if error is None or not math.isfinite(value) or not math.isfinite(error) or not error:
        return number(value, digits=3 if percent else 4) + unit
    error = scale * error
    decimals = max(0, 1 - math.floor(math.log10(error)))
    if decimals > 6 or abs(value) >= 1e7:
        return f"{number(value, digits=4)} ± {number(error, digits=2)}{unit}"
    return f"{value:,.{decimals}f} ± {error:,.{decimals}f}{unit}".replace("-", "−")
