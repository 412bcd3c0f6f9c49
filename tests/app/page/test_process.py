"""The page's covariances and exact process are dropbayes' own."""

import numpy as np
import pytest
import torch

from dropbayes.processes import Cosine, Deep, Erf, ReLU, TanH, exact_process
from tests.app.page.javascript import call, needs_node

pytestmark = needs_node
X, Y = np.linspace(-3, 3, 13), np.array([-2.9, -1.0, -0.03, 0.0, 0.03, 1.3, 3.0])
LAYERS = {"relu": ReLU, "erf": Erf, "tanh": TanH}


def ours(kind, depth, length_scale, bias_scale):
    scales = (length_scale, *[1.0] * (depth - 1))
    return Deep(tuple(Cosine(s) if kind == "cosine" else LAYERS[kind](s, bias_scale) for s in scales))


def setting(kind, depth, length_scale, bias_scale):
    return {"kind": kind, "depth": depth, "lengthScale": length_scale, "biasScale": bias_scale}


@pytest.mark.parametrize("length_scale", [0.3, 2.0])
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("kind", ["relu", "erf", "cosine", "tanh"])
def test_covariances_are_those_of_the_library(kind, depth, length_scale):
    values = np.array(
        call("covariances.js", "covarianceMatrix", setting(kind, depth, length_scale, 0.7), X.tolist(), Y.tolist())
    )
    expected = ours(kind, depth, length_scale, 0.7)(torch.tensor(X)[:, None], torch.tensor(Y)[:, None]).numpy()
    tolerance = 1e-4 if kind == "tanh" else 1e-7  # the page ends the Hermite series of a saturated TanH early
    assert np.abs(values.reshape(expected.shape) - expected).max() < tolerance * max(1, np.abs(expected).max())


@pytest.mark.parametrize("kind", ["relu", "erf", "cosine", "tanh"])
def test_prior_variances_are_the_diagonal(kind):
    values = call("covariances.js", "priorVariances", setting(kind, 3, 0.5, 1.0), X.tolist())
    assert np.allclose(values, ours(kind, 3, 0.5, 1.0).diagonal(torch.tensor(X)[:, None]), rtol=1e-6)


@pytest.mark.parametrize("kind", ["relu", "erf", "cosine", "tanh"])
def test_the_posterior_is_that_of_the_library(kind):
    y = np.sin(2 * X)
    values = call("process.js", "posterior", setting(kind, 2, 0.5, 1.0), X.tolist(), y.tolist(), 100.0, Y.tolist())
    process = exact_process(ours(kind, 2, 0.5, 1.0), torch.tensor(X)[:, None], torch.tensor(y), precision=100.0)
    at = torch.tensor(Y)[:, None]
    assert np.allclose(values["mean"], process.mean(at), atol=1e-4)
    assert np.allclose(np.sqrt(values["variance"]), process.variance(at).sqrt(), atol=1e-4)


def test_without_points_the_posterior_is_the_prior():
    values = call("process.js", "posterior", setting("relu", 1, 1.0, 1.0), [], [], 1.0, [0.0, 2.0])
    assert values["mean"] == [0, 0]
    assert np.allclose(values["variance"], [0.5, 2.5])  # half the second moment of the pre-activation


def test_points_that_lie_on_each_other_do_no_harm():
    values = call("process.js", "posterior", setting("cosine", 1, 1.0, 1.0), [0.5] * 5, [1.0] * 5, 1e4, [0.5])
    assert abs(values["mean"][0] - 1) < 1e-3 and 0 <= values["variance"][0] < 1e-4
