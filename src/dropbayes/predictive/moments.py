r"""Predictions with uncertainty: the moments and the information of a network's draws, streamed.

The predictive distribution of a dropout network is the mixture over its draws
$q(\mathbf y^* \mid \mathbf x^*) = \mathbb{E}_{q(\omega)}\, p(\mathbf y^* \mid \mathbf x^*, \omega)$
[GG16, eq:predictive_dist]. Memory does not grow with the number of draws.
"""

import math
import operator
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.linear.control import controlled_plan
from dropbayes.linear.passes import Linear, linear_plan
from dropbayes.linear.perceptrons import moments_plan
from dropbayes.predictive.prediction import Prediction
from dropbayes.predictive.statistics import AnyPlan, Observations, Request, Rows, RowStatistics, row_summaries, trees
from dropbayes.runtime.batches import given_arguments, loaded_batches, network_arguments
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import NOT_FINITE
from dropbayes.sampling import (
    Inputs,
    Mean,
    Moments,
    Plan,
    Sampling,
    UncertaintyWarning,
    as_inputs,
    check_sampling,
    draws,
    is_current,
    keep_state,
    make_plan,
)
from dropbayes.tracing.outputs import split

_REPLICATE_DRAWS = 32


def predict(
    net: nn.Module | Sequence[nn.Module],
    x: PyTree,
    *,
    method: Literal["sampling", "controlled", "linear", "moments"] | Linear = "sampling",
    n_draws: int | Literal["auto"] = 100,
    seed: int = 0,
    likelihood: Observations | None = None,
    masks: str = "shared",
    quantiles: float | Sequence[float] = (),
    keep_draws: bool = False,
    sampling: Sampling = Sampling(),
    progress: bool | None = None,
) -> Prediction:
    r"""The predictive mean and variance of a network with dropout [GG16, prop:mean, prop:var], and more.

    $\mathbb E[\mathbf y^*] \approx \frac1T \sum_t \widehat{\mathbf y}_t$ and
    $\mathrm{Var}[\mathbf y^*] \approx \tau^{-1} + \frac1T \sum_t \widehat{\mathbf y}_t^2 - \mathbb E[\mathbf y^*]^2$.

    Args:
        net: Any trained network with dropout, in any mode; neither its weights nor its flags are changed. A list of
            networks is an ensemble: the prediction is over `n_draws` draws of each.
        x: Its input: a tensor or array, a tuple of positional or a dict of named arguments (or the dict that it
            takes itself), or a DataLoader of such batches, with or without targets.
        method: "sampling"; "linear" for one forward and one backward pass per output, without draws; "moments" for a
            perceptron's mean and covariance, layer by layer; "controlled" for draws whose moments are corrected by the
            linear part. `Linear` has the options of the linear method.
        n_draws: The number of draws $T$, or "auto" to draw until the tolerance of `sampling` is met, or its
            `max_draws` are made.
        seed: The seed of the masks: the same seed and `n_draws` give the same prediction.
        likelihood: The observation model, one of `dropbayes.likelihoods` such as `Gaussian`; None for raw outputs.
            For a network with several outputs a dict or sequence with one for each, or None, as the output has them.
        masks: "shared" for one mask per draw, "row" for fresh masks for every row.
        quantiles: The level in (0, 1), or levels, of quantiles over draws; holds the draws of a tile of rows in memory.
        keep_draws: Whether to also return all draws, `[draw, row, ...]`.
        sampling: The other settings: sampler, axis of the rows, modules to ignore, memory ...
        progress: Whether to show a progress bar; by default in a terminal or notebook, for work of some seconds.

    Returns:
        The prediction; its `method` names the computation.

    Example:
        >>> from dropbayes.likelihoods import Gaussian
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> prediction = predict(net, torch.ones(3, 2), likelihood=Gaussian(precision=4.0))
        >>> prediction.mean.shape, prediction.method
        (torch.Size([3, 1]), 'exact')
        >>> bool((prediction.variance >= 0.25).all())
        True
    """
    request = Request(likelihood, tuple(np.atleast_1d(quantiles).tolist()), keep_draws)
    automatic = isinstance(n_draws, str)
    if method != "sampling" and (request.quantiles or keep_draws):
        raise ValueError(f'`quantiles` and `keep_draws` need draws; got method {method!r}. Use method="sampling".')
    if method == "controlled" and (automatic or not request.only_moments):
        rule = '"controlled" corrects moments of a number of draws, without a likelihood of classes'
        raise ValueError(f"`method` {rule}.")
    nets: list[Any] = list(net) if isinstance(net, (list, tuple, nn.ModuleList)) else [net]
    if not nets or (len(nets) > 1 and (automatic or method != "sampling")):
        rule = 'be a network, or a list of some for method "sampling" with a number of draws'
        raise ValueError(f"`net` must {rule}; got {len(nets)} networks, method {method!r} and n_draws {n_draws!r}.")
    if automatic and n_draws != "auto":
        raise TypeError(f"`n_draws` must be a whole number or 'auto'; got {n_draws!r}. Try n_draws=100.")
    if automatic and (request.quantiles or keep_draws):
        rule = '"auto" gives each row its own number of draws: quantiles and kept draws need a number'
        raise ValueError(f"`n_draws` {rule}. Try n_draws=1000.")
    check_sampling(sampling)
    keys = sampling.keys(_REPLICATE_DRAWS if n_draws == "auto" else n_draws, seed)
    results, offset = list[Rows](), sampling.row_offset
    plans: list[AnyPlan] = []
    is_loader = isinstance(x, torch.utils.data.DataLoader)
    own_bar = False if is_loader else progress  # a loader has a bar over its batches
    drawn: dict[str, Any] = {"keys": keys, "masks": masks, "sampling": sampling}
    for batch in batches(nets[0], x, progress=progress, title="predict"):
        arguments = (network_arguments if is_loader else given_arguments)(nets[0], batch)
        inputs = as_inputs(arguments, nets[0], row_axis=sampling.row_axis)
        for ahead in ({"trusted": True}, {}) if method == "sampling" and _works_ahead(inputs) else ({},):
            error: Exception | None = None
            try:
                plans, rows = _rows_by(method, nets, inputs, offset, request, automatic, own_bar, **drawn, **ahead)
            except Exception as failed:
                error = failed
            if not ahead or all(map(is_current, nets)):
                break
        if error is not None:
            raise error
        plan = plans[0]
        results += rows
        for one, its in zip(nets, plans, strict=True):
            keep_state(one, inputs, its.profile)
        offset += inputs.n_rows
    statistics = trees(results, plan.profile, request)
    used = statistics.get("draws_used")
    made = int(used.max()) if used is not None else 0 if plan.exact else keys.n_draws * len(nets)
    prediction = Prediction.of(statistics, n_draws=made, method=plan.method, quantile_levels=request.quantiles)
    check_outputs(prediction)
    return prediction


