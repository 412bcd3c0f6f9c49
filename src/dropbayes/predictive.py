r"""Predictions with uncertainty: the moments and the information of a network's draws, streamed.

The predictive distribution of a dropout network is the mixture over its draws
$q(\mathbf y^* \mid \mathbf x^*) = \mathbb{E}_{q(\omega)}\, p(\mathbf y^* \mid \mathbf x^*, \omega)$
[GG16, eq:predictive_dist]. Memory does not grow with the number of draws.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dropbayes.likelihoods import Gaussian, Likelihood
from dropbayes.runtime.progress import ProgressBar
from dropbayes.sampling.plan import Plan, checked_keys
from dropbayes.sampling.statistics import Collected, RowStatistics, Wishes, result_dtype
from dropbayes.sampling.streaming import Moments
from dropbayes.sampling.trees import Inputs, as_inputs, map_tensors, split

MOST_DRAWS = 10_000
"""The most draws that `n_draws="auto"` spends on a row."""

_REPLICATE_DRAWS = 32
_FIRST_REPLICATES = 8  # fewer estimate their own spread too roughly to be trusted

__all__ = ["Gaussian", "Prediction", "UncertaintyWarning", "batches", "predict"]


class UncertaintyWarning(UserWarning):
    """An uncertainty that is suspiciously small."""


@dataclass(frozen=True)
class Prediction:
    """A network's prediction for each row: tensors, or trees of them built like the network's output."""

    mean: Any
    """The predictive mean; for `Categorical`, class probabilities."""
    epistemic: Any
    """The variance over draws: what more data would reduce."""
    aleatoric: Any
    """The expected variance given the function: what no data would reduce; 0 without a likelihood."""
    n_draws: int
    """The number of draws made; 0 when the moments are exact."""
    method: str
    """How the prediction was made: "exact", or the way the draws took."""
    entropy: Tensor | None = None
    """For `Categorical`: the entropy of the mean probabilities, in nats."""
    expected_entropy: Tensor | None = None
    """For `Categorical`: the mean over draws of their entropies."""
    variation_ratio: Tensor | None = None
    """For `Categorical`: the share of draws that disagree with the most frequent class."""
    quantiles: Any = None
    """Quantiles over draws, `[quantile, row, ...]`, if asked for."""
    draws: Any = None
    """All draws, `[draw, row, ...]`, if asked for."""
    draws_used: Tensor | None = None
    """For `n_draws="auto"`: how many draws each row took."""
    standard_error: Any = None
    """For `n_draws="auto"`: the Monte Carlo standard error reached by the mean."""

    @property
    def variance(self) -> Any:
        r"""The total variance, epistemic and aleatoric: $\tau^{-1} + \mathrm{Var}_t[\widehat y_t]$ for a Gaussian."""
        return map_tensors(torch.add, self.epistemic, self.aleatoric)

    @property
    def std(self) -> Any:
        """The total standard deviation."""
        return map_tensors(torch.sqrt, self.variance)

    @property
    def mutual_information(self) -> Tensor | None:
        """For `Categorical`: the information a label would give about the function, in nats."""
        if self.entropy is None or self.expected_entropy is None:
            return None
        return (self.entropy - self.expected_entropy).clamp(min=0)


def predict(
    net: nn.Module,
    x: Any,
    *,
    n_draws: int | Literal["auto"] = 100,
    seed: int = 0,
    likelihood: Likelihood | None = None,
    masks: str = "shared",
    sampler: str = "stratified",
    row_axis: int = 0,
    analytic: bool = True,
    exact_rows: bool = True,
    tolerance: float = 0.05,
    quantiles: Sequence[float] = (),
    keep_draws: bool = False,
    max_bytes: int | None = None,
    progress: bool | None = None,
) -> Prediction:
    r"""The predictive mean and variance of a network with dropout [GG16, prop:mean, prop:var], and more.

    $\mathbb E[\mathbf y^*] \approx \frac1T \sum_t \widehat{\mathbf y}_t$ and
    $\mathrm{Var}[\mathbf y^*] \approx \tau^{-1} + \frac1T \sum_t \widehat{\mathbf y}_t^2 - \mathbb E[\mathbf y^*]^2$.

    Args:
        net: Any trained network with dropout, in any mode; it is not changed, and no flag of it is touched.
        x: Its input: a tensor, a tuple of positional or a dict of named arguments, or a DataLoader of such batches.
        n_draws: The number of draws $T$, or "auto" to draw until `tolerance` is met.
        seed: With `n_draws`, fixes every mask: the same seed gives the same prediction.
        likelihood: What the output means: `Gaussian`, `HeteroscedasticGaussian`, `Categorical`; None for the bare one.
        masks: "shared" for one mask per draw, "row" for fresh masks for every row.
        sampler: "stratified" or "independent".
        row_axis: The axis of the rows in the inputs, 1 for sequence-first networks.
        analytic: Integrate over the last layer's dropout exactly where the network allows it.
        exact_rows: Whether a row's result must have the same bits alone and in any batch. False lets wide perceptrons
            leave dropped units out of their products, which is faster, with results equal up to rounding.
        tolerance: For "auto": the standard error of the mean to reach, as a share of the predictive standard deviation.
        quantiles: Probabilities in (0, 1) whose quantiles over draws are wanted; keeps the draws of a tile of rows.
        keep_draws: Also return all draws, `[draw, row, ...]`.
        max_bytes: A bound on working memory.
        progress: Whether to show a progress bar; by default only for a DataLoader.

    Returns:
        The prediction; its `method` says how it was made.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> prediction = predict(net, torch.ones(3, 2), likelihood=Gaussian(precision=4.0))
        >>> prediction.mean.shape, prediction.method
        (torch.Size([3, 1]), 'exact')
        >>> bool((prediction.variance >= 0.25).all())
        True
    """
    wishes = Wishes(likelihood, tuple(quantiles), keep_draws)
    automatic = isinstance(n_draws, str)
    if automatic:
        _check_automatic(n_draws, tolerance, wishes)
    keys = checked_keys(_REPLICATE_DRAWS if automatic else n_draws, seed, sampler)  # type: ignore[arg-type]
    collected, used, offset = Collected(), [], 0
    plan: Plan | None = None
    for batch in batches(net, x, progress=progress, title="predict"):
        inputs = as_inputs(batch, row_axis=row_axis)
        plan = Plan.of(
            net, inputs, keys=keys, masks=masks, max_bytes=max_bytes, integrate=analytic and wishes.only_moments,
            exact_rows=exact_rows,
        )  # fmt: skip
        wishes.check(plan)
        with torch.no_grad():
            if automatic and not plan.exact:
                used += _stream_until(plan, inputs, offset, tolerance, wishes, collected)
            else:
                _stream(plan, inputs, offset, wishes, collected)
        offset += inputs.n_rows
    if plan is None:
        raise ValueError("`x` must have at least one batch; got an empty DataLoader.")
    draws_used = torch.cat(used) if used else None
    made = int(draws_used.max()) if draws_used is not None else 0 if plan.exact else keys.n_draws
    prediction = Prediction(n_draws=made, method=plan.method, draws_used=draws_used, **collected.trees(plan))
    _warn_if_certain(prediction)
    return prediction


def batches(net: nn.Module, x: Any, *, progress: bool | None, title: str) -> Iterator[Any]:
    """The batches in `x`: itself, or those of a DataLoader, moved to where the network is."""
    if not isinstance(x, torch.utils.data.DataLoader):
        yield x
        return
    device = next((parameter.device for parameter in net.parameters()), torch.device("cpu"))
    with ProgressBar(title, operator.length_hint(x, 0) or None, unit="batches", show=progress) as bar:
        for batch in bar.follow(x):
            yield torch.utils._pytree.tree_map(
                lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch
            )


def _stream(plan: Plan, inputs: Inputs, offset: int, wishes: Wishes, collected: Collected) -> None:
    statistics: list[RowStatistics] = []
    for tile in plan.tiles(inputs, offset=offset):
        if tile.draws.start == plan.draws.start:
            statistics = [RowStatistics(wishes) for _ in tile.outputs]
        variances: Sequence[Tensor | None] = tile.variances or [None] * len(tile.outputs)
        for one, output, variance in zip(statistics, tile.outputs, variances, strict=True):
            one.add(output, variance)
        if tile.draws.stop == plan.draws.stop:
            pairs = zip(statistics, tile.outputs, strict=True)
            collected.add([one.results(integrated=plan.integrate, dtype=result_dtype(out)) for one, out in pairs])


def _warn_if_certain(prediction: Prediction) -> None:
    """Warns of a network whose masks change nothing: its uncertainty is zero, but hardly its error."""
    variances = [prediction.epistemic] if isinstance(prediction.epistemic, Tensor) else split(prediction.epistemic)[0]
    if prediction.n_draws != 1 and not any(bool(variance.any()) for variance in variances):
        warnings.warn(
            "every draw of the network gave the same output: its dropout does not reach the output for these rows, so "
            "the epistemic variance is 0. Look at dropbayes.sites(net, x).",
            UncertaintyWarning,
            stacklevel=3,
        )


# Draws until the error is small enough -----------------------------------------------------------------------------


def _check_automatic(n_draws: Any, tolerance: float, wishes: Wishes) -> None:
    if n_draws != "auto":
        raise TypeError(f"`n_draws` must be a whole number or 'auto'; got {n_draws!r}. Try n_draws=100.")
    if not (math.isfinite(tolerance) and tolerance > 0):
        raise ValueError(f"`tolerance` must be a positive number; got {tolerance!r}. Try tolerance=0.05.")
    if wishes.quantiles or wishes.keep_draws:
        raise ValueError(
            '`n_draws` "auto" gives each row its own number of draws: quantiles and kept draws need a number. '
            "Try n_draws=1000."
        )


def _stream_until(
    plan: Plan, inputs: Inputs, offset: int, tolerance: float, wishes: Wishes, collected: Collected
) -> list[Tensor]:
    """Collects rows drawn until their error is small enough; returns the draws each used."""
    used = []
    for start in range(0, inputs.n_rows, plan.tile_rows):
        block = inputs.block(start, min(start + plan.tile_rows, inputs.n_rows))
        found, spent = _block_until(plan, block, offset + start, tolerance, wishes)
        collected.add(found)
        used.append(spent)
    return used


def _block_until(
    plan: Plan, block: Inputs, offset: int, tolerance: float, wishes: Wishes
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """The statistics of a block of rows, each stopped by its own error whatever its neighbours still need.

    The draws come in replicates: sets of a few stratified draws, independent of each other. The spread of their means
    is a valid standard error for any sampler; that of stratified draws is not.
    """
    statistics: list[RowStatistics] = []
    replicates: list[Moments] = []
    final: list[dict[str, Tensor]] = []
    used = torch.zeros(block.n_rows, dtype=torch.long)
    most = MOST_DRAWS // _REPLICATE_DRAWS
    check_at = _FIRST_REPLICATES
    for count in range(1, most + 1):
        plan.keys = replace(plan.keys, replicate=count)
        tiles = list(plan.tiles(block, offset=offset))
        statistics = statistics or [RowStatistics(wishes) for _ in tiles[0].outputs]
        replicates = replicates or [Moments() for _ in tiles[0].outputs]
        for place, (one, means) in enumerate(zip(statistics, replicates, strict=True)):
            outputs = torch.cat([tile.outputs[place] for tile in tiles])
            shares = [t.variances[place] * (len(t.draws) / len(outputs)) for t in tiles if t.variances]
            one.add(outputs, torch.stack(shares).sum(0) if shares else None)
            seen = outputs if wishes.likelihood is None else wishes.likelihood.mean(outputs)
            means.add(seen.double().mean(0, keepdim=True))
        if count not in (check_at, most):
            continue
        check_at = math.ceil(check_at * 1.5)
        snapshot, error = _snapshot(statistics, replicates, plan.integrate, tiles[0].outputs)
        done = (used == 0) & ((error <= tolerance) | (count == most))
        final = final or [{name: value.clone() for name, value in one.items()} for one in snapshot]
        for kept, new in zip(final, snapshot, strict=True):
            for name in kept:
                kept[name][done.to(kept[name].device)] = new[name][done.to(kept[name].device)]
        used[done] = count * _REPLICATE_DRAWS
        if (used > 0).all():
            break
    return final, used


def _snapshot(
    statistics: list[RowStatistics], replicates: list[Moments], integrated: bool, outputs: list[Tensor]
) -> tuple[list[dict[str, Tensor]], Tensor]:
    """The statistics so far with their standard errors, and each row's largest error relative to its deviation."""
    snapshot = []
    largest = torch.zeros(outputs[0].shape[1], dtype=torch.float64)
    for one, means, output in zip(statistics, replicates, outputs, strict=True):
        found = one.results(integrated=integrated, dtype=result_dtype(output))
        means.finish()
        error = (means.variance / (means.count - 1)).sqrt()  # of the mean of independent replicate means
        deviation = (found["epistemic"] + found["aleatoric"]).double().sqrt()
        ratio = torch.where(error > 0, error / deviation, 0.0).flatten(1) if error.dim() > 1 else error / deviation
        largest = torch.maximum(largest, (ratio.amax(1) if ratio.dim() > 1 else ratio).nan_to_num(0.0).cpu())
        found["standard_error"] = error.to(found["mean"].dtype)
        snapshot.append(found)
    return snapshot, largest
