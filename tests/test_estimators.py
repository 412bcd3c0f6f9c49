"""Tests of the scikit-learn estimators: scikit-learn's own checks, and what is ours alone."""

import math
import pickle
import warnings

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from dropbayes.estimators import DropoutClassifier, DropoutRegressor

QUICK = {
    "hidden": (20,), "drop_prob": 0.05, "weight_decay": 1e-4, "n_steps": 100, "n_folds": 2, "n_draws": 20,
    "n_networks": 2, "min_epochs": 1, "device": "cpu", "learning_rate": 0.01,
}  # fmt: skip


@parametrize_with_checks([DropoutRegressor(**QUICK), DropoutClassifier(**QUICK)])
def test_scikit_learn_estimator_check(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def toy(n: int = 150, *, noise: float = 0.2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    x = source.normal(size=(n, 2))
    return x, 100 + 20 * np.sin(x[:, 0]) + 20 * noise * source.normal(size=n)


@pytest.fixture(scope="module")
def regressor() -> DropoutRegressor:
    # With two inputs, dropping one costs much: the inputs are kept.
    settings = QUICK | {"n_steps": 1000, "n_draws": 200, "drop_prob": (0.0, 0.05), "noise": "constant"}
    return DropoutRegressor(**settings, random_state=0).fit(*toy(300))


def test_the_first_place_goes_to_the_best_candidate_and_lists_are_tried():
    x, y = toy(60)
    grid = [(p, d) for p in (0.005, 0.3) for d in (1e-6, 1e-2)]
    settings = QUICK | {"hidden": (10,), "drop_prob": [0.005, 0.3], "weight_decay": [1e-6, 1e-2]}
    model = DropoutRegressor(**settings, random_state=0).fit(x, y)
    member = model.population_.members[0]
    assert (member.drop_prob, member.weight_decay) == grid[int(model.search_scores_.argmax())]


def test_the_standard_search_trains_its_finalists_longer():
    x, y = toy(60)
    model = DropoutRegressor(hidden=(10,), n_steps=80, min_epochs=1, n_folds=2, random_state=0, device="cpu").fit(x, y)
    assert model.search_scores_.shape == (7 + 3,)
    assert len(model.population_) == 6


def test_precision_finds_the_noise_and_the_log_likelihood_that_of_the_truth(regressor):
    x, y = toy(2000, seed=1)
    truth = -0.5 * math.log(2 * math.pi * 16) - 0.5 * np.mean((y - 100 - 20 * np.sin(x[:, 0])) ** 2) / 16
    assert regressor.precision_ == pytest.approx(1 / 16, rel=0.4)
    assert truth - 0.2 < regressor.log_likelihood(x, y) < truth + 0.02
    assert regressor.score(x, y) > 0.85  # the noise leaves 0.91


def test_std_covariance_and_samples_agree(regressor):
    x, _ = toy(6, seed=2)
    mean, std = regressor.predict(x, return_std=True)
    again, covariance = regressor.predict(x, return_cov=True)
    np.testing.assert_allclose(again, mean)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), std)
    assert np.linalg.eigvalsh(covariance).min() > 0
    samples = regressor.sample_y(x, 20_000)
    assert samples.shape == (6, 20_000)
    error = std / math.sqrt(20_000)
    assert (np.abs(samples.mean(1) - mean) < 5 * error).all()
    np.testing.assert_allclose(np.cov(samples), covariance, atol=0.06 * covariance.max())
    with pytest.raises(RuntimeError, match="At most one of return_std or return_cov"):
        regressor.predict(x, return_std=True, return_cov=True)


def test_intervals_are_quantiles_of_the_samples_and_cover_fresh_outcomes(regressor):
    x, y = toy(2000, seed=3)
    lower, upper = regressor.predict_interval(x, coverage=0.8)
    assert np.mean((lower < y) & (y < upper)) == pytest.approx(0.8, abs=0.06)
    samples = regressor.sample_y(x[:5], 40_000)
    np.testing.assert_allclose(lower[:5], np.quantile(samples, 0.1, axis=1), atol=0.35)
    np.testing.assert_allclose(upper[:5], np.quantile(samples, 0.9, axis=1), atol=0.35)
    with pytest.raises(ValueError, match="`coverage` must lie in"):
        regressor.predict_interval(x, coverage=95)


def test_a_prediction_does_not_depend_on_the_other_rows(regressor):
    x, _ = toy(5000, seed=4)
    together = regressor.predict(x, return_std=True)
    for part, whole in zip(regressor.predict(x[4321:4322], return_std=True), together, strict=True):
        np.testing.assert_allclose(part, whole[4321:4322], rtol=1e-12)


