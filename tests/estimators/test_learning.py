"""Tests of what the estimators share: scikit-learn's checks, the search, weights, streams, pipelines."""

import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from scipy.stats import norm
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from dropbayes.estimators import DropoutClassifier, DropoutRegressor, learning
from dropbayes.estimators.learning import search_edges
from dropbayes.population import Member
from tests.estimators.samples import PLAIN, QUICK, toy


def test_an_edge_is_the_least_or_greatest_of_several_but_never_zero():
    def edges(tried, best):
        members = tuple(Member(drop_prob=drop_prob, weight_decay=1e-4) for drop_prob in tried)
        return search_edges(SimpleNamespace(candidates=members, members=(members[tried.index(best)],)))

    assert edges([0.1, 0.2, 0.3], 0.3) == edges([0.3, 0.4], 0.3) == {"drop_prob": 0.3}
    assert edges([(0.0, 0.1), (0.0, 0.5)], (0.0, 0.5)) == {"drop_prob": 0.5}
    assert edges([0.1, 0.2, 0.3], 0.2) == edges([0.0, 0.2], 0.0) == edges([0.2], 0.2) == {}


def test_a_decay_that_a_candidate_has_of_its_own_is_no_edge():
    x, y = toy(60)
    settings = {"hidden": (10,), "n_steps": 40, "min_epochs": 1, "n_folds": 2, "device": "cpu", "random_state": 0}
    fitted = DropoutRegressor(**settings).fit(x, 100 * x[:, 0] + y)
    assert fitted.population_.members[0].weight_decay == max(member.weight_decay for member in fitted._grid(60)[0])
    assert "weight_decay" not in fitted.search_edges_


def test_with_times_the_noise_is_that_of_forecasts_and_not_of_gaps():
    t = np.linspace(0, 1, 200)
    y = np.exp(3 * t)  # the past does not show how steep the future is
    settings = QUICK | {"noise": "constant", "random_state": 0, "n_folds": 5, "n_steps": 300}
    plain = DropoutRegressor(**settings).fit(t[:, None], y)
    forward = DropoutRegressor(**settings).fit(t[:, None], y, times=t)
    assert forward.precision_ < plain.precision_ / 2


SHORTEST = {"n_steps": 30, "n_networks": 1, "n_folds": 1}


@parametrize_with_checks([DropoutRegressor(**(PLAIN | SHORTEST)), DropoutClassifier(**(QUICK | SHORTEST))])
def test_scikit_learn_estimator_check(estimator, check):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(estimator)


def test_the_first_place_goes_to_the_best_candidate_and_lists_are_tried():
    x, y = toy(60)
    grid = [(p, d) for p in (0.005, 0.3) for d in (1e-6, 1e-2)]
    settings = PLAIN | {"hidden": (10,), "drop_prob": [0.005, 0.3], "weight_decay": [1e-6, 1e-2]}
    model = DropoutRegressor(**settings, random_state=0).fit(x, y)
    member = model.population_.members[0]
    assert (member.drop_prob, member.weight_decay) == grid[int(model.search_scores_.argmax())]


def test_the_standard_search_trains_its_finalists_longer():
    x, y = toy(180)
    model = DropoutRegressor(hidden=(10,), n_steps=80, min_epochs=1, n_folds=2, random_state=0, device="cpu").fit(x, y)
    assert model.search_scores_.shape == (6 + 3 + 3 + 2,)  # plain, with binned columns, after a process, finalists
    assert len(model.population_) == 6


def test_large_data_are_searched_on_a_part_and_learned_from_whole(monkeypatch):
    from dropbayes.estimators import learning

    monkeypatch.setattr(learning, "_SEARCH_ROWS", 100)
    x, y = toy(600)
    model = DropoutRegressor(**(PLAIN | {"min_epochs": 20, "drop_prob": [(0.0, 0.05), 0.9]}), random_state=0).fit(x, y)
    assert model.drop_prob_ == (0.0, 0.05)
    assert len(model.population_) == 2
    np.testing.assert_allclose(model.population_.x_mean[0], x.mean(0))  # of all rows, not of the searched part
    assert model.score(x, y) > 0.8
    assert 1 / 100 < model.precision_ < 1 / 9


def test_all_kinds_of_tables_give_the_same_numbers():
    x, y = toy(30)
    model = DropoutRegressor(**PLAIN, random_state=0)
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


def test_warm_start_goes_on_from_the_present_weights():
    x, y = toy(200)
    warm = DropoutRegressor(**(PLAIN | {"n_steps": 30}), warm_start=True, random_state=0).fit(x, y)
    first = warm.score(x, y)
    for _ in range(4):
        warm.fit(x, y)
    assert warm.score(x, y) > first


@pytest.mark.slow
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
    search = GridSearchCV(DropoutRegressor(**PLAIN, random_state=0), {"drop_prob": [0.05, 0.9]}, cv=2).fit(*toy(80))
    assert search.best_params_ == {"drop_prob": 0.05}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scores = cross_val_score(DropoutRegressor(**PLAIN, random_state=0), *toy(80), cv=2, n_jobs=2)
    np.testing.assert_allclose(scores, cross_val_score(DropoutRegressor(**PLAIN, random_state=0), *toy(80), cv=2))


