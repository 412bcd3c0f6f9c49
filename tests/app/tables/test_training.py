"""Tests of training rows: columns understood, rows without target dropped, weights, groups and times."""

import numpy as np
import pyarrow as pa
import pytest

from dropbayes.app.tables.training import ColumnProblems, Reading, check_name, training_rows
from tests.estimators.columns.places import at

N = 40


def rows_of(columns, *, target="y", task=None, **reading):
    columns = {"x": [str(i * 0.5) for i in range(N)], "y": [str(i * 1.5) for i in range(N)], **columns}
    return training_rows(pa.table(columns), target=target, at=at, task=task, reading=Reading(**reading))


def test_identifiers_free_text_and_indices_are_left_out_with_the_reason():
    rows = rows_of({
        "id": [str(i + 7) for i in range(N)], "code": [f"k{i}" for i in range(N)], "unnamed_1": [str(i) for i in range(N)],
        "note": [f"a long sentence about the flat with number {i}, and more" for i in range(N)],
    })  # fmt: skip
    assert [column.name for column in rows.schema.columns] == ["x"]
    assert rows.schema.left_out == {
        "id": f"an identifier: {N} different numbers in {N} rows", "code": f"an identifier: {N} different texts in {N} rows",
        "unnamed_1": "an index without a name", "note": f"free text: {N} different texts in {N} rows",
    }  # fmt: skip


def test_a_copy_of_the_target_is_left_out():
    rows = rows_of({"again": [str(i * 1.5) for i in range(N)]})
    assert rows.schema.inputs == ("x",) and rows.schema.left_out == {"again": "a copy of the target"}


def test_a_number_beside_which_the_others_vanish_is_named_with_its_row():
    with pytest.raises(ValueError, match=r"row 5, column .a.: 1e.90 is so far from the others"):
        rows_of({"a": [str(1e90 if i == 5 else i) for i in range(N)]})


