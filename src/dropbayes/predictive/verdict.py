r"""The verdict on Monte Carlo dropout for a network, and the drop probability to give one without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.layers.conversion import add_dropout
from dropbayes.likelihoods import Categorical, ClassLikelihood, Gaussian, Likelihood
from dropbayes.predictive.mixtures import Mixture
from dropbayes.sampling import draws, sites
from dropbayes.scores import confidence_and_correctness, expected_calibration_error, risk_coverage

__all__ = ["DropoutChoice", "Verdict", "check", "choose_dropout"]

DROP_PROBS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3)
"""The drop probabilities that `choose_dropout` tries."""

# The gap between claimed and observed coverage beyond which calibration is advised.
_COVERAGE_GAP = 0.05
# The share of the oracle's gain below which the spread is said not to rank the errors.
_WEAK_RANKING = 0.1


@dataclass(frozen=True)
class Verdict:
    r"""How Monte Carlo dropout fares on held-out rows; prints as a table.

    Attributes:
        sites: The name and drop probability of each stochastic operation.
        n_rows: The number of rows.
        n_draws: The number of draws.
        log_likelihood: The mean predictive log-likelihood of the draws.
        plain_log_likelihood: That of one pass without dropout.
        gain_error: The standard error of their difference.
        risk_area: The area under the risk-coverage curve when rows are ranked by their uncertainty.
        random_area: The area of a random ranking: the mean loss.
        oracle_area: The area of the ranking by the true loss.
        coverage: The observed share of outcomes inside the central intervals, by claimed share (regression).
        calibration_error: The expected calibration error (classes).
        ensemble_equivalent: The number of networks that an ensemble needs for the same log-likelihood, interpolated,
            where members are given; infinite if all of them together do not reach it.
        ensemble_log_likelihoods: The log-likelihood of ensembles of 1, 2, ... members.
        advice: What to do next.
    """

    sites: tuple[tuple[str, float | None], ...]
    n_rows: int
    n_draws: int
    log_likelihood: float
    plain_log_likelihood: float
    gain_error: float
    risk_area: float
    random_area: float
    oracle_area: float
    coverage: dict[float, float]
    calibration_error: float | None
    ensemble_equivalent: float | None
    ensemble_log_likelihoods: tuple[float, ...]
    advice: tuple[str, ...]

    @property
    def gain(self) -> float:
        """The gain in log-likelihood over one pass without dropout, in nats per row."""
        return self.log_likelihood - self.plain_log_likelihood

    @property
    def ranking(self) -> float:
        """The share of the oracle's gain over a random ranking that the uncertainty reaches: 1 is perfect, 0 chance."""
        possible = self.random_area - self.oracle_area
        return (self.random_area - self.risk_area) / possible if possible > 0 else math.nan

    def rows(self) -> list[tuple[str, str, str]]:
        """The lines of the table: a name, a value and what it says."""
        drop = ", ".join(f"{name or 'the network'}: {'?' if p is None else f'{p:g}'}" for name, p in self.sites[:4])
        more = f" and {len(self.sites) - 4} more" if len(self.sites) > 4 else ""
        lines = [
            ("random operations", str(len(self.sites)), drop + more),
            ("log-likelihood", f"{self.log_likelihood:.4g}", "nats per row, of the draws"),
            ("gain", f"{self.gain:+.3g} ± {self.gain_error:.2g}", "over one pass without dropout"),
            ("ranking of errors", f"{self.ranking:.2f}", "1 is the best possible, 0 is chance"),
        ]
        lines += [
            (f"coverage of {claimed:.0%}", f"{observed:.1%}", "outcomes inside their interval")
            for claimed, observed in self.coverage.items()
        ]
        if self.calibration_error is not None:
            lines.append(("calibration error", f"{self.calibration_error:.1%}", "gap of confidence and accuracy"))
        if self.ensemble_equivalent is not None:
            most = len(self.ensemble_log_likelihoods)
            count = f"more than {most}" if math.isinf(self.ensemble_equivalent) else f"{self.ensemble_equivalent:.1f}"
            lines.append(("worth an ensemble of", count, "networks trained apart"))
        return lines

    def __str__(self) -> str:
        lines = self.rows()
        widths = [max(len(line[k]) for line in lines) for k in (0, 1)]
        table = [f"{name:<{widths[0]}}  {value:>{widths[1]}}  {meaning}" for name, value, meaning in lines]
        head = f"Monte Carlo dropout on {self.n_rows:,} rows, {self.n_draws} draws"
        return "\n".join([head, "", *table, "", *(f"- {sentence}" for sentence in self.advice)])

    def _repr_html_(self) -> str:
        from html import escape

        cells = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>" for line in self.rows())
        advice = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.advice)
        head = f"Monte Carlo dropout on {self.n_rows:,} rows, {self.n_draws} draws"
        return f"<table><caption>{head}</caption>{cells}</table><ul>{advice}</ul>"


