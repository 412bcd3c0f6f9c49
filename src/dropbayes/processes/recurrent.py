r"""The Gaussian process of a recurrent network."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from dropbayes.covariances import Covariance, Layer, Pairs
from dropbayes.covariances.pairs import checked_inputs
from dropbayes.runtime.validation import check_count, check_positive

__all__ = ["RecurrentCovariance"]


@dataclass(frozen=True)
class RecurrentCovariance(Covariance):
    r"""The covariance of the last state of a recurrent network as its width grows.

    A state $\mathbf h_t = \sigma(\mathbf W \mathbf x_t + \mathbf U \mathbf h_{t-1} + \mathbf b)$ with $\mathbf h_0 = 0$
    and $\mathbf W \sim \mathcal N(0, l^{-2})$ and $\mathbf U \sim \mathcal N(0, l_h^{-2}/K)$ for all steps, has

    $$k_t(\mathbf x, \mathbf y) = \mathbb E[\sigma(u) \sigma(v)], \quad
    \operatorname{Cov}(u, v) = l^{-2} \mathbf x_t^T \mathbf y_t + l_h^{-2} k_{t-1}(\mathbf x, \mathbf y) + \beta^2:$$

    the recursion of [GG16, sect:going_deep] with an input at every layer. That the steps share their weights does not
    change it (Yang 2019): states at different steps are correlated, those at equal steps have this covariance. It is
    the process behind recursive and dynamical Gaussian process models [GG16, section "Applications"].

    Args:
        layer: $\sigma$, with $l$ of the input's weights and $\beta$ of the bias.
        n_steps: The number of time steps of a sequence.
        state_length_scale: $l_h$ of the recurrent weights, in units in which the paper's $l^2 = K$ is 1.

    Example:
        >>> import torch
        >>> from dropbayes.covariances import ReLU
        >>> covariance = RecurrentCovariance(ReLU(bias_scale=0.0), n_steps=2)
        >>> round(covariance(torch.tensor([[[2.0], [0.0]]])).item(), 6)  # each rectifier halves the variance
        1.0
    """

    layer: Layer
    n_steps: int
    state_length_scale: float | Tensor = 1.0

    def __post_init__(self) -> None:
        check_count("n_steps", self.n_steps)
        check_positive("state_length_scale", self.state_length_scale)
        if self.layer.bias_scale == math.inf:
            raise ValueError("`layer.bias_scale` must be finite for a recurrent network; got inf.")

    def __call__(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        r"""The covariance matrix, `[x row, y row]`, of sequences `[row, step, input]`, or flat ones."""
        rows = self._steps(x, "x")
        columns = rows if y is None else self._steps(y, "y")
        of_x, of_y = self._variances(rows), self._variances(columns)
        unit = self._unit_layer()
        covariance = rows.new_zeros(len(rows), len(columns))
        for step in range(self.n_steps):
            moved = self._next(rows[:, step] @ columns[:, step].T, covariance)
            covariance = unit.of_pairs(Pairs.of_process(of_x[step][:, None], moved, of_y[step]))
        return covariance

    def diagonal(self, x: Tensor) -> Tensor:
        variance = self._variances(self._steps(x, "x"))[-1]
        return self._unit_layer().of_pairs(Pairs.of_identical(variance.sqrt()[:, None]))[:, 0]

    def of_pairs(self, pairs: Pairs) -> Tensor:
        """Raises: a sequence is more than one inner product."""
        raise TypeError("`pairs` must be sequences: their steps have an inner product each. Call it on the inputs.")

    @property
    def scales(self) -> dict[str, float | Tensor]:
        return {**self.layer.scales, "state_length_scale": self.state_length_scale}

    def with_scales(self, values: Mapping[str, float | Tensor]) -> Self:
        own = {name: values[name] for name in self.layer.scales if name in values}
        state = values.get("state_length_scale", self.state_length_scale)
        return replace(self, layer=self.layer.with_scales(own), state_length_scale=state)

    def _steps(self, x: Tensor, name: str) -> Tensor:
        flat = checked_inputs(x.flatten(1) if isinstance(x, Tensor) and x.dim() > 2 else x, name)
        if flat.shape[1] % self.n_steps:
            raise ValueError(f"`{name}` must be [row, {self.n_steps} steps, input], flat or not; got {tuple(x.shape)}.")
        return flat.unflatten(1, (self.n_steps, -1))

    def _unit_layer(self) -> Layer:
        """The non-linearity of pre-activations, whose scales are in their covariance already."""
        return self.layer.with_scales({"length_scale": 1.0, "bias_scale": 0.0})

    def _next(self, product: Tensor, covariance: Tensor) -> Tensor:
        """The covariance of the next pre-activations."""
        scales = self.layer.length_scale, self.state_length_scale
        return product / scales[0] ** 2 + covariance / scales[1] ** 2 + self.layer.bias_scale**2

    def _variances(self, rows: Tensor) -> list[Tensor]:
        """The variance of every row's pre-activation at each step."""
        unit, state = self._unit_layer(), rows.new_zeros(len(rows))
        variances = []
        for step in rows.unbind(1):
            variances.append(self._next(step.square().sum(-1), state))
            state = unit.of_pairs(Pairs.of_identical(variances[-1].sqrt()[:, None]))[:, 0]
        return variances
