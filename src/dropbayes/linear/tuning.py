r"""Drop probabilities fitted after training: the linear variance is a weighted sum, and its weights are the rates.

The derivatives of a network by its masks are taken at their means, and so do not depend on the drop probabilities. Its
covariance is $\sum_s \frac{p_s}{1 - p_s} \mathbf C_s$ with one fixed matrix per layer, or per unit: the rates of
largest held-out likelihood, and the noise with them, are found in seconds, without touching the weights.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dropbayes.layers.conversion import add_dropout
from dropbayes.layers.structure import hook_keep_prob
from dropbayes.likelihoods import Categorical, Gaussian, Likelihood
from dropbayes.linear.passes import Linear, linear_plan
from dropbayes.linear.points import standard_points
from dropbayes.sampling import Inputs, Sampling, Site, as_inputs, draws, is_stochastic, output_tensor
from dropbayes.tracing import draw_or_mean

MAX_RATIO = 1.0
"""The largest variance p / (1 - p) of a mask that is tried: beyond p = 0.5 the linear method is poor."""

_N_POINTS = 64
_UNIT_STEPS = (0, 3, 7, 20, 70)  # from the rates of layers to those of units, by and by

Rates = Mapping[str, float | Tensor]


@dataclass(frozen=True)
class Tuning:
    """Drop probabilities and noise fitted to held-out rows; prints as a table."""

    drop_probs: Rates
    """The drop probability of each layer, or of its units, by name; empty if the plain network was no worse."""
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
        texts = {
            name: f"{rate.min():.3g} to {rate.max():.3g}" if isinstance(rate, Tensor) else f"{rate:.3g}"
            for name, rate in self.drop_probs.items()
        }
        lines = [f"{name}: drop_prob {text}" for name, text in texts.items()]
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
    per: Literal["layer", "unit"] = "layer",
    sampling: Sampling = Sampling(),
    n_draws: int = 100,
    seed: int = 0,
) -> Tuning:
    """Drop probabilities, one per layer or unit, and noise that fit held-out rows, without training the network again.

    Each third of the rows judges, by its draws, the network whose rates fit the others. Only if it is better there than
    the network without dropout are rates returned: those that fit all rows.

    Args:
        net: A trained network that returns one tensor, rows first. The rates of its dropout are fitted; one without
            dropout is given it before every weight layer (`add_dropout`).
        x: The inputs of held-out rows.
        y: Their outcomes.
        likelihood: The observation model; by default `Categorical` for whole numbers, else `Gaussian`, whose precision
            is fitted in any case.
        where: The weight layers of a network without dropout that are given it; see `add_dropout`.
        per: What has a rate of its own: a layer, or each unit, for a Gaussian likelihood. How far the rates of units
            leave those of their layer is chosen on the rows that judge.
        sampling: As for `predict`.
        n_draws: The number of draws that judge, and whose noise is fitted: fewer draws are smoothed by more noise.
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
    if per not in ("layer", "unit") or (per == "unit" and not isinstance(likelihood, Gaussian)):
        raise ValueError(f'`per` must be "layer", or "unit" for a Gaussian likelihood; got {per!r} for {likelihood!r}.')
    candidate = copy.deepcopy(net) if is_stochastic(net, x) else add_dropout(net, 0.1, where=where)
    parts = Parts(candidate, inputs, per_unit=per == "unit")
    y = y.to(parts.output.device)

    def fits(rows: Tensor) -> Iterator[tuple[Rates, nn.Module, Likelihood, Tensor]]:
        """Networks whose rates fit some rows, their noise, and the log-likelihood of every row under their draws."""
        for rates in parts.fit(rows, y[rows], likelihood):
            tuned, sampled = _with_rates(candidate, parts.settings, rates), parts.output[None]
            if any(torch.as_tensor(rate, device=y.device).any() for rate in rates.values()):
                sampled = output_tensor(draws(tuned, x, n_draws=n_draws, seed=seed, sampling=sampling)).double()
            noisy = _with_best_noise(likelihood, sampled[:, rows], y[rows])
            yield rates, tuned, noisy, noisy.log_density(sampled, y).logsumexp(0) - math.log(len(sampled))

    order = torch.randperm(len(y), generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(y.device)
    plain = parts.output.new_zeros(len(y))
    tuned = plain.repeat(len(parts.steps), 1)
    folds = [order[fold::3] for fold in range(3)]
    for number, unseen in enumerate(folds):
        rows = torch.cat([*folds[:number], *folds[number + 1 :]])
        noisy = _with_best_noise(likelihood, parts.output[None, rows], y[rows])
        plain[unseen] = noisy.log_density(parts.output[unseen], y[unseen])
        tuned[:, unseen] = torch.stack([found[unseen] for *_, found in fits(rows)])
    best = int(tuned.mean(1).argmax())
    gain, plainly = tuned[best] - plain, float(plain.mean())
    error = float(gain.std() / math.sqrt(len(y)))
    if not gain.mean() > 0:
        return Tuning({}, _with_best_noise(likelihood, parts.output[None], y), plainly, plainly, error, net)
    rates, network, noisy, _ = list(fits(order))[best]
    return Tuning(rates, noisy, plainly + float(gain.mean()), plainly, error, network)


class Parts:
    """The output of a network, and the covariance due to each layer, or to each unit, for a mask of variance 1."""

    def __init__(self, net: nn.Module, inputs: Inputs, *, per_unit: bool = False) -> None:
        plan = linear_plan(net, inputs, Linear())
        n_outputs = plan.only_size()
        named = {site.path: setting for site in plan.profile.sites if (setting := _setting(net, site)) is not None}
        if not named:
            raise ValueError(
                "`net` must have a dropout module whose probability can be set; it has none. Write nn.Dropout in place "
                "of nn.functional.dropout, or use dropbayes.add_dropout."
            )
        if per_unit and any(len(site.shape) != 2 for site in plan.profile.sites if site.path in named):
            raise ValueError('`per` "unit" needs dropout of rows `[row, unit]`; got other axes. Use per="layer".')
        self.settings, self.steps = named, _UNIT_STEPS if per_unit else _UNIT_STEPS[:1]
        outputs: list[Tensor] = []
        blocks: list[Tensor] = []
        for _, linear in plan.linearised(inputs):
            outputs.append(linear.outputs[0].detach().double())
            shape = (-1, linear.n_rows, n_outputs, n_outputs)
            # The last one has the sites whose rates stay as they are.
            found: dict[str | None, Any] = dict.fromkeys(named, 0) | {None: outputs[0].new_zeros(1, *shape[1:])}
            for variable, slope in zip(linear.variables, linear.slopes(), strict=True):
                site, path = variable.site, None
                if site.drop_prob is not None and _setting(net, site) is not None:
                    path, slope = site.path, slope * ((1 - site.drop_prob) / site.drop_prob) ** 0.5
                form = "kru,lru->urkl" if per_unit and path is not None else "kru,lru->rkl"
                found[path] = found[path] + torch.einsum(form, slope, slope).view(shape)
            *self.sizes, _ = [len(part) for part in found.values()]
            blocks.append(torch.cat(list(found.values())))
        self.output, self.covariances = torch.cat(outputs), torch.cat(blocks, 1)
        self.mean = self.output.flatten(1) if self.output.dim() > 1 else self.output[:, None]

    def fit(self, rows: Tensor, y: Tensor, likelihood: Likelihood) -> Iterator[Rates]:
        """The rates of the largest log-likelihood of some rows: one per layer, then by steps one per unit."""
        if not isinstance(likelihood, Gaussian):
            yield self._rates(self._of_points(rows, y, likelihood))
            return
        errors = (self.mean[rows] - y.double().reshape(-1, self.mean.shape[1])).square().flatten() + 1e-12
        *units, fixed = self.covariances[:, rows].diagonal(dim1=2, dim2=3).flatten(1).split([*self.sizes, 1])
        noise = torch.ones_like(fixed)
        weights = torch.cat([errors.new_full((len(units),), 0.05), errors.mean()[None] / 2])
        layers = torch.cat([*(one.sum(0, keepdim=True) for one in units), noise])
        weights = _weights(layers, fixed[0], errors, weights, 300)
        weights[:-1].clamp_(min=1e-6)  # a factor leaves 0 where it is
        weights = weights.repeat_interleave(torch.tensor([*self.sizes, 1], device=weights.device))
        for n_steps in self.steps:
            weights = _weights(torch.cat([*units, noise]), fixed[0], errors, weights, n_steps)
            yield self._rates(weights[:-1])

    def _rates(self, ratios: Tensor) -> Rates:
        parts = (ratios / (1 + ratios)).round(decimals=4).split(self.sizes)
        return {path: part if len(part) > 1 else part.item() for path, part in zip(self.settings, parts, strict=True)}

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _of_points(self, rows: Tensor, y: Tensor, likelihood: Likelihood) -> Tensor:
        """The masks' variances of the largest log-likelihood of points of the linear network."""
        mean, covariances = self.mean[rows], self.covariances[:, rows]
        size = covariances.diagonal(dim1=2, dim2=3).mean() + 1e-12
        jitter = 1e-6 * size * torch.eye(mean.shape[1], device=mean.device)
        points = standard_points(len(jitter), _N_POINTS).to(mean)
        scores = mean.new_full((len(self.settings),), -3.0).requires_grad_()

        def loss() -> Tensor:
            optimiser.zero_grad()
            ratios = torch.cat([MAX_RATIO * scores.sigmoid(), scores.new_ones(1)])
            root = torch.linalg.cholesky(torch.einsum("g,grkl->rkl", ratios, covariances) + jitter)
            outputs = mean + torch.einsum("pk,rjk->prj", points, root)
            densities = likelihood.log_density(outputs.view(_N_POINTS, *self.output[rows].shape), y)
            value = -densities.logsumexp(0).mean()
            value.backward()
            return value

        optimiser = torch.optim.LBFGS([scores], max_iter=200, line_search_fn="strong_wolfe")
        optimiser.step(loss)
        return MAX_RATIO * scores.detach().sigmoid()


def _weights(parts: Tensor, fixed: Tensor, errors: Tensor, start: Tensor, n_steps: int) -> Tensor:
    r"""The masks' variances, and last the noise, that fit errors $e_r \sim \mathcal N(0, \sum_i w_i a_{ir} + c_r)$.

    Each step multiplies them by factors that never lower the likelihood (Févotte and Idier, 2011).
    """
    weights, most = start, torch.full_like(start, MAX_RATIO)
    most[-1] = math.inf
    for _ in range(n_steps):
        variance = weights @ parts + fixed
        factors = (parts @ (errors / variance.square())) / (parts @ (1 / variance)).clamp(min=1e-300)
        weights = (weights * factors.sqrt()).minimum(most)
    return weights


def _with_best_noise(likelihood: Likelihood, outputs: Tensor, y: Tensor) -> Likelihood:
    """The likelihood with the noise that suits the errors of draws `[draw, row, ...]`, by expectation maximisation."""
    if not isinstance(likelihood, Gaussian):
        return likelihood
    errors = (outputs - y.double().reshape(outputs.shape[1:])).square().reshape(*outputs.shape[:2], -1)
    noise = errors.mean().clamp(min=1e-12)
    for _ in range(100):
        came_from = (-errors.sum(2) / (2 * noise)).softmax(0)  # the draw of each outcome
        noise = (came_from.unsqueeze(2) * errors).sum(0).mean().clamp(min=1e-12)
    return Gaussian(1 / float(noise))


def _drop_units(drop_probs: Tensor, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A forward pre-hook: each unit of the layer's input is dropped with a probability of its own."""
    x, keep = args[0], 1 - drop_probs.to(args[0])
    dropped = draw_or_mean(lambda: x * torch.bernoulli(keep.expand_as(x)) / keep, x, training=layer.training)
    return dropped, *args[1:]


def _setting(net: nn.Module, site: Site) -> str | None:
    """The attribute of a site's module that is its drop probability; "" if a hook has it, None if nothing has."""
    if not site.is_random or site.drop_prob is None or "alpha" in site.kind:  # whose mean depends on the probability
        return None
    module = net.get_submodule(site.path)
    if hook_keep_prob(module) is not None:
        return ""
    names = ("p", "drop_prob", "dropout")  # of torch's and timm's modules
    return next((name for name in names if getattr(module, name, None) == site.drop_prob), None)


def _with_rates(net: nn.Module, settings: dict[str, str], drop_probs: Rates) -> nn.Module:
    """A copy of the network with other drop probabilities, by the names of its modules."""
    net = copy.deepcopy(net)
    for path, rate in drop_probs.items():
        module, alike = net.get_submodule(path), 0.0 if isinstance(rate, Tensor) else rate
        if isinstance(rate, Tensor):
            module.register_forward_pre_hook(functools.partial(_drop_units, rate))
        if settings[path]:
            setattr(module, settings[path], alike)
        else:
            net = add_dropout(net, alike, where=[path], copy=False)
    return net
