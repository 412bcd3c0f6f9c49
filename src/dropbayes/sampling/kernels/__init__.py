"""Triton kernels for keyed masks: the masks of docs/masks.md, generated in registers.

The package can be imported only where Triton is installed. Every kernel has a counterpart in torch operations with the
same bits of masks; the kernels have no backward pass.
"""

from dropbayes.sampling.kernels.attention import attention
from dropbayes.sampling.kernels.gathering import gathered_weights
from dropbayes.sampling.kernels.masking import dropout, uniforms
from dropbayes.sampling.kernels.moments import moments_over_draws
from dropbayes.sampling.kernels.perceptron import Affine, affine_layers, perceptron_moments

__all__ = [
    "Affine",
    "affine_layers",
    "attention",
    "dropout",
    "gathered_weights",
    "moments_over_draws",
    "perceptron_moments",
    "uniforms",
]
