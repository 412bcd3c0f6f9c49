"""What the benchmarks keep of their runs; that they are importable is checked with their types."""

import functools
import json
import math
import subprocess
import sys
import types

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm

from benchmarks import (
    comparison,
    contestants,
    history,
    language_errors,
    league,
    one_pass,
    one_pass_tables,
    scoringbench,
)
from benchmarks.history import Goal
from benchmarks.one_pass_gpu import close_rows, gain_rows, speed_rows
from dropbayes.estimators.atoms import AtomMixture, Atoms
from dropbayes.predictive.mixtures import Mixture


def test_a_goal_is_met_at_its_bound_and_missed_beyond_it():
    assert Goal("speed", 20.0, at_least=20).met and not Goal("speed", 19.9, at_least=20).met
    assert Goal("memory", 50.0, at_most=50).met and not Goal("memory", 50.1, at_most=50).met


def test_missed_goals_are_printed_with_figure_and_bound(tmp_path, capsys):
    goals = [Goal("speed", 10.6, at_least=20), Goal("memory", 30, at_most=50)]
    history.write("trial", {"speed": 10.6}, goals, folder=tmp_path)
    assert capsys.readouterr().out == "\n1 of 2 goals met; missed:\n- speed: 10.6 (goal: at least 20)\n"


def test_every_run_is_added_to_the_history_and_the_last_is_a_file_of_its_own(tmp_path):
    for speed in (1.0, 2.0):
        history.write("trial", {"speed": speed}, folder=tmp_path)
    past = [json.loads(line) for line in (tmp_path / "history" / "trial.jsonl").read_text().splitlines()]
    assert [run["speed"] for run in past] == [1.0, 2.0]
    assert json.loads((tmp_path / "trial.json").read_text()) == past[-1]


def test_figures_carry_their_commit_and_processor():
    about = history.environment()
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=history.RESULTS)
    if head.returncode == 0:
        assert head.stdout.startswith(about["commit"].split(",")[0])
    assert about["cpu"] and about["torch"] and about["date"].count("-") == 2


PAGES = history.RESULTS.parent.parent / "docs"


