r"""The training of one network on the paper's objective, with checkpoints that survive termination at any moment."""

from dropbayes.training.checkpoints import Checkpoint, History
from dropbayes.training.fitting import Progress, fit
from dropbayes.training.objective import Objective, kl_divergence, negative_elbo
from dropbayes.training.optimization import EarlyStopping, InverseDecay, Optimization

__all__ = [
    "Checkpoint",
    "EarlyStopping",
    "History",
    "InverseDecay",
    "Objective",
    "Optimization",
    "Progress",
    "fit",
    "kl_divergence",
    "negative_elbo",
]