@pytest.mark.filterwarnings("ignore:.* predicted beyond the targets:UserWarning")
@pytest.mark.parametrize("learning_rate", [1e2, 1e15, 1e30])
def test_a_hopeless_learning_rate_stops_with_advice_or_predicts_finite_numbers(learning_rate):
    x, y = toy(40)
    try:
        model = DropoutRegressor(**(PLAIN | {"learning_rate": learning_rate}), random_state=0).fit(x, y)
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


def test_a_view_with_other_draws_leaves_the_model_as_it_is(regressor):
    x, _ = toy(5, seed=8)
    before = regressor.predict(x)
    assert regressor.with_draws(n_draws=3).predictive(x).n_draws == 6
    assert not torch.equal(regressor.with_draws(seed=99).predictive(x).location, regressor.predictive(x).location)
    np.testing.assert_array_equal(regressor.predict(x), before)


def test_training_goes_on_with_layers_of_the_same_widths_only():
    x, y = toy(40)
    warm = DropoutRegressor(**(PLAIN | {"hidden": (8,)}), warm_start=True, random_state=0).fit(x, y)
    for learn in (warm.fit, warm.partial_fit):
        with pytest.raises(ValueError, match=r"`hidden` must stay \(8,\) where training continues; got \(9,\)"):
            warm.set_params(hidden=(9,)) and learn(x, y)
    assert warm.set_params(hidden=[8]).fit(x, y).hidden_ == (8,)


def test_a_warm_start_refuses_other_columns_and_measures_the_noise_anew():
    x, y = toy(200)
    warm = DropoutRegressor(**QUICK, noise="constant", warm_start=True, random_state=0).fit(x, y)
    with pytest.raises(ValueError, match="features"):
        warm.fit(x[:, :1], y)
    before = warm.precision_
    louder = 100 + 5 * (y - 100)
    warm.fit(x, louder)
    assert warm.precision_ < before / 4
    label = np.where(y > 100, "high", "low")
    classifier = DropoutClassifier(**QUICK, warm_start=True, random_state=0).fit(x, label)
    with pytest.raises(ValueError, match="must hold only the classes"):
        classifier.fit(x, np.where(y > 100, "high", "lower"))


def test_one_bar_counts_the_steps_of_search_and_training(monkeypatch):
    bars = []

    class Bar(learning.ProgressBar):
        def __init__(self, *arguments, **settings):
            super().__init__(*arguments, **settings)
            bars.append(self)

    monkeypatch.setattr(learning, "ProgressBar", Bar)
    DropoutRegressor(**QUICK, random_state=0).fit(*toy(64))
    assert len(bars) == 1 and bars[0].done == bars[0].total


@pytest.mark.slow
def test_two_thousand_columns_of_one_hidden_factor_are_learned_from():
    source = np.random.default_rng(0)
    factor = source.normal(size=400)
    x = factor[:, None] * source.normal(size=2000) + 3 * source.normal(size=(400, 2000))
    model = DropoutRegressor(effort="quick", n_steps=100, random_state=0, device="cpu").fit(x[:300], factor[:300])
    assert model.score(x[300:], factor[300:]) > 0.9


def test_constant_columns_change_nothing_that_matters():
    x, y = toy(100)
    wider = np.column_stack([x, np.full(100, 7.0), np.zeros(100)])
    model = DropoutRegressor(**PLAIN, random_state=0).fit(wider, y)
    assert np.corrcoef(model.predict(wider), y)[0, 1] > 0.9
    assert model.population_.x_scale[0, 2:].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("value", "settings"), [(3.5, QUICK), (1e15, PLAIN), (-1e17, PLAIN)])
def test_a_constant_target_is_predicted_as_it_is(value, settings):
    x, _ = toy(50)
    mean, std = DropoutRegressor(**settings, random_state=0).fit(x, np.full(50, value)).predict(x, return_std=True)
    np.testing.assert_allclose(mean, value, rtol=1e-12, atol=0.05)
    assert np.isfinite(std).all()


def test_targets_of_zero_and_one_keep_their_probability_as_the_mean():
    source = np.random.default_rng(0)
    x = source.uniform(size=(600, 1))
    y = (source.random(600) < 0.2 + 0.6 * x[:, 0]).astype(float)
    model = DropoutRegressor(**(QUICK | {"n_steps": 400}), random_state=0).fit(x, y)
    np.testing.assert_allclose(model.predict(np.array([[0.1], [0.5], [0.9]])), [0.26, 0.5, 0.74], atol=0.12)
    assert np.isfinite(model.log_likelihood(x, y))


