"""Keras models on torch: every random layer is keyed, nothing of the model is moved."""

import os

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.guests.keras import KerasNetwork

os.environ.setdefault("KERAS_BACKEND", "torch")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def keras():
    return pytest.importorskip("keras", reason="keras is not installed: `make test-guests` installs it")


def spatial(keras, layers):
    i = keras.Input((6, 6, 2))
    h = layers.SpatialDropout2D(0.3)(layers.Conv2D(4, 3, activation="relu")(i))
    return keras.Model(i, layers.Dense(2)(layers.GaussianDropout(0.2)(layers.Flatten()(h)))), torch.randn(4, 6, 6, 2)


def recurrent(keras, layers):
    i = keras.Input((5, 3))
    return keras.Model(i, layers.Dense(2)(layers.LSTM(8, dropout=0.3, recurrent_dropout=0.2)(i))), torch.randn(4, 5, 3)


def attention(keras, layers):
    i = keras.Input((5, 8))
    return keras.Model(i, layers.Dense(2)(layers.MultiHeadAttention(2, 4, dropout=0.3)(i, i))), torch.randn(4, 5, 8)


def seeded(keras, layers):
    return keras.Sequential(
        [keras.Input((4,)), layers.Dense(8), layers.Dropout(0.4, seed=3), layers.Dense(1)]
    ), torch.randn(4, 4)


@pytest.mark.parametrize("made", [spatial, recurrent, attention, seeded])
def test_the_moments_are_those_of_kerass_own_dropout(keras, made):
    """Against 400 passes of Keras with `training=True`, on models without normalisation."""
    keras.utils.set_random_seed(0)
    model, x = made(keras, keras.layers)
    before = [np.array(variable) for variable in model.variables]
    seeds = [id(getattr(layer, "seed_generator", None)) for layer in model._flatten_layers()]
    prediction = db.predict(KerasNetwork(model), x, n_draws=400)
    assert all(map(np.array_equal, before, map(np.array, model.variables)))  # the states of seeds, too
    assert seeds == [id(getattr(layer, "seed_generator", None)) for layer in model._flatten_layers()]
    assert not any("call" in vars(layer) for layer in model._flatten_layers())
    with torch.no_grad():
        theirs = torch.stack([model(x, training=True) for _ in range(400)])
    error = theirs.std(0) / 20
    assert ((prediction.mean - theirs.mean(0)).abs() < 6 * error + 1e-6).all()
    torch.testing.assert_close(prediction.std, theirs.std(0), rtol=0.3, atol=1e-6)


def test_sites_bear_the_names_of_layers(keras):
    model, x = seeded(keras, keras.layers)
    (site,) = db.sites(KerasNetwork(model), x)
    assert site.path.startswith("dropout") and site.drop_prob == pytest.approx(0.4)


def test_a_model_of_another_backend_is_refused():
    class Functional:  # as Keras' models are on TensorFlow and JAX: no modules of torch
        pass

    with pytest.raises(TypeError, match="`model` must run on torch, unlike this Functional: set KERAS_BACKEND=torch"):
        KerasNetwork(Functional())


def test_the_model_itself_without_the_adapter_is_refused_and_not_read_as_certain(keras):
    model, x = seeded(keras, keras.layers)
    with pytest.raises(ValueError):
        db.predict(model, x)
    assert isinstance(model, nn.Module)
