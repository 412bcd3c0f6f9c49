"""Tests of network covariances as kernels of scikit-learn and GPyTorch."""

import sys

import gpytorch
import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from dropbayes.covariances import Cosine, Quadrature, ReLU, TanH
from dropbayes.processes import (
    Deep,
    NetworkKernel,
    exact_process,
    gpytorch_kernel,
)
from tests.processes.samples import GRID, PRECISION, toy_data


def test_kernel_clones_prints_and_compares_as_kernels_do():
    kernel = NetworkKernel(ReLU(0.5, 2.0))
    assert repr(kernel) == "ReLU(length_scale=0.5, bias_scale=2)"
    assert clone(kernel) == kernel
    moved = kernel.clone_with_theta(np.log([3.0, 4.0])).covariance
    assert (moved.length_scale, moved.bias_scale) == pytest.approx((3.0, 4.0))
    assert kernel.covariance == ReLU(0.5, 2.0)
    np.testing.assert_allclose(kernel.theta, np.log([0.5, 2.0]))
    np.testing.assert_allclose(kernel.bounds, np.log([[1e-3, 1e3]] * 2))
    assert NetworkKernel(Cosine(0.5)).n_dims == 1  # the uniform phase is not a scale to tune
    assert NetworkKernel(ReLU(bias_scale=0.0)).n_dims == 1
    assert NetworkKernel(ReLU(), bounds="fixed").n_dims == 0
    assert repr(NetworkKernel(Deep((ReLU(0.5), TanH())))).startswith("Deep(layer1_length_scale=0.5, layer1_bias")


def test_kernel_composes_and_tunes_inside_scikit_learn():
    x, y = toy_data(40)
    kernel = ConstantKernel(1.0) * NetworkKernel(Cosine(3.0)) + WhiteKernel(1.0)
    peer = ConstantKernel(1.0) * RBF(3.0, (1e-3, 1e3)) + WhiteKernel(1.0)
    ours, theirs = (GaussianProcessRegressor(k).fit(x.numpy(), y.numpy()) for k in (kernel, peer))
    assert ours.log_marginal_likelihood_value_ == pytest.approx(theirs.log_marginal_likelihood_value_, abs=1e-4)
    np.testing.assert_allclose(ours.kernel_.theta, theirs.kernel_.theta, atol=1e-2)


def gpytorch_posterior(covariance, x, y, at):
    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood):
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch_kernel(covariance).double()

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = 1 / PRECISION
    with torch.no_grad():
        return Model(likelihood).eval()(at)


@pytest.mark.parametrize("n_rows", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_gpytorch_gives_the_same_posterior(n_rows):
    x, y = toy_data(n_rows)
    posterior = gpytorch_posterior(ReLU(0.8, 0.6), x, y, GRID)
    process = exact_process(ReLU(0.8, 0.6), x, y, precision=PRECISION)
    # GPyTorch rounds the scales to float32, and above 800 rows solves by conjugate gradients.
    tolerance = 1e-5 if n_rows < 800 else 2e-2
    torch.testing.assert_close(posterior.mean, process.mean(GRID), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(posterior.variance, process.variance(GRID), rtol=10 * tolerance, atol=tolerance)


def test_gpytorch_kernel_learns_positive_scales():
    kernel = gpytorch_kernel(Deep((ReLU(0.8, 0.6), TanH(bias_scale=0.0)))).double()
    names = dict(kernel.named_parameters())
    assert set(names) == {"raw_layer1_length_scale", "raw_layer1_bias_scale", "raw_layer2_length_scale"}
    assert float(kernel.covariance.layers[0].length_scale.detach()) == pytest.approx(0.8)
    kernel(GRID[:3]).to_dense().sum().backward()
    assert all(p.grad.isfinite() and p.grad != 0 for p in kernel.parameters())
    torch.testing.assert_close(kernel(GRID, diag=True), kernel(GRID).to_dense().diagonal())


def test_gpytorch_missing_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gpytorch", None)
    with pytest.raises(ImportError, match=r"dropbayes\[gp\]"):
        gpytorch_kernel(ReLU())


def test_a_kernel_names_its_function_and_knows_whether_it_is_stationary():
    assert "function=tanh" in repr(NetworkKernel(Quadrature(function=torch.tanh)))
    assert NetworkKernel(Cosine()).is_stationary() and not NetworkKernel(Cosine(1.0, 1.0)).is_stationary()
    assert not NetworkKernel(ReLU()).is_stationary()
