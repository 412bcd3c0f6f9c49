"""Dates: how they are written, and the numbers they become."""

import datetime
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
# A day without separators, months, ISO weeks and quarters, as those of the end of a year are written.
_PERIODS = ("%Y%m%d", "%Y-%m", "%Y/%m", "%b %Y", "%b-%Y", "%G-W%V", "%GW%V", "%YQ4", "%Y-Q4", "%Y Q4", "Q4 %Y")


def is_date(texts: pa.Array) -> bool:
    """Whether most of the texts look like dates."""
    month = "(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"  # in English, as `strptime` reads them
    day = (
        "[0-9]{4}[/-][0-9]{1,2}[/-][0-9]{1,2}|[0-9]{4}[.][0-9]{2}[.][0-9]{2}"  # 2021.4.1 may be a version
        "|[0-9]{1,2}[./-][0-9]{1,2}[./-][0-9]{2,4}"
        f"|[0-9]{{1,2}}[ -]{month}[ -][0-9]{{2,4}}|{month} [0-9]{{1,2}},? [0-9]{{4}}"
    )
    date = f"(?i)^({day})([T ][0-9:.]+ ?(Z|[+-][0-9:]+|[ap]m)?)?$"
    return bool(pc.mean(pc.match_substring_regex(texts, date)).as_py() > 0.5)


def period_of(texts: pa.Array) -> str | None:
    """The format in which all texts are months, quarters, ISO weeks or days without separators; None if none is."""
    digits = {"%Y": "(1[89]|2[01])[0-9]{2}", "%G": "(1[89]|2[01])[0-9]{2}", "%b": "[a-z]{3,9}", "4": "[1-4]"}
    for form in _PERIODS:
        pattern = re.sub("%.|4", lambda part: digits.get(part[0], "[0-9]{2}"), form)
        likely = len(texts) and re.fullmatch(f"(?i){pattern}", texts[0].as_py())  # most columns are none by their first
        written = pc.match_substring_regex(texts, f"(?i)^{pattern}$") if likely else pa.array([False])
        if pc.all(written).as_py() and not _parse(texts, form).null_count:
            by_month = form in ("%Y-%m", "%Y/%m")  # of which 2010-11, 2011-12 and so on may be seasons
            years = [(text[5:], f"{int(text[:4]) + 1}"[2:]) for text in pc.unique(texts).to_pylist() if by_month]
            return None if by_month and all(month == after for month, after in years) else form
    return None


def are_days(texts: pa.Array, name: str) -> bool:
    """Whether different numbers such as 20210401 are days: their name says so, or so many would hardly be by chance."""
    if period_of(texts) != "%Y%m%d":
        return False
    named = re.search(r"(?i)date|datum|ymd|(^|[\W_])(day|dt)([\W_]|$)", name)
    numbers, days = (np.ptp(values) + 1 for values in (texts.cast(pa.int64()).to_numpy(), days_of(texts, "%Y%m%d")))
    return bool(named or (days / numbers) ** len(texts) < 1e-6)


def date_format_of(texts: pa.Array) -> str:
    """The format of all texts: "iso", "iso zone", or one of `strptime`; one of the first two for a temporal type.

    Raises ValueError where they have none in common, or day and month can be exchanged in every row.
    """
    if pa.types.is_temporal(texts.type):
        return "iso zone" if getattr(texts.type, "tz", None) else "iso"
    short = ("%d.%m.", "%d/%m/", "%m/%d/", "%d-%m-", "%m-%d-", "%d-%b-", "%d %b ")  # also with two digits of the year
    days = ["%Y/%m/%d", "%Y-%m-%d", "%Y.%m.%d", "%b %d, %Y", "%b %d %Y", *(d + y for d in short for y in ("%Y", "%y"))]
    times = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
    forms = [period_of(texts) or "iso", "iso zone", *(day + time for day in days for time in times)]
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
    if form in _PERIODS:
        firsts = texts.dictionary_encode()
        days = pa.array([_first_day(text) for text in firsts.dictionary.to_pylist()], pa.date32())
        return days.take(firsts.indices).cast(pa.timestamp("us")).cast(pa.int64())
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


def _first_day(text: str) -> datetime.date | None:
    """The day itself, or the first one of a month, quarter or ISO week."""
    text = re.sub("^(Q[1-4]) ([0-9]{4})$", r"\2\1", text.upper())
    month = re.sub("[- ]?Q([1-4])$", lambda quarter: f"-{3 * int(quarter[1]) - 2:02}", text)
    try:
        if text[:1].isalpha():
            return datetime.datetime.strptime(f"{text[:3]} {text[-4:]}", "%b %Y").date()
        return datetime.date.fromisoformat(re.sub("^([0-9]{4})[-/]([0-9]{2})$", r"\1-\2-01", month))
    except ValueError:
        return None


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
    angles = {part: 2 * np.pi * (turns[part] % 1) for part in parts if part in turns}
    columns = {"year": [1970 + days / _YEAR]} | {part: [np.sin(angle), np.cos(angle)] for part, angle in angles.items()}
    return np.stack([column for part in parts for column in columns[part]], axis=1)


def day_of_year(year: float) -> np.datetime64:
    """The day of a decimal year, as `date_inputs` counts them."""
    return np.datetime64(math.floor((year - 1970) * _YEAR + 1e-6), "D")