def _works_ahead(inputs: Inputs) -> bool:
    """Whether a device works on the rows while the host compares their network with the one that was inspected."""
    return inputs.device.type != "cpu"


def _rows_by(
    method: str | Linear, nets: list[Any], inputs: Inputs, first_row: int, request: Request, automatic: bool,
    progress: bool | None, **drawn: Any,
) -> tuple[list[AnyPlan], list[Rows]]:  # fmt: skip
    """The plans of the networks by a method, and the statistics of all rows, block by block."""
    only_moments = request.only_moments and len(nets) == 1
    plans = [plan_by(method, net, inputs, request, only_moments=only_moments, **drawn) for net in nets]
    if automatic and isinstance(plans[0], Plan) and not plans[0].exact:
        summaries = _summaries_until(plans[0], inputs, first_row, request, drawn["sampling"])
    else:
        summaries = row_summaries(plans, inputs, first_row, request)
    rows = list[Rows]()
    with ProgressBar("predict", inputs.n_rows, unit="rows", show=progress, delay=3.0) as bar:
        for n_rows, summary in summaries:
            rows += [] if summary is None else [summary]
            bar.advance(n_rows)
    return plans, rows


def plan_by(
    method: str | Linear, net: nn.Module, inputs: Inputs, request: Request, *, only_moments: bool, **drawn: Any
) -> AnyPlan:
    """The plan of a prediction by a method; `drawn` has the keys and the masks of draws, and the settings."""
    if method == "sampling":
        return make_plan(net, inputs, moments_only=only_moments, **drawn)
    if method == "controlled" and only_moments:
        return controlled_plan(net, inputs, **drawn)
    if method == "moments":
        return moments_plan(net, inputs, drawn["sampling"], only_moments=only_moments)
    options = Linear() if method == "linear" else method
    if not isinstance(options, Linear):
        known = '"sampling", "linear", "moments"' + ' or "controlled"' * only_moments  # which corrects moments alone
        raise ValueError(f"`method` must be one of {known}; got {method!r}.")
    plan = linear_plan(net, inputs, drawn["sampling"])
    return replace(plan, options=options, judged=request.likelihood_tensor(plan.profile), only_moments=only_moments)


def outputs_by(method: str | Linear, net: nn.Module, x: PyTree, *, n_draws: int, seed: int) -> PyTree:
    """Draws of a network, or, by a method without draws, fixed points of each row's output in their place."""
    if method == "sampling":
        return draws(net, x, n_draws=n_draws, seed=seed)
    inputs = as_inputs(x, net)
    plan = plan_by(method, net, inputs, Request(), only_moments=False, sampling=Sampling())
    return torch.cat([block.outputs[0] for block in plan.run(inputs)], 1)


