r"""The predictions of a population: draws, predictive moments and log-likelihoods of all members at once."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dropbayes.population import randomness
from dropbayes.population.program import forward
from dropbayes.population.records import Population, select
from dropbayes.runtime.validation import check_count, finite_tensor, row_weights
from dropbayes.sampling import Moments

_ELEMENTS = {"cpu": 2**19, "cuda": 2**27}  # of masks at a time: they fill the device, but not its cache or memory


@dataclass(frozen=True, eq=False)
class Evaluation:
    r"""Predictions and scores of each member (axis 0) on its rows (axis 1), in the units of y.

    The predictive mean (class probabilities for the categorical likelihood), its variance over draws, and the total
    variance, which has the mean of the noise besides, are `[member, row, output]`; `log_density` is
    $\log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)$ of each row, `[member, row]`.
    """

    mean: Tensor
    epistemic: Tensor
    variance: Tensor
    log_density: Tensor
    y: Tensor
    weight: Tensor  # 0 for the padding of tasks with fewer rows

    @property
    def log_likelihood(self) -> Tensor:
        """The (weighted) mean log-density of each member's rows [GG16, eq:predictive_dist]."""
        return row_mean(self.log_density, self.weight)

    @property
    def rmse(self) -> Tensor:
        """The root mean squared error of each member's predictive mean."""
        return row_mean((self.y - self.mean).square().mean(-1), self.weight).sqrt()


def row_mean(values: Tensor, weight: Tensor) -> Tensor:
    """The weighted mean over the rows, the last axis; rows of weight zero may hold anything."""
    return torch.where(weight > 0, values * weight, 0).sum(-1) / weight.sum(-1)


def draws(population: Population, x: Any, *, n_draws: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sampled means `[draw, member, row, output]` of every member and their noise variances, in the units of y.

    For inputs `[row, feature]` of all members, or a sequence of such, one per task. Every row of every draw has its own
    mask: for draws that are functions, take a member's `network`. For the categorical likelihood the means are class
    probabilities and the variances theirs.
    """
    return _draws(population, _task_rows(population, x)[0], n_draws, seed)


def evaluate(population: Population, rows: Any, *, n_draws: int = 1000, seed: int = 0) -> Evaluation:
    r"""The `Evaluation` of every member on rows of its task, streamed over any number of draws.

    The log-density of a row is $\log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)$ with the member's
    precision τ [GG16, eq:predictive_dist], its variance $\tau^{-1}$ plus the variance of the draws [GG16, prop:var].
    `rows` are `(x, y)` or `(x, y, weight)` for all members, or a sequence of these, one per task.
    """
    inputs, y, weight = _labelled_rows(population, rows)
    groups = []
    for index in _member_groups(population, inputs.shape[1]):
        some, moments, noise = select(population, index), Moments(), Moments()
        log_sum = torch.full(y[index].shape[:2], -torch.inf, dtype=torch.float64, device=y.device)
        for outputs in _chunks(some, inputs, n_draws, seed):
            mean, variance = in_units(some, outputs)
            moments.add(mean)
            noise.add(variance)
            log_sum = torch.logaddexp(log_sum, some.head.log_density(mean, variance, y[index]).logsumexp(0))
        epistemic = moments.finish().variance
        groups.append((moments.mean, epistemic, epistemic + noise.finish().mean, log_sum - math.log(n_draws)))
    mean, epistemic, variance, log_density = (torch.cat(values) for values in zip(*groups, strict=True))
    log_density = torch.where(population.diverged[:, None], -torch.inf, log_density)
    return Evaluation(mean, epistemic, variance, log_density, y, weight)


def _labelled_rows(population: Population, rows: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of each task `[task, row, feature]`; targets and weights of each member."""
    given = [rows] if isinstance(rows, tuple) else list(rows)
    inputs, counts = _task_rows(population, [entry[0] for entry in given])
    columns = [population.head.columns(entry[1]) for entry in given]
    n_outputs = population.y_mean.shape[1] if population.head.has_noise else 1
    for column, count in zip(columns, counts, strict=True):
        if column.shape != (count, n_outputs):
            rule = f"must have targets of the shape {(count, n_outputs)}, one per row and output"
            raise ValueError(f"`rows` {rule}; got {tuple(column.shape)}.")
    weights = [row_weights((*entry, None)[2], n, name="weight") for entry, n in zip(given, counts, strict=True)]
    task = torch.tensor([m.task if len(given) > 1 else 0 for m in population.members])
    y, weight = (pad_sequence(values, batch_first=True) for values in (columns, weights))
    return inputs, y.to(population.device)[task], weight.to(population.device)[task]