def test_the_order_of_rows_does_not_matter_and_weights_are_repetitions():
    x, y = toy(40)
    order = np.random.default_rng(0).permutation(40)
    model = DropoutRegressor(**QUICK, random_state=1)
    plain = clone(model).fit(x, y).predict(x)
    np.testing.assert_array_equal(plain, clone(model).fit(x[order], y[order]).predict(x))
    weight = np.arange(40) % 3
    weighted = clone(model).fit(x, y, sample_weight=weight).predict(x)
    np.testing.assert_array_equal(weighted, clone(model).fit(x.repeat(weight, 0), y.repeat(weight)).predict(x))


def test_copies_of_a_row_are_never_learned_from_and_held_out_at_once():
    # Noise alone: were copies on both sides of a split, the held-out noise would look predictable and τ too large.
    source = np.random.default_rng(0)
    x, y = source.normal(size=(60, 8)), source.normal(size=60)
    settings = QUICK | {"hidden": (100,), "drop_prob": 0.005, "weight_decay": 1e-6, "n_steps": 600}
    once = DropoutRegressor(**settings, random_state=0).fit(x, y)
    thrice = DropoutRegressor(**settings, random_state=0).fit(x.repeat(3, 0), y.repeat(3))
    assert once.precision_ < 1.2
    assert thrice.precision_ < 1.2


def test_fractional_weights_draw_the_fit_towards_heavy_rows():
    x = np.zeros((200, 1))
    y = np.r_[np.zeros(100), np.ones(100)]
    weight = np.r_[np.full(100, 0.25), np.full(100, 0.75)]
    model = DropoutRegressor(**(QUICK | {"n_steps": 300}), random_state=0).fit(x, y, sample_weight=weight)
    assert model.predict(x[:1])[0] == pytest.approx(0.75, abs=0.08)


def test_large_data_are_searched_on_a_part_and_learned_from_whole(monkeypatch):
    from dropbayes.estimators import learning

    monkeypatch.setattr(learning, "_SEARCH_ROWS", 100)
    x, y = toy(600)
    model = DropoutRegressor(**(QUICK | {"min_epochs": 20, "drop_prob": [(0.0, 0.05), 0.9]}), random_state=0).fit(x, y)
    assert model.drop_prob_ == (0.0, 0.05)
    assert len(model.population_) == 2
    np.testing.assert_allclose(model.population_.x_mean[0], x.mean(0))  # of all rows, not of the searched part
    assert model.score(x, y) > 0.8
    assert 1 / 100 < model.precision_ < 1 / 9


def test_many_outputs_are_learned_together():
    x, y = toy(200)
    both = np.c_[y, -3 * y + 7]
    model = DropoutRegressor(**(QUICK | {"n_steps": 300}), random_state=0).fit(x, both)
    mean, std = model.predict(x, return_std=True)
    assert mean.shape == std.shape == (200, 2)
    assert model.score(x, both) > 0.8
    np.testing.assert_allclose(std[:, 1] / std[:, 0], 3, rtol=0.35)
    assert model.sample_y(x[:4], 5).shape == (4, 2, 5)
    assert model.predict(x[:4], return_cov=True)[1].shape == (4, 4, 2)
    assert model.precision_.shape == (2,)
    assert math.isfinite(model.log_likelihood(x, both))


def test_heteroscedastic_noise_and_learned_drop_probability():
    source = np.random.default_rng(0)
    x = source.uniform(-2, 2, size=(600, 1))
    y = x[:, 0] + np.where(x[:, 0] > 0, 1.0, 0.1) * source.normal(size=600)
    model = DropoutRegressor(
        **(QUICK | {"n_steps": 600}), noise="heteroscedastic", learn_drop_prob=True, random_state=0
    ).fit(x, y)
    _, std = model.predict([[-1.5], [1.5]], return_std=True)
    assert std[0] < 0.45
    assert std[1] == pytest.approx(1, abs=0.35)
    assert all(0 < p < 0.5 for p in model.drop_prob_)
    assert model.drop_prob_ != (0.05, 0.05)


def test_all_kinds_of_tables_give_the_same_numbers():
    x, y = toy(30)
    model = DropoutRegressor(**QUICK, random_state=0)
    expected = clone(model).fit(x, y).predict(x)
    frame, column = pd.DataFrame(x, columns=["a", "b"]), pd.Series(y)
    for inputs, targets in (
        (x.tolist(), y.tolist()),
        (frame, column),
        (pl.DataFrame(frame.to_dict("list")), pl.Series(y)),
        (torch.tensor(x, requires_grad=True), torch.tensor(y)),
    ):
        fitted = clone(model).fit(inputs, targets)
        np.testing.assert_allclose(fitted.predict(inputs), expected)
    assert list(clone(model).fit(pl.DataFrame(frame.to_dict("list")), y).feature_names_in_) == ["a", "b"]


