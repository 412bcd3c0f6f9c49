r"""Drop probabilities fitted after training: the linear variance is a weighted sum, and its weights are the rates.

The derivatives of a network by its masks are taken at their means, and so do not depend on the drop probabilities. Its
covariance is $\sum_s \frac{p_s}{1 - p_s} \mathbf C_s$ with one fixed matrix per layer, or per unit: the rates of
largest held-out likelihood, and the noise with them, are found in seconds, without touching the weights.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from dropbayes.layers.conversion import Rates, add_dropout, settable_drop_probs, with_drop_probs
from dropbayes.likelihoods import Gaussian, Likelihood, output_tensor, predictive_log_density
from dropbayes.linear.passes import linear_plan
from dropbayes.linear.points import standard_points
from dropbayes.predictive.evaluation import all_pairs, checked_targets, fitted_noise
from dropbayes.runtime.formatting import Printed, Table
from dropbayes.runtime.validation import NOT_FINITE, Array, random_generator
from dropbayes.sampling import Sampling, as_inputs, draws, evaluation_output, sites
from dropbayes.scores.averages import standard_error

MAX_RATIO = 1.0  #: The largest variance p / (1 - p) of a mask that is tried: beyond p = 0.5 the linear method is poor.

_UNIT_STEPS = (0, 3, 7, 20, 70)  # from the rates of layers to those of units, by and by


@dataclass(frozen=True)
class Tuning(Printed):
    """Drop probabilities and noise fitted to held-out rows; prints as a table."""

    drop_probs: Rates  #: The drop probability of each layer, or of its units, by name; empty if none was good enough.
    likelihood: Likelihood | None  #: The observation model with the noise that belongs to the network; None for a text.
    log_likelihood: float
    """The log-likelihood of the result on rows that were not fitted, in nats per row; of a text, per token."""
    plain_log_likelihood: float  #: That of the network without dropout, with the noise that suits it best.
    standard_error: float  #: Of the difference between the two.
    tried: Mapping[float, float]  #: The log-likelihood by drop probability, of one for the whole network.
    network: nn.Module
    """A copy of the network with these rates, which shares its weights for a text; itself if none was good enough."""

    @property
    def gain(self) -> float:
        """The gain over the plain network, in nats per row."""
        return self.log_likelihood - self.plain_log_likelihood

    def table(self) -> Table:
        """The log-likelihood of what was tried, and the rates."""
        tried = {f"drop_prob {p:g}": value for p, value in self.tried.items()} or {"tuned": self.log_likelihood}
        scores = {"without dropout": self.plain_log_likelihood, **tried}
        notes = list[str]()
        for name, rate in list(self.drop_probs.items())[: 1 if self.tried else None]:  # of a network all are the same
            text = f"{rate.min():.3g} to {rate.max():.3g}" if isinstance(rate, Tensor) else f"{rate:.3g}"
            notes.append(f"{'chosen' if self.tried else name or '(network)'}: drop_prob {text}")
        gain = f"gain: {self.gain:+.4f} ± {self.standard_error:.4f}"
        title = f"held-out log-likelihood, nats per {'row' if self.likelihood else 'token'}"
        below = [*notes, gain] if notes else ["no drop probabilities were good enough"]
        return Table(title, [(name, f"{value:.4f}") for name, value in scores.items()], align="<>", notes=below)


def tune_dropout(
    net: nn.Module,
    x: PyTree,
    y: Array | None = None,
    *,
    likelihood: Likelihood | None = None,
    where: Callable[[str, nn.Module], bool] | Collection[str] | None = None,
    per: Literal["network", "layer", "unit"] | None = None,
    drop_probs: Sequence[float] = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3),
    tolerance: float | None = None,
    sampling: Sampling = Sampling(),
    n_draws: int = 100,
    seed: int = 0,
) -> Tuning:
    """Drop probabilities and noise that fit held-out rows, without training the network again.

    Each third of the rows judges, by its draws, the network whose rates and noise fit the others. Only if it is better
    there than the network without dropout are rates returned: those that fit all rows.

    Without `y` the network is a causal language model and `x` a text: each token is the outcome of those before it,
    with one mask for all positions of a sequence, one rate for the whole network and nats per token.

    Args:
        net: A trained network that returns one tensor, rows first, or a record with `logits`.
        x: The inputs of held-out rows; of a text token ids `[row, position]`, or a dict with `input_ids` and
            `attention_mask`; or a DataLoader of pairs (input, outcome).
        y: Their outcomes; None for a text and for a DataLoader.
        likelihood: The observation model; by default `Categorical` for whole numbers, fewer than the outputs, else
            `Gaussian`, whose precision is fitted in any case.
        where: The weight layers that are given dropout (`add_dropout`); by default all of a network that has none. One
            with dropout keeps it, and its rates are fitted.
        per: What has a rate of its own: by default a layer, of a text the whole network, whose rate is one of
            `drop_probs`, and which needs no derivatives; or each unit, for a Gaussian likelihood, where how far the
            rates of units leave those of their layer is chosen on the rows that judge.
        drop_probs: The rates of a whole network to try.
        tolerance: Not the best rate of a whole network but the largest that costs at most so many nats per row against
            none: the widest distribution over functions that is consistent with the rows.
        sampling: As for `predict`.
        n_draws: The number of draws that judge, and whose noise is fitted: fewer draws are smoothed by more noise.
        seed: The seed of those draws and of the split.

    Example:
        >>> net, x = nn.Linear(2, 1), torch.randn(300, 2)
        >>> tuning = tune_dropout(net, x, net(x).detach() + torch.randn(300, 1))
        >>> tuning.log_likelihood >= tuning.plain_log_likelihood
        True
    """
    x, y = all_pairs(net, x, y) if isinstance(x, torch.utils.data.DataLoader) else (x, y)
    per = per or ("network" if y is None else "layer")
    if per not in ("network", "layer", "unit") or (y is None and per != "network"):
        raise ValueError(f'`per` must be "network", or, with outcomes `y`, "layer" or "unit"; got {per!r}.')
    probabilities = drop_probs if hasattr(drop_probs, "__len__") else ()
    if not len(probabilities) or not all(hasattr(p, "__float__") and 0 < p < 1 for p in probabilities):
        raise ValueError(f"`drop_probs` must hold probabilities in (0, 1); got {drop_probs!r}.")
    if tolerance is not None and (per != "network" or not (hasattr(tolerance, "__float__") and tolerance >= 0)):
        raise ValueError(f'`tolerance` must be zero or more nats, for per="network"; got {tolerance!r}, {per!r}.')
    held = HeldOut(net, x, y, likelihood)
    has_dropout = where is None and any(site.is_random for site in sites(net, held.inputs, sampling=sampling))
    base = net if has_dropout else add_dropout(net, 0.1, where=where, copy=False)
    settings = settable_drop_probs(base, sites(base, held.inputs, sampling=sampling))

    def drawn(rates: Rates) -> tuple[Rates, Tensor]:
        """The rates, and the draws of the network with them."""
        if not any(rate.any() if isinstance(rate, Tensor) else rate for rate in rates.values()):
            return rates, held.plain[None]
        return rates, held.draws(with_drop_probs(base, settings, rates, copy=False), n_draws, seed, sampling)

    alike = [drawn(dict.fromkeys(settings, p)) for p in sorted(drop_probs) if per == "network"]
    parts = None if alike else Parts(base, held, settings, sampling, per_unit=per == "unit")

    def fits(rows: Tensor) -> Iterator[tuple[Rates, Tensor]]:
        yield drawn({})
        yield from alike if parts is None else map(drawn, parts.fit(rows))

    order = torch.randperm(len(held.plain), generator=random_generator(seed), device="cpu").to(held.plain.device)
    folds = [order[fold::3] for fold in range(3)]
    judged = []
    for number, unseen in enumerate(folds):
        rows = torch.cat([*folds[:number], *folds[number + 1 :]])
        judged.append(torch.stack([held.judged(sampled, rows)[1][unseen] for _, sampled in fits(rows)]))
    scores = torch.cat(judged, 1)  # of the plain network, and of each fit
    means = scores.mean(1).tolist()
    plain, fitted = means[0], range(1, len(means))
    allowed = [k for k in fitted if (means[k] > plain if tolerance is None else means[k] >= plain - tolerance)]
    best = max(allowed or fitted, key=means.__getitem__ if tolerance is None else None)
    error = float(standard_error(scores[best] - scores[0]))
    tried = dict(zip(sorted(drop_probs), means[1:], strict=True)) if alike else {}
    chosen = best if allowed else 0
    rates, sampled = next(itertools.islice(fits(order), chosen, None))
    network = with_drop_probs(base, settings, rates, copy=y is not None) if rates else net
    return Tuning(rates, held.judged(sampled, order)[0], means[chosen], plain, error, tried, network)


class HeldOut:
    """Rows that a network was not trained on, which judge its draws: with outcomes `y`, or a text without."""

    def __init__(self, net: nn.Module, x: PyTree, y: Array | None, likelihood: Likelihood | None) -> None:
        self.function: Callable[[nn.Module], nn.Module] = NextTokens if y is None else lambda network: network
        self.inputs = text_inputs(x) if y is None else x
        self.plain = output_tensor(evaluation_output(self.function(net), self.inputs))  # without dropout
        self.likelihood: Likelihood | None = None  # for a text
        if y is not None:
            self.y, observed = checked_targets(y, self.plain, likelihood)
            self.likelihood = Gaussian(1.0) if observed is None else observed
            self.likelihood.check(self.plain, self.y)
            if len(self.y) < 6:
                raise ValueError(f"`y` must have the outcomes of at least 6 rows; got {len(self.y)}.")

    def draws(self, network: nn.Module, n_draws: int, seed: int, sampling: Sampling) -> Tensor:
        """The draws of a network, `[draw, row, ...]`: of a text, the log-probabilities of its tokens."""
        sampling = sampling if self.likelihood else replace(sampling, positions="tied")
        network = self.function(network)
        return output_tensor(draws(network, self.inputs, n_draws=n_draws, seed=seed, masks="row", sampling=sampling))

    def judged(self, sampled: Tensor, rows: Tensor) -> tuple[Likelihood | None, Tensor]:
        """The noise that suits some rows, and the log-likelihood of every row under draws."""
        if self.likelihood is None:
            return None, text_densities(sampled, self.inputs)
        sampled, noisy = sampled.double(), self.likelihood
        if isinstance(noisy, Gaussian):
            noisy = fitted_noise(sampled[:, rows], self.y[rows])
        return noisy, predictive_log_density(noisy, sampled, self.y)


class NextTokens(nn.Module):
    """A causal language model as a function from a text to the log-probability of every token except the first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The log-probabilities `[row, position - 1]`."""
        known = {} if attention_mask is None else {"attention_mask": attention_mask}
        logits = output_tensor(self.model(input_ids=input_ids, **known))
        if logits.dim() != 3 or logits.shape[:2] != input_ids.shape:
            rule = "be a causal language model, with logits [row, position, token] for every position"
            raise ValueError(f"`net` must {rule}: without outcomes `y`, `x` is a text.")
        return logits[:, :-1].float().log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


def text_densities(sampled: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The log-likelihood in nats of each text under draws of its tokens' log-probabilities, excluding padding."""
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    counted = (mask[:, 1:] * mask[:, :-1]).double()  # the first token after padding has no context
    if not counted.sum() > 0:
        raise ValueError("`x` must hold a text of two tokens at least; every second token is padding.")
    mixed = sampled.double().logsumexp(0) - math.log(len(sampled))
    total = (mixed * counted.to(mixed.device)).sum(-1)
    if bool(total.isnan().any()):
        raise ValueError(NOT_FINITE)
    return total * len(total) / float(counted.sum())  # whose mean over rows is the mean over tokens


