"""Tests of the sections on a classifier."""

import pytest

from dropbayes.app.report import figures, report
from dropbayes.estimators import DropoutClassifier
from tests.app.report.pages import QUICK, Page, class_rows


@pytest.mark.parametrize("n_classes", [2, 12, 50])
def test_any_number_of_classes(n_classes):
    x, labels = class_rows(10 * n_classes, n_classes)
    model = DropoutClassifier(**QUICK | {"n_steps": 20}, random_state=0).fit(x, labels)
    text = report(model, x, labels, target="class")
    assert len(text) < 400_000
    page = Page(text)
    assert f"one of {n_classes} classes" in page.text
    assert ('id="figure-confusion"' in text) == (n_classes <= figures.CONFUSION_CLASSES)
