"""Tests of dates: how they are written, and the numbers they become."""

import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dropbayes.estimators.columns.dates import (
    PARTS,
    are_days,
    date_format_of,
    date_inputs,
    date_parts,
    day_of_year,
    days_of,
    is_date,
    period_of,
)
from tests.estimators.columns.places import texts

MOMENTS = st.datetimes(datetime.datetime(1950, 1, 1), datetime.datetime(2060, 1, 1)).map(
    lambda t: t.replace(microsecond=0)
)


@pytest.mark.parametrize(
    "form",
    [
        *("iso", "%d.%m.%Y", "%d.%m.%Y %H:%M:%S", "%Y/%m/%d", "%m/%d/%Y %H:%M", "%d.%m.%y", "%m/%d/%y", "%Y.%m.%d"),
        *("%m/%d/%Y %I:%M %p", "%d-%b-%Y", "%d-%b-%y", "%d %b %Y %H:%M", "%b %d, %Y", "%b %d %Y"),
    ],
)
@given(moments=st.lists(MOMENTS, min_size=1, max_size=5))
@settings(max_examples=20, deadline=None)
def test_a_format_is_found_and_reads_what_python_wrote(form, moments):
    moments = [*moments, datetime.datetime(2001, 12, 31, 5)]  # in which no day is a month
    cells = texts(*(t.isoformat() if form == "iso" else t.strftime(form) for t in moments))
    assert is_date(cells)
    assert date_format_of(cells) == form
    read = [t if form == "iso" else datetime.datetime.strptime(t.strftime(form), form) for t in moments]
    expected = [(t - datetime.datetime(1970, 1, 1)) / datetime.timedelta(days=1) for t in read]
    np.testing.assert_allclose(days_of(cells, form), expected, atol=1e-9)


def test_a_date_of_another_format_is_found_without_reading_each_alone(monkeypatch):
    calls, cast = [], pc.cast
    monkeypatch.setattr(pc, "cast", lambda *given, **how: calls.append(0) or cast(*given, **how))
    many = [f"{1 + day % 28}.{1 + day % 12}.2020" for day in range(5000)]
    assert date_format_of(texts(*many)) == "%d.%m.%Y"
    bad = days_of(texts(*["2020-01-31"] * 4999, "2020-02-31"), "iso")
    assert np.flatnonzero(np.isnan(bad)).tolist() == [4999] and len(calls) < 200


def test_a_year_of_two_digits_is_not_one_of_the_first_century():
    assert days_of(texts("31.12.20", "31.12.2020"), "%d.%m.%Y").tolist()[1:] == [18627.0]
    assert np.isnan(days_of(texts("31.12.20"), "%d.%m.%Y")).all()
    with pytest.raises(ValueError, match="written otherwise"):
        date_format_of(texts("31.12.20", "1.2.2019"))
    assert days_of(texts("2020-1-5"), date_format_of(texts("2020-1-5"))).tolist() == [18266.0]


def test_months_are_read_by_their_names_in_full_and_in_any_case():
    for written in ("1-APR-2021", "01 April 2021", "april 1, 2021"):
        cells = texts(written)
        assert is_date(cells) and days_of(cells, date_format_of(cells)).tolist() == [18718.0]
    with pytest.raises(ValueError, match="30-Feb-2021"):
        date_format_of(texts("01-Apr-2021", "30-Feb-2021"))
    assert not is_date(texts("10 box 2021", "1 sack 12")) and not is_date(texts("2021.4.1", "2021.12.0"))


@pytest.mark.parametrize(("form", "written", "first_days"), [
    ("%Y-%m", ["2021-03", "2020-12"], ["2021-03-01", "2020-12-01"]), ("%Y/%m", ["2021/03", "2021/10"], ["2021-03-01", "2021-10-01"]),
    ("%YQ4", ["2021Q3", "1999q1"], ["2021-07-01", "1999-01-01"]), ("%Y-Q4", ["2021-Q4", "2021-Q2"], ["2021-10-01", "2021-04-01"]),
    ("%Y Q4", ["2021 Q1"], ["2021-01-01"]), ("Q4 %Y", ["Q3 2021", "q4 1999"], ["2021-07-01", "1999-10-01"]),
    ("%b %Y", ["Mar 2021", "december 1999"], ["2021-03-01", "1999-12-01"]), ("%b-%Y", ["Mar-2021"], ["2021-03-01"]),
     ("%G-W%V", ["2021-W01", "2020-W53"], ["2021-01-04", "2020-12-28"]),
    ("%GW%V", ["2021W07"], ["2021-02-15"]), ("%Y%m%d", ["20210401", "20200229"], ["2021-04-01", "2020-02-29"]),
])  # fmt: skip
def test_a_period_is_its_first_day(form, written, first_days):
    cells = texts(*written, None)
    assert period_of(texts(*written)) == date_format_of(texts(*written)) == form
    days = days_of(cells, form)
    assert np.isnan(days[-1]) and days[:-1].astype("datetime64[D]").astype(str).tolist() == first_days


@pytest.mark.parametrize("written", [
    ("2021-13", "2021-01"), ("2021-W07", "2021-W53"), ("2021Q5", "2021Q1"), ("1234-05", "2021-04"), ("20210230", "20210401"),
    ("2009-10", "2010-11", "2011-12"), ("2021-03", "other"), ("2021-03", "2021/03"), ("21-03", "21-04"), ("Box 2021", "Mar 2021"), ("Mar 21", "Mar 22"),
])  # fmt: skip
def test_codes_and_seasons_are_no_periods(written):
    assert period_of(texts(*written)) is None


