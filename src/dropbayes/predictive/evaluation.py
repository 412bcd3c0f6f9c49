"""The evaluation of a network against outcomes: log-likelihood, error and calibration, streamed.

`DrawScores` is the one scorer of `evaluate` and `check`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree, tree_map

from dropbayes.calibration import ReliabilityCurve
from dropbayes.likelihoods import Categorical, ClassLikelihood, Gaussian, Likelihood
from dropbayes.linear import Linear
from dropbayes.predictive.moments import batches, plan_by
from dropbayes.predictive.scoring import ClassOutcomes, RegressionOutcomes, RowOutcomes, core_scores, reliability_curve
from dropbayes.predictive.statistics import Observations, Request, Rows, RowStatistics, by_head, joined_rows
from dropbayes.runtime.batches import labelled_batch
from dropbayes.runtime.formatting import Printed, Table, count
from dropbayes.runtime.validation import NOT_FINITE, Array, check_type, outcomes, row_weights
from dropbayes.sampling import Inputs, LogMean, Profile, Sampling, as_inputs, check_sampling, keep_state
from dropbayes.scores.averages import weighted_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class Evaluation(Printed):
    """The scores of a network's predictive distribution against outcomes; prints as a table."""

    log_likelihood: float  #: The mean log-likelihood of a row; for several outputs, of all of them together.
    scores: dict[str, float]  #: The other scores by name; those of several outputs are called `output.score`.
    log_likelihoods: Tensor  #: The log-likelihood of each row.
    reliability: ReliabilityCurve
    """What was claimed and what was observed: of central intervals, or of the predicted classes; for several outputs,
    of the first that has a likelihood."""
    n_rows: int
    n_outcomes: int  #: The outcomes that the scores count: pixels of maps, nodes of a graph, outputs of a row.
    n_draws: int  #: The number of draws; 0 for a method without draws.
    method: str = "sampling"  #: That method.

    def __getattr__(self, name: str) -> float:
        scores: dict[str, float] = self.__dict__.get("scores", {})
        if name in scores:
            return scores[name]
        raise AttributeError(f"an evaluation has {', '.join(['log_likelihood', *scores])}; not {name!r}")

    def __repr__(self) -> str:
        first = {"log_likelihood": self.log_likelihood, **dict(list(self.scores.items())[:3])}
        scores = ", ".join(f"{name} {value:.4g}" for name, value in first.items())
        return f"Evaluation({count(self.n_rows, 'row')}, {scores}; {self._how})"

    @property
    def _how(self) -> str:
        return count(self.n_draws, "draw") if self.n_draws else self.method

    def table(self) -> Table:
        """The scores, one in each line."""
        lines = {"log-likelihood": self.log_likelihood, **{k.replace("_", " "): v for k, v in self.scores.items()}}
        rows = [(name, f"{value: .4f}") for name, value in lines.items()]
        of = "" if self.n_outcomes == self.n_rows else f" of {count(self.n_outcomes, 'outcome')}"
        return Table(f"{count(self.n_rows, 'row')}{of}, {self._how}", rows, align="<>")

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """The reliability diagram: observed against claimed probabilities; needs matplotlib (the extra `plot`)."""
        from dropbayes import plots

        return plots.reliability_diagram(self.reliability, ax=ax)


