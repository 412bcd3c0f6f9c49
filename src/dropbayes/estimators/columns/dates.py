"""Dates: how they are written, and the numbers they become."""

import math
import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dropbayes.runtime.validation import Numbers, quote

PARTS = {
    "year": ("year",),
    "season": ("season sin", "season cos"),
    "week": ("weekday sin", "weekday cos"),
    "day": ("hour sin", "hour cos"),
}
"""The parts of a date with the names of their inputs: the year with its fraction, and places on a circle."""

_YEAR = 365.2425  # days
_MONTH = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"  # in English, as `strptime` reads them


def is_date(texts: pa.Array) -> bool:
    """Whether most of the texts look like dates."""
    day = (
        "[0-9]{4}[/-][0-9]{1,2}[/-][0-9]{1,2}|[0-9]{4}[.][0-9]{2}[.][0-9]{2}"  # 2021.4.1 may be a version
        "|[0-9]{1,2}[./-][0-9]{1,2}[./-][0-9]{2,4}"
        f"|[0-9]{{1,2}}[ -]{_MONTH}[ -][0-9]{{2,4}}|{_MONTH} [0-9]{{1,2}},? [0-9]{{4}}"
    )
    date = f"(?i)^({day})([T ][0-9:.]+ ?(Z|[+-][0-9:]+|[ap]m)?)?$"
    return bool(pc.mean(pc.match_substring_regex(texts, date)).as_py() > 0.5)


def date_format_of(texts: pa.Array) -> str:
    """The format of all texts: "iso", "iso zone", or one of `strptime`; one of the first two for a temporal type.

    Raises:
        ValueError: They have none in common, or day and month can be exchanged in every row.
    """
    if pa.types.is_temporal(texts.type):
        return "iso zone" if getattr(texts.type, "tz", None) else "iso"
    short = ("%d.%m.", "%d/%m/", "%m/%d/", "%d-%m-", "%m-%d-", "%d-%b-", "%d %b ")  # also with two digits of the year
    days = ["%Y/%m/%d", "%Y-%m-%d", "%Y.%m.%d", "%b %d, %Y", "%b %d %Y", *(d + y for d in short for y in ("%Y", "%y"))]
    times = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
    forms = ["iso", "iso zone", *(day + time for day in days for time in times)]
    for form in forms:
        if _parse(texts.slice(0, 1), form).null_count == 0 == _parse(texts, form).null_count:  # most forms fail at once
            exchanged = form.replace("%d/%m", "%m/%d").replace("%d-%m", "%m-%d")
            if exchanged != form and _parse(texts, exchanged).null_count == 0:
                raise ValueError("day and month can be exchanged in every row; write the dates as 2020-12-31")
            return form
    usual = min(forms, key=lambda form: _parse(texts[:100], form).null_count)
    odd = texts.filter(pc.is_null(_parse(texts, usual)))[0].as_py()
    raise ValueError(f"{quote(odd)} is not a day, or is written otherwise than others; write them as 2020-12-31")


def _parse(texts: pa.Array, form: str) -> pa.Array:
    """The instants in microseconds since 1970; null for a text that has another format."""
    if form not in ("iso", "iso zone"):
        instants = pc.strptime(texts, format=form, unit="us", error_is_null=True)
        full = pc.greater_equal(pc.year(instants), 1000)  # arrow reads the year 20 of 31.12.20 as four digits, too
        pattern = re.sub("%[bp]", "[A-Za-z]+", form).replace("%d", "(?P<day>[0-9]+)")
        parts = pc.extract_regex(texts, f"^{re.sub('%.', '[0-9]+', pattern)}$")
        # Arrow reads the 30th of February as the 1st of March.
        exists = pc.equal(pc.day(instants), pc.cast(pc.struct_field(parts, "day"), pa.int64()))
        return pc.cast(pc.if_else(pc.and_(full, exists), instants, None), pa.int64())
    try:
        return pc.cast(pc.cast(texts, pa.timestamp("us", None if form == "iso" else "UTC")), pa.int64())
    except pa.ArrowInvalid:
        if len(texts) == 1:
            return pa.nulls(1, pa.int64())
        return pa.concat_arrays([_parse(half, form) for half in (texts[: len(texts) // 2], texts[len(texts) // 2 :])])


def days_of(values: pa.Array, form: str) -> Numbers:
    """Days since 1970 of texts in a format, or of values of a temporal type; NaN for what is missing or otherwise."""
    values = values.cast(pa.date64()) if pa.types.is_date32(values.type) else values
    temporal = pa.types.is_temporal(values.type)
    unit = getattr(values.type, "unit", "ms") if temporal else "us"  # a date of 64 bits is in milliseconds
    instants = pc.cast(values, pa.int64()) if temporal else _parse(values, form)
    per_day = 86_400 * {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit]
    return instants.to_numpy(zero_copy_only=False).astype(np.float64) / per_day


def date_parts(days: Numbers) -> tuple[str, ...]:
    """The parts that can teach something: the year always, the season over more than a quarter of it, and so on."""
    span = float(days.max() - days.min()) if len(days) else 0.0
    whole = np.floor(days)
    daily = len(np.unique(whole)) > 0.5 * span  # weekdays of monthly data are an accident of the calendar
    parts = {"year": True, "season": span > _YEAR / 4, "week": span >= 7 and daily, "day": bool((days != whole).any())}
    return tuple(name for name, useful in parts.items() if useful)


def date_inputs(days: Numbers, parts: tuple[str, ...]) -> Numbers:
    """The inputs of a network, `[row, input]`: the decimal year, then sine and cosine of each place on a circle."""
    turns = {"season": days / _YEAR, "week": (days + 3) / 7, "day": days}  # 1 January 1970 was a Thursday
    columns = []
    for part in parts:
        if part == "year":
            columns.append(1970 + days / _YEAR)
        else:
            angle = 2 * np.pi * (turns[part] % 1)
            columns += [np.sin(angle), np.cos(angle)]
    return np.stack(columns, axis=1)


def day_of_year(year: float) -> np.datetime64:
    """The day of a decimal year, as `date_inputs` counts them."""
    return np.datetime64(math.floor((year - 1970) * _YEAR + 1e-6), "D")
