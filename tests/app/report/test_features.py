"""Tests of what the features do: importance, segments and shifts from the training rows."""

import warnings

import numpy as np
import pytest
from scipy.stats import ks_2samp

from dropbayes.app.report import measurements, report
from dropbayes.app.report.features import Feature, features_of, importances, segments, shifts
from dropbayes.estimators import DropoutRegressor
from dropbayes.estimators.columns.dates import date_inputs
from dropbayes.runtime.formatting import printable_name
from tests.app.report.pages import Page, class_rows, regression_rows


class Straight:
    """A model that predicts twice the first input and nothing of the second."""

    population_ = (None,)

    def with_draws(self, **_):
        return self

    def predict(self, x):
        return 2 * x[:, 0]


def test_the_importance_of_a_straight_line_is_what_shuffling_does_to_it():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 2))
    first, second = importances(Straight(), x, 2 * x[:, 0], features_of(x, ["a", "b"]))
    assert (first.feature.name, second.feature.name) == ("a", "b")
    assert second.rise == second.error == 0.0
    expected = 2 * np.abs(x[:, None, 0] - x[None, :, 0]).mean()  # E|2(x - x')| over random pairs of rows
    assert abs(first.rise - expected) < 4 * first.error


def test_the_shuffled_tables_of_many_features_are_predicted_together():
    class Counted(Straight):
        n_calls = 0

        def predict(self, x):
            self.n_calls += 1
            return super().predict(x)

    x, model = np.random.default_rng(0).normal(size=(40, 200)), Counted()
    ranked = importances(model, x, 2 * x[:, 0], features_of(x, [str(k) for k in range(200)]))
    assert model.n_calls == 1 + 200 * 2 * 40 // 4000
    assert ranked[0].feature.name == "0" and ranked[0].rise > 1 > 0 == ranked[1].rise


def test_inputs_of_one_feature_are_shuffled_together():
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(300, 1)), 2, axis=1)
    [only] = importances(Straight(), x, 2 * x[:, 0], features_of(x, ["a", "b"], {"both": (0, 1)}))
    assert only.rise > 1


def test_dates_are_written_as_days():
    days = np.array(["2023-01-05", "2023-11-30"], dtype="datetime64[D]").astype(float)
    [feature] = features_of(date_inputs(days, ("year", "week")), ["d: year", "d: sin", "d: cos"], {"d": (0, 1, 2)})
    assert [feature.text(value) for value in feature.values] == ["2023-01-05", "2023-11-30"]


def test_a_few_numbers_are_written_as_in_the_table_where_each_has_one_text():
    feature = Feature("paid", (0,), np.array([0.0, 1.0, 1.0, np.nan]))
    assert [feature.with_labels({"paid": ["no", "yes", "yes", ""]}).text(v) for v in (0.0, 1.0, np.nan)] == [
        "no",
        "yes",
        "(missing)",
    ]
    assert feature.with_labels({"paid": ["no", "yes", "1", ""]}).text(1.0) == "1"  # written in two ways
    many = Feature("size", (0,), np.arange(20.0))
    assert many.with_labels({"size": [f"no. {k}" for k in range(20)]}).text(3.0) == "3"


def test_large_numbers_have_their_digits_and_no_exponent():
    feature = Feature("price", (0,), np.zeros(1))
    assert [feature.text(v) for v in (2023.0, 123456.7, -0.012346, 1e12)] == ["2023", "123457", "−0.01235", "1e+12"]


def test_missing_values_among_few_numbers_are_called_missing(regressor):
    measured = measurements.measure(regressor, *regression_rows(120))
    values = np.where(np.arange(120) % 3 == 0, np.nan, np.arange(120) % 2)
    parts = segments(measured, [Feature("f", (0,), values)])
    assert {part.values: part.n_rows for part in parts} == {"(missing)": 40, "0": 40, "1": 40}