def evaluate(
    net: nn.Module,
    x: PyTree,
    y: PyTree = None,
    *,
    likelihood: Observations,
    method: Literal["sampling", "linear", "moments"] | Linear = "sampling",
    n_draws: int = 100,
    seed: int = 0,
    masks: str = "row",
    sample_weight: Array | None = None,
    sampling: Sampling = Sampling(),
    progress: bool | None = None,
) -> Evaluation:
    r"""The scores of a network against outcomes: log-likelihood, RMSE or accuracy, calibration.

    The log-likelihood is that of the mixture over draws,
    $\log \frac1T \sum_t p(\mathbf y^* \mid \widehat{\mathbf y}_t)$ [GG16, eq:predictive_dist_reg], averaged over rows.
    Coverage is that of the central intervals of the mixture of Gaussians with each draw's mean and variance;
    `predictive.REGRESSION_SCORES` and `predictive.CLASS_SCORES` define the scores.

    Args:
        net: Any network with dropout.
        x: Its input, or a DataLoader of pairs (input, outcome) or of dicts with `labels`.
        y: The outcomes, one per row; None when `x` is a DataLoader.
        likelihood: The observation model, which defines the meaning of the output; for several outputs a dict or
            sequence with one for each, or None, as the output has them. `y` then has the same form.
        method: As in `predict`; without draws, points of each row's Gaussian take their place.
        n_draws: The number of draws $T$.
        seed: The seed of the masks.
        masks: "row", which makes averages over a test set less noisy, or "shared".
        sample_weight: The weight of each row: a row of weight 2 counts twice in every score. Not for a DataLoader.
        sampling: The other settings, as in `predict`.
        progress: Whether to show a progress bar; by default only for a DataLoader.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
        >>> from dropbayes.likelihoods import Gaussian
        >>> result = evaluate(net, torch.ones(3, 2), torch.zeros(3, 1), likelihood=Gaussian(precision=1.0))
        >>> sorted(result.scores)
        ['coverage_50', 'coverage_80', 'coverage_95', 'mae', 'rmse', 'sharpness']
    """
    if likelihood is None:
        raise TypeError("`likelihood` must say what the output means, such as Gaussian(precision=1.0); got None.")
    check_sampling(sampling)
    request, keys = Request(likelihood), sampling.keys(n_draws, seed)
    results, joint_densities = list[Rows](), list[Tensor]()
    offset = sampling.row_offset
    heads: dict[int, tuple[str, Likelihood, Tensor]] = {}
    for arguments, y_tree in _pairs(net, x, y, sample_weight, progress):
        inputs = as_inputs(arguments, net, row_axis=sampling.row_axis)
        plan = plan_by(method, net, inputs, request, only_moments=False, keys=keys, masks=masks, sampling=sampling)
        heads = _heads(request, plan.profile, y_tree, inputs)
        for rows, blocks in itertools.groupby(plan.run(inputs, first_row=offset), lambda block: block.rows):
            scored = {i: DrawScores(one, target[rows.start : rows.stop]) for i, (_, one, target) in heads.items()}
            joint = LogMean()
            for block in blocks:
                joint.add(functools.reduce(torch.add, [one.score(block.outputs[i]) for i, one in scored.items()]))
            joint_densities.append(joint.finish().value)
            results.append([one.results() for one in scored.values()])
        keep_state(net, inputs, plan.profile)
        offset += inputs.n_rows
    per_row = torch.cat(joint_densities)
    if sample_weight is not None:
        sample_weight = row_weights(sample_weight, len(per_row), like=per_row)
    scores, curves, n_outcomes = dict[str, float](), list[ReliabilityCurve](), 0
    for index, (prefix, model, _) in enumerate(heads.values()):
        columns = joined_rows(results, index)
        rows_scored = row_scores(columns, model, sample_weight)
        curves.append(reliability_curve(rows_scored))
        scores |= {prefix + score: value for score, value in core_scores(rows_scored).items()}
        n_outcomes += columns["y"].numel()
    scores.pop("log_likelihood", None)
    mean = float(weighted_mean(per_row, sample_weight))
    made = (keys.n_draws, "sampling") if method == "sampling" else (0, plan.method)
    return Evaluation(mean, scores, per_row, curves[0], len(per_row), n_outcomes, *made)


def _heads(request: Request, profile: Profile, y: PyTree, inputs: Inputs) -> dict[int, tuple[str, Likelihood, Tensor]]:
    """The outputs that have a likelihood, by place: the prefix of their scores, their likelihood and their outcomes."""
    judged = request.judged(profile)
    named = {f"{name}.": one for name, one in by_head("y", y, profile).items()} if request.is_by_head else {"": y}
    entries = zip(judged, named, judged.values(), named.values(), strict=True)
    heads = {place: (name, model, _targets(one, inputs)) for place, name, model, one in entries if model is not None}
    if not heads:
        raise TypeError("`likelihood` must say what at least one of the outputs means; all are None.")
    return heads


