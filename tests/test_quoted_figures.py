"""The figures that pages quote from experiments are those of the stored results."""

import json
import pathlib
import re

import pytest

from experiments.page import page_of, with_results
from experiments.record import results_text

ROOT = pathlib.Path(__file__).parent.parent


def page(name):
    return " ".join((ROOT / "docs" / f"{name}.md").read_text().split())


def stored(name):
    return json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text())


def numbers(text, pattern):
    """The numbers in the groups of a sentence of the page."""
    found = re.search(pattern, text)
    assert found, pattern
    return [float(group) for group in found.groups()]


def rounded(values, digits):
    return [round(value, digits) for value in values]


def test_the_limits_quote_the_growth_and_coverage_of_the_co2_networks():
    co2, text = stored("co2")["metrics"], page("limits")
    relu, tanh = co2["relu-5"], co2["tanh-0.1"]
    growth = relu["epistemic_std_last_third"] / relu["epistemic_std_observed"]
    assert numbers(text, r"beyond the CO₂ data their deviation grew (\d+) times") == [round(growth)]
    deviations = [tanh["epistemic_std_observed"], tanh["epistemic_std_last_third"]]
    assert numbers(text, r"did not grow at all \(([\d.]+) before, ([\d.]+) after\)") == rounded(deviations, 3)
    coverages = [100 * co2[name]["coverage_95"] for name in ("tanh-0.1", "tanh-0.2")]
    assert numbers(text, r"their 95 % bands held (\d+) and (\d+) % of what followed") == rounded(coverages, 0)


def test_the_limits_quote_the_coverage_of_the_missing_segments():
    networks = [scores for name, scores in stored("solar")["metrics"].items() if name.startswith("MC dropout")]
    quoted = numbers(page("limits"), r"the draws' own 95 % band held (\d+) and (\d+) % of the values")
    assert quoted == [round(100 * scores["coverage_95_without_noise_gaps"]) for scores in networks]


def test_the_limits_quote_the_detection_of_a_strong_attack():
    results = stored("adversarial")
    strongest = results["settings"]["strengths"].index(0.3) + 1  # the first entry is the clean image
    (auroc,) = numbers(page("limits"), r"a PGD strength of 0.3 on MNIST, .* with an AUROC of ([\d.]+)")
    assert auroc == round(results["metrics"]["all"]["PGD"]["auroc_entropy"][strongest], 2)


def test_the_limits_count_the_uci_sets_on_which_dropout_beats_ensembles():
    # The ensembles' log-likelihoods (Lakshminarayanan and others 2017) are in the README's table.
    rows = [
        line.strip("|").split("|") for line in (ROOT / "README.md").read_text().splitlines() if line.count("|") == 11
    ]
    table = {row[0].strip(): [float(cell.strip(" *").replace("−", "-")) for cell in row[1:]] for row in rows[2:]}
    ours, theirs = table["their protocol of 2018, here"], table["deep ensembles"]
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    better = sum(a > b for a, b in zip(ours, theirs, strict=True))
    assert f"on {words[better]} of the {words[len(ours)]} UCI sets" in page("limits")


def test_the_pages_quote_how_much_faster_a_late_dropout_is():
    measured = json.loads((ROOT / "benchmarks" / "results" / "prediction.json").read_text())
    ratios = [case["against_loop"] for case in measured["speed"] if "ResNet" in case["case"]]
    (quoted,) = numbers(page("architectures"), r"\((\d+) times faster than the loop for a \[small ResNet\]")
    assert [quoted] == [float(int(ratio)) for ratio in ratios]


