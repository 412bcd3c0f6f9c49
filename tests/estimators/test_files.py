"""Tests of the estimators as files and pickles."""

import pickle

import joblib
import numpy as np
import pytest

from dropbayes.estimators import DropoutClassifier, DropoutRegressor

QUICK = {
    "hidden": (20,), "drop_prob": 0.05, "weight_decay": 1e-4, "n_steps": 100, "n_folds": 2, "n_draws": 20,
    "n_networks": 2, "min_epochs": 1, "device": "cpu", "learning_rate": 0.01,
}  # fmt: skip


def toy(n: int = 150, *, noise: float = 0.2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    source = np.random.default_rng(seed)
    x = source.normal(size=(n, 2))
    return x, 100 + 20 * np.sin(x[:, 0]) + 20 * noise * source.normal(size=n)


@pytest.fixture(scope="module")
def regressor() -> DropoutRegressor:
    # With two inputs, dropping one costs much: the inputs are kept.
    settings = QUICK | {"n_steps": 1000, "n_draws": 200, "drop_prob": (0.0, 0.05), "noise": "constant"}
    return DropoutRegressor(**settings, random_state=0).fit(*toy(300))


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


def test_an_unknown_activation_in_a_file_is_refused(tmp_path, regressor):
    odd = pickle.loads(pickle.dumps(regressor))
    odd.activation = "sine"
    odd.save(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="unknown activation 'sine'"):
        DropoutRegressor.load(tmp_path / "m.safetensors")