def test_partial_fit_learns_a_stream_and_follows_its_noise():
    x, y = toy(4000)
    model = DropoutRegressor(**(QUICK | {"drop_prob": (0.0, 0.05)}), random_state=0)
    for rows in np.array_split(np.arange(4000), 20):
        model.partial_fit(x[rows], y[rows])
    assert model.score(*toy(500, seed=5)) > 0.8  # the noise leaves 0.91
    assert model.precision_ == pytest.approx(1 / 16, rel=0.6)


def test_a_stream_of_single_rows_keeps_a_sane_noise():
    x, y = toy(60)
    model = DropoutRegressor(**QUICK, random_state=0).partial_fit(x[:40], y[:40])
    for row in range(40, 60):
        model.partial_fit(x[[row]], y[[row]])
    assert 1 / y.var() / 4 < model.precision_ < 20 / y.var()


def test_classifier_learns_a_stream_with_all_classes_named_first():
    x, y = toy(1200)
    label = np.where(y > 100, "high", "low")
    model = DropoutClassifier(**QUICK, random_state=0)
    with pytest.raises(ValueError, match="`classes` must be passed on the first call"):
        model.partial_fit(x, label)
    for rows in np.array_split(np.arange(1200), 12):
        model.partial_fit(x[rows], label[rows], classes=["low", "high", "never"])
    assert model.predict_proba(x).shape == (1200, 3)
    assert model.score(x, label) > 0.85
    with pytest.raises(ValueError, match="must hold only the classes"):
        model.partial_fit(x[:2], ["low", "other"])


def test_warm_start_goes_on_from_the_present_weights():
    x, y = toy(200)
    warm = DropoutRegressor(**(QUICK | {"n_steps": 30}), warm_start=True, random_state=0).fit(x, y)
    first = warm.score(x, y)
    for _ in range(4):
        warm.fit(x, y)
    assert warm.score(x, y) > first


def test_pipelines_searches_and_parallel_cross_validation():
    source = np.random.default_rng(0)
    frame = pd.DataFrame({"size": source.normal(size=120), "colour": source.choice(["red", "blue"], 120)})
    target = frame["size"] + (frame["colour"] == "red")
    frame.loc[::10, "size"] = np.nan
    columns = ColumnTransformer(
        [("n", make_pipeline(SimpleImputer(), StandardScaler()), ["size"]), ("c", OneHotEncoder(), ["colour"])]
    )
    pipeline = make_pipeline(columns, DropoutRegressor(**(QUICK | {"n_steps": 300}), random_state=0)).fit(frame, target)
    assert pipeline.score(frame, target) > 0.7
    search = GridSearchCV(DropoutRegressor(**QUICK, random_state=0), {"drop_prob": [0.05, 0.9]}, cv=2).fit(*toy(80))
    assert search.best_params_ == {"drop_prob": 0.05}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = cross_val_score(DropoutRegressor(**QUICK, random_state=0), *toy(80), cv=2, n_jobs=2)
    np.testing.assert_allclose(scores, cross_val_score(DropoutRegressor(**QUICK, random_state=0), *toy(80), cv=2))