def test_a_column_that_is_no_period_by_its_first_text_is_not_read_through(monkeypatch):
    calls, match = [], pc.match_substring_regex
    monkeypatch.setattr(pc, "match_substring_regex", lambda *given, **how: calls.append(0) or match(*given, **how))
    assert period_of(texts("0.5", "2021-03")) is None and not calls
    assert period_of(texts("2021-03", "2021-05")) == "%Y-%m" and len(calls) == 1


def test_numbers_are_days_by_their_name_or_where_chance_would_write_others():
    year = [f"2020{month:02}{day:02}" for month in range(1, 13) for day in (1, 15)]
    in_a_month = [f"202004{day:02}" for day in range(1, 31)]
    assert (
        are_days(texts(*year), "x") and are_days(texts(*in_a_month), "SaleDate") and are_days(texts("20210401"), "day")
    )
    assert not are_days(texts(*in_a_month), "x") and not are_days(texts(*year, "20201301"), "date")
    assert not are_days(texts("2021-03"), "date") and not are_days(texts("20200101", "20200102"), "holidays")


def test_zones_and_types_are_the_same_instants():
    moment = datetime.datetime(2020, 6, 1, 12, tzinfo=datetime.UTC)
    cells = texts("2020-06-01T14:00:00+02:00", "2020-06-01T12:00:00Z")
    assert date_format_of(cells) == "iso zone"
    typed = pa.array([moment.replace(tzinfo=None)] * 2, pa.timestamp("ms"))
    assert days_of(cells, "iso zone").tolist() == days_of(typed, "").tolist() == [18414.5, 18414.5]


def test_the_last_date_of_a_type_is_a_number_of_days():
    last = pa.array([2**31 - 1, 0], pa.int32()).cast(pa.date32())
    assert days_of(last, "").tolist() == [2**31 - 1, 0]
    for unit, ticks in (("s", 1), ("ms", 10**3), ("us", 10**6), ("ns", 10**9)):
        assert days_of(pa.array([86_400 * ticks, None], pa.timestamp(unit)), "")[0] == 1
    assert days_of(pa.array([86_400_000], pa.int64()).cast(pa.date64()), "") == 1


def test_exchangeable_days_and_months_are_refused():
    with pytest.raises(ValueError, match="day and month can be exchanged in every row"):
        date_format_of(texts("3/4/2020", "5/6/2020"))


@pytest.mark.parametrize(
    "cells", [("2020-01-01", "1.2.2020"), ("2020-01-01", "2020-02-30"), ("31.1.2020", "30.2.2020")]
)
def test_a_date_that_is_none_or_written_otherwise_is_named(cells):
    with pytest.raises(ValueError, match=f"^'{cells[1]}' is not a day, or is written otherwise"):
        date_format_of(texts(cells[0], *cells))


def test_a_day_that_does_not_exist_is_not_that_of_the_next_month():
    assert np.isnan(days_of(texts("30.2.2020", "31.4.2020"), "%d.%m.%Y")).all()
    assert np.isnan(days_of(texts("2/30/20 10:00"), "%m/%d/%y %H:%M")).all()


def test_what_is_written_otherwise_is_missing():
    assert np.isnan(days_of(texts("2020-01-01", "soon", None), "iso")).tolist() == [False, True, True]


def test_places_on_circles_return_after_a_turn():
    day = date_inputs(np.array([5.3, 6.3]), ("day",))
    week = date_inputs(np.array([5.3, 12.3]), ("week",))
    season = date_inputs(np.array([5.3, 5.3 + 365.2425]), ("season",))
    for inputs in (day, week, season):
        np.testing.assert_allclose(inputs[0], inputs[1], atol=1e-9)
        np.testing.assert_allclose((inputs**2).sum(1), 1.0)


def test_the_year_runs_on():
    year = date_inputs(np.array([0.0, 365.2425 * 30]), ("year",))
    assert year[:, 0].tolist() == [1970.0, 2000.0]


def test_parts_are_those_that_vary():
    assert date_parts(np.arange(0.0, 30.0, 1 / 24)) == ("year", "week", "day")
    assert date_parts(np.arange(0.0, 2000.0, 365.0)) == ("year", "season")
    assert set(date_parts(np.arange(0.0, 900.0))) == {"year", "season", "week"}
    assert set(PARTS) == {"year", "season", "week", "day"}


def test_what_each_function_makes_of_a_few_days():
    assert date_format_of(pa.array(["2020-01-31", "2020-02-29"])) == "iso"
    assert date_format_of(pa.array(["31.1.2020"])) == "%d.%m.%Y"
    assert days_of(pa.array(["1970-01-02"]), "iso").tolist() == [1.0]
    assert date_parts(np.arange(0.0, 900.0, 30.0)) == ("year", "season")
    assert date_parts(np.arange(0.0, 30.0)) == ("year", "week")
    inputs = date_inputs(np.array([0.0, 0.25]), ("year", "day"))
    assert inputs.round(3).tolist() == [[1970.0, 0.0, 1.0], [1970.001, 1.0, 0.0]]
    a_year = float(date_inputs(np.array([365.0]), ("year",))[0, 0])
    assert day_of_year(a_year) == np.datetime64("1971-01-01")
