"""Tests of `dropbayes fit`."""

import errno
import json
import os
import re
import shlex
import shutil

import numpy as np
import pytest

import dropbayes as db
from dropbayes.app.models.model import load
from dropbayes.app.models.storage import CARD, COLUMNS, MODEL
from tests.command_line import TINY, check, run, table


def test_fit_says_what_it_did_with_each_column(models, tmp_path):
    result = run("fit", models / "train.csv", "--target", "price", "--ignore", "kind", "--out", tmp_path / "m", *TINY)
    assert (result.code, result.err) == (0, "")
    assert "regression of price (a numeric target)" in result.text
    assert re.search(r"size +number +2 +7 +missing taken as the median .*, and flagged", result.text)
    assert re.search(r"city +category +2 +one input for each of 2: Oslo, Rome", result.text)
    assert re.search(r"new +boolean +1 +as it is", result.text)
    assert re.search(r"kind +left out +0 +as asked", result.text)
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["card.md", "columns.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


@pytest.mark.parametrize("target", ["price", "kind"])
def test_the_held_out_score_is_that_of_the_whole_ensemble_then_and_later(models, tmp_path, target):
    options = ["--out", tmp_path / "m", "--n-steps", "5", "--quick", "--json"]
    told = json.loads(run("fit", models / "train.csv", "--target", target, *options).text)["held_out_log_likelihood"]
    ensemble = db.load(tmp_path / "m").ensemble
    assert told == ensemble.held_out_score_ != max(ensemble.search_scores_)
    assert json.loads(run("explain", tmp_path / "m", "--json").text)["held_out_log_likelihood"] == told


def test_fit_says_that_settings_of_numbers_change_nothing_for_classes(models, tmp_path):
    result = run("fit", models / "train.csv", "--target", "kind", "--out", tmp_path / "m", *TINY)
    assert result.code == 0
    assert "--noise and --target-transform are for numbers: 'kind' has classes, and they change nothing" in result.err


def test_fit_drops_rows_without_target_and_leaves_out_what_teaches_nothing(tmp_path):
    lines = ["a,same,void,y", "1,7,,1", "2,7,NA,?", "3,7,,2", "4,7,,3", "5,7,,2.5"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    result = run("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "m", "--json", *TINY)
    found = json.loads(result.text)
    assert (found["n_data"], found["rows_without_target"]) == (4, 1)
    assert found["left_out"] == {"same": "7 in every row", "void": "no value in any row"}
    assert [entry["name"] for entry in found["columns"]] == ["a"]


@pytest.mark.parametrize(("target", "options", "task"), [
    ("number", [], "regression"), ("text", [], "classification"), ("yes", [], "classification"),
    ("number", ["--task", "classification"], "classification"),
])  # fmt: skip
def test_fit_chooses_the_task_from_the_target(tmp_path, target, options, task):
    rows = "".join(f"{i},{i % 3},{'ab'[i % 2]},{bool(i % 2)}\n" for i in range(12))
    (tmp_path / "t.csv").write_text("x,number,text,yes\n" + rows)
    result = run("fit", tmp_path / "t.csv", "--target", target, "--out", tmp_path / "m", "--json", *options, *TINY)
    found = json.loads(result.text)
    assert found["task"] == task
    if task == "classification":
        assert found["classes"] == {"number": ["0", "1", "2"], "text": ["a", "b"], "yes": ["false", "true"]}[target]


def test_the_same_call_fits_the_same_bytes(models, tmp_path, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        run("fit", models / "train.csv", "--target", "price", "--ignore", "kind", "--out", "m", *TINY)
    for file in (MODEL, COLUMNS, CARD):
        assert (tmp_path / "one" / "m" / file).read_bytes() == (tmp_path / "two" / "m" / file).read_bytes()


def test_categories_may_be_numbers(tmp_path):
    (tmp_path / "t.csv").write_text("zip,y\n" + "".join(f"{100 + i % 3},{i % 3 + i / 100}\n" for i in range(12)))
    options = ["--target", "y", "--categorical", "zip", "--out", tmp_path / "m", "--json", *TINY]
    found = json.loads(run("fit", tmp_path / "t.csv", *options).text)
    assert found["columns"][0]["inputs"] == ["zip = 100", "zip = 101", "zip = 102"]


def test_a_target_learned_as_its_logarithm_is_predicted_in_its_own_units(tmp_path):
    rows = "".join(f"{i % 7},{np.exp(5 + (i % 7) / 2 + (i % 3) / 9)}\n" for i in range(42))
    (tmp_path / "t.csv").write_text("x,y\n" + rows)
    fitted = run(
        "fit", tmp_path / "t.csv", "--target", "y", "--target-transform", "log", "--out", tmp_path / "m", *TINY
    )
    assert "learned: the logarithm of the target" in fitted.text
    assert "the logarithm of the target" in run("explain", tmp_path / "m").text
    lower, _ = load(tmp_path / "m").ensemble.predict_interval(np.arange(7.0)[:, None])
    assert (lower > 0).all()


def test_settings_reach_the_estimator(models, tmp_path):
    options = ["--hidden", "3,5", "--drop-prob", "0.2", "--weight-decay", "0.01", "--noise",
               "heteroscedastic", "--n-steps", "3", "--n-networks", "1", "--n-draws", "7", "--seed", "5"]  # fmt: skip
    run("fit", models / "train.csv", "--target", "price", "--ignore", "kind", "--out", tmp_path / "m", *options)
    estimator = load(tmp_path / "m").ensemble
    wanted = {"hidden": (3, 5), "drop_prob": 0.2, "weight_decay": 0.01, "noise": "heteroscedastic",
              "n_steps": 3, "n_networks": 1, "n_draws": 7, "random_state": 5}  # fmt: skip
    assert {name: getattr(estimator, name) for name in wanted} == wanted
    assert run("predict", tmp_path / "m", models / "new.csv", "-o", "-").code == 0
    assert "heteroscedastic" in run("explain", tmp_path / "m").text


def test_the_short_name_of_an_effort_is_that_effort(models, tmp_path):
    known = []
    for option in (["--quick"], ["--effort", "quick"]):
        run("fit", models / "train.csv", "--target", "price", "--out", tmp_path / "m", *TINY, *option)
        known.append(load(tmp_path / "m").origin["settings"])
    assert known[0] == known[1]


def rows(*columns, n=12):
    return "\n".join(",".join(str(c(i)) for c in columns) for i in range(n)) + "\n"


number, text = lambda i: i * 1.5, lambda i: "ab"[i % 2]


# The contents of a table given to `fit --target y`, further options, and what the one line must say.
WRONG_TRAINING = {
    "target absent": ("x,z\n" + rows(number, number), [], "has no column 'y' .*; it has 'x', 'z'"),
    "one row": ("x,y\n1,2\n", [], "1 row with a target; at least 2 are needed"),
    "header only": ("x,y\n", [], "has a header but no rows"),
    "constant target": ("x,y\n" + rows(number, lambda i: 3), [], "column 'y': has the value 3 in every row"),
    "one class": ("x,y\n" + rows(number, lambda i: "a"), [], "column 'y': has the class 'a' in every row; there is nothing to learn"),
    "target without values": ("x,y\n" + rows(number, lambda i: "NA"), [], "column 'y': has no value in every row"),
    "one row with a target": ("x,y\n" + rows(number, lambda i: "" if i else 1), [], "1 row with a target"),
    "infinite target": ("x,y\n" + rows(number, lambda i: "inf" if i == 5 else i), [], "line 7, column 'y': must be a finite"),
    "infinite column": ("x,y\n" + rows(lambda i: "-inf" if i == 2 else i, number), [], "line 4, column 'x': must be a finite"),
    "a typing error among numbers": ("x,y\n" + rows(lambda i: "1O" if i == 3 else i, number), [], "column 'x' has '1O' among numbers at t.csv, line 5; .*--categorical"),
    "a typing error in the target": ("x,y\n" + rows(number, lambda i: "1O" if i == 3 else i), [], "column 'y' has '1O' among numbers at t.csv, line 5"),
    "a date as the target": ("x,y\n" + rows(number, lambda i: f"2024-01-{i + 1:02}"), [], "column 'y': holds dates; a target is"),
    "dates in either order": ("day,y\n" + rows(lambda i: f"{i + 1}/3/2024", number), [], "column 'day' holds dates such as '1/3/2024', in which day and month can be exchanged"),
    "an identifier": ("id,y\n" + rows(lambda i: f"k{i}", number), ["--max-categories", "5"], "has 12 different texts, more than 5; allow as many with --max-categories, or leave it out with --ignore"),
    "nothing to learn from": ("y\n" + rows(number), [], "no column is left to learn from"),
    "only constants": ("x,y\n" + rows(lambda i: 1, number), [], "no column is left to learn from"),
    "ignoring the target": ("x,y\n" + rows(number, number), ["--ignore", "y"], "must not name the target 'y'"),
    "ignoring nothing": ("x,y\n" + rows(number, number), ["--ignore", "z"], r"has no column 'z' \(--ignore\)"),
    "unknown categorical": ("x,y\n" + rows(number, number), ["--categorical", "z"], r"has no column 'z' \(--categorical\)"),
    "categories to ignore": ("x,y\n" + rows(number, number), ["--categorical", "x", "--ignore", "x"], "--categorical must not name a column to --ignore; both name 'x'"),
    "a day that does not exist": ("day,y\n" + rows(lambda i: f"{i + 20}.2.2024", number), [], "column 'day' holds dates such as '20.2.2024', in which '30.2.2024' is not a day"),
    "more draws than memory": ("x,y\n" + rows(number, lambda i: i % 5), ["--n-draws", "1" + 30 * "0"], "not enough memory; .*--n-draws"),
    "more units than memory": ("x,y\n" + rows(number, lambda i: i % 5), ["--hidden", "1e14"], "not enough memory; .*--hidden"),
    "regressing texts": ("x,y\n" + rows(number, text), ["--task", "regression"], "line 2, column 'y': must be a number written as 1234.5; got 'a'"),
    "names as classes": ("x,y\n" + rows(number, lambda i: f"n{i}", n=50), [], "has 50 classes in 50 rows, such as 'n0', 'n1', …; is it the target"),
    "duplicate header": ("x,x,y\n" + rows(number, number, number), [], "columns 1 and 2 are both named 'x'"),
    "unknown device": ("x,y\n" + rows(number, lambda i: f"{3 * i % 7}"), ["--device", "toaster"], "toaster"),
    "ragged": ("x,y\n1,2\n1,2,3\n", [], "line 3: 3 fields"),
}  # fmt: skip


@pytest.mark.parametrize(("contents", "options", "pattern"), WRONG_TRAINING.values(), ids=WRONG_TRAINING)
def test_wrong_training_is_one_line_and_leaves_the_previous_model(models, tmp_path, contents, options, pattern):
    (tmp_path / "t.csv").write_text(contents)
    shutil.copytree(models / "numbers", tmp_path / "m")
    before = (tmp_path / "m" / COLUMNS).read_bytes()
    check(
        run("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "m", *TINY, *options),
        1,
        pattern,
        out=b"regression",
    )
    assert (tmp_path / "m" / COLUMNS).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "t.csv"]


@pytest.mark.parametrize("place", ["os.fsync", "dropbayes.runtime.files._exchange"])
def test_a_model_that_cannot_be_written_leaves_the_previous_one(models, tmp_path, monkeypatch, place):
    shutil.copytree(models / "numbers", tmp_path / "m")
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(place, fail)
    options = ["--target", "kind", "--ignore", "price", "--out", tmp_path / "m", *TINY]
    check(run("fit", models / "train.csv", *options), 1, "No space left on device", out=b"classification of kind")
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(("options", "left_out"), [(["--group", "g"], {"g": "the group of each row"}), (["--time", "t"], {}),
                                                   (["--weights", "w"], {"w": "the weight of each row"})])  # fmt: skip
def test_groups_and_times_and_weights_are_taken_from_their_columns(tmp_path, options, left_out):
    lines = ["x,g,t,w,y", *(f"{i},g{i % 4},2020-01-{1 + i % 28:02},{1 + i % 2},{i * 1.5}" for i in range(40))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    result = run("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "m", "--json", *options, *TINY)
    assert result.code == 0, result.err
    found = json.loads(result.text)
    assert found["left_out"] == left_out
    assert {entry["name"] for entry in found["columns"]} == {"x", "g", "t", "w"} - set(left_out)


def test_every_column_that_needs_a_decision_is_named_with_the_command_that_repairs_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ["x,n,d,y", *(f"{i},{'1O' if i == 3 else i},{1 + i % 12}/3/2020,{i * 1.5}" for i in range(40))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    call = ["fit", "t.csv", "--target", "y", "--out", "m", *TINY]
    result = run(*call)
    assert result.code == 1
    assert "2 columns need a decision" in result.err
    repair = re.search(r"to fit without them: dropbayes (.*)", result.err)[1]
    assert shlex.split(repair) == [*call, "--ignore", "n", "--ignore", "d"]
    assert run(*shlex.split(repair)).code == 0


@pytest.mark.parametrize(("tried", "said"), [("0.05,0.9", "--drop-prob 0.025,0.05,0.1 tries beyond it"), ("0.05", "")])
def test_a_best_setting_at_the_edge_of_those_tried_is_told(tmp_path, tried, said):
    (tmp_path / "train.csv").write_text(table(60))
    options = [*TINY, "--ignore", "kind", "--drop-prob", tried, "--n-steps", "200"]
    result = run("fit", tmp_path / "train.csv", "--target", "price", "--out", tmp_path / "m", *options)
    assert result.code == 0
    assert (said in result.err) if said else ("edge" not in result.err)


def test_many_columns_that_are_read_alike_have_one_line(tmp_path):
    names = [f"g{k}" for k in range(30)]
    rows = np.random.default_rng(0).normal(size=(40, 31)).round(3)
    lines = [",".join([*names, "city", "y"])]
    lines += [",".join([*map(str, row[:30]), "AB"[k % 2], str(row[30])]) for k, row in enumerate(rows)]
    (tmp_path / "wide.csv").write_text("\n".join(lines))
    text = run("fit", tmp_path / "wide.csv", "--target", "y", "--out", tmp_path / "m", *TINY).text
    assert re.search(r"g0 to g29, 30 columns +number +30 ", text)
    assert re.search(r"city +category +2 ", text) and "g17" not in text


@pytest.mark.parametrize(("n_rows", "noted"), [(8, False), (40, True)])
def test_few_whole_values_of_a_target_are_noted_where_they_repeat(tmp_path, n_rows, noted):
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{i},{2 * (i % 8)}\n" for i in range(n_rows)))
    err = run("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "m", *TINY).err
    assert ("'y' has only 8 whole values; if they are classes use --task classification" in err) == noted


def test_a_target_of_zero_and_one_is_said_to_be_classes(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(40)))
    arguments = ("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "m", *TINY)
    [note] = [line for line in run(*arguments).err.splitlines() if "note: 'y'" in line]
    assert note == "dropbayes: note: 'y' holds 0 and 1, which are classes; to predict a number use --task regression."
    assert load(tmp_path / "m").schema.task == "classification"
    assert "which are classes" not in run(*arguments, "--task", "regression").err
    assert load(tmp_path / "m").schema.task == "regression"


def fitted_notes(folder, lines, target="y"):
    (folder / "t.csv").write_text("\n".join(lines))
    settings = [*TINY[:2], "--n-steps", "300", *TINY[4:]]
    result = run("fit", folder / "t.csv", "--target", target, "--out", folder / "m", *settings)
    assert result.code == 0, result.err
    return result.err


@pytest.mark.filterwarnings("always:The held-out log-likelihood")
@pytest.mark.parametrize("name", ["day", "count"])
def test_rows_in_order_of_time_are_noted_with_the_option_that_holds_out_what_follows(tmp_path, name):
    days = (np.datetime64("2010-01") + np.arange(120)).astype("datetime64[D]")
    times = days if name == "day" else np.arange(120) * 2
    walk = np.random.default_rng(0).normal(size=120).cumsum()
    notes = fitted_notes(tmp_path, [f"{name},y", *(f"{t},{y:.3f}" for t, y in zip(times, walk, strict=True))])
    said = re.search(rf"in order of '{name}': held out at random they score (\S+) nats per row, held out after those "
                     rf"learned from (\S+); .* --time {name}\.", notes)  # fmt: skip
    assert float(said[2]) < float(said[1])
    assert notes.count("note: ") == 1  # nothing of the networks that were fitted to compare


def test_rows_in_no_order_are_not_noted(tmp_path):
    shuffled = np.random.default_rng(0).permutation(120)
    notes = fitted_notes(tmp_path, ["count,y", *(f"{t},{t / 2 + (7 * t) % 11:.3f}" for t in shuffled)])
    assert "--time" not in notes and "--group" not in notes


def test_repeated_identifiers_are_noted_with_the_option_that_holds_out_whole_groups(tmp_path):
    generator = np.random.default_rng(0)
    numbers = np.repeat(generator.permutation(500)[:20], 6)
    lines = [f"{n},{generator.normal():.3f},{n / 9 + generator.normal():.3f}" for n in numbers]
    notes = fitted_notes(tmp_path, ["nr,x,y", *lines])
    assert "'nr' repeats in runs: 20 values of about 6 rows" in notes and "--group nr" in notes