def test_files_and_pickles_predict_the_same(tmp_path, regressor):
    x, _ = toy(20, seed=6)
    expected = regressor.predict(x, return_std=True)
    regressor.save(tmp_path / "m.safetensors")
    joblib.dump(regressor, tmp_path / "m.joblib")
    for copy in (
        DropoutRegressor.load(tmp_path / "m.safetensors"),
        joblib.load(tmp_path / "m.joblib"),
        pickle.loads(pickle.dumps(regressor)),
    ):
        for ours, theirs in zip(copy.predict(x, return_std=True), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert copy.get_params() == regressor.get_params()
        copy.partial_fit(*toy(10))  # a copy can go on learning
    with pytest.raises(ValueError, match="holds a 'DropoutRegressor'"):
        DropoutClassifier.load(tmp_path / "m.safetensors")


@pytest.mark.parametrize("labels", [["low", "high"], [False, True], [3, -1]])
def test_a_stored_classifier_keeps_its_labels(tmp_path, labels):
    x, y = toy(40)
    label = np.asarray(labels)[(y > 100).astype(int)]
    model = DropoutClassifier(**QUICK, random_state=0).fit(x, label)
    model.save(tmp_path / "m.safetensors")
    copy = DropoutClassifier.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(copy.predict(x), model.predict(x))
    np.testing.assert_array_equal(copy.predict_proba(x), model.predict_proba(x))
    assert copy.classes_.dtype == model.classes_.dtype


def test_an_unknown_activation_in_a_file_is_refused(tmp_path, regressor):
    odd = pickle.loads(pickle.dumps(regressor))
    odd.activation = "sine"
    odd.save(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="unknown activation 'sine'"):
        DropoutRegressor.load(tmp_path / "m.safetensors")


def test_classifier_is_calibrated_enough_to_beat_its_own_accuracy_baseline():
    x, y = load_iris(return_X_y=True)
    model = DropoutClassifier(**(QUICK | {"n_steps": 300}), random_state=0).fit(x[::2], y[::2])
    assert model.score(x[1::2], y[1::2]) > 0.92
    assert -0.25 < model.log_likelihood(x[1::2], y[1::2]) < 0
    np.testing.assert_allclose(model.predict_proba(x).sum(1), 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_draws": 0}, "`n_draws` must be a positive integer"),
        ({"drop_prob": "auto"}, "`drop_prob` must be 'search'"),
        ({"noise": "gaussian"}, "`noise` must be one of"),
        ({"learning_rate": 0}, "`learning_rate` must be 'auto' or a positive"),
        ({"n_folds": 0}, "`n_folds` must be 'auto'"),
    ],
)
def test_bad_parameters_are_refused_in_fit(settings, message):
    with pytest.raises(ValueError, match=message):
        DropoutRegressor(**(QUICK | settings)).fit(*toy(20))


@pytest.mark.parametrize("learning_rate", [1e2, 1e15, 1e30])
def test_a_hopeless_learning_rate_stops_with_advice_or_predicts_finite_numbers(learning_rate):
    x, y = toy(40)
    try:
        model = DropoutRegressor(**(QUICK | {"learning_rate": learning_rate}), random_state=0).fit(x, y)
    except (FloatingPointError, ValueError) as error:
        assert "learning" in str(error)
    else:
        assert np.isfinite(model.predict(x)).all()


@pytest.mark.slow
@parametrize_with_checks([DropoutRegressor(), DropoutClassifier()])
def test_scikit_learn_estimator_check_with_the_default_settings(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def test_a_read_only_column_is_judged_without_a_word(recwarn):
    x, y = np.linspace(-1, 1, 40)[:, None], np.linspace(-1, 1, 40) ** 2
    model = DropoutRegressor(drop_prob=0.05, weight_decay=1e-4, n_steps=20, n_networks=1, random_state=0).fit(x, y)
    column = pd.DataFrame({"y": y})["y"]
    recwarn.clear()
    assert model.log_likelihood(x, column) == model.log_likelihood(x, y)
    assert not [w for w in recwarn if "writable" in str(w.message)]


def test_outcomes_of_another_shape_are_refused_not_broadcast(regressor):
    x, y = toy(20)
    for wrong in (y[:10], np.r_[y, y], y[:, None], np.c_[y, y]):
        with pytest.raises(ValueError, match="`y` must have the shape"):
            regressor.log_likelihood(x, wrong)
    label = np.where(y > 100, 2, 0)
    model = DropoutClassifier(**QUICK, random_state=0).fit(x, label)
    for wrong in (label[:10], label[:, None]):
        with pytest.raises(ValueError, match="one class for each"):
            model.log_likelihood(x, wrong)
    with pytest.raises(ValueError, match="must hold only the classes"):
        model.log_likelihood(x, label - 1)


def test_the_predictive_distribution_is_what_predict_reads(regressor):
    x, y = toy(50, seed=7)
    mixture = regressor.predictive(x)
    assert mixture.n_draws == 2 * 200
    mean, std = regressor.predict(x, return_std=True)
    np.testing.assert_array_equal(mixture.mean, mean)
    np.testing.assert_array_equal(mixture.std, std)
    assert float(mixture.log_density(y).mean()) == pytest.approx(regressor.log_likelihood(x, y))
    np.testing.assert_allclose(mixture.aleatoric, 1 / regressor.precision_)
    blocks = list(regressor.predictive_blocks(x, block_rows=20))
    assert [len(block.mean) for _, block in blocks] == [20, 20, 10]
    np.testing.assert_allclose(np.concatenate([block.mean for _, block in blocks]), mean, rtol=1e-12)


def test_a_view_with_other_draws_leaves_the_model_as_it_is(regressor):
    x, _ = toy(5, seed=8)
    before = regressor.predict(x)
    assert regressor.with_draws(n_draws=3).predictive(x).n_draws == 6
    assert not torch.equal(regressor.with_draws(seed=99).predictive(x).location, regressor.predictive(x).location)
    np.testing.assert_array_equal(regressor.predict(x), before)
