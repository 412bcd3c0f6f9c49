import csv
import io
import json
import os
import pathlib
import re
import resource
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyarrow import csv as arrow_csv

from dropbayes import folders
from dropbayes.cli.explaining import facts
from dropbayes.precision import model_precision
from dropbayes.tables import encoded, open_table
from tests.command_line import TINY, make_models, run, table

SOURCE = pathlib.Path(__file__).parent.parent / "src"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    (folder / "new.csv").write_text(table(40, seed=1))
    return folder


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


def column(rows: list[dict[str, str]], name: str) -> np.ndarray:
    return np.array([float(row[name]) for row in rows])


def inputs(model: folders.Model, path: pathlib.Path) -> np.ndarray:
    source = open_table(path)
    return np.concatenate([encoded(model.schema, block, at=str).x for block in source.blocks()])


# --- fit -------------------------------------------------------------------------------------------------------------


def test_fit_says_what_it_did_with_each_column(models, tmp_path):
    result = run("fit", models / "train.csv", "--target", "price", "--ignore", "kind", "--out", tmp_path / "m", *TINY)
    assert (result.code, result.err) == (0, "")
    assert "regression of price (its values are numbers)" in result.text
    assert re.search(r"size +number +2 +7 +missing taken as the median .*, and flagged", result.text)
    assert re.search(r"city +category +2 +one input for each of 2: Oslo, Rome", result.text)
    assert re.search(r"new +boolean +1 +as it is", result.text)
    assert re.search(r"kind +left out +0 +asked for", result.text)
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["columns.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]


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


def test_the_same_seed_fits_the_same_bytes(models, tmp_path):
    for name in ("one", "two"):
        run("fit", models / "train.csv", "--target", "price", "--ignore", "kind", "--out", tmp_path / name, *TINY)
    for file in (folders.MODEL, folders.COLUMNS):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_categories_may_be_numbers(tmp_path):
    (tmp_path / "t.csv").write_text("zip,y\n" + "".join(f"{100 + i % 3},{i % 3 + i / 100}\n" for i in range(12)))
    options = ["--target", "y", "--categorical", "zip", "--out", tmp_path / "m", "--json", *TINY]
    found = json.loads(run("fit", tmp_path / "t.csv", *options).text)
    assert found["columns"][0]["inputs"] == ["zip = 100", "zip = 101", "zip = 102"]


def test_settings_reach_the_estimator(models, tmp_path):
    options = ["--hidden", "3,5", "--drop-prob", "0.2", "--weight-decay", "0.01", "--activation", "tanh", "--noise",
               "heteroscedastic", "--n-steps", "3", "--n-networks", "1", "--n-draws", "7", "--seed", "5"]  # fmt: skip
    run("fit", models / "train.csv", "--target", "price", "--ignore", "kind", "--out", tmp_path / "m", *options)
    estimator = folders.load(tmp_path / "m").estimator
    wanted = {"hidden": (3, 5), "drop_prob": 0.2, "weight_decay": 0.01, "activation": "tanh", "noise": "heteroscedastic",
              "n_steps": 3, "n_networks": 1, "n_draws": 7, "random_state": 5}  # fmt: skip
    assert {name: getattr(estimator, name) for name in wanted} == wanted
    assert run("predict", tmp_path / "m", models / "new.csv", "-o", "-").code == 0
    assert "heteroscedastic" in run("explain", tmp_path / "m").text


# --- predict ---------------------------------------------------------------------------------------------------------


def test_predict_agrees_with_the_estimator(models):
    result = run("predict", models / "numbers", models / "new.csv", "-o", "-", "--coverage", "0.8")
    rows = rows_of(result.text)
    model = folders.load(models / "numbers")
    x = inputs(model, models / "new.csv")
    mean, std = model.estimator.predict(x, return_std=True)
    lower, upper = model.estimator.predict_interval(x, 0.8)
    for name, values in {"mean": mean, "std": std, "lower": lower, "upper": upper}.items():
        np.testing.assert_allclose(column(rows, f"price_{name}"), values, rtol=1e-9)
    np.testing.assert_allclose(column(rows, "price_epistemic") + column(rows, "price_aleatoric"), std**2, rtol=1e-9)
    np.testing.assert_allclose(column(rows, "price_aleatoric"), 1 / model.estimator.precision_, rtol=1e-9)
    assert [row["city"] for row in rows] == [row["city"] for row in rows_of((models / "new.csv").read_text())]


def test_predict_agrees_with_the_classifier(models):
    rows = rows_of(run("predict", models / "classes", models / "new.csv", "-o", "-").text)
    model = folders.load(models / "classes")
    x = inputs(model, models / "new.csv")
    probabilities = model.estimator.predict_proba(x)
    found = np.column_stack([column(rows, f"kind_probability_{label}") for label in ("high", "low", "middle")])
    np.testing.assert_allclose(found, probabilities, rtol=1e-9)
    assert [row["kind_predicted"] for row in rows] == model.estimator.predict(x).tolist()
    entropy = -(probabilities * np.log(probabilities)).sum(1)
    np.testing.assert_allclose(column(rows, "kind_entropy"), entropy, rtol=1e-9)
    draws = model.estimator.draws(x).numpy()
    expected = -(draws * np.log(draws)).sum(-1).mean(0)
    np.testing.assert_allclose(column(rows, "kind_mutual_information"), entropy - expected, atol=1e-12)


@pytest.mark.parametrize("name", ["numbers", "classes"])
def test_the_same_seed_gives_the_same_bytes_whatever_the_block_size(models, tmp_path, name):
    (tmp_path / "many.csv").write_text(table(4200, seed=2))  # more than are predicted at once
    expected = run("predict", models / name, tmp_path / "many.csv", "-o", "-", "--seed", 3).out
    assert expected.count(b"\n") == 4201
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

    added = "mean,std,epistemic,aleatoric,lower,upper"
    assert header("--keep", "none", "--prefix", "") == added
    assert header("--keep", "city, kind", "--prefix", "") == "city,kind," + added
    assert header().startswith("size,city,new,price,kind,price_mean,")


def test_draws_may_be_more_than_in_the_fit(models):
    found = json.loads(
        run("predict", models / "numbers", models / "new.csv", "-o", os.devnull, "--n-draws", 20, "--json").text
    )
    assert found["n_draws"] == 40 and found["n_rows"] == 40 and found["coverage"] == 0.95


def test_what_was_missing_or_new_is_said(models, tmp_path):
    (tmp_path / "t.csv").write_text("size,city,new\n,Oslo,true\n1,,false\n1,Bergen,TRUE\n")
    result = run("predict", models / "numbers", tmp_path / "t.csv", "-o", "-", "--allow-new")
    assert result.code == 0 and len(rows_of(result.text)) == 3
    notes = result.err.splitlines()
    assert re.fullmatch(r"dropbayes: note: 1 missing value of 'size' taken as -?[\d.]+\.", notes[0])
    assert notes[1:] == [
        "dropbayes: note: 1 missing value of 'city' taken as none of the categories; no training row lacked it.",
        "dropbayes: note: 1 value of 'city' new to the model, taken as none of its categories.",
    ]


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


# --- evaluate, explain, report ---------------------------------------------------------------------------------------


def test_evaluate_scores_as_the_estimator_does(models):
    found = json.loads(run("evaluate", models / "numbers", models / "new.csv", "--json").text)
    model = folders.load(models / "numbers")
    x, y = inputs(model, models / "new.csv"), column(rows_of((models / "new.csv").read_text()), "price")
    assert found["rmse"] == pytest.approx(np.sqrt(((model.estimator.predict(x) - y) ** 2).mean()), rel=1e-9)
    assert found["log_likelihood"] == pytest.approx(model.estimator.log_likelihood(x, y), rel=1e-9)
    for level in (0.5, 0.8, 0.95):
        lower, upper = model.estimator.predict_interval(x, level)
        assert found[f"coverage_{100 * level:.0f}"] == ((lower <= y) & (y <= upper)).mean()


def test_evaluate_scores_classes(models):
    from sklearn.metrics import accuracy_score, log_loss

    found = json.loads(run("evaluate", models / "classes", models / "new.csv", "--json").text)
    model = folders.load(models / "classes")
    probabilities = model.estimator.predict_proba(inputs(model, models / "new.csv"))
    labels = [row["kind"] for row in rows_of((models / "new.csv").read_text())]
    assert found["log_likelihood"] == pytest.approx(-log_loss(labels, probabilities, labels=model.estimator.classes_))
    assert found["accuracy"] == accuracy_score(labels, model.estimator.classes_[probabilities.argmax(1)])


def test_evaluate_leaves_out_rows_without_target_and_prints_a_table(models, tmp_path):
    text = (models / "new.csv").read_text()
    short = re.sub(r",-?[\d.]+,(\w+)\n", r",,\1\n", text, count=3)
    (tmp_path / "t.csv").write_text(short)
    result = run("evaluate", models / "numbers", tmp_path / "t.csv")
    assert "37 rows" in result.text and "RMSE" in result.text
    assert "3 rows without a target left out" in result.err


def test_explain_states_the_identity_of_precision_weight_decay_and_length_scale(models):
    found = json.loads(run("explain", models / "numbers", "--json").text)
    population = folders.load(models / "numbers").estimator.population_
    standard = found["precision"] * float(population.y_scale[0, 0]) ** 2
    for layer in found["layers"]:
        tau = model_precision(
            weight_decay=layer["weight_decay"], keep_prob=1 - layer["drop_prob"], length_scale=layer["length_scale"],
            n_data=found["n_data"],
        )  # fmt: skip
        assert tau == pytest.approx(standard)
    assert [(layer["n_inputs"], layer["n_outputs"]) for layer in found["layers"]] == [(5, 4), (4, 1)]
    assert found["n_weights"] == 5 * 4 + 4 + 4 + 1 and found["n_draws"] == 6 and found["n_data"] == 60
    shown = run("explain", models / "numbers").text
    assert "precision τ" in shown and "length-scale l" in shown and "city = Oslo, city = Rome" in shown


def test_the_precision_of_classes_is_one(models):
    layer = facts(folders.load(models / "classes"))["layers"][0]
    tau = model_precision(
        weight_decay=layer["weight_decay"],
        keep_prob=1 - layer["drop_prob"],
        length_scale=layer["length_scale"],
        n_data=60,
    )
    assert tau == pytest.approx(1)


def test_a_model_without_dropout_is_explained_and_warned_of(models, tmp_path):
    options = ["--hidden", "4", "--n-steps", "5", "--n-networks", "1", "--drop-prob", "0", "--weight-decay", "0"]
    result = run(
        "fit", models / "train.csv", "--target", "price", "--ignore", "kind", "--out", tmp_path / "m", *options
    )
    assert result.code == 0 and "nothing is dropped" in result.err
    assert "nothing before layer 1" in run("explain", tmp_path / "m").text
    rows = rows_of(run("predict", tmp_path / "m", models / "new.csv", "-o", "-").text)
    assert set(column(rows, "price_epistemic")) == {0.0}


@pytest.mark.parametrize("name", ["numbers", "classes"])
def test_report_hands_over_rows_outcomes_and_what_was_done(models, tmp_path, monkeypatch, name):
    seen = {}

    def page(model, x, y, **rest):
        seen.update(x=x, y=y, **rest)
        return "<html></html>"

    monkeypatch.setitem(sys.modules, "dropbayes.report", types.SimpleNamespace(report=page))
    result = run("report", models / name, models / "new.csv", "-o", tmp_path / "r.html", "--seed", 4)
    assert result.code == 0 and (tmp_path / "r.html").read_text() == "<html></html>"
    rows = rows_of((models / "new.csv").read_text())
    target = "price" if name == "numbers" else "kind"
    assert seen["target"] == target and seen["x"].shape == (40, 5) and seen["seed"] == 4
    assert list(map(str, seen["y"])) == [str(float(r["price"])) if name == "numbers" else r["kind"] for r in rows]
    assert seen["shown"]["city"] == [row["city"] for row in rows] and target not in seen["shown"]
    assert seen["done"]["command"].startswith("dropbayes report ") and "--seed 4" in seen["done"]["command"]


# --- reproduce, demo, bench ------------------------------------------------------------------------------------------


def test_reproduce_knows_the_experiments():
    from dropbayes.cli.reproducing import NAMES
    from dropbayes.experiments import reproduction

    assert reproduction.NAMES == NAMES


def test_reproduce_runs_an_experiment_with_its_settings(tmp_path, monkeypatch):
    from dropbayes.experiments import reproduction
    from dropbayes.experiments.record import Findings

    seen = {}

    def stand_in(name, **rest):
        seen.update(name=name, **rest)
        print("a line of the experiment")
        return Findings("A title", ["It came out."], {"rmse": 0.5})

    monkeypatch.setattr(reproduction, "reproduce", stand_in)
    options = ["--quick", "--out", tmp_path, "--device", "cpu", "--set", "seed=7", "--json"]
    result = run("reproduce", "toy", *options)
    assert json.loads(result.text)["metrics"] == {"rmse": 0.5}
    assert "a line of the experiment" in result.err
    assert seen["name"] == "toy" and seen["settings"].seed == 7 and seen["device"] == "cpu"
    assert "It came out." in run("reproduce", "toy", "--quick").text


def test_reproduce_uci_passes_every_argument_on(monkeypatch):
    from dropbayes.experiments.uci import run as uci

    seen = []
    monkeypatch.setattr(uci, "main", seen.append)
    assert (
        run("reproduce", "uci", "--csv", "my.csv", "--target", "y", "--method", "best", "--quick", "--out", "o").code
        == 0
    )
    assert seen == [
        ["--quick", "--out", "o", "--device", "auto", "--csv", "my.csv", "--target", "y", "--method", "best"]
    ]


def test_reproduce_uci_reports_wrong_arguments():
    result = run("reproduce", "uci", "--csv", "my.csv")
    assert result.code == 2 and "`--csv` and `--target` go together" in result.err


def test_demo_is_called_with_its_folder(tmp_path, monkeypatch):
    called = {}

    def demo(*, out, console):
        called.update(out=out, console=console)
        return out / "report.html"

    monkeypatch.setitem(sys.modules, "dropbayes.cli.demo", types.SimpleNamespace(demo=demo))
    result = run("demo", "--out", tmp_path, "--json")
    assert called["out"] == tmp_path and json.loads(result.text) == {"report": str(tmp_path / "report.html")}


def test_bench_prints_ratios():
    found = json.loads(run("bench", "--n-draws", 2, "--repeats", 1, "--json").text)
    assert len(found["cases"]) == 5
    assert all(case["against_loop"] > 0 and case["against_repeated_batch"] > 0 for case in found["cases"])
    assert "How many times faster than ..., with 2 draws" in run("bench", "--n-draws", 2, "--repeats", 1).text


# --- help, streams and signals ---------------------------------------------------------------------------------------


def process(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dropbayes", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, **options)


def test_help_imports_neither_torch_nor_arrow():
    script = (
        "import sys; from dropbayes.cli import main; main(['--help']); main(['fit', '--help']); main(['--version'])\n"
        "print(sorted({'torch', 'numpy', 'pyarrow', 'sklearn'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.splitlines()[-1] == "[]"
    assert "Usage: dropbayes" in out.stdout and "dropbayes 0." in out.stdout


@pytest.mark.parametrize("name", ["fit", "predict", "evaluate", "explain", "report", "reproduce", "demo", "bench"])
def test_every_command_has_help(name):
    result = run(name, "--help")
    assert result.code == 0 and f"Usage: dropbayes {name}" in result.text


def test_nothing_asked_is_answered_with_help():
    result = run()
    assert result.code == 2 and "Usage: dropbayes" in result.text and result.err == ""


def test_the_module_runs_and_the_first_lines_can_be_taken_from_a_pipe(models, tmp_path):
    (tmp_path / "many.csv").write_text(table(20_000, seed=3))
    child = process("predict", models / "numbers", tmp_path / "many.csv", "-o", "-", stdout=subprocess.PIPE)
    assert child.stdout.readline().startswith(b"size,city")
    child.stdout.close()
    assert child.wait(60) == 1
    assert child.stderr.read() == b""


def test_an_interruption_leaves_the_previous_file(models, tmp_path):
    out = tmp_path / "out.csv"
    out.write_text("previous")
    child = process("predict", models / "numbers", "-", "-o", out, stdin=subprocess.PIPE)
    text = table(2000, seed=3)
    child.stdin.write((text + text[text.index("\n") + 1 :] * 60).encode())  # more than is read at once, and no end
    child.stdin.flush()
    deadline = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)  # until it has begun to write
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130
    assert child.stderr.read() == b"dropbayes: error: interrupted; nothing was left half-written.\n"
    assert out.read_text() == "previous" and [p.name for p in tmp_path.iterdir()] == ["out.csv"]


def test_a_full_disk_is_one_line(models):
    with open("/dev/full", "wb") as full:
        child = process("predict", models / "numbers", models / "new.csv", "-o", "-", stdout=full)
        assert child.wait(60) == 1
    assert re.fullmatch(rb"(dropbayes: note: .*\n)*dropbayes: error: No space left on device\.\n", child.stderr.read())


def test_a_file_that_cannot_grow_leaves_the_previous_one(models, tmp_path):
    out = tmp_path / "out.csv"
    out.write_text("previous")
    (tmp_path / "many.csv").write_text(table(3000))
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # noqa: E731
    child = process("predict", models / "numbers", tmp_path / "many.csv", "-o", out, preexec_fn=limit)
    assert child.wait(60) == 1
    assert re.fullmatch(rb"dropbayes: error: File too large\.\n", child.stderr.read())
    assert out.read_text() == "previous" and sorted(p.name for p in tmp_path.iterdir()) == ["many.csv", "out.csv"]