def text_inputs(x: PyTree) -> dict[str, Tensor]:
    """A text as the named inputs `input_ids` and, if given, `attention_mask`, with padding on the right."""
    inputs = {"input_ids": x} if isinstance(x, Tensor) else dict(x) if isinstance(x, Mapping) else {}
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.shape[1] < 2:
        rule = "token ids [row, position], two positions at least, or what a tokenizer returns"
        got = type(x).__name__ + ("" if ids is None else f" with input_ids {tuple(ids.shape)}")
        raise ValueError(f"`x` must be a text where no `y` is given: {rule}; got {got}.")
    if (mask := inputs.get("attention_mask")) is None:
        return {"input_ids": ids}
    order = mask.argsort(dim=1, descending=True, stable=True)  # padding goes behind, where it shifts no position
    return {"input_ids": ids.gather(1, order), "attention_mask": mask.gather(1, order)}


class Parts:
    """The covariance of a network's outputs due to each layer, or to each unit, for a mask of variance 1."""

    def __init__(
        self, net: nn.Module, held: HeldOut, settings: dict[str, float], sampling: Sampling, *, per_unit: bool = False
    ) -> None:
        inputs = as_inputs(held.inputs, net, row_axis=sampling.row_axis)
        plan = linear_plan(net, inputs, sampling)
        n_outputs = plan.only_size()
        if per_unit and not isinstance(held.likelihood, Gaussian):
            raise ValueError(f'`per` "unit" needs a Gaussian likelihood; got {held.likelihood!r}. Use per="layer".')
        if per_unit and any(len(site.shape) != 2 for site in plan.profile.sites if site.path in settings):
            raise ValueError('`per` "unit" needs dropout of rows `[row, unit]`; got other axes. Use per="layer".')
        self.settings, self.held = settings, held
        self.mean = held.plain.double().reshape(len(held.plain), -1)
        self.steps = _UNIT_STEPS if per_unit else _UNIT_STEPS[:1]
        blocks: list[Tensor] = []
        for _, (linear,) in plan.linearised(inputs):
            shape = (-1, len(linear.output), n_outputs, n_outputs)
            # The last one has the sites whose rates stay as they are.
            found: dict[str | None, Any] = dict.fromkeys(settings, 0) | {None: self.mean.new_zeros(1, *shape[1:])}
            for site, slope in linear.slopes():
                path, slope = None, slope.double()  # single precision may leave a covariance of low rank indefinite
                if site.drop_prob is not None and site.drop_prob == settings.get(site.path):
                    path, slope = site.path, slope * ((1 - site.drop_prob) / site.drop_prob) ** 0.5
                form = "kru,lru->urkl" if per_unit and path is not None else "kru,lru->rkl"
                found[path] = found[path] + torch.einsum(form, slope, slope).view(shape)
            *self.sizes, _ = [len(part) for part in found.values()]
            blocks.append(torch.cat(list(found.values())))
        self.covariances = torch.cat(blocks, 1)

    def fit(self, rows: Tensor) -> Iterator[Rates]:
        """The rates of the largest log-likelihood of some rows: one per layer, then by steps one per unit."""
        likelihood, y = self.held.likelihood, self.held.y[rows]
        assert likelihood is not None
        if not isinstance(likelihood, Gaussian):
            yield self._rates(self._of_points(rows, y, likelihood))
            return
        errors = (self.mean[rows] - y.double().reshape(-1, self.mean.shape[1])).square().flatten()
        errors = errors.clamp(min=max(1e-12 * float(errors.mean()), 1e-100))  # whatever the unit of y
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
        size = covariances.diagonal(dim1=2, dim2=3).mean().clamp(min=1e-100)
        jitter = 1e-6 * size * torch.eye(mean.shape[1], device=mean.device)
        points = standard_points(len(jitter), n_points=64).to(mean)
        scores = mean.new_full((len(self.settings),), -3.0).requires_grad_()

        def loss() -> Tensor:
            optimiser.zero_grad()
            ratios = torch.cat([MAX_RATIO * scores.sigmoid(), scores.new_ones(1)])
            root = torch.linalg.cholesky(torch.einsum("g,grkl->rkl", ratios, covariances) + jitter)
            outputs = mean + torch.einsum("pk,rjk->prj", points, root)
            densities = likelihood.log_density(outputs.view(len(points), *self.held.plain[rows].shape), y)
            value = -densities.logsumexp(0).sum()  # of all rows: their mean may change by less than a tolerance
            value.backward()
            return value

        optimiser = torch.optim.LBFGS([scores], max_iter=200, line_search_fn="strong_wolfe")
        optimiser.step(loss)
        return MAX_RATIO * scores.detach().sigmoid()


def _weights(parts: Tensor, fixed: Tensor, errors: Tensor, start: Tensor, n_steps: int) -> Tensor:
    r"""The masks' variances, and last the noise, that fit errors $e_r \sim \mathcal N(0, \sum_i w_i a_{ir} + c_r)$."""
    weights, most = start, torch.full_like(start, MAX_RATIO)
    most[-1] = math.inf
    for _ in range(n_steps):  # of which none lowers the likelihood (Févotte and Idier, 2011)
        variance = weights @ parts + fixed
        factors = (parts @ (errors / variance.square())) / (parts @ (1 / variance)).clamp(min=1e-300)
        weights = (weights * factors.sqrt()).minimum(most)
    return weights
