"""All kernels; the module can be imported only where Triton is installed."""

from dropbayes.sampling.kernels.attention import attention
from dropbayes.sampling.kernels.masking import dropout, uniforms
from dropbayes.sampling.kernels.moments import moments_over_draws

__all__ = ["attention", "dropout", "moments_over_draws", "uniforms"]