def test_the_values_of_features_are_those_people_know():
    x = np.array([[1.0, 0.0, 0.0, 3.0, 0.0], [0.0, 1.0, 0.0, 7.0, 1.0], [0.0, 0.0, 1.0, 5.0, 0.0], [0, 0, 0, 2.0, 0]])
    names = ["city = Oslo", "city = Rome", "city is missing", "size", "size is missing"]
    city, size = features_of(x, names, {"city": (0, 1, 2), "size": (3, 4)})
    assert city.values.tolist() == ["Oslo", "Rome", "(missing)", "(not in training)"]
    assert size.is_number
    np.testing.assert_array_equal(size.values, [3.0, np.nan, 5.0, 2.0])


def test_a_category_that_no_training_row_had_is_not_called_missing():
    [city] = features_of(np.array([[1.0, 0.0], [0.0, 0.0]]), ["city = Oslo", "city = Rome"], {"city": (0, 1)})
    assert city.values.tolist() == ["Oslo", "(not in training)"]


def test_names_and_texts_may_hold_what_marks_the_inputs_of_a_category():
    x = np.array(
        [[1.0, 0.0, 0.0, 2020.5, 0.0, 1.0], [0.0, 1.0, 0.0, 2021.5, 1.0, 0.0], [0.0, 0.0, 1.0, 2022.5, 0.0, 1.0]]
    )
    names = [
        "rule = a = 1",
        "rule = b = 1",
        "rule = it is missing",
        "k = v: year",
        "k = v: season sin",
        "k = v: season cos",
    ]
    rule, date = features_of(x, names, {"rule": (0, 1, 2), "k = v": (3, 4, 5)})
    assert rule.values.tolist() == ["a = 1", "b = 1", "it is missing"]
    assert date.is_date and date.values.tolist() == [2020.5, 2021.5, 2022.5]


def test_rows_far_beyond_the_targets_are_noted_once():
    x = np.linspace(-2, 2, 40)[:, None]
    model = DropoutRegressor(drop_prob=0.05, weight_decay=1e-4, n_steps=20, n_networks=1, noise="constant")
    model.set_params(random_state=0).fit(x, x[:, 0])
    with warnings.catch_warnings(record=True, action="always") as noted:
        report(model, 1e4 * x, x[:, 0], target="t")
    assert len([one for one in noted if "predicted beyond the targets" in str(one.message)]) == 1


def test_long_names_that_begin_alike_are_features_of_their_own(regressor):
    x, y = regression_rows(60, seed=5)
    first, second = (f"{'a question of a survey ' * 5}{number}" for number in (1, 2))
    names = [f"{first} = yes", f"{first} = no", second]
    ranges, answers = {first: (-np.inf, np.inf), second: (9.0, 10.0)}, {first: ["yes"] * 60, second: ["?"] * 60}
    groups = {first: [0, 1], second: [2]}
    page = Page(report(regressor, x, y, target="t", names=names, features=groups, ranges=ranges, columns=answers))
    assert set(page.column("feature")[:2]) == {printable_name(first), printable_name(second)}
    assert page.column("here")[1] in ("yes", "no")  # after the number, which is the most shifted
    assert page.column("outside the training range") == ["100 %", "0 %"]


def test_segments_are_quarters_and_count_every_row(regressor):
    x, y = regression_rows(200, seed=5)
    measured = measurements.measure(regressor, x, y)
    parts = segments(measured, [Feature("a", (0,), x[:, 0])])
    assert [part.n_rows for part in parts] == [50] * 4
    loss = np.abs(measured.y - measured.mean)
    assert np.average([part.loss for part in parts]) == pytest.approx(loss.mean())
    held = (measured.lower <= y) & (y <= measured.upper)
    assert np.average([part.surprise for part in parts]) == pytest.approx(held.mean() - 0.95)


def test_a_segment_in_which_the_model_errs_stands_out(regressor):
    x, y = regression_rows(300, seed=5)
    wrong = x[:, 1] > np.quantile(x[:, 1], 0.75)
    y = np.where(wrong, y + 10, y)
    parts = segments(measurements.measure(regressor, x, y), features_of(x, ["a", "b", "c"]))
    worst = max(parts, key=lambda part: part.sigmas)
    assert worst.feature == "b"
    assert worst.surprise < -0.75
    assert worst.surprise_sigmas < -10


