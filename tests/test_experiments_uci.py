import ast
import gzip
import hashlib
import io
import json
import math
import subprocess
import sys
import time
import urllib.error
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from dropbayes.experiments.uci import best as uci_best
from dropbayes.experiments.uci import data as uci_data
from dropbayes.experiments.uci import faithful as uci_faithful
from dropbayes.experiments.uci import noise as uci_noise
from dropbayes.experiments.uci import page as uci_report
from dropbayes.experiments.uci import run as uci

# SHA-256 (first half) of the published index files of each set, all splits in order, as little-endian uint16.
SHIPPED_SPLITS = {
    "boston": "845498d6ef71675cf3d39a0d4f6f5f6c",
    "concrete": "8cea7ca9aef22ca6e9d5373fb62447d8",
    "energy": "e60ee3afd95a6e854bfb7a7fff2a1def",
    "kin8nm": "5c84fb843b9b96968cee46fbcb17ab4e",
    "naval": "b340ba977ae3f8f2aefe4d4c4280c24f",
    "power": "3e6a884791e6a624f745aa6f2e4b60e8",
    "protein": "2f540e4342ac840522c5b36f54504c81",
    "wine": "92876a4db5a01ffa9a7f93b788394c10",
    "yacht": "27947261dc776ebf5d723b388f8ded6a",
}
TINY_FAITHFUL = uci_faithful.Settings((2.0, 8.0), drop_probs=(0.01, 0.3), n_hidden=8, epochs=120, n_draws=40)
TINY_BEST = uci_best.Settings(
    candidates=((0.0, 0.01, 1.0), (0.0, 0.3, 1.0)),
    hidden=(8, 8),
    steps=60,
    steps_per_row=0.0,
    n_places=2,
    n_seeds=2,
    selection_draws=8,
    noise_draws=4,
    test_draws=8,
    noise_steps=20,
)


@pytest.fixture(scope="module")
def small():
    source = np.random.default_rng(0)
    x = source.normal(size=(120, 3))
    y = 5 + 2 * np.sin(x[:, 0]) + x[:, 1] + 0.3 * source.normal(size=120)
    return uci_data.from_arrays(x, y, name="small", n_splits=2)


# --- data ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", uci_data.SETS)
def test_splits_from_the_seed_are_the_shipped_ones(name):
    source = uci_data.SETS[name]
    splits = uci_data.train_test_splits(source.n_rows, source.n_splits)
    orders = np.stack([np.concatenate(parts) for parts in splits]).astype("<u2")
    assert hashlib.sha256(orders.tobytes()).hexdigest()[:32] == SHIPPED_SPLITS[name]
    assert all(len(train) == round(0.9 * source.n_rows) for train, _ in splits)


@pytest.mark.parametrize("name", uci_data.SETS)
def test_named_folder_holds_the_published_data_and_splits(name):
    folder = uci_data.data_folder()
    source = uci_data.SETS[name]
    if folder is None or not (folder / f"{source.name}.splits.npz").exists():
        pytest.skip("set DROPBAYES_DATA to a folder with the UCI files to compare with them")
    data = uci_data.load(name)
    assert data.x.shape == (source.n_rows, source.n_features)
    shipped = np.load(folder / f"{source.name}.splits.npz")
    for order, (train, test) in zip(shipped["perm"], data.splits, strict=True):
        assert len(train) == shipped["n_train"]
        assert np.array_equal(order, np.concatenate([train, test]))