def test_a_score_below_that_of_the_target_alone_is_said():
    source = np.random.default_rng(0)
    x, noise = source.normal(size=(60, 8)), source.normal(size=60)
    settings = QUICK | {"hidden": (100,), "drop_prob": 0.0, "n_steps": 300}
    with pytest.warns(UserWarning, match="is below that of the target's own mean and deviation alone") as warned:
        model = DropoutRegressor(**settings, noise="constant", random_state=0).fit(x, noise)
    assert warned[0].filename == __file__  # the line that called `fit`
    assert model.baseline_score_ == pytest.approx(norm(noise.mean(), noise.std()).logpdf(noise).mean(), abs=1e-6)
    with pytest.warns(UserWarning, match="is below that of the class shares alone"):
        classifier = DropoutClassifier(**settings, random_state=0).fit(x, noise > 0.5)
    shares = (np.bincount(noise > 0.5) + 1) / 62
    assert classifier.baseline_score_ == pytest.approx(np.log(shares[(noise > 0.5).astype(int)]).mean())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_fit_that_is_interrupted_leaves_the_estimator_as_it_was(monkeypatch, error):
    x, y = toy(40)
    model = DropoutClassifier(**QUICK, random_state=0).fit(x, np.where(y > y.mean(), "high", "low"))
    before, probabilities = dict(vars(model)), model.predict_proba(x)

    def interrupted(*args, **kwargs):
        raise error

    monkeypatch.setattr(learning, "train_in_jobs", interrupted)
    with pytest.raises(error):
        model.fit(pd.DataFrame({"a": x[:, 0], "b": ["u", "v"] * 20}), np.where(y > y.mean(), "no", "yes"))
    assert vars(model).keys() == before.keys() and all(vars(model)[name] is before[name] for name in before)
    np.testing.assert_array_equal(model.predict_proba(x), probabilities)
    new = DropoutRegressor(**PLAIN)
    with pytest.raises(error):
        new.fit(x, y)
    assert vars(new) == vars(DropoutRegressor(**PLAIN))
    with pytest.raises(error):
        new.partial_fit(x, y)
    assert vars(new) == vars(DropoutRegressor(**PLAIN))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_partial_fit_that_is_interrupted_leaves_the_estimator_as_it_was(monkeypatch, error):
    x, y = toy(40)
    labels = np.where(y > y.mean(), "high", "low")
    models = [DropoutRegressor(**PLAIN, random_state=0).fit(x, y), DropoutClassifier(**QUICK).fit(x, labels)]
    for model, targets in zip(models, (y, labels), strict=True):
        before = dict(vars(model))
        monkeypatch.setattr(learning, "train_in_jobs", Mock(side_effect=error))
        with pytest.raises(error):
            model.partial_fit(x, targets)
        assert vars(model).keys() == before.keys() and all(vars(model)[name] is before[name] for name in before)


def test_a_dict_of_columns_is_refused_with_a_remedy():
    x, y = toy(20)
    with pytest.raises(TypeError, match=r"`X` must be an array or a data frame; got a dict. Pass pandas.DataFrame"):
        DropoutRegressor(**PLAIN).fit({"a": x[:, 0]}, y)


@pytest.mark.parametrize("model", ["regressor", "classifier"])
def test_a_row_too_far_off_for_a_number_is_refused_and_not_predicted_as_nan(model):
    x, y = toy(40)
    fitted = (
        DropoutRegressor(**PLAIN).fit(x, y) if model == "regressor" else DropoutClassifier(**QUICK).fit(x, y > y.mean())
    )
    far = np.vstack([x[:2], np.full_like(x[:1], 1e308)])
    calls = [fitted.predict, fitted.predict_interval if model == "regressor" else fitted.predict_proba]
    for call in calls:
        with pytest.raises(ValueError, match="`X`, row 2: the prediction is not finite"):
            call(far)


def test_wrong_requests_of_estimators_are_refused_by_name():
    x, y = toy(40)
    model = DropoutRegressor(**PLAIN).fit(x, y)
    with pytest.raises(ValueError, match="`n_draws` must be a whole number, at least 1; got 0"):
        model.with_draws(n_draws=0)
    with pytest.raises(ValueError, match="`n_samples` must be a whole number, at least 0; got -1"):
        model.sample_y(x, -1)
    with pytest.raises(ValueError, match=r"`y` must hold numbers; .* DropoutClassifier takes texts as classes"):
        DropoutRegressor(**QUICK).fit(x, np.where(y > 0, "high", "low"))
    with pytest.raises(ValueError, match=r"`X` must hold numbers; .* Pass columns of texts in a data frame"):
        DropoutRegressor(**QUICK).fit(np.full((40, 2), "a", dtype=object), y)
    with pytest.raises(ValueError, match="`class_weight` must not be negative; got"):
        DropoutClassifier(**QUICK, class_weight={False: 1, True: -2}).fit(x, y > y.mean())
    for tensor, kind in ((torch.tensor(x).to_sparse(), "of layout"), (torch.tensor(x, device="meta"), "on the meta")):
        with pytest.raises(TypeError, match=f"`X` must be a dense tensor of numbers; got one {kind}"):
            DropoutRegressor(**QUICK).fit(tensor, y)
    with pytest.raises(TypeError, match=r"`X` must be .*got a LazyFrame.* Pass X.collect\(\)"):
        DropoutRegressor(**QUICK).fit(pl.DataFrame({"a": x[:, 0]}).lazy(), y)