def check(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    likelihood: Likelihood | None = None,
    members: Sequence[nn.Module] = (),
    n_draws: int = 100,
    seed: int = 0,
) -> Verdict:
    r"""The verdict on Monte Carlo dropout for a network: is it any good on this problem?

    Args:
        net: A trained network with dropout.
        x: Inputs of rows it was not trained on.
        y: Their outcomes.
        likelihood: What the output means. By default classes where `y` holds integers and the output several columns;
            otherwise Gaussian noise whose precision τ is fitted to these rows, for the draws and for the plain pass
            each its own.
        members: Networks of the same kind trained apart, to say how many of them an ensemble needs for the same.
        n_draws: The number of draws T.
        seed: The seed of the draws.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Dropout(0.2), nn.Linear(50, 1))
        >>> verdict = check(net, torch.randn(200, 2), torch.randn(200, 1))
        >>> verdict.sites
        (('2', 0.2),)
        >>> 0.85 < verdict.coverage[0.95] <= 1
        True
    """
    found = sites(net, x)
    sampled = draws(net, x, n_draws=n_draws, seed=seed, masks="row")
    if not isinstance(sampled, Tensor):
        raise TypeError(f"`net` must return one tensor; got {type(sampled).__name__}. Wrap it to return its logits.")
    plain = _plain_output(net, x)
    targets = _targets(y, plain, likelihood)
    judge = _ClassJudge() if _is_classes(targets, plain, likelihood) else _NumberJudge(likelihood)
    densities, base = judge.log_densities(sampled, targets), judge.log_densities(plain[None], targets)
    uncertainty, loss = judge.uncertainty_and_loss(sampled, targets)
    curve = risk_coverage(uncertainty, loss)
    difference = densities - base
    equivalent, ensembles = _ensemble_equivalent(judge, members, x, targets, float(densities.mean()))
    measured: dict[str, Any] = {
        "sites": tuple((site.path, site.drop_prob) for site in found),
        "n_rows": len(targets),
        "n_draws": n_draws,
        "log_likelihood": float(densities.mean()),
        "plain_log_likelihood": float(base.mean()),
        "gain_error": float(difference.std() / math.sqrt(len(difference))),
        "risk_area": float(curve.area),
        "random_area": float(loss.mean()),
        "oracle_area": float(curve.oracle_area),
        "coverage": judge.coverage(sampled, targets),
        "calibration_error": judge.calibration_error(sampled, targets),
        "ensemble_equivalent": equivalent,
        "ensemble_log_likelihoods": ensembles,
    }
    verdict = Verdict(**measured, advice=())
    return Verdict(**measured, advice=_advice(verdict))


@dataclass(frozen=True)
class DropoutChoice:
    """The drop probability for a network trained without dropout; prints as a table.

    Attributes:
        drop_prob: The largest that costs at most the tolerance; 0 if none does. One per weight layer, by name, where
            they were chosen apart.
        helps: Whether the held-out log-likelihood is better with it than without dropout, by more than its standard
            error.
        log_likelihood: That of the choice.
        plain_log_likelihood: That of the network without dropout.
        tried: The log-likelihood of each drop probability, one for all layers.
        network: A copy of the network with the chosen dropout; the network itself if nothing was chosen.
    """

    drop_prob: float | dict[str, float]
    helps: bool
    log_likelihood: float
    plain_log_likelihood: float
    tried: dict[float, float]
    network: nn.Module

    def __str__(self) -> str:
        lines = [f"without dropout  {self.plain_log_likelihood: .4f}"]
        lines += [f"drop_prob {p:<6g} {value: .4f}" for p, value in self.tried.items()]
        chosen = self.drop_prob
        if not chosen or (isinstance(chosen, dict) and not any(chosen.values())):
            return "\n".join([*lines, "no drop probability keeps the held-out log-likelihood within the tolerance"])
        word = "better than" if self.helps else "no better than"
        return "\n".join([*lines, f"chosen: {chosen}, {word} no dropout"])


