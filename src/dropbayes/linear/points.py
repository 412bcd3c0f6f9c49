"""Points of a Gaussian: a fixed set whose averages are nearly its expectations, in place of random draws."""

import torch
from torch import Tensor

N_POINTS = 256  #: The number of points: a class probability is then within about 0.005 of its expectation.


def standard_points(n_axes: int, n_points: int = N_POINTS) -> Tensor:
    """Points of the standard Gaussian, `[point, axis]`: scrambled Sobol numbers, each with its opposite: of mean 0."""
    engine = torch.quasirandom.SobolEngine(n_axes, scramble=True, seed=0)
    half = torch.special.ndtri(engine.draw(n_points // 2, dtype=torch.float64).clamp(1e-9, 1 - 1e-9))
    points = torch.cat([half, -half])
    covariance = points.T @ points / n_points
    if n_axes > n_points // 4:  # the covariance is 1 on each axis; of fewer axes, it is 1 exactly
        return points / covariance.diagonal().sqrt()
    return torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), points.T, upper=False).T


def gaussian_points(mean: Tensor, covariance: Tensor) -> Tensor:
    """Points of Gaussians `[row, output]` with covariances `[row, output, output]`: `[point, row, output]`."""
    levels, axes = torch.linalg.eigh(covariance)
    root = axes * levels.clamp(min=0).sqrt().unsqueeze(-2)
    return mean + torch.einsum("pk,rjk->prj", standard_points(mean.shape[-1]).to(root), root)