@pytest.fixture
def tiny_source(monkeypatch, tmp_path):
    content = b"1.0 2.0 3.0\n4.0 5.0 6.0\n"
    source = uci_data.Source("tiny", 2, 2, 2, hashlib.sha256(content).hexdigest(), n_splits=1)
    monkeypatch.setitem(uci_data.SETS, "tiny", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DROPBAYES_DATA", raising=False)
    return content


def test_data_is_downloaded_once_checked_and_cached(tiny_source, monkeypatch):
    asked = []

    def answer(address, timeout):
        asked.append(address)
        return io.BytesIO(tiny_source)

    monkeypatch.setattr(uci_data.urllib.request, "urlopen", answer)
    for _ in range(2):
        assert uci_data.load("tiny").y.tolist() == [3.0, 6.0]
    assert len(asked) == 1
    assert "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/tiny/data/data.txt" in asked[0]


def test_downloaded_data_with_another_digest_is_refused(tiny_source, monkeypatch):
    monkeypatch.setattr(uci_data.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(tiny_source + b"7 8 9\n"))
    with pytest.raises(ValueError, match="SHA-256"):
        uci_data.load("tiny")
    assert not uci_data.cache_folder().exists()


def test_corrupt_file_in_the_named_folder_is_refused(tiny_source, monkeypatch, tmp_path):
    (tmp_path / "uci").mkdir()
    (tmp_path / "uci" / "tiny.txt.gz").write_bytes(gzip.compress(tiny_source[:-2]))
    monkeypatch.setenv("DROPBAYES_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="Delete the file"):
        uci_data.load("tiny")


def test_offline_without_data_says_what_to_do(tiny_source, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(uci_data.urllib.request, "urlopen", refuse)
    with pytest.raises(FileNotFoundError, match=r"(?s)tiny/data/data\.txt.*DROPBAYES_DATA"):
        uci_data.load("tiny")


def test_csv_columns_other_than_the_target_are_inputs(tmp_path):
    path = tmp_path / "my.csv"
    path.write_text("a,y,b\n" + "".join(f"{i},{10 * i},{-i}\n" for i in range(25)))
    data = uci_data.from_csv(path, target="y", n_splits=3)
    assert data.name == "my" and len(data.splits) == 3
    assert data.x[7].tolist() == [7.0, -7.0] and data.y[7] == 70.0


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("a,y\n" + "1,2\n" * 30, "z", "`target` must be a column"),
        ("a,y\n" + "1,x\n" * 30, "y", "Encode or drop text columns"),
        ("a,y\n" + "1,2\n" * 5, "y", "at least 20 rows"),
        ("a,y\n" + "nan,2\n" * 30, "y", "must be finite"),
    ],
)
def test_unusable_csv_is_explained(tmp_path, text, target, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        uci_data.from_csv(path, target=target)


# --- the authors' protocol ----------------------------------------------------------------------------------------


def test_weight_decay_gives_the_minimiser_of_the_authors_loss():
    """Their loss: squared error without ½ + l²(1 − p)/(2Nτ)·‖W‖². Its gradient must be twice ours everywhere."""
    settings = uci_faithful.SETTINGS["boston"]
    n_rows, member = 364, uci_faithful.candidates(uci_faithful.SETTINGS["boston"], 364)[5]
    drop_prob, precision = 0.01, 0.2  # the sixth of the grid
    assert member.drop_prob == drop_prob and settings.precisions[2] == precision
    weight, error = torch.randn(7, dtype=torch.float64, requires_grad=True), torch.randn(7, dtype=torch.float64)
    theirs = (weight - error).square().mean() + 1e-4 * (1 - drop_prob) / (
        2 * n_rows * precision
    ) * weight.square().sum()
    ours = 0.5 * (weight - error).square().mean() + member.weight_decay * weight.square().sum()
    (of_theirs,) = torch.autograd.grad(theirs, weight)
    (of_ours,) = torch.autograd.grad(ours, weight)
    torch.testing.assert_close(of_theirs, 2 * of_ours, rtol=1e-12, atol=0)


def test_settings_are_the_authors():
    assert set(uci_faithful.SETTINGS) == set(uci_data.SETS)
    for name, settings in uci_faithful.SETTINGS.items():
        assert settings.epochs * settings.n_hidden == 200_000
        assert (settings.n_hidden, settings.epochs) == ((100, 2000) if name == "protein" else (50, 4000))
        assert settings.n_draws == 10_000 and settings.batch_size == 128 and settings.length_scale == 0.01


def test_faithful_log_likelihood_respects_the_cap_of_its_precision(small):
    for entry in uci_faithful.results(small, [0, 1], settings=TINY_FAITHFUL, device="cpu"):
        assert entry["log_likelihood"] < 0.5 * math.log(entry["precision"] / (2 * math.pi))
        assert 0.1 < entry["rmse"] < 4.0


def with_other_test_targets(data):
    """The same data, the outcomes of the first split's test rows replaced."""
    y = data.y.copy()
    y[data.splits[0][1]] = 1e3
    return replace(data, y=y)


def test_no_test_row_chooses_anything_in_the_authors_protocol(small):
    before, after = (
        uci_faithful.results(data, [0], settings=TINY_FAITHFUL, device="cpu")[0]
        for data in (small, with_other_test_targets(small))
    )
    assert (before["drop_prob"], before["precision"]) == (after["drop_prob"], after["precision"])
    assert after["rmse"] > 100 * before["rmse"]


def test_choice_is_that_of_the_held_out_log_likelihood(small):
    """The chosen candidate is the one that scores best when each candidate runs alone."""
    from dropbayes.population import Task, evaluate, train

    rows, _ = small.splits[1]
    cut = int(0.8 * len(rows))
    learned, held = rows[:cut], rows[cut:]
    task = Task(small.x[learned], small.y[learned])
    scores = {}
    for member, (drop_prob, tau) in zip(
        uci_faithful.candidates(TINY_FAITHFUL, cut),
        [(p, t) for p in TINY_FAITHFUL.drop_probs for t in TINY_FAITHFUL.precisions],
        strict=True,
    ):
        alone = train([task], [replace(member, seed=1)], hidden=(8,), device="cpu")
        alone = replace(alone, precision=torch.tensor([[tau]], dtype=torch.float64))
        scored = evaluate(alone, (small.x[held], small.y[held]), n_draws=TINY_FAITHFUL.n_draws)
        scores[drop_prob, tau] = float(scored.log_likelihood[0])
    entry = uci_faithful.results(small, [1], settings=TINY_FAITHFUL, device="cpu")[0]
    assert (entry["drop_prob"], entry["precision"]) == max(scores, key=scores.__getitem__)


# --- our method ---------------------------------------------------------------------------------------------------


def test_no_test_row_chooses_anything_in_our_method(small):
    before, after = (
        uci_best.results(data, [0, 1], settings=TINY_BEST, device="cpu")
        for data in (small, with_other_test_targets(small))
    )
    for name in ("candidates", "shrink", "tail"):
        assert before[0][name] == after[0][name]
    assert after[0]["rmse"] > 100 * before[0]["rmse"]
    assert before[0]["log_likelihood"] > -10 and before[0]["rmse"] < 3.0


def test_large_sets_hold_out_the_last_fold_alone(small):
    settings = replace(TINY_BEST, few_rows=50)
    plan = uci_best._plan(small, [0], settings)
    rows, test = small.splits[0]
    assert plan.n_folds == 1 and len(plan.tasks) == 2
    assert np.array_equal(plan.held_out(0)[1], small.y[np.array_split(rows, 5)[-1]])
    assert np.array_equal(plan.held_out(1)[1], small.y[test])
    assert not set(map(tuple, plan.tasks[0].x)) & set(map(tuple, plan.held_out(0)[0]))


def noise_of(scale, shrink, nu, n_features=1, dtype=torch.float64):
    def fill(value, *shape):
        return torch.full((1, *shape), value, dtype=dtype)

    return uci_noise.Noise(
        first=fill(0.0, n_features, 4),
        first_bias=fill(0.0, 1, 4),
        second=fill(0.0, 1, 4),
        second_bias=fill(math.log(scale), 1),
        log_shrink=fill(math.log(shrink)),
        log_tail=fill(math.log(nu - 1)),
        feature_mean=fill(0.0, 1, n_features),
        feature_scale=fill(1.0, 1, n_features),
    )


def test_density_is_the_mixture_of_students_over_shrunk_draws():
    draws = torch.randn(1, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y, z = torch.linspace(-2, 2, 6, dtype=torch.float64)[None], torch.zeros(1, 6, 1, dtype=torch.float64)
    centre = draws.mean(1, keepdim=True)
    students = torch.distributions.StudentT(4.0, centre + 0.3 * (draws - centre), 0.7)
    expected = students.log_prob(y[:, None]).exp().mean(1).log()
    torch.testing.assert_close(uci_noise.log_density(noise_of(0.7, 0.3, 4.0), draws, z, y), expected)


def test_density_of_light_tails_and_unshrunk_draws_is_the_papers():
    r"""log 1/T Σ N(y; f_t, τ⁻¹) with τ = σ⁻² [GG16, eq:predictive_dist]."""
    draws = torch.randn(1, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y, z, tau = torch.randn(1, 4, dtype=torch.float64), torch.zeros(1, 4, 1, dtype=torch.float64), 2.5
    paper = (
        torch.logsumexp(-0.5 * tau * (y[:, None] - draws).square(), 1)
        - math.log(5)
        - 0.5 * math.log(2 * math.pi)
        + 0.5 * math.log(tau)
    )
    ours = uci_noise.log_density(noise_of(tau**-0.5, 1.0, 1e7), draws, z, y)
    torch.testing.assert_close(ours, paper, rtol=1e-5, atol=1e-5)


def test_noise_fit_recovers_scale_and_uses_inputs_only_when_they_matter():
    source = torch.Generator().manual_seed(0)
    n_rows = 600
    x = torch.rand(2, n_rows, 1, generator=source) * 4 - 2
    draws = 0.01 * torch.randn(2, 6, n_rows, generator=source)
    log_sigma = torch.stack([torch.full((n_rows,), math.log(0.5)), -1.0 + 0.8 * x[1, :, 0]])
    y = log_sigma.exp() * torch.randn(2, n_rows, generator=source)
    z = uci_noise.features(x, draws)
    noise, scores = uci_noise.fit_noise(draws, z, y, n_steps=150)
    fitted = uci_noise.log_scale(noise, z)
    assert (fitted[0] - math.log(0.5)).abs().max() < 0.35
    slope = torch.linalg.lstsq(torch.stack([torch.ones(n_rows), x[1, :, 0]], 1), fitted[1]).solution[1]
    assert 0.6 < slope < 1.0
    truth = torch.distributions.Normal(torch.zeros(()), log_sigma.exp()).log_prob(y).mean(1)
    assert ((scores - truth).abs() < 0.06).all()


# --- runner and page ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountedSettings:
    size: int = 1


class Counted:
    """A method that notes what it is asked for."""

    QUICK: dict = {}  # noqa: RUF012

    def __init__(self):
        self.asked = []

    def settings_for(self, dataset):
        return CountedSettings()

    def network_steps(self, dataset, n_splits, settings):
        return 1.0

    def results(self, dataset, splits, *, settings, device, progress):
        time.sleep(0.05)
        if 3 in splits and not self.asked:
            raise KeyboardInterrupt
        self.asked += splits
        return [{"split": s, "rmse": 1.0 + s, "log_likelihood": -1.0} for s in splits]


@pytest.fixture
def counted(monkeypatch):
    method = Counted()
    monkeypatch.setitem(uci.METHODS, "faithful", method)
    return method


def test_interrupted_runs_go_on_with_the_missing_splits(small, counted, tmp_path):
    uci.run_set(small, "faithful", [0, 1], out=tmp_path, splits_per_chunk=1)
    results = uci.run_set(small, "faithful", [2, 0, 1], out=tmp_path, splits_per_chunk=1)
    assert counted.asked == [0, 1, 2]
    assert [entry["split"] for entry in results["splits"]] == [0, 1, 2]
    assert json.loads((tmp_path / "faithful-small.json").read_text()) == json.loads(json.dumps(results))
    assert [path.name for path in tmp_path.iterdir()] == ["faithful-small.json"]


def test_chunks_before_an_interruption_are_kept(small, counted, tmp_path):
    counted.asked = []
    with pytest.raises(KeyboardInterrupt):
        uci.run_set(small, "faithful", [3, 4], out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_results_of_other_settings_are_not_mixed(small, counted, tmp_path):
    uci.run_set(small, "faithful", [0], out=tmp_path)
    with pytest.raises(ValueError, match="other settings"):
        uci.run_set(small, "faithful", [1], out=tmp_path, settings=CountedSettings(2))


def test_budget_leaves_sets_out_and_says_so(counted, monkeypatch, tmp_path, small, capsys):
    monkeypatch.setattr(uci_data, "load", lambda name: replace(small, name=name))
    uci.main(["--sets", "a,b", "--splits", "1", "--out", str(tmp_path), "--budget-seconds", "0.05"])
    shown = capsys.readouterr().out
    assert "b: left out" in shown and not (tmp_path / "faithful-b.json").exists()


def test_splits_are_named_in_four_ways():
    assert uci.split_numbers("all", 3) == [0, 1, 2]
    assert uci.split_numbers("9", 3) == [0, 1, 2]
    assert uci.split_numbers("1-2,0", 3) == [1, 2, 0]
    with pytest.raises(ValueError, match="a range as 0-4"):
        uci.split_numbers("x", 3)


def test_command_runs_both_methods_on_a_csv_and_writes_a_page(small, monkeypatch, tmp_path, capsys):
    path = tmp_path / "mine.csv"
    table = np.column_stack([small.x, small.y])
    path.write_text("a,b,c,y\n" + "\n".join(",".join(map(repr, row)) for row in table.tolist()) + "\n")
    monkeypatch.setattr(uci_faithful, "QUICK", {**vars(TINY_FAITHFUL)})
    monkeypatch.setattr(uci_best, "QUICK", {**vars(TINY_BEST)})
    for method in ("faithful", "best"):
        told = f"--csv {path} --target y --method {method} --quick --splits 0-1 --device cpu"
        uci.main([*told.split(), "--out", str(tmp_path / "out")])
    assert capsys.readouterr().out.count("mine") == 2
    uci_report.main([str(tmp_path / "out")])
    assert "# The UCI table" in capsys.readouterr().out


def test_csv_needs_its_target():
    with pytest.raises(SystemExit, match="go together"):
        uci.main(["--csv", "x.csv"])


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


def test_published_means_are_those_of_the_authors_files():
    reference = uci_report.clean_reference()
    if not reference:
        pytest.skip("set DROPBAYES_DATA to a folder with the authors' results to compare with them")
    for name, published in uci_report.PUBLISHED.items():
        for place, key in enumerate(("mc_rmse", "ll")):
            mean, error = uci_report.mean_and_error(reference[name][key])
            assert published.clean[place] == pytest.approx(mean, rel=0.01, abs=6e-5)
            assert published.clean_error[place] == pytest.approx(error, rel=0.1, abs=6e-4)


def test_sign_flip_test_knows_the_exact_p_value():
    """Four equal differences: of 16 sign patterns only two reach the observed sum."""
    assert uci_report.sign_flip_p_value([1.0] * 4) == pytest.approx(2 / 16, abs=0.01)


def test_run_path_needs_torch_and_numpy_only():
    script = (
        "import sys, torch, numpy; before = set(sys.modules); import dropbayes.experiments.uci; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before if not m.startswith('_')}))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=_with_source())
    third_party = set(ast.literal_eval(out.stdout)) - set(sys.stdlib_module_names) - {"dropbayes", "torch", "numpy"}
    assert not third_party, third_party


def _with_source():
    import os
    import pathlib

    source = pathlib.Path(uci.__file__).parents[3]
    return {**os.environ, "PYTHONPATH": str(source)}
