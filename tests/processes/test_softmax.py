"""Tests of the softmax process: against the logistic one for two classes, and against integration for three."""

import math

import pytest
import torch
from sklearn.gaussian_process import GaussianProcessClassifier
from sklearn.gaussian_process.kernels import ConstantKernel

from dropbayes.processes import Cosine, NetworkKernel, ReLU, softmax_process

X = torch.randn(14, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_two_classes_are_the_logistic_process_of_twice_the_covariance():
    # The difference of two latent functions has covariance 2K, and their sum is left as it was.
    labels = (X[:, 0] > 0.2).long()
    ours = softmax_process(ReLU(), X, labels)
    kernel = ConstantKernel(2.0, "fixed") * NetworkKernel(ReLU())
    theirs = GaussianProcessClassifier(kernel, optimizer=None).fit(X.numpy(), labels.numpy())
    assert ours.log_marginal_likelihood == pytest.approx(theirs.log_marginal_likelihood_value_, abs=1e-6)
    new = X + 0.3
    probabilities = ours.probabilities(new, n_draws=20_000)[:, 1]
    expected = torch.as_tensor(theirs.predict_proba(new.numpy())[:, 1])
    torch.testing.assert_close(probabilities, expected, rtol=0, atol=0.01)


def test_three_classes_have_nearly_the_integrated_evidence_and_predictions():
    x, labels = torch.tensor([[0.0], [1.0]], dtype=torch.float64), torch.tensor([0, 2])
    process = softmax_process(Cosine(1.0), x, labels, n_classes=3)
    new = torch.tensor([[0.4]], dtype=torch.float64)
    root = torch.linalg.cholesky(Cosine(1.0)(torch.cat([x, new])) + 1e-10 * torch.eye(3, dtype=x.dtype))
    latent = torch.randn(200_000, 3, 3, dtype=x.dtype, generator=torch.Generator().manual_seed(1)) @ root.T
    log_softmax = latent.log_softmax(1)  # [draw, class, row]
    log_weight = log_softmax[:, 0, 0] + log_softmax[:, 2, 1]
    assert process.log_marginal_likelihood == pytest.approx(
        (log_weight.logsumexp(0) - math.log(200_000)).item(), abs=0.06
    )
    exact = log_weight.softmax(0) @ log_softmax[:, :, 2].exp()
    torch.testing.assert_close(process.probabilities(new, n_draws=20_000)[0], exact, rtol=0, atol=0.02)


def test_the_mode_is_where_newtons_equation_holds():
    labels = torch.arange(14) % 3
    process = softmax_process(ReLU(0.5), X, labels)
    latent = process.mean(X)  # f = K (y - π(f)) at the mode
    torch.testing.assert_close(
        torch.nn.functional.one_hot(labels, 3) - latent.softmax(-1), process.residual, rtol=1e-5, atol=1e-6
    )
    assert (torch.linalg.eigvalsh(process.latent_covariance(X + 0.1)) > -1e-9).all()


def test_single_precision_gives_the_same_in_single_precision():
    labels = (X[:, 0] > 0.2).long()
    exact, single = (softmax_process(ReLU(), x, labels).probabilities(x + 0.3) for x in (X, X.float()))
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, rtol=0, atol=1e-5)


def test_labels_are_checked():
    with pytest.raises(ValueError, match="`labels` must be integers, one class index"):
        softmax_process(ReLU(), X, X[:, 0])
    with pytest.raises(ValueError, match="must lie between 0 and 1"):
        softmax_process(ReLU(), X, torch.arange(14) % 3, n_classes=2)
