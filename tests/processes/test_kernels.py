"""Tests of network covariances as kernels of scikit-learn."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

from dropbayes.processes import Cosine, Deep, NetworkKernel, Quadrature, ReLU, TanH
from tests.processes.samples import toy_data


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
    assert NetworkKernel(ReLU(), scale_bounds="fixed").n_dims == 0
    assert repr(NetworkKernel(Deep((ReLU(0.5), TanH())))).startswith("Deep(layer1_length_scale=0.5, layer1_bias")


def test_kernel_composes_and_tunes_inside_scikit_learn():
    x, y = toy_data(40)
    kernel = ConstantKernel(1.0) * NetworkKernel(Cosine(3.0)) + WhiteKernel(1.0)
    peer = ConstantKernel(1.0) * RBF(3.0, (1e-3, 1e3)) + WhiteKernel(1.0)
    ours, theirs = (GaussianProcessRegressor(k).fit(x.numpy(), y.numpy()) for k in (kernel, peer))
    assert ours.log_marginal_likelihood_value_ == pytest.approx(theirs.log_marginal_likelihood_value_, abs=1e-4)
    np.testing.assert_allclose(ours.kernel_.theta, theirs.kernel_.theta, atol=1e-2)


def test_a_kernel_names_its_function_and_knows_whether_it_is_stationary():
    assert "function=tanh" in repr(NetworkKernel(Quadrature(function=torch.tanh)))
    assert NetworkKernel(Cosine()).is_stationary() and not NetworkKernel(Cosine(1.0, 1.0)).is_stationary()
    assert not NetworkKernel(ReLU()).is_stationary()
