r"""The training of one network on the paper's objective, with checkpoints that survive termination at any moment."""

from dropbayes.training.checkpoints import Checkpoint, History
from dropbayes.training.descent import Descent, InverseDecay
from dropbayes.training.fitting import Progress, fit
from dropbayes.training.objective import kl_divergence, last_layer_moments, negative_elbo
from dropbayes.training.settings import Bound
from dropbayes.training.stopping import EarlyStopping

__all__ = [
    "Bound",
    "Checkpoint",
    "Descent",
    "EarlyStopping",
    "History",
    "InverseDecay",
    "Progress",
    "fit",
    "kl_divergence",
    "last_layer_moments",
    "negative_elbo",
]