def fit_precision(
    population: Population, rows: Any, *, n_draws: int = 200, seed: int = 0, groups: list[int] | Tensor | None = None
) -> Population:
    r"""The population with the precision τ that maximises the log-likelihood of held-out rows; no retraining.

    Given the draws, $\ell(\tau) = \sum_n w_n \log \tfrac1T \sum_t \mathcal N(\mathbf y_n; \widehat{\mathbf
    y}_t(\mathbf x_n), \operatorname{diag}(\tau)^{-1})$ is a function of one number per output. In training, τ only
    sets the weight decay [GG16, eq:weightdecay_tau_relation], so the τ of prediction can be fitted to rows held out
    from it, given as to `evaluate`. For heteroscedastic networks τ scales the precision that they give. Members of the
    same index in `groups`, such as the folds of one candidate, share their τ (in standardised units).
    """
    return fit_and_score(population, rows, n_draws=n_draws, seed=seed, groups=groups)[0]


def fit_and_score(
    population: Population, rows: Any, *, n_draws: int, seed: int = 0, groups: list[int] | Tensor | None = None
) -> tuple[Population, Tensor, Tensor]:
    """The population of `fit_precision`, and log-densities `[member, row]` and errors `[member, row, output]` of it.

    The log-densities are those of `evaluate`, the errors those of the mean over the draws; classes have no output.
    """
    if not population.head.has_noise:
        density = evaluate(population, rows, n_draws=n_draws, seed=seed).log_density
        return population, density, density.new_zeros(*density.shape, 0)
    check_count("n_draws", n_draws)
    inputs, y, weight = _labelled_rows(population, rows)
    group = torch.arange(len(population)) if groups is None else torch.as_tensor(groups)
    _, group = group.to(population.device).unique(return_inverse=True)
    unit = replace(population, precision=population.y_scale**-2)
    errors, logs, of_mean = [], [], []
    for index in _member_groups(population, inputs.shape[1] * max(1, n_draws // 8)):
        mean, variance = _draws(select(unit, index), inputs, n_draws, seed)
        errors.append(((y[index] - mean).square() / variance).float())
        logs.append((-0.5 * variance.log()).sum(-1).float())
        of_mean.append(y[index] - mean.mean(0))
    error, log = torch.cat(errors, 1), torch.cat(logs, 1)
    tau = _best_precision(error, log, weight, group)
    density = _log_density(error, log, tau[group])
    density = torch.where(population.diverged[:, None], -torch.inf, density)
    return replace(population, precision=tau[group] * population.y_scale**-2), density, torch.cat(of_mean)


def _log_density(error: Tensor, log: Tensor, tau: Tensor) -> Tensor:
    r"""$\log \tfrac1T \sum_t \mathcal N$ `[member, row]` at τ `[member, output]`, of what `fit_and_score` has."""
    exponent = -0.5 * (error * tau[:, None].to(error)).sum(-1) + log
    constant = 0.5 * (tau.log() - math.log(2 * math.pi)).sum(-1, keepdim=True)
    return exponent.logsumexp(0).double() + constant - math.log(len(error))


def _best_precision(error: Tensor, log: Tensor, weight: Tensor, group: Tensor) -> Tensor:
    r"""The maximiser `[group, output]` of $\ell(\tau)$ from errors `[draw, member, row, output]`.

    Newton's method in each log τ. Where ℓ is not concave the step is that of expectation maximisation,
    $\tau \leftarrow \sum_n w_n / \sum_n w_n \mathbb E_r[\text{error}_n]$, which never decreases ℓ.
    """
    n_groups, n_outputs = int(group.max()) + 1, error.shape[-1]
    zeros = torch.zeros(n_groups, n_outputs, dtype=torch.float64, device=error.device)
    weight = weight.double()[..., None]

    def group_sum(values: Tensor) -> Tensor:
        return zeros.index_add(0, group, (weight * values.double()).sum(1))

    error = torch.where((weight > 0) & error.isfinite(), error, 0)  # networks that diverged
    count = group_sum(torch.ones_like(error[0]))
    log_tau = (count / group_sum(error.amin(0)).clamp(min=1e-12)).log()  # of each row's best draw: an upper bound
    for _ in range(60):
        tau = log_tau.exp()[group].to(error.dtype)[:, None]
        share = torch.softmax((-0.5 * tau * error).sum(-1) + log, 0)[..., None]
        first = (share * error).sum(0)
        second = (share * error.square()).sum(0) - first.square()
        mean, spread = group_sum(first * tau), group_sum(second * tau.square())
        slope, curvature = 0.5 * (count - mean), -0.5 * mean + 0.25 * spread
        expectation = (count / mean.clamp(min=1e-12)).log()
        step = torch.where(curvature < -1e-3 * count, -slope / curvature, expectation).clamp(-1.0, 1.0)
        log_tau = log_tau + step
        if float(step.abs().max()) < 1e-4:
            break
    return log_tau.exp()


def _task_rows(population: Population, x: Any) -> tuple[Tensor, list[int]]:
    """Inputs of each task padded to `[task, row, feature]`, and the numbers of rows without padding."""
    given = [x] if hasattr(x, "__array__") else list(x)
    tensors = [finite_tensor("x", values, axes="[row, feature]").double() for values in given]
    if any(t.shape[1] != population.x_mean.shape[1] for t in tensors):
        rule = f"must be [row, feature] with {population.x_mean.shape[1]} features"
        raise ValueError(f"`x` {rule}; got {[tuple(t.shape) for t in tensors][:3]}.")
    return pad_sequence(tensors, batch_first=True).to(population.device), [len(t) for t in tensors]


def _member_groups(population: Population, n_rows: int) -> Iterator[Tensor]:
    """Consecutive members whose masks for one draw of `n_rows` fit in the budget."""
    widest = max(weight.shape[1] for weight in population.weights)
    size = max(1, _ELEMENTS[population.device.type] // max(1, n_rows * widest))
    yield from torch.arange(len(population), device=population.device).split(size)


def in_units(population: Population, output: Tensor) -> tuple[Tensor, Tensor]:
    """Means and noise variances in the units of y, in float64, from outputs `[draw, member, row, output]`."""
    shift, scale = population.y_mean[:, None], population.y_scale[:, None]
    return population.head.in_units(output.double(), shift, scale, 1 / population.precision[:, None])


def _draws(population: Population, inputs: Tensor, n_draws: int, seed: int) -> tuple[Tensor, Tensor]:
    chunks = [in_units(population, outputs) for outputs in _chunks(population, inputs, n_draws, seed)]
    return torch.cat([mean for mean, _ in chunks]), torch.cat([variance for _, variance in chunks])


def _chunks(population: Population, inputs: Tensor, n_draws: int, seed: int) -> Iterator[Tensor]:
    """Standardised outputs of a few draws at a time, `[draw, member, row, output]`."""
    check_count("n_draws", n_draws)
    device, dtype, n_members = population.device, population.weights[0].dtype, len(population)
    task = torch.tensor([m.task if len(inputs) > 1 else 0 for m in population.members], device=device)
    x = ((inputs[task] - population.x_mean[:, None]) / population.x_scale[:, None]).to(dtype)
    n_rows, widths = x.shape[1], [w.shape[1] for w in population.weights] + [0]
    seeds = [member.seed for member in population.members]
    member_words = [own.to(device)[:, None] for own in randomness.member_words(seeds, widths)]
    keep = (1 - population.drop_prob).to(dtype)
    scaled = [w / keep[:, layer, None, None] for layer, w in enumerate(population.weights)]
    size = max(1, min(n_draws, _ELEMENTS[device.type] // (n_members * n_rows * max(widths))))
    # One stream of words and one of dithers for each layer, draw by draw: on a CPU independent of the chunks of draws.
    keys = [(randomness.Stream.EVALUATION, seed, layer) for layer in range(len(scaled))]
    dithers = [randomness.generator(*key, 1) for key in keys]
    sources = [randomness.generator(*key, 0, device=device) for key in keys]
    for start in range(0, n_draws, size):
        count = min(size, n_draws - start)
        masks = []
        for layer, own_words in enumerate(member_words):
            n = n_rows * widths[layer]
            padded = -(-n // 4) * 4  # a whole number of 64-bit words for each draw
            words = randomness.words((count, padded), sources[layer])[:, :n].reshape(count, n_rows, -1)
            dither = torch.rand(count, generator=dithers[layer], dtype=torch.float64).to(device)[:, None, None]
            below = randomness.thresholds(population.drop_prob[:, layer, None, None, None], dither)
            mixed = torch.bitwise_xor(words, own_words)
            kept = torch.ge(mixed, below, out=mixed).to(dtype)  # bits as words: bytes take ten times as long
            masks.append(kept.reshape(n_members, count * n_rows, -1))
        repeated = x[:, None].expand(-1, count, -1, -1).reshape(n_members, count * n_rows, -1)
        output = forward(scaled, population.biases, repeated, masks, population.activation)
        yield output.view(n_members, count, n_rows, -1).transpose(0, 1)
