"""How numbers are written: decimal point or comma, separators of thousands, currencies, percent signs, units."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

NUMBER = r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$"  #: A number as programs write it.

_SIGN = "(?:[$€£¥₹₩₽₺฿]|USD|EUR|GBP|JPY|CHF|CNY|INR|AUD|CAD|SEK|NOK|DKK|PLN)"
_PLUS_MINUS = "[+\u2212-]?"  # the second is the minus sign of typesetters
_SPACE = "[ \u00a0\u202f\u2009]"  # between thousands: the plain one, no-break, narrow no-break and thin


@dataclass(frozen=True)
class Notation:
    """A way of writing numbers."""

    decimal: str = "."  # or ","
    thousands: str = ""  # the separator: "", ",", ".", "'" or a space of any kind as " "
    # The currency, "%" or unit that the numbers carry, which is dropped: 7 % is read as 7. "currency" is any of those,
    # as models written before a currency was recorded have it. ":" is a time or duration, read as a number of days.
    sign: str = ""

    @property
    def pattern(self) -> str:
        """A regular expression that matches exactly the numbers so written, spaces around them removed."""
        if self.sign == ":":
            return r"^[0-9]{1,3}:[0-5][0-9](?::[0-5][0-9](?:\.[0-9]+)?)?$"
        groups = rf"[1-9][0-9]{{0,2}}(?:{self._separator}[0-9]{{3}})+|"  # 0,123 has a decimal comma
        digits = (groups if self.thousands else "") + "[0-9]+"
        fraction = rf"(?:{re.escape(self.decimal)}[0-9]*)?"
        body = rf"(?:{digits}){fraction}|{re.escape(self.decimal)}[0-9]+"
        number = rf"{_PLUS_MINUS}(?:{body})(?:[eE]{_PLUS_MINUS}[0-9]+)?"
        if self.sign in ("", "%"):
            return rf"^{number}{_SPACE}?%$" if self.sign else rf"^{number}$"
        return rf"^(?:{_PLUS_MINUS}{self._currency}{_SPACE}?{number}|{number}{_SPACE}?{self._currency})$"

    @property
    def _currency(self) -> str:
        return _SIGN if self.sign == "currency" else re.escape(self.sign)

    @property
    def _separator(self) -> str:
        return {" ": _SPACE, "'": "['’]"}.get(self.thousands, re.escape(self.thousands))

    @property
    def example(self) -> str:
        """How 1234.5 is written; a time, how half past twelve is."""
        if self.sign == ":":
            return "12:30"
        written = f"1{self.thousands}234{self.decimal}5"
        sign = "$" if self.sign == "currency" else self.sign
        return f"{written}{sign}" if sign in ("", "%") else f"{written} {sign}"

    def plain(self, texts: pa.Array) -> pa.Array:
        """The texts as programs write numbers; those that do not match stay as they are, or empty if unclear."""
        texts = cleaned = others = pc.replace_substring(texts, "\u2212", "-")
        if self == PLAIN:
            return texts
        if self.sign == ":":
            read = [_as_days(one) if one and re.match(self.pattern, one) else one for one in texts.to_pylist()]
            return pa.array(read, pa.string())
        if self.sign == "%" or self.decimal != ".":  # 0.07 may be 7 %, and 1.234 a thousand
            unclear = NUMBER if self.sign == "%" else r"^[+-]?[1-9][0-9]{0,2}\.[0-9]{3}$"
            others = pc.replace_substring_regex(texts, unclear, "")
        if self.sign:
            cleaned = pc.replace_substring_regex(cleaned, rf"{_SPACE}?{self._currency}{_SPACE}?", "")
        if self.thousands:
            cleaned = pc.replace_substring_regex(cleaned, self._separator, "")
        if self.decimal != ".":
            cleaned = pc.replace_substring(cleaned, self.decimal, ".")
        return pc.if_else(pc.match_substring_regex(texts, self.pattern), cleaned, others)


PLAIN = Notation()

# Most common first: a column of 1,000 to 9,000 is in thousands unless something says that its comma is decimal.
_MARKS = ((".", ""), (".", ","), (",", ""), (",", "."), (".", " "), (",", " "), (".", "'"), (",", "'"))

ANY_NUMBER = "|".join(Notation(*marks, sign).pattern for marks in _MARKS for sign in ("", "%", "currency"))
"""A number in any notation."""


def notation_of(texts: pa.Array, *, decimal: str | None = None) -> Notation | None:
    """The notation in which every text is a number, with the decimal mark where it is known; None if there is none."""
    signs = [*_currencies(texts)[:1], *_unit(texts)]
    return _matching(texts, ("", "%"), decimal) or _matching(texts, signs, decimal)


def mixed_currencies(texts: pa.Array, *, decimal: str | None = None) -> list[str]:
    """The currencies of a column of amounts in more than one; empty for any other column."""
    signs = _currencies(texts)
    return signs if len(signs) > 1 and _matching(texts, ("currency",), decimal) else []


def _matching(texts: pa.Array, signs: Sequence[str], decimal: str | None) -> Notation | None:
    marks = [pair for pair in _MARKS if decimal in (None, pair[0])]
    notations = (Notation(*pair, sign) for sign in signs for pair in marks)
    return next((one for one in notations if pc.all(pc.match_substring_regex(texts, one.pattern)).as_py()), None)


def _unit(texts: pa.Array) -> list[str]:
    """The word after the first number, such as kg or m², or the mark in it of a time; none for few different texts."""
    word = re.search(rf"[0-9]{_SPACE}?(°?[^\W\d_][^\d\s]*)$|[0-9](:)[0-9]", texts[0].as_py() if len(texts) else "")
    return [word[1] or word[2]] if word and pc.count_distinct(texts).as_py() > 20 else []


def _as_days(time: str) -> str:
    parts = zip(map(float, time.split(":")), (24, 1440, 86_400), strict=False)  # seconds may be left out
    return repr(sum(part / per_day for part, per_day in parts))


def _currencies(texts: pa.Array) -> list[str]:
    signs = pc.extract_regex(texts, rf"(?P<sign>{_SIGN})")
    return sorted(pc.unique(pc.struct_field(signs, "sign")).drop_null().to_pylist())
