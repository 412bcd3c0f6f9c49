r"""Drop probabilities fitted after training: the linear variance is a weighted sum, and its weights are the rates.

The derivatives of a network by its masks are taken at their means, and so do not depend on the drop probabilities. Its
covariance is $\sum_s \frac{p_s}{1 - p_s} \mathbf C_s$ with one fixed matrix per layer: the rates of largest held-out
likelihood, and the noise with them, are found in seconds, without touching the weights.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dropbayes.layers.conversion import add_dropout
from dropbayes.layers.structure import hook_keep_prob
from dropbayes.likelihoods import Categorical, Gaussian, Likelihood
from dropbayes.linear.passes import Linear, linear_plan
from dropbayes.linear.points import standard_points
from dropbayes.sampling import Inputs, Sampling, Site, as_inputs, draws, is_stochastic

MAX_RATIO = 1.0
"""The largest variance p / (1 - p) of a mask that is tried: beyond p = 0.5 the linear method is poor."""

_N_POINTS = 64


@dataclass(frozen=True)
class Tuning:
    """Drop probabilities and noise fitted to held-out rows; prints as a table."""

    drop_probs: dict[str, float]
    """The drop probability of each layer by name; empty if the plain network was no worse."""
    likelihood: Likelihood
    """The observation model with the noise that belongs to the network."""
    log_likelihood: float
    """The log-likelihood of the result on rows that were not fitted, in nats per row."""
    plain_log_likelihood: float
    """That of the network without dropout, with the noise that suits it best."""
    standard_error: float
    """Of the difference between the two."""
    network: nn.Module
    """A copy of the network with these rates; the network itself if it was no worse."""

    @property
    def gain(self) -> float:
        """The gain over the plain network, in nats per row."""
        return self.log_likelihood - self.plain_log_likelihood

    def __str__(self) -> str:
        lines = [f"{name}: drop_prob {rate:.3g}" for name, rate in self.drop_probs.items()]
        lines.append(f"without dropout: {self.plain_log_likelihood:.4f} nats per row")
        tuned = f"tuned: {self.log_likelihood:.4f} nats per row, {self.gain:+.4f} ± {self.standard_error:.4f}"
        return "\n".join([*lines, tuned if self.drop_probs else "no drop probabilities were better"])


def tune_dropout(
    net: nn.Module,
    x: Any,
    y: Tensor,
    *,
    likelihood: Likelihood | None = None,
    where: Callable[[str, nn.Module], bool] | Collection[str] | None = None,
    sampling: Sampling = Sampling(),
    n_draws: int = 100,
    seed: int = 0,
) -> Tuning:
    """Drop probabilities, one per layer, and noise that fit held-out rows, without training the network again.

    Two thirds of the rows fit the rates; the others, which they have not seen, judge the network that results by its
    draws. Only if it is better there than the network without dropout are rates returned: those that fit all rows.

    Args:
        net: A trained network that returns one tensor, rows first. The rates of its dropout are fitted; one without
            dropout is given it before every weight layer (`add_dropout`).
        x: The inputs of held-out rows.
        y: Their outcomes.
        likelihood: The observation model; by default `Categorical` for whole numbers, else `Gaussian`, whose precision
            is fitted in any case.
        where: The weight layers of a network without dropout that are given it; see `add_dropout`.
        sampling: As for `predict`.
        n_draws: The number of draws that judge.
        seed: The seed of those draws and of the split.

    Example:
        >>> net, x = nn.Linear(2, 1), torch.randn(300, 2)
        >>> tuning = tune_dropout(net, x, net(x).detach() + torch.randn(300, 1))
        >>> tuning.log_likelihood >= tuning.plain_log_likelihood
        True
    """
    if likelihood is None:
        likelihood = Gaussian(1.0) if y.is_floating_point() else Categorical()
    inputs = as_inputs(x, row_axis=sampling.row_axis)
    if len(y) != inputs.n_rows or inputs.n_rows < 6:
        raise ValueError(f"`y` must have an outcome for each of at least 6 rows; got {len(y)} for {inputs.n_rows}.")
    candidate = copy.deepcopy(net) if is_stochastic(net, x) else add_dropout(net, 0.1, where=where)
    parts = Parts(candidate, inputs)
    y = y.to(parts.mean.device)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed)).to(y.device)
    fitted, unseen = order[: 2 * len(y) // 3], order[2 * len(y) // 3 :]
    drop_probs, tuned = parts.fit(fitted, y[fitted], likelihood)
    candidate = _with_rates(candidate, parts.settings, drop_probs)
    plain = _with_best_noise(likelihood, parts.output[fitted], y[fitted])
    base = plain.log_density(parts.output[unseen], y[unseen])
    found, plainly = base, float(base.mean())
    if any(drop_probs.values()):
        sampled = draws(candidate, x, n_draws=n_draws, seed=seed, sampling=sampling)[:, unseen].double()
        found = tuned.log_density(sampled, y[unseen]).logsumexp(0) - math.log(n_draws)
    error = float((found - base).std() / math.sqrt(len(base)))
    if not float(found.mean()) > plainly:
        return Tuning({}, _with_best_noise(likelihood, parts.output, y), plainly, plainly, error, net)
    drop_probs, tuned = parts.fit(order, y[order], likelihood)
    candidate = _with_rates(candidate, parts.settings, drop_probs)
    return Tuning(drop_probs, tuned, float(found.mean()), plainly, error, candidate)


class Parts:
    """The mean of a network's output, and the covariance due to each layer for a mask of variance 1."""

    def __init__(self, net: nn.Module, inputs: Inputs) -> None:
        plan = linear_plan(net, inputs, Linear())
        n_outputs = plan.only_size()
        named = {site.path: setting for site in plan.profile.sites if (setting := _setting(net, site)) is not None}
        if not named:
            raise ValueError(
                "`net` must have a dropout module whose probability can be set; it has none. Write nn.Dropout in place "
                "of nn.functional.dropout, or use dropbayes.add_dropout."
            )
        self.settings, groups = named, list(named)
        outputs: list[Tensor] = []
        blocks: list[Tensor] = []
        for _, linear in plan.linearised(inputs):
            outputs.append(linear.outputs[0].detach().double())
            # The last group has the sites whose rates stay as they are.
            block = torch.zeros(len(groups) + 1, linear.n_rows, n_outputs, n_outputs).to(outputs[-1])
            for variable, slope in zip(linear.variables, linear.slopes(), strict=True):
                site, group = variable.site, -1
                if site.drop_prob is not None and _setting(net, site) is not None:
                    group, slope = groups.index(site.path), slope * ((1 - site.drop_prob) / site.drop_prob) ** 0.5
                block[group] += torch.einsum("kru,lru->rkl", slope, slope)
            blocks.append(block)
        self.output, self.covariances = torch.cat(outputs), torch.cat(blocks, 1)
        self.mean = self.output.flatten(1) if self.output.dim() > 1 else self.output[:, None]

    def log_likelihood(self, rows: Tensor, ratios: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
        """The log-likelihood of some rows under the linear network whose masks have these variances, per row."""
        weights, mean = torch.cat([ratios, ratios.new_ones(1)]), self.mean[rows]
        covariance = torch.einsum("g,grkl->rkl", weights, self.covariances[:, rows])
        if isinstance(likelihood, Gaussian):
            variance = covariance.diagonal(dim1=1, dim2=2) + 1 / likelihood.precision
            error = (mean - y.double().reshape(mean.shape)).square()
            return -0.5 * ((2 * math.pi * variance).log() + error / variance).sum(1).mean()
        size = covariance.detach().diagonal(dim1=1, dim2=2).mean() + 1e-12
        jitter = 1e-6 * size * torch.eye(mean.shape[1]).to(mean)
        points, root = standard_points(len(jitter), _N_POINTS).to(jitter), torch.linalg.cholesky(covariance + jitter)
        outputs = mean + torch.einsum("pk,rjk->prj", points, root)
        densities = likelihood.log_density(outputs.view(_N_POINTS, *self.output[rows].shape), y)
        return (densities.logsumexp(0) - math.log(_N_POINTS)).mean()

    @torch.inference_mode(False)
    @torch.enable_grad()
    def fit(self, rows: Tensor, y: Tensor, likelihood: Likelihood) -> tuple[dict[str, float], Likelihood]:
        """The drop probabilities, and the likelihood with its noise, of the largest log-likelihood of some rows."""
        plain = _with_best_noise(likelihood, self.output[rows], y)
        scores = torch.full((len(self.settings),), -3.0).to(self.mean).requires_grad_()
        noise = torch.zeros(1).to(self.mean).requires_grad_()  # logarithm of its precision, relative to the plain one

        def noisy(factor: Any) -> Likelihood:
            return Gaussian(factor * plain.precision) if isinstance(plain, Gaussian) else plain

        def loss() -> Tensor:
            optimiser.zero_grad()
            value = -self.log_likelihood(rows, MAX_RATIO * scores.sigmoid(), y, noisy(noise.exp()))
            value.backward()
            return value

        optimiser = torch.optim.LBFGS([scores, noise], max_iter=200, line_search_fn="strong_wolfe")
        optimiser.step(loss)
        ratios = (MAX_RATIO * scores.detach().sigmoid()).tolist()
        rates = {path: round(ratio / (1 + ratio), 4) for path, ratio in zip(self.settings, ratios, strict=True)}
        return rates, noisy(math.exp(noise.item()))


def _with_best_noise(likelihood: Likelihood, output: Tensor, y: Tensor) -> Likelihood:
    """The likelihood of a network without dropout, with the noise that suits its errors."""
    if not isinstance(likelihood, Gaussian):
        return likelihood
    return Gaussian(1 / max(float((output - y.double().reshape(output.shape)).square().mean()), 1e-12))


def _setting(net: nn.Module, site: Site) -> str | None:
    """The attribute of a site's module that is its drop probability; "" if a hook has it, None if nothing has."""
    if not site.is_random or site.drop_prob is None or "alpha" in site.kind:  # whose mean depends on the probability
        return None
    module = net.get_submodule(site.path)
    if hook_keep_prob(module) is not None:
        return ""
    names = ("p", "drop_prob", "dropout")  # of torch's and timm's modules
    return next((name for name in names if getattr(module, name, None) == site.drop_prob), None)


def _with_rates(net: nn.Module, settings: dict[str, str], drop_probs: dict[str, float]) -> nn.Module:
    """The network with other drop probabilities, by the names of its modules."""
    for path, drop_prob in drop_probs.items():
        if settings[path]:
            setattr(net.get_submodule(path), settings[path], drop_prob)
        else:
            net = add_dropout(net, drop_prob, where=[path], copy=False)
    return net
