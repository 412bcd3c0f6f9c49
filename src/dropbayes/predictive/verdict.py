r"""The verdict on Monte Carlo dropout for a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.likelihoods import Likelihood, output_tensor
from dropbayes.linear import LinearCheck, check_linear
from dropbayes.predictive.evaluation import all_pairs, checked_targets, score_draws
from dropbayes.predictive.scoring import COVERAGE_LEVELS, RowOutcomes, core_scores, risk_curve
from dropbayes.runtime.formatting import Printed, Table, count
from dropbayes.runtime.validation import Array, check_type
from dropbayes.sampling import draws, evaluation_output, sites
from dropbayes.scores import RiskCoverage
from dropbayes.scores.averages import standard_error, weighted_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Verdict(Printed):
    """The evaluation of Monte Carlo dropout on held-out rows; prints as a table."""

    sites: Sequence[tuple[str, float | None]]  #: The name and drop probability of each stochastic operation.
    n_rows: int
    n_draws: int
    log_likelihood: float  #: The mean predictive log-likelihood of the draws.
    plain_log_likelihood: float  #: That of one pass without dropout.
    gain_error: float  #: The standard error of their difference.
    risk: RiskCoverage  #: The risk-coverage curve of the rows ranked by their uncertainty.
    random_area: float  #: The area under the curve of a random ranking: the mean loss.
    coverage: dict[float, float]  #: The observed coverage of the central intervals, by nominal coverage (regression).
    calibration_error: float | None  #: The expected calibration error (classification).
    ensemble_log_likelihoods: tuple[float, ...] = ()  #: Of ensembles of 1, 2, ... members, if any are given.
    linear: LinearCheck | None = None
    """The linear method (`predict(method="linear")`) beside 30 draws of some of the rows; None where the network has no
    derivatives."""

    @property
    def gain(self) -> float:
        """The gain in log-likelihood over one pass without dropout, in nats per row."""
        return self.log_likelihood - self.plain_log_likelihood

    @property
    def ranking(self) -> float:
        """The ranking gain over chance as a fraction of the oracle's: 1 is perfect, 0 is chance."""
        possible = self.random_area - float(self.risk.oracle_area)
        return (self.random_area - float(self.risk.area)) / possible if possible > 0 else math.nan

    @property
    def ensemble_equivalent(self) -> float | None:
        """The interpolated size of a deep ensemble with the same log-likelihood; infinite if no size reaches it."""
        if not self.ensemble_log_likelihoods:
            return None
        best = np.maximum.accumulate(self.ensemble_log_likelihoods)
        return float(np.interp(self.log_likelihood, best, range(1, len(best) + 1), right=math.inf))

    @property
    def advice(self) -> tuple[str, ...]:
        """The recommended next steps."""
        steps, max_gap = [], max(0.05, self.n_rows**-0.5)  # of claimed and observed shares, more than by chance
        if self.gain > 2 * self.gain_error:
            steps.append("Keep the draws: they predict the outcomes better than one pass.")
        elif self.gain < -2 * self.gain_error:
            steps.append("The draws predict worse than one pass: choose smaller drop probabilities (tune_dropout).")
        else:
            steps.append("The draws predict about as well as one pass.")
        if self.ranking < 0.1:  # of the oracle's gain
            remedy = "add dropout before more layers, or train an ensemble"
            steps.append(f"The uncertainty does not rank the errors: {remedy}.")
        worst = max((observed - claimed for claimed, observed in self.coverage.items()), key=abs, default=0.0)
        if abs(worst) > max_gap:
            word = "narrow" if worst < 0 else "wide"
            steps.append(f"Intervals are too {word}: calibrate them on held-out rows (calibration.std_scale).")
        if (self.calibration_error or 0.0) > max_gap:
            steps.append("Confidence and accuracy differ: calibrate on held-out rows (calibration.temperature).")
        return tuple(steps)

    def rows(self) -> list[tuple[str, str, str]]:
        """The rows of the table: name, value and meaning."""
        drop = ", ".join(f"{name or 'the network'}: {'?' if p is None else f'{p:g}'}" for name, p in self.sites[:4])
        more = f" and {len(self.sites) - 4} more" if len(self.sites) > 4 else ""
        lines = [
            ("random operations", str(len(self.sites)), drop + more),
            ("log-likelihood", f"{self.log_likelihood:.4g}", "nats per row, of the draws"),
            ("gain", f"{self.gain:+.3g} ± {self.gain_error:.2g}", "over one pass without dropout"),
            ("ranking of errors", f"{self.ranking:.2f}", "1 is the best possible, 0 is chance"),
        ]
        for claimed, observed in self.coverage.items():
            lines.append((f"coverage of {claimed:.0%}", f"{observed:.1%}", "outcomes inside their interval"))
        if self.calibration_error is not None:
            lines.append(("calibration error", f"{self.calibration_error:.1%}", "gap of confidence and accuracy"))
        if self.ensemble_equivalent is not None:
            most = len(self.ensemble_log_likelihoods)
            size = f"more than {most}" if math.isinf(self.ensemble_equivalent) else f"{self.ensemble_equivalent:.1f}"
            lines.append(("worth an ensemble of", size, "networks trained apart"))
        if self.linear is not None:
            lines.append(("linear method", f"{self.linear.ratio:.2f}", "its deviation, of that of 30 draws"))
        return lines

    def table(self) -> Table:
        """The verdict as a table, with the advice below."""
        title = f"Monte Carlo dropout on {count(self.n_rows, 'row')}, {count(self.n_draws, 'draw')}"
        return Table(title, self.rows(), align="<><", notes=self.advice)

    def plot(self, *, ax: Axes | None = None) -> Axes:
        """The risk of the rows kept when the uncertain ones are set aside; needs matplotlib (the extra `plot`)."""
        from dropbayes import plots

        return plots.risk_coverage_diagram(self.risk, ax=ax)


