"""Tests of `dropbayes predict`."""

import csv
import errno
import io
import json
import os
import re
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow import csv as arrow_csv

import dropbayes as db
from dropbayes.app.models.model import load
from tests.app.distributed.rows import digest, written
from tests.app.distributed.rows import rows as parquet_rows
from tests.command_line import TINY, check, column, inputs, rows_of, run, table


def test_predict_agrees_with_the_estimator(models):
    result = run("predict", models / "numbers", models / "new.csv", "-o", "-", "--coverage", "0.8")
    rows = rows_of(result.text)
    model = load(models / "numbers")
    x = inputs(model, models / "new.csv")
    mean, std = model.ensemble.predict(x, return_std=True)
    lower, upper = model.ensemble.predict_interval(x, 0.8)
    for name, values in {"mean": mean, "std": std, "lower": lower, "upper": upper}.items():
        np.testing.assert_allclose(column(rows, f"price_{name}"), values, rtol=1e-9)
    epistemic, aleatoric = column(rows, "price_epistemic_std"), column(rows, "price_aleatoric_std")
    np.testing.assert_allclose(epistemic**2 + aleatoric**2, std**2, rtol=1e-9)
    np.testing.assert_allclose(aleatoric, model.ensemble.predictive(x).aleatoric.sqrt(), rtol=1e-9)
    assert [row["city"] for row in rows] == [row["city"] for row in rows_of((models / "new.csv").read_text())]


def test_predict_by_the_linear_method_agrees_with_the_estimator(models):
    rows = rows_of(run("predict", models / "numbers", models / "new.csv", "-o", "-", "--method", "linear").text)
    model = load(models / "numbers")
    x = inputs(model, models / "new.csv")
    mean, std = model.ensemble.with_draws(method="linear").predict(x, return_std=True)
    np.testing.assert_allclose(column(rows, "price_mean"), mean, rtol=1e-9)
    np.testing.assert_allclose(column(rows, "price_std"), std, rtol=1e-9)


def test_predict_agrees_with_the_classifier(models):
    rows = rows_of(run("predict", models / "classes", models / "new.csv", "-o", "-").text)
    model = load(models / "classes")
    x = inputs(model, models / "new.csv")
    probabilities = model.ensemble.predict_proba(x)
    found = np.column_stack([column(rows, f"kind_probability_{label}") for label in ("high", "low", "middle")])
    np.testing.assert_allclose(found, probabilities, rtol=1e-9)
    assert [row["kind_predicted"] for row in rows] == model.ensemble.predict(x).tolist()
    entropy = -(probabilities * np.log(probabilities)).sum(1)
    np.testing.assert_allclose(column(rows, "kind_entropy"), entropy, rtol=1e-9)
    draws = model.ensemble.draws(x).numpy()
    expected = -(draws * np.log(draws)).sum(-1).mean(0)
    np.testing.assert_allclose(column(rows, "kind_mutual_information"), entropy - expected, atol=1e-12)


def test_a_coverage_that_changes_nothing_is_noted(models, tmp_path):
    for name, noted in (("classes", True), ("numbers", False)):
        result = run("predict", models / name, models / "train.csv", "-o", tmp_path / "out.csv", "--coverage", "0.95")
        assert ("--coverage is that of intervals and of conformal sets" in result.err) == noted


@pytest.mark.slow
def test_automatic_draws_are_those_of_the_predictor(models):
    result = run("predict", models / "numbers", models / "new.csv", "-o", "-", "--n-draws", "auto", "--max-draws", 100)
    rows = rows_of(result.text)
    predictor = db.Predictor.load(models / "numbers", n_draws="auto", max_draws=100)
    expected = predictor({name: [row[name] for row in rows] for name in predictor.inputs})
    assert column(rows, "price_mean").tolist() == expected["mean"].tolist()
    assert column(rows, "price_draws_used").tolist() == expected["draws_used"].tolist()
    for wrong in ("0", "many"):
        refused = run("predict", models / "numbers", models / "new.csv", "-o", "-", "--n-draws", wrong)
        assert refused.code == 2 and "must be a number of draws, or auto" in refused.err