def batches(net: nn.Module, x: PyTree, *, progress: bool | None, title: str) -> Iterator[PyTree]:
    """`x`, or each batch of a DataLoader on the network's device, with their targets."""
    if not isinstance(x, torch.utils.data.DataLoader):
        yield x
        return
    with ProgressBar(title, operator.length_hint(x, 0) or None, unit="batches", show=progress) as bar:
        yield from bar.follow(loaded_batches(net, x))


def check_outputs(prediction: Prediction) -> None:
    """Raises for outputs that are not finite, and warns if the masks do not change the output.

    The uncertainty of such a network is zero, though its error is not.
    """
    means, variances = (split(tree)[0] for tree in (prediction.mean, prediction.epistemic))
    real = [torch.view_as_real(t) if t.is_complex() else t for t in (*means, *variances)]
    # For each a number that is not finite if an element is not, and zero if all are; one synchronisation.
    norms = [torch.linalg.vector_norm(t, math.inf) if t.numel() else t.new_ones(()) for t in real]
    magnitudes = torch.stack([norm.to(norms[0].device) for norm in norms]).tolist()  # a tag, a count may be on the CPU
    if not all(map(math.isfinite, magnitudes)):
        # One NaN or infinity among the draws makes their mean so, too; a derivative makes the variance NaN alone.
        defined = [*(mean.isfinite() for mean in means), *(~variance.isnan() for variance in variances)]
        if not all(bool(one.all()) for one in defined):
            raise ValueError(NOT_FINITE)
    if prediction.n_draws != 1 and not any(magnitudes[len(means) :]):
        why = "every draw of the network gave the same output: its dropout does not reach the output for these rows"
        if prediction.method.startswith("linear"):  # a unit that is off has no slope, though a draw may switch it on
            why = 'to first order the output does not change with the masks (method="sampling" has all orders)'
        message = f"{why}, so the epistemic variance is 0. Look at dropbayes.doctor(net, x)."
        warnings.warn(message, UncertaintyWarning, stacklevel=3)


def _summaries_until(
    plan: Plan, inputs: Inputs, first_row: int, request: Request, sampling: Sampling
) -> Iterator[tuple[int, Rows | None]]:
    """How many rows more have met the tolerance, and with the last of a block the statistics of its rows.

    Each row is stopped by its own error, independently of the others. The draws come in replicates: sets of a few
    stratified draws, independent of each other. The spread of their means is a valid standard error for any sampler;
    that of stratified draws is not.
    """
    last = sampling.max_draws // _REPLICATE_DRAWS
    for start in range(0, inputs.n_rows, plan.block_rows):
        block = inputs.block(start, min(start + plan.block_rows, inputs.n_rows))
        statistics = request.summaries(plan.profile)
        replicates = [Moments() for _ in statistics]
        final: Rows = []
        used = torch.zeros(block.n_rows, dtype=torch.long, device="cpu")
        check_at = 8  # fewer give too rough an estimate of the error
        for count in range(1, last + 1):
            means = {place: Mean() for place in statistics}
            for part in plan.replicate(count).run(block, first_row=first_row + start):
                for place, one in statistics.items():
                    output = part.outputs[place]
                    one.add(output, None if part.variances is None else part.variances[place])
                    means[place].add((output if one.likelihood is None else one.likelihood.mean(output)).double())
            for replicate, mean in zip(replicates, means.values(), strict=True):
                replicate.add(mean.finish().value[None])
            if count not in (check_at, last):
                continue
            check_at = math.ceil(check_at * 1.5)
            snapshot, error = _snapshot(statistics.values(), replicates, block.n_rows)
            done = (used == 0) & ((error <= sampling.tolerance) | (count == last))
            final = final or [{name: value.clone() for name, value in one.items()} for one in snapshot]
            for settled, new in zip(final, snapshot, strict=True):
                for name in settled:
                    settled[name][done.to(settled[name].device)] = new[name][done.to(settled[name].device)]
            used[done] = count * _REPLICATE_DRAWS
            if (used > 0).all():
                final[0]["draws_used"] = used
                yield int(done.sum()), final
                break
            yield int(done.sum()), None


def _snapshot(statistics: Iterable[RowStatistics], replicates: list[Moments], n_rows: int) -> tuple[Rows, Tensor]:
    """The statistics so far with their standard errors, and each row's largest error relative to its deviation."""
    snapshot = []
    largest = torch.zeros(n_rows, dtype=torch.float64, device="cpu")
    for one, means in zip(statistics, replicates, strict=True):
        summary = one.results()
        if not summary["mean"].isfinite().all():  # more draws would not help
            raise ValueError(NOT_FINITE)
        error = (means.finish().variance / (means.count - 1)).sqrt()  # of the mean of independent replicate means
        deviation = (summary["epistemic"] + summary["aleatoric"]).double().sqrt()
        ratio = torch.where(error > 0, error / deviation, 0.0).reshape(n_rows, -1)
        largest = torch.maximum(largest, ratio.amax(1).nan_to_num(0.0).cpu())
        snapshot.append(summary | {"standard_error": error.to(summary["mean"].dtype)})
    return snapshot, largest