def _pairs(net: nn.Module, x: PyTree, y: PyTree, weight: Array | None, progress: bool | None) -> Iterator[PyTree]:
    """The inputs and outcomes in `x` and `y`, or in each batch of a DataLoader."""
    is_loader = isinstance(x, torch.utils.data.DataLoader)
    if is_loader and not (y is None and weight is None):
        raise TypeError("`x` is a DataLoader, whose batches hold the outcomes: leave `y` and `sample_weight` out.")
    for batch in batches(net, x, progress=progress, title="evaluate"):
        if y is None and not is_loader and not (isinstance(batch, Mapping) and "labels" in batch):
            raise TypeError("`y` must hold the outcomes unless `x` is a DataLoader of pairs; got None.")
        yield (batch, y) if y is not None else labelled_batch(net, batch, "x")


def all_pairs(net: nn.Module, x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
    """The inputs and outcomes in `x` and `y`; of a DataLoader, those of all batches together."""
    pairs = list(_pairs(net, x, y, None, progress=False))
    try:
        return pairs[0] if len(pairs) == 1 else tree_map(lambda *parts: torch.cat(parts), *pairs)
    except (RuntimeError, TypeError, ValueError) as error:
        rule = "must be a DataLoader whose batches can be joined here (pad texts to one length)"
        raise ValueError(f"`x` {rule}; {error}") from None


def _targets(y: PyTree, inputs: Inputs) -> Tensor:
    """The outcomes of one output as a tensor, one for each row."""
    targets = outcomes(y).to(inputs.device)
    if not inputs.is_one_row and (targets.dim() == 0 or len(targets) != inputs.n_rows):
        raise ValueError(f"`y` must have one entry per row; got shape {tuple(targets.shape)} for {inputs.n_rows} rows.")
    return targets[None] if inputs.is_one_row else targets


class DrawScores(RowStatistics):
    """The statistics of some rows' draws, with how well these predict the outcomes `y` of the rows, `[row, ...]`."""

    def __init__(self, likelihood: Likelihood, y: Tensor) -> None:
        super().__init__(Request(likelihood), likelihood)
        self.y, self.densities = y, LogMean()

    def score(self, output: Tensor) -> Tensor:
        """Adds outputs `[draw, row, ...]`; the log-density of the outcomes under each draw, `[draw, row]`."""
        self.add(output, None)
        likelihood, exact = self.likelihood, output.double()
        assert likelihood is not None
        likelihood.check(output, self.y)
        density = likelihood.log_density(exact, self.y)
        self.densities.add(density)
        if not isinstance(likelihood, ClassLikelihood):
            # The distribution function at the outcome, of the Gaussian with each draw's mean and variance.
            standard = (self.y - likelihood.mean(exact)) / likelihood.variance(exact).sqrt()
            self.means["pit"].add(torch.special.ndtr(standard))
        return density

    def results(self, dtype: torch.dtype | None = torch.float64) -> dict[str, Tensor]:
        """The statistics of the rows by name, with `y`, their `log_likelihood`, and for numbers `pit`."""
        return super().results(dtype) | {"y": self.y, "log_likelihood": self.densities.finish().value}


def row_scores(rows: dict[str, Tensor], likelihood: Likelihood, sample_weight: Tensor | None = None) -> RowOutcomes:
    """What all scores follow from, of the results of `DrawScores`."""
    y, mean = rows["y"], rows["mean"]
    if not bool(mean.isfinite().all()):
        raise ValueError(NOT_FINITE)
    likelihood = likelihood.for_output(mean.dim())
    if isinstance(likelihood, ClassLikelihood):
        labels, probabilities = y.flatten(), likelihood.class_probabilities(mean).flatten(0, -2)
        if sample_weight is not None:  # each of a row's labels has the row's weight
            sample_weight = sample_weight.repeat_interleave(y[0].numel())
        if bool((labels != labels.long()).any()):  # a label of 0.7 is yes with weight 0.7 and no with 0.3
            sample_weight = torch.cat([1 - labels, labels]) * (1 if sample_weight is None else sample_weight.repeat(2))
            labels, probabilities = torch.cat([labels * 0, labels * 0 + 1]), probabilities.repeat(2, 1)
        return ClassOutcomes(labels.long(), probabilities, sample_weight)
    std = (rows["epistemic"] + rows["aleatoric"]).sqrt()
    return RegressionOutcomes(y, mean, std, rows["pit"], rows["log_likelihood"], sample_weight)


def score_draws(sampled: Tensor, y: Tensor, likelihood: Likelihood | None) -> tuple[Tensor, RowOutcomes]:
    """The log-likelihood of each row under draws `[draw, row, ...]`, and what all scores follow from."""
    likelihood = fitted_noise(sampled.double(), y) if likelihood is None else likelihood
    statistics = DrawScores(likelihood, y)
    statistics.score(sampled)
    rows = statistics.results()
    return rows["log_likelihood"], row_scores(rows, likelihood)


def fitted_noise(sampled: Tensor, y: Tensor) -> Gaussian:
    """The Gaussian noise that fits draws `[draw, row, ...]`: a precision for each output of a row, one of a map."""
    from scipy.optimize import minimize_scalar

    errors, precisions = (y - sampled).square(), []
    for squares in errors.unbind(2) if y.dim() == 2 else [errors.flatten(1)]:

        def loss(log_scale: float, squares: Tensor = squares) -> float:
            return log_scale - float((-0.5 * squares * math.exp(-2 * log_scale)).logsumexp(0).mean())

        least = max(1e-12 * float(squares.mean()), 1e-100)  # whatever the unit of y
        low, high = (math.log(max(float(value), least)) / 2 for value in (squares.amin(0).mean(), squares.mean()))
        precisions.append(math.exp(-2 * minimize_scalar(loss, bounds=(low, high + 0.1), method="bounded").x))
    by_output = torch.tensor(precisions, dtype=torch.float64, device=sampled.device)
    return Gaussian(by_output if len(precisions) > 1 else precisions[0])


def checked_targets(y: Array, output: Tensor, likelihood: Likelihood | None) -> tuple[Tensor, Likelihood | None]:
    """The outcomes as a tensor, one for each row of the output, and their likelihood: if not given, by their dtype."""
    rule = "be one of dropbayes' likelihoods, such as Gaussian(precision=1.0)"
    check_type("likelihood", likelihood, (Likelihood, type(None)), rule)
    if bool(output.isnan().any()):
        raise ValueError(NOT_FINITE)
    targets = outcomes(y).to(output.device)
    if targets.shape[:1] != output.shape[:1]:
        raise ValueError(f"`y` must have one outcome for each of the {len(output)} rows; got {tuple(targets.shape)}.")
    if likelihood is not None:
        likelihood = likelihood.for_output(output.dim())
    elif not targets.is_floating_point() and output.numel() > targets.numel():
        likelihood = Categorical().for_output(output.dim())
    elif bool((targets.square() == targets).all()) and bool(targets.any()):
        remedy = "Bernoulli() of labels, Gaussian(1.0) of numbers; one-hot rows are y.argmax(1)"
        raise ValueError(f"`likelihood` must be given for a `y` of 0 and 1 alone: {remedy}.")
    if isinstance(likelihood, ClassLikelihood):
        return targets, likelihood
    mean = output if likelihood is None else likelihood.mean(output)
    if [n for n in targets.shape if n > 1] != [n for n in mean.shape if n > 1]:  # axes of length 1 may be left out
        expected, got = tuple(mean.shape), tuple(targets.shape)
        raise ValueError(f"`y` must have the shape {expected} of the network's output; got {got}.")
    return targets.reshape(mean.shape), likelihood
