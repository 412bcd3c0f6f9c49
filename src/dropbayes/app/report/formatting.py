"""Numbers, names and scores as text."""

from __future__ import annotations

import math
import unicodedata

_JOINERS = "\u200c\u200d"  # part of emoji and of some scripts
# part of emoji and of some scripts


def name(text: object, *, most: int = 80) -> str:
    r"""A name from the data as harmless text: no control characters, not empty, not too long.

    Control characters, line breaks and marks that turn the direction of writing are written out. Escaping for HTML is
    the page's own work.

    Examples:
        >>> name("a\u202eb"), name(""), name("x" * 100, most=5)
        ('a\\u202eb', '(empty)', 'xxxx…')
    """
    plain = "".join(map(_visible, str(text)[: 4 * most])).strip() or "(empty)"
    return plain if len(plain) <= most else plain[: most - 1] + "…"


def _visible(character: str) -> str:
    if character in "\t\n\r":
        return " "
    steers = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS
    return f"\\u{ord(character):04x}" if steers else character


def number(value: float, *, digits: int = 3) -> str:
    """The number with so many significant digits, at least those before the point.

    Examples:
        >>> number(1234.56), number(0.012345), number(-0.0), number(3.2e-9), number(float("-inf"))
        ('1,235', '0.0123', '0', '3.2e−9', '−∞')
    """
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "−∞"
    rounded = float(f"{value:.{digits - 1}e}")
    if rounded == 0:
        return "0"
    power = math.floor(math.log10(abs(rounded)))
    if not -4 <= power < 9:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:,.{max(0, digits - 1 - power)}f}".replace("-", "−")


def fixed_point(value: float, *, spread: float) -> str:
    """The number to a hundredth of the first digit of a spread, so that a column has the same decimals throughout.

    Examples:
        >>> fixed_point(135.57, spread=61.8), fixed_point(0.1234567, spread=0.02), fixed_point(-3, spread=1e-9)
        ('135.6', '0.1235', '−3')
    """
    if not (math.isfinite(spread) and spread > 0 and math.isfinite(value)):
        return number(value, digits=4)
    decimals = max(0, 2 - math.floor(math.log10(spread)))
    if decimals > 6 or abs(value) >= 1e9:
        return number(value, digits=5).rstrip("0").rstrip(".")
    return f"{value:,.{decimals}f}".replace("-", "−")


def times(count: int, what: str) -> str:
    """The count with its noun, in the plural where it is one.

    Examples:
        >>> times(1, "row"), times(1200, "row")
        ('1 row', '1,200 rows')
    """
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def percent(share: float) -> str:
    """The share in percent, with a digit after the point only where it matters.

    Examples:
        >>> percent(0.5), percent(0.034), percent(0.9991), percent(1.0), percent(0.0)
        ('50 %', '3.4 %', '99.9 %', '100 %', '0 %')
    """
    if math.isnan(share):
        return "–"
    coarse = share in (0, 1) or 0.1 <= share <= 0.985 or share > 1
    return f"{100 * share:.{0 if coarse else 1}f} %"


def score_text(value: float, error: float | None = None, *, percent: bool = False) -> str:
    """The value of a score and its standard error, to as many digits as the error supports.

    Examples:
        >>> score_text(1.23456, 0.0312), score_text(0.0345, percent=True)
        ('1.235 ± 0.031', '3.45 %')
    """
    scale, unit = (100.0, " %") if percent else (1.0, "")
    value = scale * value
    if error is None or not math.isfinite(value) or not math.isfinite(error) or not error:
        return number(value, digits=3 if percent else 4) + unit
    error = scale * error
    decimals = max(0, 1 - math.floor(math.log10(error)))
    if decimals > 6 or abs(value) >= 1e7:
        return f"{number(value, digits=4)} ± {number(error, digits=2)}{unit}"
    return f"{value:,.{decimals}f} ± {error:,.{decimals}f}{unit}".replace("-", "−")