@pytest.mark.parametrize(("n_rows", "at_once"), [(130, 60), pytest.param(4200, None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["numbers", "classes"])
def test_the_same_seed_gives_the_same_bytes_whatever_the_block_size(
    models, tmp_path, monkeypatch, name, n_rows, at_once
):
    if at_once:  # otherwise thousands
        monkeypatch.setattr(type(load(models / name).ensemble), "block_rows", at_once)
    (tmp_path / "many.csv").write_text(table(n_rows, seed=2))  # more than are predicted at once
    expected = run("predict", models / name, tmp_path / "many.csv", "-o", "-", "--seed", 3).out
    assert expected.count(b"\n") == n_rows + 1
    for rows in (1, 7, 1000):
        out = tmp_path / "out.csv"
        assert (
            run("predict", models / name, tmp_path / "many.csv", "-o", out, "--seed", 3, "--block-rows", rows).code == 0
        )
        assert out.read_bytes() == expected
    assert run("predict", models / name, tmp_path / "many.csv", "-o", "-", "--seed", 4).out != expected


def test_a_row_is_predicted_alike_alone_and_among_others(models, tmp_path):
    lines = (models / "new.csv").read_text().splitlines()
    whole = rows_of(run("predict", models / "numbers", models / "new.csv", "-o", "-").text)
    (tmp_path / "one.csv").write_text(f"{lines[0]}\n{lines[8]}\n")
    [alone] = rows_of(run("predict", models / "numbers", tmp_path / "one.csv", "-o", "-").text)
    for name in ("mean", "std", "lower", "upper"):
        assert float(alone[f"price_{name}"]) == pytest.approx(float(whole[7][f"price_{name}"]), rel=1e-11)


def test_files_and_streams_and_formats_give_the_same_numbers(models, tmp_path):
    data = models / "new.csv"
    expected = run("predict", models / "numbers", data, "-o", "-").text
    assert run("predict", models / "numbers", "-", "-o", "-", stdin=data.read_bytes()).text == expected
    run("predict", models / "numbers", data, "-o", tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_text() == expected
    pq.write_table(arrow_csv.read_csv(data), tmp_path / "new.parquet")  # numbers and booleans now have types
    run("predict", models / "numbers", tmp_path / "new.parquet", "-o", tmp_path / "out.parquet")
    typed = pq.read_table(tmp_path / "out.parquet")
    np.testing.assert_array_equal(typed["price_mean"].to_numpy(), column(rows_of(expected), "price_mean"))
    run("predict", models / "numbers", data, "-o", tmp_path / "from_text.parquet")
    mixed = pq.read_table(tmp_path / "from_text.parquet")
    assert mixed["size"].null_count == 4 and mixed.schema.field("size").type == "double"
    np.testing.assert_array_equal(mixed["price_upper"].to_numpy(), column(rows_of(expected), "price_upper"))


def test_keep_and_prefix_choose_columns(models):
    def header(*options):
        return run("predict", models / "numbers", models / "new.csv", "-o", "-", *options).text.split("\n")[0]

    added = "mean,std,epistemic_std,aleatoric_std,lower,upper,outside"
    assert header("--keep", "none", "--prefix", "") == added
    assert header("--keep", "city, kind", "--prefix", "") == "city,kind," + added
    assert header().startswith("size,city,new,price,kind,price_mean,")


def test_draws_may_be_more_than_in_the_fit(models):
    found = json.loads(
        run("predict", models / "numbers", models / "new.csv", "-o", os.devnull, "--n-draws", 20, "--json").text
    )
    assert found["n_draws"] == 40 and found["n_rows"] == 40 and found["coverage"] == 0.95


def test_formulas_in_texts_are_made_harmless(models, tmp_path):
    texts = ["=1+1", "+x", "-cmd", "@SUM(A1)", "\tx", "-5", "+1.5e3", "plain", "＝1"]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["size", "city", "new", "=note"])
        writer.writerows([[1, "Oslo", "true", text] for text in texts])
    rows = rows_of(run("predict", models / "numbers", tmp_path / "t.csv", "-o", "-").text)
    harmless = ["'=1+1", "'+x", "'-cmd", "'@SUM(A1)", "'\tx", "-5", "+1.5e3", "plain", "'＝1"]
    assert [row["'=note"] for row in rows] == harmless
    assert any(row["price_lower"].startswith("-") for row in rows)  # a number stays a number


def test_cells_come_out_as_they_went_in(models, tmp_path):
    cells = ['a "quoted" word', "two\nlines", "comma, here", " spaces ", "", "ünïcode", "007"]
    with (tmp_path / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=";", lineterminator="\r\n")
        writer.writerow(["size", "city", "new", "text"])
        writer.writerows([[1, "Oslo", "true", cell] for cell in cells])
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "t.csv").read_bytes())
    out = run("predict", models / "numbers", tmp_path / "t.csv", "-o", "-", "--delimiter", ";").text
    found = list(csv.DictReader(io.StringIO(out, newline=""), delimiter=";"))
    assert [row["text"] for row in found] == cells


