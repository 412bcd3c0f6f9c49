"""Networks and estimators behind a predictor."""

import numpy as np
import pandas as pd
import torch
from torch import nn

import dropbayes as db


def same_bits(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_network_with_columns_is_read_by_its_likelihood():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
    predictor = db.Predictor(net, likelihood=db.Gaussian(precision=4.0), columns=("a", "b"), n_draws=20, seed=3)
    x = torch.randn(9, 2)
    found = predictor({"a": x[:, 0], "b": x[:, 1]})
    draws = db.draws(net, x, n_draws=20, seed=3)
    np.testing.assert_allclose(found["mean"], draws.mean(0), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(found["aleatoric"], 0.25)
    alone = predictor({"a": x[4:5, 0], "b": x[4:5, 1]})
    assert all(np.array_equal(alone[name], found[name][4:5]) for name in found)


def test_a_network_of_classes_over_pixels_keeps_its_shape():
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Dropout2d(0.5), nn.Conv2d(4, 3, 1))
    predictor = db.Predictor(net, likelihood=db.Categorical(class_axis=-3), n_draws=5)
    found = predictor({"x": np.random.default_rng(0).normal(size=(2, 1, 6, 6)).astype(np.float32)})
    assert found["probabilities"].shape == (2, 6, 6, 3) and found["entropy"].shape == (2, 6, 6)
    np.testing.assert_allclose(found["probabilities"].sum(-1), 1, rtol=1e-5)


def test_all_columns_may_come_as_one_matrix(tmp_path):
    x = np.random.default_rng(1).normal(size=(30, 2))
    frame = pd.DataFrame(x, columns=["a", "b"])
    model = db.DropoutRegressor((4,), drop_prob=0.1, weight_decay=1e-4, n_steps=5, n_networks=1, random_state=0)
    model.fit(frame, x[:, 0]).save(tmp_path / "model.safetensors")
    predictor = db.Predictor.load(tmp_path / "model.safetensors")
    assert predictor.inputs == {"a": "number", "b": "number"}
    assert same_bits(predictor({"x": x}), predictor({"a": x[:, 0], "b": x[:, 1], "other": x}))