def test_categories_and_classes_have_segments_too(classifier):
    x, labels = class_rows(120, seed=4)
    measured = measurements.measure(classifier, x, labels)
    kind = np.array(["old", "new"], dtype=object)[np.arange(120) % 2]
    parts = segments(measured, [Feature("kind", (0,), kind)])
    wrong = measured.predicted != measured.labels
    assert {part.values: part.loss for part in parts} == {v: wrong[kind == v].mean() for v in ("old", "new")}


def test_all_three_features_matter_alike_and_are_said_to(regressor):
    x, y = regression_rows(300, seed=5)  # the truth is their sum
    page = Page(report(regressor, x, y, target="t", names=["a", "b", "c"]))
    rises = [float(text.split()[0]) for text in page.column("rise")]
    assert min(rises) > 0.6 * max(rises)
    assert "matters most" in page.text


def test_inputs_of_one_category_are_one_feature(regressor):
    x, y = regression_rows(60, seed=5)
    page = Page(report(regressor, x, y, target="t", names=["c = x", "c = y", "n"], features={"c": [0, 1], "n": [2]}))
    assert sorted(page.column("feature")[:2]) == ["c", "n"]


def test_shifts_are_the_distances_of_kolmogorov_and_smirnov():
    rng = np.random.default_rng(0)
    before, after = rng.normal(size=(300, 2)), rng.normal(size=(200, 2)) + np.array([0.0, 1.0])
    first, second = shifts(features_of(after, ["a", "b"], training=before), {})
    assert (first.name, second.name) == ("b", "a")
    assert first.distance == pytest.approx(ks_2samp(before[:, 1], after[:, 1]).statistic)
    assert first.p_value < 1e-6 < second.p_value
    outside = (after[:, 1] > before[:, 1].max()) | (after[:, 1] < before[:, 1].min())
    assert first.outside == pytest.approx(outside.mean())


def test_new_categories_lie_outside():
    before, after = (np.array(list(letters), dtype=object) for letters in ("xy" * 50, "xyzz" * 10))
    [shift] = shifts([Feature("c", (0,), after, trained=before)], {})
    assert (shift.distance, shift.outside) == (0.5, 0.5)


def test_new_categories_lie_outside_where_the_training_rows_are_not_known():
    names, groups = ["c = x", "c = y"], {"c": (0, 1)}
    [shift] = shifts(features_of(np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0]]), names, groups), {})
    assert (shift.distance, shift.outside) == (None, 0.25)


def test_ranges_alone_tell_what_lies_outside():
    [shift] = shifts([Feature("a", (0,), np.array([0.0, 1.0, 2.0, 3.0]))], {"a": (0.5, 2.5)})
    assert (shift.outside, shift.distance) == (0.5, None)


def test_rows_far_from_the_training_rows_are_said_to_be(regressor):
    training, (x, y) = regression_rows(80), regression_rows(100, seed=7)
    page = Page(
        report(regressor, x + np.array([3.0, 0.0, 0.0]), y, target="t", names=["a", "b", "c"], training=training)
    )
    assert "Beyond chance, a differs from the training rows." in page.text
    same = Page(report(regressor, x, y, target="t", training=training))
    assert "The rows look like those trained on." in same.text
    ranged = Page(report(regressor, x, y, target="t", names=["a", "b", "c"], ranges={"a": (-1.0, 1.0)}))
    share = (np.abs(x[:, 0]) > 1).mean()
    assert f"{100 * share:.0f} % of the rows lie outside the training range of a." in ranged.text


def test_shuffled_rows_are_not_warned_of(recwarn):
    class Loud(Straight):
        def predict(self, x):
            warnings.warn("far from the training rows", UserWarning, stacklevel=2)
            return super().predict(x)

    x = np.random.default_rng(0).normal(size=(20, 2))
    importances(Loud(), x, x[:, 0], features_of(x, ["a", "b"]))
    assert not recwarn.list