def check(
    net: nn.Module,
    x: PyTree,
    y: Array | None = None,
    *,
    likelihood: Likelihood | None = None,
    members: Sequence[nn.Module] = (),
    n_draws: int = 100,
    seed: int = 0,
) -> Verdict:
    r"""The verdict on Monte Carlo dropout for a network: does it help on this problem?

    Args:
        net: A trained network with dropout.
        x: The inputs of rows that it was not trained on, or a DataLoader of pairs (input, outcome).
        y: Their outcomes; None for a DataLoader.
        likelihood: The observation model. By default categorical if `y` holds integers, fewer than the outputs;
            otherwise Gaussian with a precision τ fitted to these rows, separately for the draws and the plain pass. A
            `y` of 0 and 1 alone needs one, labels as numbers.
        members: Independently trained networks of the same kind, to find the size of an equivalent ensemble.
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
    check_type("members", members, Sequence, "be a list of networks")
    x, y = all_pairs(net, x, y)
    places = tuple((site.path, site.drop_prob) for site in sites(net, x))
    plain, *outputs = (output_tensor(evaluation_output(one, x)) for one in (net, *members))
    sampled = output_tensor(draws(net, x, n_draws=n_draws, seed=seed, masks="row"))
    targets, judged = checked_targets(y, plain, likelihood)
    (density, outcomes), (base, _) = (score_draws(one, targets, judged) for one in (sampled, plain[None]))
    try:
        linear = check_linear(net, x[:64] if isinstance(x, Tensor) else x, seed=seed)
    except (ValueError, RuntimeError):  # no derivative, or one that torch does not have
        linear = None
    worth = []
    for size in range(1, len(outputs) + 1):
        # Every member is in equally many of these ensembles.
        chosen = [[outputs[(start + k) % len(outputs)] for k in range(size)] for start in range(len(outputs))]
        densities = [score_draws(torch.stack(together), targets, judged)[0].mean() for together in chosen]
        worth.append(sum(map(float, densities)) / len(chosen))
    known = {"sites": places, "n_draws": n_draws, "ensemble_log_likelihoods": tuple(worth), "linear": linear}
    return row_verdict(outcomes, density, base, **known)


def row_verdict(outcomes: RowOutcomes, density: Tensor, plain: Tensor, **known: Any) -> Verdict:
    """The verdict from rows' outcomes and log-densities under draws and without dropout, and what is `known`."""
    measured = core_scores(outcomes)
    return Verdict(
        n_rows=len(density),
        log_likelihood=float(density.mean()),
        plain_log_likelihood=float(plain.mean()),
        gain_error=float(standard_error(density - plain)),
        risk=risk_curve(outcomes),
        random_area=float(weighted_mean(outcomes.loss(), outcomes.sample_weight)),
        coverage={p: measured[f"coverage_{100 * p:.0f}"] for p in COVERAGE_LEVELS if "rmse" in measured},
        calibration_error=measured.get("calibration_error"),
        **known,
    )