def table_after(page, words):
    """The cells of the first table after some words of a page, without its head."""
    text = (PAGES / page).read_text().split(words, 1)[1]
    lines = text.split("\n|", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def last_run(name):
    return json.loads((history.RESULTS / f"{name}.json").read_text())


def test_the_tables_of_the_theory_are_those_of_the_last_run():
    run = last_run("theory")
    overlap = table_after("theory.md", "`python -m benchmarks.theory overlap`")
    assert overlap == [[std, *(f"{share:.2g}" for share in row.values())] for std, row in run["overlap"].items()]
    choice = table_after("theory.md", "`python -m benchmarks.theory choice`")
    figures = [[f"{row['bound']:.3f}", f"{row['held_out']:.3f}"] for row in run["choice"]]
    assert sorted(row[3:] for row in choice) == sorted(figures)


def test_the_table_of_the_gpu_is_that_of_the_last_run():
    cases = last_run("gpu")["cases"]
    columns = ("loop_ms", "repeat_ms", "row_ms", "shared_ms")
    for words, precision in (("In float32:", "float32"), ("(`--precision bfloat16`)", "bfloat16")):
        run = [case for case in cases if case["precision"] == precision and "loop_ms" in case]
        expected = [[case["case"], *(f"{case[column]:.3g}" for column in columns)] for case in run]
        assert [row[:5] for row in table_after("benchmarks.md", words)] == expected


def test_the_tables_of_one_pass_are_those_of_the_last_run():
    run = last_run("one_pass")
    for words, part in (("`python -m benchmarks.one_pass`", "zoo"), ("## Where it fails", "rates")):
        expected = [[name, *one_pass.cells(figures)] for name, figures in run[part].items()]
        assert table_after("one_pass.md", words) == expected
    costs = table_after("one_pass.md", "The\ncost of one output")
    assert costs == [[name, f"{cost:.1f}"] for name, cost in run["costs"].items()]
    assert f"{run['close']} of these {len(run['zoo'])} networks" in (PAGES / "one_pass.md").read_text()
    gains = ([name, f"{one['mean']:.1f}", f"{one['variance']:.1f}"] for name, one in run["controls"].items())
    assert table_after("one_pass.md", "draws of a\nperceptron of two hidden layers") == list(gains)


@pytest.mark.parametrize("part", one_pass_tables.PARTS)
def test_the_tables_of_one_pass_on_tables_are_those_of_the_last_run(part):
    words = f"`python -m benchmarks.one_pass_tables {part}`"
    assert table_after("one_pass.md", words) == one_pass_tables.PARTS[part][1](last_run(f"one_pass_{part}"))


def test_the_tables_of_one_pass_on_a_gpu_are_those_of_the_last_run():
    run = last_run("one_pass_gpu")
    assert table_after("one_pass.md", "`python -m benchmarks.one_pass_gpu`") == speed_rows(run)
    assert table_after("one_pass.md", "Ten networks trained on MNIST") == close_rows(run)
    assert table_after("one_pass.md", "On the ten networks") == gain_rows(run)


def test_the_table_of_wrong_answers_is_that_of_the_last_run():
    page, table = (PAGES / "hugging_face.md").read_text(), language_errors.table(last_run("language_errors")["figures"])
    assert table in page


def test_a_wording_means_its_value():
    relation, value = torch.tensor([0, 2]), torch.tensor([3, 19])
    for word in (0, 3):
        tokens = language_errors.wording(relation, value, torch.tensor([word, word]))
        assert language_errors.MEANINGS[tokens].tolist() == [3, 2 * language_errors.VALUES + 19]


def test_the_comparison_scores_a_gaussian_as_scipy_does():
    y, mean, std = np.array([0.3, -1.0, 2.0]), np.array([0.0, -0.5, 2.5]), np.array([1.0, 0.5, 2.0])
    found = comparison.scores(comparison.gaussian(mean, std), y)
    assert math.isclose(found["log_likelihood"], norm(mean, std).logpdf(y).mean())
    assert math.isclose(found["width"], (2 * norm.ppf(0.95) * std).mean(), rel_tol=1e-6)
    z = (y - mean) / std
    crps = std * (z * (2 * norm.cdf(z) - 1) + 2 * norm.pdf(z) - 1 / math.sqrt(math.pi))
    assert math.isclose(found["crps"], crps.mean(), rel_tol=1e-6)


def test_the_comparison_scores_quantiles_nearly_as_their_distribution():
    y = np.random.default_rng(0).normal(size=2000)
    quantiles = norm.ppf(comparison.LEVELS)[:, None] + np.zeros(len(y))
    prediction = {"mean": np.zeros(len(y)), "quantiles": quantiles, "ends": (quantiles[0], quantiles[-1])}
    found, exact = comparison.scores(prediction, y), comparison.scores(comparison.gaussian(0 * y, 1 + 0 * y), y)
    assert found["log_likelihood"] is None and math.isclose(found["coverage"], exact["coverage"])
    assert math.isclose(found["crps"], exact["crps"], rel_tol=0.05)


def test_the_comparison_marks_the_best_of_the_splits_that_all_methods_have_run():
    row = {"set": "yacht", "rmse": 2.0, "crps": 1.0, "coverage": 0.9, "width": 3.0, "cpu_seconds": 1.0}
    fits = [
        {**row, "method": method, "split": split, "log_likelihood": None if method == "quantile_boosting" else score}
        for score, method in enumerate(comparison.METHODS)
        for split in range(1 + score)
    ]
    lines = comparison.table(fits).splitlines()
    assert len(lines) == 2 + len(comparison.METHODS) and lines[2].startswith("| yacht | 1 |")
    assert "| **3.000** |" in lines[5] and "| – |" in lines[6]


def gaussian_crps(y):
    """In closed form, of the standard normal distribution."""
    return (y * (2 * norm.cdf(y) - 1) + 2 * norm.pdf(y) - 1 / math.sqrt(math.pi)).mean()


def test_the_scores_of_the_league_are_those_of_a_known_gaussian():
    y = np.random.default_rng(0).normal(size=20_000)
    scores = contestants.gaussian_scores(y, np.zeros_like(y), np.ones_like(y))
    assert abs(scores["CRPS"] / gaussian_crps(y) - 1) < 0.02  # ten levels
    assert abs(scores["coverage"] - 0.9) < 0.01 and abs(scores["RMSE"] - 1) < 0.02
    assert abs(scores["width"] - 2 * norm.ppf(0.95)) < 1e-9
    assert math.isclose(scores["log score"], norm.logpdf(y).mean())
    found = contestants.class_scores(np.array([0, 1]), np.array([[0.8, 0.2], [0.4, 0.6]]))
    expected = [-np.log([0.8, 0.6]).mean(), np.mean([2 * 0.2**2, 2 * 0.4**2]), 1.0]
    np.testing.assert_allclose([found["NLL"], found["Brier"], found["accuracy"]], expected)


class StubModel:
    """A library's model that predicts the standard normal distribution, in the shape that the library gives it."""

    def __init__(self, answer, **settings):
        self.answer, self.settings = answer, settings

    def fit(self, x, y):
        self.x, self.y = x, y
        return self

    def __getattr__(self, name):
        if name not in ("predict", "predict_proba", "pred_dist"):
            raise AttributeError(name)
        return lambda new: self.answer(new)


def quantile_columns(new):
    return np.tile(norm.ppf(contestants.LEVELS)[::-1], (len(new), 1))  # crossed: they must be sorted


def stub_library(monkeypatch, library, answer, *names):
    module = types.ModuleType(library)
    for name in names:
        setattr(module, name, functools.partial(StubModel, answer))
    monkeypatch.setitem(sys.modules, library, module)
    return module


def play(contestant):
    source = np.random.default_rng(0)
    x, y = source.normal(size=(50, 2)), source.normal(size=20_000)
    return y, contestant.play(x, y[:50], np.zeros((len(y), 2)), y)


def test_quantiles_of_catboost_and_pytabkit_are_scored_by_their_pinball_loss(monkeypatch):
    stub_library(monkeypatch, "catboost", quantile_columns, "CatBoostRegressor")
    stub_library(monkeypatch, "pytabkit", quantile_columns, "TabM_D_Regressor", "RealMLP_TD_Regressor")
    for name in ("CatBoost quantiles", "TabM", "RealMLP"):
        y, scores = play(contestants.NUMBERS[name])
        assert abs(scores["CRPS"] / gaussian_crps(y) - 1) < 0.02 and "log score" not in scores
        assert abs(scores["coverage"] - 0.9) < 0.01


def test_gaussians_of_catboost_ngboost_and_xgboostlss_are_scored_with_their_deviation(monkeypatch):
    def normal(new):
        return types.SimpleNamespace(loc=np.zeros(len(new)), scale=np.full(len(new), 2.0))

    def mean_and_variance(new):
        return np.column_stack([normal(new).loc, normal(new).scale ** 2])

    stub_library(monkeypatch, "catboost", mean_and_variance, "CatBoostRegressor")
    stub_library(monkeypatch, "ngboost", normal, "NGBRegressor")
    matrix = stub_library(monkeypatch, "xgboost", None)
    matrix.DMatrix = lambda x, label=None, nthread=None: x
    for module in ("xgboostlss", "xgboostlss.distributions"):
        stub_library(monkeypatch, module, None)
    stub_library(monkeypatch, "xgboostlss.distributions.Gaussian", None).Gaussian = lambda: None
    boosted = types.SimpleNamespace(train=lambda *rows, **settings: None)
    boosted.predict = lambda new, pred_type: pd.DataFrame(vars(normal(new)))
    stub_library(monkeypatch, "xgboostlss.model", None).XGBoostLSS = lambda distribution: boosted
    for name in ("CatBoost Gaussian", "NGBoost", "XGBoostLSS"):
        y, scores = play(contestants.NUMBERS[name])
        assert math.isclose(scores["log score"], norm(0, 2).logpdf(y).mean())
        assert math.isclose(scores["width"], 4 * norm.ppf(0.95), rel_tol=1e-9)


def test_probabilities_of_every_library_are_scored_by_their_likelihood(monkeypatch):
    def thirds(new):
        return np.tile([1 / 3, 2 / 3], (len(new), 1))

    stub_library(monkeypatch, "catboost", thirds, "CatBoostClassifier")
    stub_library(monkeypatch, "pytabkit", thirds, "TabM_D_Classifier", "RealMLP_TD_Classifier")
    stub_library(monkeypatch, "ngboost", thirds, "NGBClassifier")
    stub_library(monkeypatch, "ngboost.distns", None).k_categorical = lambda n_classes: n_classes
    y = np.array([0, 1, 1], dtype=np.uint8)
    for name in ("CatBoost", "TabM", "RealMLP", "NGBoost"):
        scores = contestants.CLASSES[name].play(np.zeros((3, 1)), y, np.zeros((3, 1)), y)
        assert math.isclose(scores["NLL"], -np.log([1 / 3, 2 / 3, 2 / 3]).mean())


def test_a_contestant_whose_library_is_not_installed_is_left_out():
    assert contestants.NUMBERS["dropbayes"].is_installed
    assert not contestants.Contestant(None, library="no_such_library").is_installed


def test_a_contestant_that_fails_says_so_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    def fail(*rows):
        raise ValueError("all targets are equal")

    players = {"broken": contestants.Contestant(fail), "sound": contestants.Contestant(lambda *rows: {"CRPS": 1.0})}
    monkeypatch.setattr(league, "NUMBERS", players)
    np.savez(tmp_path / "trial.npz", X=np.zeros((4, 1)), y=np.arange(4.0), fold=np.arange(4) % 2)
    games = [(tmp_path / "trial.npz", name, 0) for name in players]
    ended = list(league.played(games, 1))
    assert [(game[1], scores["CRPS"]) for game, scores in ended] == [("sound", 1.0)]
    assert "broken 0 gave up: ValueError('all targets are equal')" in capsys.readouterr().out


def test_the_page_of_the_league_is_that_of_its_games():
    assert league.page(last_run("league")) in (PAGES / "alternatives.md").read_text()


def trial_games(places):
    return {player: {"0": {"NLL": place, "accuracy": 0.5, "CPU s": 1.0}} for player, place in places.items()}


def test_standings_mark_the_best_and_rank_the_players():
    places = {"dropbayes": 1.0, "dropbayes best": 0.5, "boosting": 1.1, "extra trees": 2.0}
    results = {f"table {i}": trial_games(places) for i in range(6)}
    del results["table 5"]["dropbayes best"]
    text = league.standings(results, list(results))
    assert "| table 0 | 1.0000 | **0.5000** | 1.1000 | 2.0000 | 50.0% | 1.0 |" in text
    assert "| table 5 | **1.0000** | – | 1.1000 | 2.0000 | 50.0% | 1.0 |" in text
    # "best" does not push the others down, and is ranked where it played
    assert "| dropbayes | 6 | 1.00 | 6 | 6 | 1.0 |  |" in text and "| dropbayes best | 5 | 1.00 | 5 | 5 |" in text
    assert "| boosting | 6 | 2.00 | 0 | 6 | 1.0 | 0.062 |" in text  # 2 / 2^6, corrected for two rivals


def test_a_contestant_that_gave_up_is_last():
    results = {f"table {i}": trial_games({"dropbayes": 1.0, "boosting": 2.0, "extra trees": 3.0}) for i in range(3)}
    del results["table 0"]["boosting"]
    assert "| boosting | 2 | 2.33 |" in league.standings(results, list(results))
    del results["table 1"]["boosting"]  # too few tables to be ranked on those it did not play
    assert "| boosting | 1 | 2.00 |" in league.standings(results, list(results))


def test_the_critical_difference_is_that_of_demsar():
    # Table 5 of Demsar (2006): q of 2.569 for four and 3.164 for ten contestants
    for n_players, q in ((4, 2.569), (10, 3.164)):
        expected = q * math.sqrt(n_players * (n_players + 1) / (6 * 14))
        assert math.isclose(league.critical_difference(n_players, 14), expected, rel_tol=1e-3)


def test_the_histogram_of_scoringbench_has_the_mean_and_the_mass_of_the_mixture():
    mixture = Mixture(torch.tensor([[0.0, 5.0], [1.0, 5.0]]).double(), torch.tensor(0.5))
    edges, mass = scoringbench.histogram(mixture)
    np.testing.assert_allclose(mass.sum(1), 1)
    np.testing.assert_allclose(((edges[:, 1:] + edges[:, :-1]) / 2 * mass).sum(1), mixture.mean, atol=1e-3)


def test_the_histogram_of_scoringbench_has_the_exact_distribution_function():
    mixture = Mixture(torch.tensor([[0.0, 5.0], [1.0, 5.0]]).double(), torch.tensor(0.5), 4.0)
    grades = Atoms(*torch.tensor([[0.0, 5.0], [-1.0, 4.5], [0.5, 5.5]]).double())
    for distribution in (mixture, AtomMixture(mixture, grades)):
        edges, mass = scoringbench.histogram(distribution)
        below = torch.stack([distribution.pit(edge) for edge in torch.from_numpy(edges).T[1:-1]], 1)
        np.testing.assert_allclose(mass.cumsum(1)[:, :-1], below, atol=1e-12)
        assert mass.min() >= 0


def test_the_wrapper_of_scoringbench_gives_its_container_what_it_asks_for(monkeypatch):
    """The constructor has the signature of ScoringBench's `DistributionPrediction.from_histogram`."""

    class Container:
        @classmethod
        def from_histogram(cls, bin_edges, probas, mean=None, *, train_range, is_grid_native=False):
            return bin_edges, probas, mean, train_range, is_grid_native

    module = types.ModuleType("scoringbench.univariate.wrappers.base")
    vars(module)["DistributionPrediction"] = Container
    monkeypatch.setitem(sys.modules, module.__name__, module)
    x = pd.DataFrame({"a": np.linspace(0, 1, 60)})
    wrapper = scoringbench.DropoutWrapper(drop_prob=0.05, weight_decay=1e-4, n_steps=20, n_networks=1)
    edges, mass, mean, train_range, native = wrapper.fit(x, 2 * x["a"] + 1).predict_distribution(x[:5])
    assert edges.shape == (5, scoringbench.N_BINS + 1) and mass.shape == (5, scoringbench.N_BINS)
    assert train_range == (1.0, 3.0) and native
    np.testing.assert_allclose(mean, wrapper.predict(x[:5]))
    np.testing.assert_allclose(mean, ((edges[:, 1:] + edges[:, :-1]) / 2 * mass).sum(1), atol=0.02)
