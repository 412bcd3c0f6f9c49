r"""The training of one network on the paper's objective, with checkpoints that survive a kill at any moment."""

from dropbayes.training.checkpoints import History
from dropbayes.training.fitting import InverseDecay, Progress, fit

__all__ = ["History", "InverseDecay", "Progress", "fit"]