def choose_dropout(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    tolerance: float = 0.01,
    likelihood: Likelihood | None = None,
    drop_probs: Sequence[float] = DROP_PROBS,
    per_layer: bool = False,
    n_draws: int = 50,
    seed: int = 0,
) -> DropoutChoice:
    r"""The drop probability that costs at most so much held-out log-likelihood, for a network trained without dropout.

    Dropout is put before every weight layer (`add_dropout`), nothing is trained. Of the probabilities that cost at most
    the tolerance against the plain network the largest is chosen: the widest distribution over functions that the rows
    do not contradict.

    Args:
        net: A trained network.
        x: Inputs of rows it was not trained on.
        y: Their outcomes.
        tolerance: The greatest loss of log-likelihood, in nats per row.
        likelihood: What the output means; see `check`.
        drop_probs: The probabilities to try, rising.
        per_layer: Whether to go on and raise the probability of each weight layer apart, as far as the same tolerance
            allows, the layers in turn.
        n_draws: The number of draws T.
        seed: The seed of the draws.
    """
    if not tolerance >= 0:
        raise ValueError(f"`tolerance` must be zero or more nats per row; got {tolerance!r}.")
    if not drop_probs or not all(0 < p < 1 for p in drop_probs):
        raise ValueError(f"`drop_probs` must hold probabilities in (0, 1); got {list(drop_probs)}.")
    plain = _plain_output(net, x)
    targets = _targets(y, plain, likelihood)
    judge = _ClassJudge() if _is_classes(targets, plain, likelihood) else _NumberJudge(likelihood)
    base = judge.log_densities(plain[None], targets)

    def densities(candidate: nn.Module) -> Tensor:
        return judge.log_densities(draws(candidate, x, n_draws=n_draws, seed=seed, masks="row"), targets)

    scores = {p: densities(add_dropout(net, p)) for p in sorted(drop_probs)}
    tried = {p: float(values.mean()) for p, values in scores.items()}
    allowed = [p for p, value in tried.items() if value >= float(base.mean()) - tolerance]
    chosen = max(allowed, default=0.0)
    network, best = (add_dropout(net, chosen), scores[chosen]) if chosen else (net, base)
    by_layer: dict[str, float] = {}
    if per_layer and chosen:
        network, best, by_layer = _raise_layers(network, chosen, sorted(drop_probs), densities, base, tolerance)
    gain = best - base
    helps = bool(chosen) and float(gain.mean()) > float(gain.std() / math.sqrt(len(gain)))
    return DropoutChoice(by_layer or chosen, helps, float(best.mean()), float(base.mean()), tried, network)


def _raise_layers(
    network: nn.Module, chosen: float, drop_probs: list[float], densities: Any, base: Tensor, tolerance: float
) -> tuple[nn.Module, Tensor, dict[str, float]]:
    names = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    by_layer, best = dict.fromkeys(names, chosen), densities(network)
    for name in names:
        for p in (p for p in drop_probs if p > chosen):
            candidate = add_dropout(network, p, where=[name])
            score = densities(candidate)
            if float(score.mean()) < float(base.mean()) - tolerance:
                break
            network, best, by_layer[name] = candidate, score, p
    return network, best, by_layer


# --- judging one kind of outcome ----------------------------------------------------------------------------------