@pytest.mark.parametrize("out", ["out.csv", "out.parquet"])
def test_no_space_left_leaves_the_previous_file(models, tmp_path, monkeypatch, out):
    (tmp_path / out).write_text("previous")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    check(run("predict", models / "numbers", models / "train.csv", "-o", tmp_path / out), 1, "No space left on device")
    assert (tmp_path / out).read_text() == "previous" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_a_few_rows_wait_for_no_library_that_only_learning_needs(models, command):
    arguments = [command, models / "numbers", models / "train.csv", *(["-o", "-"] if command == "predict" else [])]
    script = (
        "import sys; from dropbayes.app.cli import main\n"
        f"assert main({[str(argument) for argument in arguments]!r}) == 0\n"
        "print({'sklearn', 'joblib', 'matplotlib'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.endswith("set()\n"), done.stderr


def test_a_table_with_decimal_commas_stays_one(tmp_path):
    rows = [f"{k - 20},5;{(k - 20) ** 2},25" for k in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["a;y", *rows]))
    run("fit", tmp_path / "t.csv", "--target", "y", "--out", tmp_path / "m", *TINY)
    assert run("predict", tmp_path / "m", tmp_path / "t.csv", "-o", tmp_path / "o.csv").code == 0
    header, *lines = (tmp_path / "o.csv").read_text().splitlines()
    assert [";".join(line.split(";")[:2]) for line in lines] == rows
    assert all(re.fullmatch(r"-?\d+(,\d+)?(e-\d+)?", cell) for line in lines for cell in line.split(";")[2:-1])
    again = run("predict", tmp_path / "m", tmp_path / "o.csv", "-o", tmp_path / "again.csv", "--prefix", "again_")
    assert again.code == 0 and header in (tmp_path / "again.csv").read_text()


@pytest.mark.slow
def test_an_engine_writes_a_folder_with_the_numbers_of_the_command_without_one(models, tmp_path):
    pq.write_table(parquet_rows(200), tmp_path / "rows.parquet")
    options = ["--engine", "processes", "--workers", "1", "--json"]
    result = run("predict", models / "numbers", tmp_path / "rows.parquet", "-o", tmp_path / "out", *options)
    assert result.code == 0 and json.loads(result.text)["n_rows"] == 200
    plain = run("predict", models / "numbers", tmp_path / "rows.parquet", "-o", tmp_path / "plain.parquet")
    assert plain.code == 0
    expected = digest(db.Predictor.load(models / "numbers").add_columns(parquet_rows(200)))
    assert digest(written(tmp_path / "out")) == digest(pq.read_table(tmp_path / "plain.parquet")) == expected


def test_the_table_that_is_read_is_not_written_over(models, tmp_path):
    rows, link = tmp_path / "rows.csv", tmp_path / "link.csv"
    rows.write_text((models / "new.csv").read_text())
    link.symlink_to(rows)
    for output in (rows, link):
        result = run("predict", models / "numbers", rows, "-o", output, "--keep", "none")
        assert result.code == 2 and "'-o': is a table that is read; name another" in result.err
    assert rows.read_text() == (models / "new.csv").read_text()


def test_options_of_the_one_way_are_refused_in_the_other(models):
    keeping = run("predict", models / "numbers", "rows.parquet", "-o", "out", "--engine", "processes", "--keep", "none")
    assert keeping.code == 2 and "has no --keep" in keeping.err
    alone = run("predict", models / "numbers", "rows.parquet", "-o", "out.csv", "--workers", "2")
    assert alone.code == 2 and "name one with --engine" in alone.err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--max-draws", 100], "'--max-draws': is for --n-draws auto"),
        (["--max-draws", 100, "--n-draws", 50], "'--max-draws': is for --n-draws auto"),
        (["--method", "linear", "--n-draws", 50], "'--method': linear makes no draws"),
        (["--method", "linear", "--seed", 0], "'--method': linear makes no draws"),
        (["--method", "moments", "--n-draws", "auto", "--max-draws", 100], "'--method': moments makes no draws"),
    ],
)
def test_a_setting_of_draws_that_would_change_nothing_is_refused(models, given, message):
    result = run("predict", models / "numbers", models / "new.csv", "-o", "-", *given)
    assert result.code == 2 and message in result.err and result.out == b""
