"""Tests of the estimators as files and pickles."""

import pickle

import joblib
import numpy as np
import pytest

from dropbayes.estimators import DropoutClassifier, DropoutRegressor
from tests.estimators.samples import toy


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
        assert (copy.held_out_score_, copy.baseline_score_) == (regressor.held_out_score_, regressor.baseline_score_)
        copy.partial_fit(*toy(10))  # a copy can go on learning
    with pytest.raises(ValueError, match="holds a 'DropoutRegressor'"):
        DropoutClassifier.load(tmp_path / "m.safetensors")


def test_an_unknown_activation_in_a_file_is_refused(tmp_path, regressor):
    odd = pickle.loads(pickle.dumps(regressor))
    odd.activation = "sine"
    odd.save(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="unknown activation 'sine'"):
        DropoutRegressor.load(tmp_path / "m.safetensors")
