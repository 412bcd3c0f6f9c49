"""Tests of the page of results."""

from dataclasses import replace

import pytest

from experiments.uci import data as uci_data
from experiments.uci import page as uci_report


def test_page_compares_with_the_published_figures_when_all_splits_are_run(monkeypatch):
    def entry(method, values):
        splits = [{"split": s, "rmse": r, "log_likelihood": ll} for s, (r, ll) in enumerate(values)]
        told = {"hardware": "an abacus", "torch": "2", "date": "2020-01-01", "command": "run", "seconds": 3.0}
        return {"method": method, "set": "boston", "splits": splits, **told}

    results = {(m, "boston"): entry(m, [(2.5, -2.2), (2.7, -2.4)]) for m in ("faithful", "best")}
    reference = {"boston": {"mc_rmse": [2.4, 2.4], "ll": [-2.3, -2.3]}}
    assert "not comparable" in uci_report.page(results, reference)
    monkeypatch.setitem(uci_data.SETS, "boston", replace(uci_data.SETS["boston"], n_splits=2))
    text = uci_report.page(results, reference)
    assert "+0.2 (+2.0 s.e.)" in text  # differences 0.1 and 0.3: mean 0.2, standard error 0.1
    assert "**-2.300 ± 0.071**" in text and "clean, ensembles, best" in text
    assert "an abacus" in text


def test_published_means_are_those_of_the_authors_files(data_folder):
    reference = uci_report.clean_reference()
    assert reference
    for name, published in uci_report.PUBLISHED.items():
        for place, key in enumerate(("mc_rmse", "ll")):
            mean, error = uci_report.mean_and_error(reference[name][key])
            assert published.clean[place] == pytest.approx(mean, rel=0.01, abs=6e-5)
            assert published.clean_error[place] == pytest.approx(error, rel=0.1, abs=6e-4)


def test_sign_flip_test_knows_the_exact_p_value():
    """Four equal differences: of 16 sign patterns only two reach the observed sum."""
    assert uci_report.sign_flip_p_value([1.0] * 4) == pytest.approx(2 / 16, abs=0.01)


def test_the_gap_table_compares_only_where_all_splits_were_run():
    splits = [{"split": s, "rmse": 1.0, "log_likelihood": value} for s, value in enumerate((-1.0, -2.0))]
    results = {("standard", "yacht"): {"splits": splits}}
    assert "| 2 of 6 | -1.500 ± 0.354 | -2.11 | not comparable |" in uci_report.gap_table(results, {"yacht": 6})
    assert "| -2.11 | yes |" in uci_report.gap_table(results, {"yacht": 2})
