"""A model as it is served: the columns it knows, the version of its folder, and the outputs of the command line."""

import numpy as np
import pytest

pytest.importorskip("msgspec", reason="the extra `serve` is not installed")

import msgspec

from dropbayes.app.models.model import load
from dropbayes.app.serving.served import ServedModel
from tests.app.serving.test_application import COLUMNS


@pytest.fixture(scope="module")
def served(models):
    return ServedModel.load(models / "numbers")


def test_the_outputs_of_some_rows_are_those_of_the_model(served, models):
    rows = served.encode(COLUMNS, allow_new=False)
    found = served.complete(served.predictor.predict_inputs(rows.x), rows, served.predictor, 0.0)
    expected = load(models / "numbers").predict(COLUMNS)
    assert found["mean"].tolist() == expected["mean"] and found["outside"].tolist() == expected["outside"]
    assert found["deferred"].all() and set(found) == set(served.outputs)


def test_records_are_the_columns_of_the_schema(served):
    text = b'{"records": [{"size": null, "new": true, "city": "Oslo"}, {"size": 1, "city": "Rome", "new": false}]}'
    asked = msgspec.json.decode(text, type=served.records_type)
    assert served.columns_of(asked.records) == {"size": [None, 1.0], "city": ["Oslo", "Rome"], "new": [True, False]}


def test_a_matrix_beside_a_column_is_refused(served):
    with pytest.raises(ValueError, match="send it alone"):
        served.encode({"x": np.zeros((1, 3)), "size": [1.0]}, allow_new=False)
