"""How a prediction is read and how it shows itself."""

import math

import pytest
import torch
from torch import nn

import dropbayes as db


def predicted(n_rows=12, n_outputs=1, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, n_outputs))
    return db.predict(net, torch.randn(n_rows, 3), **options)


def test_an_interval_holds_its_share_of_a_gaussian():
    prediction = predicted(likelihood=db.Gaussian(precision=4.0))
    lower, upper = prediction.interval(0.8)
    normal = torch.distributions.Normal(prediction.mean, prediction.std)
    torch.testing.assert_close(normal.cdf(upper) - normal.cdf(lower), torch.full((12, 1), 0.8))
    torch.testing.assert_close((lower + upper) / 2, prediction.mean)


@pytest.mark.parametrize("level", [0.0, 1.0, 90])
def test_an_interval_of_an_impossible_level_is_refused(level):
    with pytest.raises(ValueError, match="`level` must lie strictly between 0 and 1"):
        predicted().interval(level)


def test_classes_have_no_interval():
    with pytest.raises(ValueError, match="classes have probabilities"):
        predicted(n_outputs=3, likelihood=db.Categorical()).interval()


def test_rows_are_picked_by_index_slice_and_mask():
    prediction = predicted(keep_draws=True, n_draws=7)
    for index, n_rows in ((-1, 1), (slice(2, 5), 3), (prediction.mean[:, 0] > prediction.mean.median(), 6)):
        some = prediction[index]
        assert len(some) == n_rows and some.draws.shape == (7, n_rows, 1)
    torch.testing.assert_close(prediction[3].std, prediction.std[3:4])


def test_arrays_and_tables_hold_the_same_numbers():
    prediction = predicted(likelihood=db.Gaussian(precision=4.0))
    assert prediction.numpy()["std"].tolist() == prediction.std.tolist()
    table = prediction.to_pandas()
    assert list(table) == ["mean", "std", "epistemic_std"] and len(table) == 12
    assert math.isclose(table["std"][4], float(prediction.std[4]))
    classes = predicted(n_outputs=3, likelihood=db.Categorical()).to_pandas()
    assert list(classes) == ["probability_0", "probability_1", "probability_2", "entropy", "mutual_information"]


def test_a_prediction_shows_itself_in_a_few_lines():
    prediction = predicted(n_rows=1000)
    assert len(repr(prediction)) < 120 and "1000 rows" in repr(prediction)
    assert str(prediction).count("\n") <= 13 and "…" in str(prediction)
    assert prediction._repr_html_().count("<tr>") == 12


def test_several_outputs_are_read_by_their_fields():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.d = nn.Linear(3, 2), nn.Dropout(0.5)

        def forward(self, x):
            return {"a": self.d(self.a(x)), "b": x}

    prediction = db.predict(Two(), torch.randn(4, 3))
    assert "(4, 2), (4, 3)" in repr(prediction) and str(prediction) == repr(prediction)
    with pytest.raises(TypeError, match="several tensors"):
        prediction[0]
