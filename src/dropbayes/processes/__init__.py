"""Gaussian processes behind a network: the covariance of its hidden units, and its exact, finite-rank and deep process.

The engines are scikit-learn's `GaussianProcessRegressor` and `GaussianProcessClassifier`; this package adds the paper's
covariances as their kernels, and the paper's own steps between them.
"""

from dropbayes.processes.covariances import (
    Cosine,
    Erf,
    Features,
    Identity,
    Layer,
    Quadrature,
    RandomBias,
    ReLU,
    Sigmoid,
    Step,
    TanH,
)
from dropbayes.processes.deep import Deep, RecurrentCovariance, network_prior_draws
from dropbayes.processes.exact import ExactProcess, NetworkKernel, Process, exact_process, prior_draws, tuned_covariance
from dropbayes.processes.finite_rank import Evidence, FiniteRankProcess, finite_rank_process, network_evidence
from dropbayes.processes.networks import NetworkCovariance, process_of
from dropbayes.processes.pairs import Covariance, Pairs
from dropbayes.processes.softmax import SoftmaxProcess, softmax_process
from dropbayes.processes.theory import TheoryReport, VarianceRatio, WeightReading, theory_report, variance_ratio

__all__ = [
    "Cosine",
    "Covariance",
    "Deep",
    "Erf",
    "Evidence",
    "ExactProcess",
    "Features",
    "FiniteRankProcess",
    "Identity",
    "Layer",
    "NetworkCovariance",
    "NetworkKernel",
    "Pairs",
    "Process",
    "Quadrature",
    "RandomBias",
    "ReLU",
    "RecurrentCovariance",
    "Sigmoid",
    "SoftmaxProcess",
    "Step",
    "TanH",
    "TheoryReport",
    "VarianceRatio",
    "WeightReading",
    "exact_process",
    "finite_rank_process",
    "network_evidence",
    "network_prior_draws",
    "prior_draws",
    "process_of",
    "softmax_process",
    "theory_report",
    "tuned_covariance",
    "variance_ratio",
]