def test_identifiers_with_a_few_repeats_are_left_out_and_groups_stay():
    rows = rows_of({
        "ID": [str(max(i, 3)) for i in range(N)], "patient_id": ["" if i == 5 else str(i) for i in range(N)],
        "store_id": [str(i // 2) for i in range(N)],
    })  # fmt: skip
    assert rows.schema.inputs == ("x", "store_id")
    assert rows.schema.left_out["ID"] == f"an identifier: {N - 3} different numbers in {N} rows"


@pytest.mark.parametrize(
    ("cells", "task"),
    [
        (["0", "1"], "classification"),
        (["1.0", "0.0"], "classification"),
        (["yes", "no"], "classification"),
        (["1", "2"], "regression"),
        (["0", "0.5"], "regression"),
    ],
)
def test_zero_and_one_are_classes_unless_regression_is_asked_for(cells, task):
    with pytest.raises(ValueError, match="`task` must be one of 'regression', 'classification'; got 'ranking'"):
        rows_of({"y": cells * (N // 2)}, task="ranking")
    assert rows_of({"y": cells * (N // 2)}).schema.task == task
    typed = (
        pa.array([float(c) for c in cells] * (N // 2)) if cells != ["yes", "no"] else pa.array([True, False] * (N // 2))
    )
    assert rows_of({"y": typed}).schema.task == task
    assert rows_of({"y": typed}, task="regression").schema.task == "regression"


def test_a_running_number_that_is_no_identifier_stays():
    assert "t" in rows_of({"t": [str(i) for i in range(N)]}).schema.inputs


def test_every_problem_is_told_at_once():
    columns = {
        "when": [f"{1 + i % 12}/{1 + i % 12}/2020" for i in range(N)], "n": ["1O" if i == 3 else str(i) for i in range(N)],
        "many": [f"c{i % 15}" for i in range(N)],
    }  # fmt: skip
    with pytest.raises(ColumnProblems, match="table: 3 columns need a decision") as caught:
        rows_of(columns, max_categories=10)
    assert set(caught.value.problems) == {"when", "n", "many"}
    assert any("column 'n' has '1O' among numbers at row 3" in note for note in caught.value.__notes__)


def test_dates_numbers_and_booleans_become_inputs():
    rows = rows_of({
        "day": [f"2020-{1 + i % 12:02}-05" for i in range(N)], "price": [f"€1.{i:03},50" for i in range(N)],
        "yes": ["yes" if i % 2 else "no" for i in range(N)],
    })  # fmt: skip
    assert rows.schema.inputs == ("x", "day: year", "day: season sin", "day: season cos", "price", "yes")
    np.testing.assert_allclose(rows.x[:, 4], [1000.5 + i for i in range(N)])


def test_numbers_of_the_type_of_a_category_are_categories():
    codes = pa.array([i % 3 for i in range(N)]).dictionary_encode()
    assert rows_of({"code": codes}).schema.inputs == ("x", "code = 0", "code = 1", "code = 2")
    assert rows_of({"y": codes}).schema.task == "classification"
    assert rows_of({"y": codes}, task="regression").y.tolist() == codes.to_pylist()


def test_the_targets_of_other_notations_are_read():
    rows = rows_of({"y": [f"${i},{i + 100}.50" for i in range(1, N + 1)]})
    assert rows.schema.task == "regression"
    np.testing.assert_allclose(rows.y, [1000 * i + i + 100.5 for i in range(1, N + 1)])


def test_weights_and_groups_leave_the_inputs_and_keep_their_rows():
    target = ["" if i == 3 else str(i) for i in range(N)]
    columns = {"w": [str(i) for i in range(N)], "g": [f"g{i % 4}" for i in range(N)], "y": target}
    rows = rows_of(columns, weights="w", group="g")
    kept = [i for i in range(N) if i != 3]
    assert rows.weight.tolist() == kept
    assert rows.group.tolist() == [i % 4 for i in kept]
    assert rows.schema.inputs == ("x",)


def test_a_time_that_is_left_out_still_orders_the_rows():
    days = {"day": [f"2020-{12 - i % 12:02}-{1 + i % 28:02}" for i in range(N)]}
    read, left_out = rows_of(days, time="day"), rows_of(days, time="day", ignore=["day"])
    assert left_out.schema.inputs == ("x",) and left_out.time.tolist() == read.time.tolist()


@pytest.mark.parametrize("name", ["row", "unnamed_1"])
def test_a_counter_that_is_no_input_orders_the_rows(name):
    rows = rows_of({name: [str(N - i) for i in range(N)]}, time=name)
    assert rows.schema.inputs == ("x",) and rows.time.tolist() == list(range(N - 1, -1, -1))


def test_weights_and_times_are_read_in_the_notation_of_the_table():
    written = [f"{i / 10}".replace(".", ",") for i in range(N)]
    assert rows_of({"w": written}, weights="w", decimal=",").weight.tolist() == [i / 10 for i in range(N)]
    assert rows_of({"t": written[::-1]}, time="t").time.tolist() == list(range(N - 1, -1, -1))


def test_rows_are_ranked_by_their_time_and_equal_times_share_a_rank():
    times = [str(10 * ((7 * i) % N // 2)) for i in range(N)]
    rows = rows_of({"t": times}, time="t")
    assert rows.time.tolist() == [int(text) // 10 for text in times]
    assert rows.group is None


@pytest.mark.parametrize(("columns", "reading", "message"), [
    ({"w": ["-1"] * N}, {"weights": "w"}, "a weight must be a number of 0 or more"),
    ({"w": ["0"] * N}, {"weights": "w"}, "every weight is 0"),
    ({"g": ["a"] * N}, {"group": "g"}, "one group holds every row"),
    ({"t": ["5"] * N}, {"time": "t"}, "one time holds every row"),
    ({"g": ["a", "b"] * (N // 2)}, {"time": "g"}, "must hold numbers or dates"),
    ({"t": ["1", ""] * (N // 2)}, {"time": "t"}, "row 1, column 't': must have a time in every row"),
    ({"g": ["a", "b"] * (N // 2)}, {"time": "x", "group": "g"}, "are two ways to hold rows out"),
    ({}, {"ignore": ["y"]}, "`ignore` must not name the target"),
])  # fmt: skip
def test_wrong_roles_are_refused(columns, reading, message):
    with pytest.raises(ValueError, match=message):
        rows_of(columns, **reading)


@pytest.mark.parametrize(
    ("name", "meant"), [("Price", "'price'"), ("prize", "'price'"), ("a,b", "Give it once for each")]
)
def test_a_name_that_is_not_there_is_told_with_what_was_meant(name, meant):
    with pytest.raises(ValueError, match=f"has no column .*{meant}"):
        check_name(name, ["price", "a", "b"], "t", "ignore")


@pytest.mark.parametrize(("names", "hint"), [
    (["a b quality"], "separated by spaces; set the `delimiter`"), (["7.4 0.7 5"], "Its first line holds numbers"),
    (["7.4", "-2", "5e3"], "Its first line holds numbers"), (["sep=", "unnamed_2"], "setting of a spreadsheet"), (["7.4", "b"], r"'b'\.$"), (["a b"], r"'a b'\.$"),
])  # fmt: skip
def test_a_header_that_is_none_is_pointed_out(names, hint):
    with pytest.raises(ValueError, match=f"has no column 'quality'.*{hint}"):
        check_name("quality", names, "t.csv", "target")


@pytest.mark.parametrize("cells", [["$5", "€7"], ["2020-01-01", "01.02.2020"]])
def test_a_target_that_cannot_be_read_is_not_to_be_left_out(cells):
    with pytest.raises(ValueError, match=r"column 'y': holds .*; a target is a number or a class\.$"):
        rows_of({"y": cells * (N // 2)})


MARKED = {"share": ["0,5", "12,25", "3"], "count": ["850", "1.250", "12.000"], "length": ["1,250", "2,375", "1,125"]}
TARGET = {"y": ["1", "4", "2"]}


def test_a_decimal_comma_in_one_column_is_that_of_the_table():
    rows = training_rows(pa.table(MARKED | TARGET), target="y", at=str)
    assert rows.x.T.tolist() == [[0.5, 12.25, 3.0], [850.0, 1250.0, 12000.0], [1.25, 2.375, 1.125]]


def test_where_another_column_needs_a_point_each_column_is_read_alone():
    rows = training_rows(pa.table(MARKED | {"mass": ["0.5", "1.25", "3"]} | TARGET), target="y", at=str)
    examples = {column.name: column.notation.example for column in rows.schema.columns}
    assert examples == {"share": "1234,5", "count": "1234.5", "length": "1,234.5", "mass": "1234.5"}


@pytest.mark.parametrize(
    ("cells", "classes"),
    [
        ("Yes yes NO no", ["no", "yes"]),
        ("Yes No", ["No", "Yes"]),
        ("A a", ["A", "a"]),
        ("T F t x", ["F", "T", "t", "x"]),
    ],
)
def test_yes_and_no_in_several_cases_are_two_classes(cells, classes):
    rows = rows_of({"y": (cells.split() * N)[:N]})
    assert np.unique(rows.y).tolist() == classes


def test_two_classes_written_in_several_ways_are_not_three():
    with pytest.raises(ValueError, match=r"column 'y': writes two classes as '0', '1', 'true'; write each in one way"):
        rows_of({"y": (["true", "1", "0"] * N)[:N]})
    assert np.unique(rows_of({"y": (["true", "1", "0"] * N)[:N]}, task="classification").y).size == 3


def test_a_table_without_columns_is_an_error_of_the_table():
    with pytest.raises(ValueError, match=r"has no column 'y' \(`target`\); it has none\.$"):
        training_rows(pa.table({}), target="y", at=at)
