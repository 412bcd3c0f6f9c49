r"""The predictions of a population: draws, predictive moments and log-likelihoods of all members at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dropbayes.population import randomness
from dropbayes.population.program import forward
from dropbayes.population.records import Population, as_columns, select

# Mask elements in flight: enough to fill the device, few enough for its cache (CPU) or memory (CUDA).
_ELEMENTS = {"cpu": 2**21, "cuda": 2**27}
_EVALUATION = 6


@dataclass(frozen=True, eq=False)
class Evaluation:
    r"""Predictions and scores of each member (axis 0) on its rows (axis 1), in the units of y.

    Attributes:
        mean: The predictive mean `[member, row, output]` (class probabilities for the categorical likelihood).
        epistemic: The variance over draws of the conditional mean, the same shape.
        variance: The predictive (total) variance: epistemic plus the mean of the noise.
        log_density: $\log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)$ of each row, `[member, row]`.
        y: The outcomes `[member, row, output]`.
        valid: Which rows are true ones; tasks with fewer rows are padded.
        task: The task of each member.
    """

    mean: Tensor
    epistemic: Tensor
    variance: Tensor
    log_density: Tensor
    y: Tensor
    valid: Tensor
    task: Tensor

    def _row_mean(self, values: Tensor) -> Tensor:
        return torch.where(self.valid, values, 0).sum(1) / self.valid.sum(1)

    @property
    def log_likelihood(self) -> Tensor:
        """The mean log-density of each member's rows [GG16, eq:predictive_dist]."""
        return self._row_mean(self.log_density)

    @property
    def rmse(self) -> Tensor:
        """The root mean squared error of each member's predictive mean."""
        return self._row_mean((self.y - self.mean).square().mean(-1)).sqrt()

    @property
    def accuracy(self) -> Tensor:
        """The share of rows whose most probable class is the true one."""
        return self._row_mean((self.mean.argmax(-1) == self.y[..., 0]).to(self.mean.dtype))


def draws(population: Population, x: Any, *, n_draws: int, seed: int = 0, masks: str = "row") -> tuple[Tensor, Tensor]:
    """Sampled means `[draw, member, row, output]` of every member and their noise variances, in the units of y.

    Args:
        population: The networks.
        x: Inputs `[row, feature]` for all members, or a sequence of such, one per task.
        n_draws: T.
        seed: The seed of the draws.
        masks: "row" for a fresh mask for every row, "shared" for one mask per draw (a draw is then a function).

    For the categorical likelihood the means are class probabilities and the variances theirs.
    """
    inputs, _ = _task_rows(population, x)
    parts = list(_chunks(population, inputs, n_draws, seed, masks))
    means, variances = ([in_units(population, part)[i] for part in parts] for i in (0, 1))
    return torch.cat(means), torch.cat(variances)


def evaluate(
    population: Population, rows: Any, *, n_draws: int = 1000, seed: int = 0, masks: str = "row"
) -> Evaluation:
    r"""The `Evaluation` of every member on rows of its task, streamed over T draws of any number.

    The log-density of a row is $\log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)$ with the member's
    precision τ [GG16, eq:predictive_dist], its variance $\tau^{-1}$ plus the variance of the draws [GG16, prop:var].

    Args:
        population: The networks.
        rows: `(x, y)` for all members, or a sequence of such pairs, one per task.
        n_draws: T.
        seed: The seed of the draws.
        masks: "row" or "shared" (see `draws`).
    """
    pairs = [rows] if isinstance(rows, tuple) else list(rows)
    inputs, valid = _task_rows(population, [x for x, _ in pairs])
    y = _padded([as_columns(y, population.likelihood, torch.float64) for _, y in pairs])
    task = torch.tensor([m.task if len(pairs) > 1 else 0 for m in population.members])
    y, valid, task = y.to(population.device)[task.to(population.device)], valid[task], task
    parts = [
        _streamed(select(population, index), inputs, y[index], n_draws, seed, masks)
        for index in _member_groups(population, inputs.shape[1])
    ]
    mean, epistemic, variance, log_density = (torch.cat(part) for part in zip(*parts, strict=True))
    log_density = torch.where(population.diverged[:, None], -torch.inf, log_density)
    return Evaluation(mean, epistemic, variance, log_density, y, valid.to(y.device), task)


