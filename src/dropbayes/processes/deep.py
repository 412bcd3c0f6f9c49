r"""The deep Gaussian process of the paper, its prior and the covariance it tends to; with an input at every layer."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from dropbayes.processes.covariances import Layer
from dropbayes.processes.pairs import Covariance, Pairs
from dropbayes.runtime.validation import check_count, check_positive


def checked_layers(layers: Sequence[Layer]) -> None:
    if not isinstance(layers, Sequence) or not layers or not all(isinstance(layer, Layer) for layer in layers):
        raise ValueError(f"`layers` must be one or more covariances of a layer, first layer first; got {layers!r}.")


@dataclass(frozen=True)
class Deep(Covariance):
    r"""The covariance of a deep network's output as all its widths grow [GG16, sect:going_deep].

    $$\mathbf K_i(\mathbf x, \mathbf y) = \mathbb E[\sigma_i(u) \sigma_i(v)], \quad
    \operatorname{Cov}(u, v) = l_i^{-2} \mathbf K_{i-1}(\mathbf x, \mathbf y) + \beta_i^2,$$

    with $\mathbf K_0 = \mathbf x^T \mathbf y$: the paper's $\mathbf K_2$ averaged over $\mathbf F_1$, for the
    covariances of any number of `layers`, first layer first. (The paper has $l_i = 1$ after the first.)

    From the second layer on, inputs are distinguished by differences of covariances, to half the digits of the dtype:
    `Step` shows this for nearly equal inputs, and `Cosine` for a variance below it of 1e8 or more (1e4 in float32).

    Example:
        >>> from dropbayes.processes import ReLU
        >>> layer = ReLU(bias_scale=0.0)
        >>> round(Deep((layer, layer))(torch.tensor([[2.0]])).item(), 6)  # each rectifier halves the variance
        1.0
    """

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        checked_layers(self.layers)

    def of_pairs(self, pairs: Pairs) -> Tensor:
        for layer in self.layers[:-1]:
            pairs = layer.units(pairs)
        return self.layers[-1].of_pairs(pairs)

    @property
    def scales(self) -> dict[str, float | Tensor]:
        numbered = enumerate(self.layers, start=1)
        return {f"layer{i}_{name}": value for i, layer in numbered for name, value in layer.scales.items()}

    def with_scales(self, values: Mapping[str, float | Tensor]) -> Self:
        numbered = enumerate(self.layers, start=1)
        return type(self)(tuple(layer.with_own_scales(values, f"layer{i}_") for i, layer in numbered))


@dataclass(frozen=True)
class RecurrentCovariance(Covariance):
    r"""The covariance of the last state of a recurrent network as its width grows.

    A state $\mathbf h_t = \sigma(\mathbf W \mathbf x_t + \mathbf U \mathbf h_{t-1} + \mathbf b)$ with $\mathbf h_0 = 0$
    and $\mathbf W \sim \mathcal N(0, l^{-2})$, $\mathbf U \sim \mathcal N(0, l_h^{-2}/K)$ for all steps, has

    $$k_t(\mathbf x, \mathbf y) = \mathbb E[\sigma(u) \sigma(v)], \quad
    \operatorname{Cov}(u, v) = l^{-2} \mathbf x_t^T \mathbf y_t + l_h^{-2} k_{t-1}(\mathbf x, \mathbf y) + \beta^2:$$

    the recursion of [GG16, sect:going_deep] with an input at every layer, behind recursive and dynamical Gaussian
    process models [GG16, section "Applications"]. That the steps share their weights does not change it (Yang 2019).

    Args:
        layer: $\sigma$, with $l$ of the input's weights and $\beta$ of the bias.
        n_steps: The number of time steps of a sequence.
        state_length_scale: $l_h$ of the recurrent weights, in units in which the paper's $l^2 = K$ is 1.

    Example:
        >>> from dropbayes.processes import ReLU
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

    def parts(self, x: Tensor, name: str) -> Tensor:
        """Sequences `[row, step, input]`, or flat ones, as `[step, row, input]`."""
        if x.flatten(1).shape[1] % self.n_steps:
            raise ValueError(f"`{name}` must be [row, {self.n_steps} steps, input], flat or not; got {tuple(x.shape)}.")
        return x.flatten(1).unflatten(1, (self.n_steps, -1)).movedim(1, 0)

    def of_pairs(self, pairs: Pairs) -> Tensor:
        """The covariance of sequences whose steps are the first axis."""
        unit = self.layer.with_scales({"length_scale": 1.0, "bias_scale": 0.0})  # the scales are in the pairs
        entering = pairs.affine(self.layer.length_scale, self.layer.bias_scale)
        sums, *later = (Pairs(*step) for step in zip(*vars(entering).values(), strict=True))
        for step in later:
            sums = step.through(torch.add, unit.units(sums).affine(self.state_length_scale, 0.0))
        return unit.of_pairs(sums)

    @property
    def scales(self) -> dict[str, float | Tensor]:
        return {**self.layer.scales, "state_length_scale": self.state_length_scale}

    def with_scales(self, values: Mapping[str, float | Tensor]) -> Self:
        state = values.get("state_length_scale", self.state_length_scale)
        return replace(self, layer=self.layer.with_own_scales(values), state_length_scale=state)


def network_prior_draws(
    layers: Sequence[Layer],
    x: Tensor,
    *,
    widths: Sequence[int],
    n_draws: int,
    n_outputs: int = 1,
    output_bias: float = 0.0,
    seed: int = 0,
) -> Tensor:
    r"""Functions drawn from the prior of the network, which is the deep Gaussian process: `[draw, row, output]`.

    [GG16, sect:going_deep], for any number $L$ of hidden layers:
    $\phi_{1,nk} = K_1^{-1/2} \sigma_1(\mathbf w_{1,k}^T \mathbf x_n + b_{1,k})$,
    $\mathbf F_i = \Phi_i \mathbf W_{i+1} \sim \mathcal N(0, \widehat{\mathbf K}_i)$,
    $\phi_{i,nk} = K_i^{-1/2} \sigma_i(f_{i-1,nk} + b_{i,k})$; the output is $\mathbf F_L + \mathbf b_L$. Every draw
    has its own weights and biases. The covariance of each of the `layers` gives its $p(\mathbf w)$, $p(b)$ and
    $\sigma$, `widths` are $K_1, \dots, K_L$, `n_outputs` is $D$ and `output_bias` $\mathbf b_L$.

    Example:
        >>> from dropbayes.processes import ReLU
        >>> network_prior_draws([ReLU(), ReLU()], torch.ones(5, 3), widths=[20, 30], n_draws=7).shape
        torch.Size([7, 5, 1])
    """
    checked_layers(layers)
    check_count("n_draws", n_draws)
    if not hasattr(widths, "__len__") or len(widths) != len(layers) or min(widths) < 1:
        raise ValueError(f"`widths` must be one positive width for each of the {len(layers)} layers; got {widths!r}.")
    generator = torch.Generator().manual_seed(seed)
    draws = []
    for _ in range(n_draws):
        seeds = torch.randint(2**62, (len(layers),), generator=generator, device="cpu").tolist()
        phi = x
        for layer, width, layer_seed in zip(layers, widths, seeds, strict=True):
            phi = layer.features(phi.shape[-1], width, seed=layer_seed)(phi)
        weights = torch.randn(phi.shape[-1], n_outputs, generator=generator, dtype=torch.float64, device="cpu").to(x)
        draws.append(phi @ weights + output_bias)
    return torch.stack(draws)
