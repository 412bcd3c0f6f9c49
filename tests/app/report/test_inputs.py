"""Tests of the report's arguments."""

import re

import numpy as np
import pytest

from dropbayes.app.report import report
from dropbayes.estimators import DropoutRegressor
from tests.app.report.pages import QUICK, Page, class_rows, regression_rows

X, Y = regression_rows(10)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": X[:, :2]}, ValueError, "`x` must be"),
        ({"x": X[:1], "y": Y[:1]}, ValueError, "at least 2 rows"),
        ({"x": X[0]}, ValueError, "`x` must be"),
        ({"x": [["a"] * 3] * 10}, TypeError, "`x` must be a tensor or an array of numbers"),
        ({"x": np.where(X[3, 1] == X, np.nan, X)}, ValueError, "`x` must be finite; 1 of 30 values are not"),
        ({"y": Y[:5]}, ValueError, "`y` must have one value per row; got 5 for 10 rows"),
        ({"y": Y[:, None]}, ValueError, "`y` must be [row]"),
        ({"y": np.where(Y[4] == Y, np.inf, Y)}, ValueError, "`y` must be finite"),
        ({"y": ["a"] * 10}, TypeError, "`y` must be a tensor or an array of numbers"),
        ({"columns": {"a": [1, 2]}}, ValueError, "`columns` must have one value"),
        ({"numbers": Y[:3]}, ValueError, "`numbers` must have one value per row; got 3 for 10 rows"),
        ({"names": ["a"]}, ValueError, "`names` must name each of the 3"),
        ({"band_feature": 3}, ValueError, "`band_feature` must be a whole number, between 0 and 2"),
        ({"training": (X, Y[:3])}, ValueError, "`training` must have one value per row"),
        ({"training": (X[:1], Y[:1])}, ValueError, "`training` must be [row, feature] with at least 2 rows"),
        ({"unknown": X[:, :1]}, ValueError, "`unknown` must be"),
        ({"features": {"a": [0, 1]}}, ValueError, "`features` must share out the 3 columns"),
        ({"model": "model"}, TypeError, "`model` must be a DropoutRegressor or"),
    ],
)
def test_a_wrong_argument_is_one_clear_error(regressor, change, error, message):
    arguments = {"model": regressor, "x": X, "y": Y, "target": "t"} | change
    with pytest.raises(error, match=re.escape(message)):
        report(arguments.pop("model"), arguments.pop("x"), arguments.pop("y"), **arguments)


def test_models_that_cannot_be_reported_on_are_refused(classifier):
    from sklearn.exceptions import NotFittedError

    with pytest.raises(NotFittedError):
        report(DropoutRegressor(), X, Y, target="t")
    two = DropoutRegressor(**QUICK, noise="constant", random_state=0).fit(X, np.stack([Y, -Y], 1))
    with pytest.raises(ValueError, match="`model` must predict one output; it predicts 2"):
        report(two, X, Y, target="t")
    with pytest.raises(
        ValueError, match="one of the classes the model was fitted to for each of the 2 rows; got 'dog'"
    ):
        report(classifier, class_rows(2)[0], ["ant", "dog"], target="t")


def test_frames_and_shuffled_series_are_read_by_position_without_a_warning(recwarn):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    x, y = regression_rows(40)
    frame = pandas.DataFrame(x, columns=["a", "b", "c"], index=np.arange(40)[::-1])
    model = DropoutRegressor(**QUICK, noise="constant", random_state=0).fit(frame, y)
    page = Page(
        report(
            model,
            frame,
            pandas.Series(y),
            target="t",
            columns={"a": frame["a"], "n": pandas.Series(range(40), index=frame.index)},
        )
    )
    assert page.column("n") == [str(int(row) - 1) for row in page.column("row")]
    assert not recwarn.list and list(model.feature_names_in_) == ["a", "b", "c"]
    assert page.column("a") == Page(report(model, x, y, target="t")).column("a")  # the model's own names


def test_a_missing_class_and_an_endless_prediction_are_refused(regressor, classifier):
    with pytest.raises(ValueError, match=r"one of the classes the model was fitted to .* got 'None'"):
        report(classifier, class_rows(2)[0], np.array(["ant", None], dtype=object), target="t")
    with pytest.raises(ValueError, match="row 1: the prediction is not finite"):
        report(regressor, np.array([[0.0, 0, 0], [1e300, 0, 0]]), np.zeros(2), target="t")
    with pytest.raises(ValueError, match="row 0: the prediction is not finite"):
        report(classifier, np.array([[1e300, 0, 0, 0], [0.0, 0, 0, 0]]), ["ant", "bee"], target="t")