def _streamed(
    population: Population, inputs: Tensor, y: Tensor, n_draws: int, seed: int, masks: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    total: Any = 0.0
    squares: Any = 0.0
    noise: Any = 0.0
    log_sum = torch.full(y.shape[:2], -torch.inf, dtype=torch.float64, device=y.device)
    centre = None
    for outputs in _chunks(population, inputs, n_draws, seed, masks):
        mean, variance = in_units(population, outputs)
        centre = mean[0] if centre is None else centre  # sums about a first guess lose no digits to a large mean
        total = total + (mean - centre).sum(0)
        squares = squares + (mean - centre).square().sum(0)
        noise = noise + variance.sum(0)
        log_sum = torch.logaddexp(log_sum, _log_densities(population, mean, variance, y).logsumexp(0))
    shift = total / n_draws
    epistemic = (squares / n_draws - shift.square()).clamp(min=0)
    return centre + shift, epistemic, epistemic + noise / n_draws, log_sum - math.log(n_draws)


def _log_densities(population: Population, mean: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    if population.likelihood == "categorical":
        return mean.log().gather(-1, y.expand(*mean.shape[:-1], 1))[..., 0]
    return -0.5 * ((y - mean).square() / variance + variance.log() + math.log(2 * math.pi)).sum(-1)


def mixture(evaluation: Evaluation, groups: Sequence[int] | Tensor) -> Evaluation:
    r"""The evaluation of equally weighted mixtures: members with the same group number predict together.

    The mixture's density is the mean of its members', its variance the mean of theirs plus the variance of their
    means. The members of a group must have been evaluated on the same rows.
    """
    group = torch.as_tensor(groups, device=evaluation.mean.device)
    numbers = [(group == g).nonzero()[:, 0] for g in group.unique().tolist()]
    for index in numbers:
        if len(set(evaluation.task[index.cpu()].tolist())) > 1:
            raise ValueError("`groups` must join members of one task; got a group with members of several.")
    means = [evaluation.mean[i] for i in numbers]
    spread = [m.var(0, unbiased=False) for m in means]
    epistemic = torch.stack([evaluation.epistemic[i].mean(0) + s for i, s in zip(numbers, spread, strict=True)])
    variance = torch.stack([evaluation.variance[i].mean(0) + s for i, s in zip(numbers, spread, strict=True)])
    log_density = torch.stack([evaluation.log_density[i].logsumexp(0) - math.log(len(i)) for i in numbers])
    first = torch.stack([i[0] for i in numbers])
    return Evaluation(
        torch.stack([m.mean(0) for m in means]),
        epistemic,
        variance,
        log_density,
        evaluation.y[first],
        evaluation.valid[first],
        evaluation.task[first.cpu()],
    )


def fit_precision(
    population: Population,
    rows: Any,
    *,
    n_draws: int = 200,
    seed: int = 0,
    groups: Sequence[int] | Tensor | None = None,
) -> Population:
    r"""The population with the precision τ that maximises the log-likelihood of held-out rows; no retraining.

    Given the draws, $\ell(\tau) = \sum_n \log \tfrac1T \sum_t \mathcal N(\mathbf y_n; \widehat{\mathbf y}_t(\mathbf
    x_n), \tau^{-1})$ is a function of one number. In training, τ only sets the weight decay [GG16,
    eq:weightdecay_tau_relation], so the τ of prediction is free to be what held-out rows say it is.

    Args:
        population: The networks, Gaussian or heteroscedastic (there, τ scales the precision the network gives).
        rows: `(x, y)` for all members, or a sequence of such pairs, one per task, held out from training.
        n_draws: T.
        seed: The seed of the draws.
        groups: Members with the same group number share one τ (in standardised units): the folds of one candidate, say.
    """
    if population.likelihood == "categorical":
        return population
    pairs = [rows] if isinstance(rows, tuple) else list(rows)
    inputs, valid = _task_rows(population, [x for x, _ in pairs])
    y = _padded([as_columns(y, population.likelihood, torch.float64) for _, y in pairs]).to(population.device)
    task = torch.tensor([m.task if len(pairs) > 1 else 0 for m in population.members], device=population.device)
    group = torch.arange(len(population)) if groups is None else torch.as_tensor(groups)
    _, group = group.to(population.device).unique(return_inverse=True)
    unit = replace(population, precision=population.y_scale**-2)
    errors, logs = [], []
    for index in _member_groups(population, inputs.shape[1] * max(1, n_draws // 8)):
        part = select(unit, index)
        outputs = [in_units(part, o) for o in _chunks(part, inputs, n_draws, seed, "row")]
        mean, variance = torch.cat([m for m, _ in outputs]), torch.cat([v for _, v in outputs])
        errors.append(((y[task[index]] - mean).square() / variance).sum(-1).float())
        logs.append((-0.5 * variance.log()).sum(-1).float())
    error, log = torch.cat(errors, 1), torch.cat(logs, 1)
    tau = _best_precision(error, log, valid.to(task.device)[task], group, y.shape[-1])
    return replace(population, precision=tau[group][:, None] * population.y_scale**-2)


def _best_precision(error: Tensor, log: Tensor, valid: Tensor, group: Tensor, n_outputs: int) -> Tensor:
    r"""The maximiser of $\ell(\tau)$ for each group, from errors `[draw, member, row]`, by Newton's method in log τ.

    Where ℓ is not concave the step is that of expectation maximisation,
    $\tau \leftarrow D N / \sum_n \mathbb E_r[\text{error}_n]$, which never decreases ℓ.
    """
    n_groups = int(group.max()) + 1
    zeros = torch.zeros(n_groups, dtype=torch.float64, device=error.device)
    count = zeros.index_add(0, group, valid.sum(1).double()) * n_outputs
    error = torch.where(valid & error.isfinite(), error, 0)
    smallest = error.amin(0).double()  # start from the best draw of each row: an upper bound of τ
    log_tau = (count / zeros.index_add(0, group, smallest.sum(1)).clamp(min=1e-12)).log()
    for _ in range(40):
        tau = log_tau.exp()[group].to(error.dtype)[:, None]
        share = torch.softmax(-0.5 * tau * error + log, 0)
        first = (share * error).sum(0)
        second = (share * error.square()).sum(0) - first.square()
        mean = zeros.index_add(0, group, torch.where(valid, first * tau, 0).sum(1).double())
        spread = zeros.index_add(0, group, torch.where(valid, second * tau.square(), 0).sum(1).double())
        slope, curvature = 0.5 * (count - mean), -0.5 * mean + 0.25 * spread
        expectation = (count / mean.clamp(min=1e-12)).log()
        newton = torch.where(curvature < -1e-3 * count, -slope / curvature, expectation)
        step = newton.clamp(-1.0, 1.0)
        log_tau = log_tau + step
        if float(step.abs().max()) < 1e-4:
            break
    return log_tau.exp()


def _padded(parts: Sequence[Tensor]) -> Tensor:
    longest = max(len(part) for part in parts)
    return torch.stack([torch.nn.functional.pad(p, (0, 0, 0, longest - len(p))) for p in parts])


def _task_rows(population: Population, x: Any) -> tuple[Tensor, Tensor]:
    """Inputs of each task padded to `[task, row, feature]`, and which rows are true."""
    parts = [x] if isinstance(x, Tensor) or hasattr(x, "__array__") else list(x)
    tensors = [torch.as_tensor(part, dtype=torch.float64) for part in parts]
    if any(t.dim() != 2 or t.shape[1] != population.x_mean.shape[1] for t in tensors):
        raise ValueError(
            f"`x` must be [row, feature] with {population.x_mean.shape[1]} features; got "
            f"{[tuple(t.shape) for t in tensors][:3]}."
        )
    inputs = _padded(tensors).to(population.device)
    valid = torch.arange(inputs.shape[1])[None] < torch.tensor([len(t) for t in tensors])[:, None]
    return inputs, valid


def _member_groups(population: Population, n_rows: int) -> Iterator[Tensor]:
    """Consecutive members whose masks for one draw of `n_rows` fit in the budget."""
    widest = max(weight.shape[1] for weight in population.weights)
    size = max(1, _ELEMENTS[population.device.type] // max(1, n_rows * widest))
    yield from torch.arange(len(population), device=population.device).split(size)


def in_units(population: Population, output: Tensor) -> tuple[Tensor, Tensor]:
    """Means and noise variances in the units of y, in float64, from outputs `[draw, member, row, output]`."""
    output = output.double()
    if population.likelihood == "categorical":
        probabilities = output.softmax(-1)
        return probabilities, probabilities * (1 - probabilities)
    scale, shift = population.y_scale[:, None], population.y_mean[:, None]
    noise = 1 / population.precision[:, None]
    if population.likelihood == "gaussian":
        return output * scale + shift, noise.expand_as(output)
    mean, log_variance = output.chunk(2, dim=-1)
    return mean * scale + shift, log_variance.exp() * noise


def _chunks(population: Population, inputs: Tensor, n_draws: int, seed: int, masks: str) -> Iterator[Tensor]:
    """Standardised outputs of a few draws at a time, `[draw, member, row, output]`."""
    if masks not in ("row", "shared"):
        raise ValueError(f"`masks` must be 'row' or 'shared'; got {masks!r}.")
    device, dtype, n_members = population.device, population.weights[0].dtype, len(population)
    task = torch.tensor([m.task if len(inputs) > 1 else 0 for m in population.members], device=device)
    x = ((inputs[task] - population.x_mean[:, None]) / population.x_scale[:, None]).to(dtype)
    n_rows, widths = x.shape[1], [w.shape[1] for w in population.weights] + [0]
    pads = [
        torch.stack(layer).to(device)[:, None]
        for layer in zip(*[randomness.member_pad(m.seed, widths) for m in population.members], strict=True)
    ]
    keep = (1 - population.drop_prob).to(dtype)
    scaled = [w / keep[:, layer, None, None] for layer, w in enumerate(population.weights)]
    size = max(1, min(n_draws, _ELEMENTS[device.type] // (n_members * n_rows * max(widths))))
    sources = [
        _Words(seed, layer, n_rows if masks == "row" else 1, width, device) for layer, width in enumerate(widths[:-1])
    ]
    for start in range(0, n_draws, size):
        count = min(size, n_draws - start)
        layers: list[Tensor | None] = []
        for layer, (pad, source) in enumerate(zip(pads, sources, strict=True)):
            words, dither = source.next(count)
            below = randomness.thresholds(population.drop_prob[:, layer, None, None, None], dither[:, None, None])
            mask = (torch.bitwise_xor(words, pad) >= below).to(dtype)
            layers.append(mask.expand(-1, -1, n_rows, -1).reshape(n_members, count * n_rows, -1))
        repeated = x[:, None].expand(-1, count, -1, -1).reshape(n_members, count * n_rows, -1)
        output = forward(scaled, population.biases, repeated, layers, population.activation)
        yield output.view(n_members, count, n_rows, -1).transpose(0, 1)


class _Words:
    """The stream of one layer's mask words, draw by draw: the same on a CPU however the draws are cut into chunks."""

    def __init__(self, seed: int, layer: int, n_rows: int, width: int, device: torch.device) -> None:
        # Masks shared by all rows are few and always drawn on the host, so that a draw is the same function everywhere.
        self.device, self.shape = device, (n_rows, width)
        place = device if n_rows > 1 else torch.device("cpu")
        self.words, self.dithers = torch.Generator(place), randomness.generator(_EVALUATION, seed, layer, 1)
        self.words.manual_seed(randomness.generator(_EVALUATION, seed, layer, 0).initial_seed())

    def next(self, count: int) -> tuple[Tensor, Tensor]:
        """Words `[draw, row, unit]` and threshold dithers `[draw]` of the next draws."""
        n = self.shape[0] * self.shape[1]
        padded = -(-n // 4) * 4  # a whole number of 64-bit words for each draw
        words = randomness.words((count, padded), self.words)[:, :n].reshape(count, *self.shape)
        dither = torch.rand(count, generator=self.dithers, dtype=torch.float64)
        return words.to(self.device), dither.to(self.device)