class _NumberJudge:
    """Numbers, with Gaussian noise of given precision, or of the precision that fits best."""

    def __init__(self, likelihood: Likelihood | None) -> None:
        self.likelihood = likelihood

    def mixture(self, sampled: Tensor, y: Tensor) -> Mixture:
        """The predictive mixture of draws `[draw, row, output]`, one column per output."""
        location = sampled.double().reshape(len(sampled), len(y), -1)
        outcome = y.double().reshape(len(y), -1)
        if isinstance(self.likelihood, Gaussian):
            return Mixture(location, torch.tensor(float(self.likelihood.precision) ** -0.5, dtype=torch.float64))
        if self.likelihood is not None:
            raise TypeError(f"`likelihood` must be Gaussian or a class likelihood; got {self.likelihood}.")
        return Mixture(location, _best_scale(location, outcome))

    def log_densities(self, sampled: Tensor, y: Tensor) -> Tensor:
        return self.mixture(sampled, y).log_density(y.double().reshape(len(y), -1))

    def uncertainty_and_loss(self, sampled: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mixture = self.mixture(sampled, y)
        error = (mixture.mean - y.double().reshape(len(y), -1)).abs().mean(-1)
        return mixture.variance.sum(-1), error

    def coverage(self, sampled: Tensor, y: Tensor) -> dict[float, float]:
        pit = self.mixture(sampled, y).pit(y.double().reshape(len(y), -1))
        return {level: float(((2 * pit - 1).abs() <= level).double().mean()) for level in (0.5, 0.8, 0.95)}

    def calibration_error(self, sampled: Tensor, y: Tensor) -> None:
        del sampled, y


class _ClassJudge:
    """Classes, with logits as outputs."""

    def log_densities(self, sampled: Tensor, y: Tensor) -> Tensor:
        log = sampled.double().log_softmax(-1)
        return log.gather(-1, y.expand(len(log), -1)[..., None])[..., 0].logsumexp(0) - math.log(len(log))

    def uncertainty_and_loss(self, sampled: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mean = sampled.double().softmax(-1).mean(0)
        entropy = -(mean * mean.clamp_min(1e-300).log()).sum(-1)
        return entropy, 1 - confidence_and_correctness(mean, y)[1]

    def coverage(self, sampled: Tensor, y: Tensor) -> dict[float, float]:
        del sampled, y
        return {}

    def calibration_error(self, sampled: Tensor, y: Tensor) -> float:
        return float(expected_calibration_error(sampled.double().softmax(-1).mean(0), y))


def _best_scale(location: Tensor, y: Tensor) -> Tensor:
    """The scale of Gaussian noise with the largest likelihood of the mixture, one per output, by golden section."""
    error = (y - location).square()
    scales = []
    for k in range(y.shape[1]):
        column = error[..., k]
        low = math.log(max(float(column.amin(0).mean()), 1e-12)) / 2
        high = math.log(max(float(column.mean()), 1e-12)) / 2 + 0.1

        def likelihood(log_scale: float, column: Tensor = column) -> float:
            density = -0.5 * column * math.exp(-2 * log_scale)
            return float(density.logsumexp(0).mean()) - log_scale

        for _ in range(40):
            first, second = (low + share * (high - low) for share in (0.381966, 0.618034))
            low, high = (low, second) if likelihood(first) > likelihood(second) else (first, high)
        scales.append(math.exp((low + high) / 2))
    return torch.tensor(scales, dtype=torch.float64, device=location.device)


def _plain_output(net: nn.Module, x: Tensor) -> Tensor:
    """One pass without dropout; the network's flags are left as they were."""
    training = {name: module.training for name, module in net.named_modules()}
    try:
        with torch.no_grad():
            output = net.eval()(x)
    finally:
        for name, module in net.named_modules():
            module.training = training[name]
    if not isinstance(output, Tensor):
        raise TypeError(f"`net` must return one tensor; got {type(output).__name__}. Wrap it to return its logits.")
    return output


def _is_classes(y: Tensor, output: Tensor, likelihood: Likelihood | None) -> bool:
    if likelihood is not None:
        if isinstance(likelihood, ClassLikelihood) and not isinstance(likelihood, Categorical):
            raise TypeError(f"`likelihood` must be Categorical or Gaussian; got {likelihood}.")
        return isinstance(likelihood, Categorical)
    return not y.is_floating_point() and output.dim() == 2 and output.shape[1] > 1


def _targets(y: Any, output: Tensor, likelihood: Likelihood | None) -> Tensor:
    targets = torch.as_tensor(y, device=output.device)
    if len(targets) != len(output):
        raise ValueError(f"`y` must have one outcome for each of the {len(output)} rows; got {len(targets)}.")
    if not _is_classes(targets, output, likelihood) and targets.numel() != output.numel():
        raise ValueError(
            f"`y` must have the shape {tuple(output.shape)} of the network's output; got {tuple(targets.shape)}."
        )
    return targets


def _ensemble_equivalent(
    judge: Any, members: Sequence[nn.Module], x: Tensor, y: Tensor, reached: float
) -> tuple[float | None, tuple[float, ...]]:
    """The size of the ensemble with the same log-likelihood, interpolated, and the log-likelihoods of all sizes."""
    if not members:
        return None, ()
    outputs = torch.stack([_plain_output(member, x) for member in members])
    scores = []
    for size in range(1, len(members) + 1):
        starts = range(len(members))  # every member is in as many of these ensembles as every other
        chosen = [[(start + k) % len(members) for k in range(size)] for start in starts]
        scores.append(sum(float(judge.log_densities(outputs[index], y).mean()) for index in chosen) / len(chosen))
    for size, score in enumerate(scores, start=1):
        if score >= reached:
            before = scores[size - 2] if size > 1 else score
            share = (reached - before) / (score - before) if score > before else 1.0
            return (size - 1 + share if size > 1 else 1.0), tuple(scores)
    return math.inf, tuple(scores)


def _advice(verdict: Verdict) -> tuple[str, ...]:
    advice = []
    if verdict.gain > 2 * verdict.gain_error:
        advice.append("Keep the draws: they predict the outcomes better than one pass.")
    elif verdict.gain < -2 * verdict.gain_error:
        advice.append("The draws predict worse than one pass: choose a smaller drop probability (choose_dropout).")
    else:
        advice.append("The draws predict about as well as one pass.")
    if verdict.ranking < _WEAK_RANKING:
        advice.append("The uncertainty does not rank the errors: add dropout before more layers, or train an ensemble.")
    gaps = [observed - claimed for claimed, observed in verdict.coverage.items()]
    worst = max(gaps, key=abs, default=0.0)
    if abs(worst) > _COVERAGE_GAP:
        word = "narrow" if worst < 0 else "wide"
        advice.append(f"Intervals are too {word}: calibrate them on held-out rows (calibration.std_scale).")
    if verdict.calibration_error is not None and verdict.calibration_error > _COVERAGE_GAP:
        advice.append("Confidence and accuracy differ: calibrate on held-out rows (calibration.temperature).")
    return tuple(advice)
