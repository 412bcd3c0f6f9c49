"""Rows of another kind are told from known ones by their uncertainty."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.predictive import detect_outliers
from dropbayes.scores import auroc


def predictions(likelihood, n_outputs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, n_outputs))
    return [db.predict(net, scale * torch.randn(40, 3), likelihood=likelihood, n_draws=30) for scale in (1.0, 6.0)]


def test_classes_are_detected_by_each_of_their_uncertainties():
    known, other = predictions(db.Categorical(), 4)
    found = detect_outliers(known, other)
    assert list(found.scores) == ["entropy", "mutual_information", "variation_ratio", "epistemic"]
    both = torch.cat([known.mutual_information, other.mutual_information])
    expected = auroc(both, torch.arange(80) >= 40)
    assert found.scores["mutual_information"]["auroc"] == pytest.approx(float(expected))


def test_the_rate_is_that_of_the_rows_that_pass_where_95_percent_of_the_known_do():
    known, other = predictions(db.Gaussian(1.0), 1)
    found = detect_outliers(known, other)
    threshold = known.variance[:, 0].sort().values[37]  # the 38th of 40
    share = float((other.variance[:, 0] <= threshold).double().mean())
    assert found.scores["variance"]["fpr_at_95"] == pytest.approx(share)
    assert found.scores["epistemic"]["auroc"] > 0.9
    assert "40 rows among 40 known ones" in str(found) and "<th>AUROC</th>" in found._repr_html_()


def test_predictions_of_two_likelihoods_are_refused():
    with pytest.raises(ValueError, match="`other` must have the likelihood of `known`"):
        detect_outliers(predictions(db.Categorical(), 4)[0], predictions(None, 1)[1])