def test_the_table_of_predictions_and_what_is_said_of_it_are_those_measured():
    measured = json.loads((ROOT / "benchmarks" / "results" / "prediction.json").read_text())["speed"]
    lines = (ROOT / "docs" / "benchmarks.md").read_text().split("## On a GPU")[0].splitlines()
    table = {cells[0]: cells[1:] for cells in ([c.strip() for c in line.strip("|").split("|")] for line in lines)}
    first = {case["case"]: case["first_ms"] / case["loop_ms"] for case in measured}
    for case in measured:
        assert table[case["case"]][::2] == [f"{case['against_loop']:.1f}x", f"{first[case['case']]:.2g}"], case["case"]
    quoted = numbers(
        page("benchmarks"), r"small transformer takes ([\d.]+) .* ([\d.]+) loop.* row of it ([\d.]+) loops"
    )
    networks = ("Transformer 4x128, S=32, N=4", "BERT-like 6x128, S=32, N=16", "BERT-like 6x128, S=32, N=1")
    assert quoted == [float(f"{first[name]:.2g}") for name in networks]
    (passes,) = numbers(page("benchmarks"), r"The U-Net's 20 draws take as long as (\d+) forward passes")
    assert [passes] == [round(20 / case["against_loop"]) for case in measured if "U-Net" in case["case"]]


def test_the_pages_quote_the_time_of_large_tables():
    measured = json.loads((ROOT / "benchmarks" / "results" / "large_tables.json").read_text())
    quoted = numbers(page("training"), r"10,000 rows and 20 columns takes (\d+) s of CPU, one of 100,000 rows (\d+) s")
    assert quoted == rounded((fit["cpu_seconds"] for fit in measured["fits"]), 0)


def test_the_pages_quote_how_predict_compares_with_the_loop():
    measured = json.loads((ROOT / "benchmarks" / "results" / "prediction.json").read_text())["speed"]
    ratios = {case["case"]: case["against_loop"] for case in measured}
    branching = [ratio for case, ratio in ratios.items() if re.match("LayerDrop|random depth|packed", case)]
    others = [ratio for ratio in ratios.values() if ratio not in branching]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert numbers(text, r"`predict` is ([\d.]+) to (\d+) times faster") == [round(min(others), 1), int(max(others))]
    slower = numbers(text, r"packed sequences\), it takes ([\d.]+) to ([\d.]+) times as long as the loop")
    assert slower == [round(1 / max(branching), 1), round(1 / min(branching), 1)]


def test_the_benchmarks_show_the_stored_table():
    measured = json.loads((ROOT / "benchmarks" / "results" / "prediction.json").read_text())
    text = (ROOT / "docs" / "benchmarks.md").read_text().partition("\n## ")[0]
    lines = [line.split(" | ") for line in text.splitlines() if line.count("|") == 5]
    assert [line[0].strip("| ") for line in lines[2:]] == [case["case"] for case in measured["speed"]]
    for (_, loop, repeat, first), case in zip(lines[2:], measured["speed"], strict=True):
        assert loop == f"{case['against_loop']:.1f}x"
        assert repeat == ("-" if case["against_repeat"] is None else f"{case['against_repeat']:.1f}x")
        assert first.strip(" |") == f"{case['first_ms'] / case['loop_ms']:.2g}"


def test_the_architectures_quote_the_errors_of_lenet():
    metrics = stored("convolution")["metrics"]
    quoted = numbers(
        page("architectures"),
        r"the error of LeNet from ([\d.]+) % to ([\d.]+) %, and dropout before every layer to ([\d.]+) %; with all of them, "
        r"from ([\d.]+) % to ([\d.]+) %, and to no less than ([\d.]+) %",
    )
    names = ("none, averaged", "last, mc", "all, mc")
    errors = [100 * metrics[name][share]["error"] for share in ("0.1", "1") for name in names]
    assert quoted == pytest.approx(errors, abs=0.00501)


@pytest.mark.parametrize("file", sorted((ROOT / "experiments" / "results").glob("*.json")), ids=lambda file: file.stem)
def test_the_pages_show_the_stored_results(file):
    text = page_of(file.stem).read_text()
    assert with_results(text, file.stem, results_text(json.loads(file.read_text()))) == text


def test_the_theory_quotes_the_comparison_with_hamiltonian_monte_carlo():
    table = stored("posteriors")["metrics"]["table"]
    (ratio,) = numbers(page("theory"), r"the deviation of dropout is ([\d.]+) times that of \[Hamiltonian")
    assert ratio == float(f"{table['dropout before the last layer']['at the data']:.2g}")
