r"""Classes, labels and counts: the softmax, independent Bernoulli labels, and the Poisson distribution."""

import warnings
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from dropbayes.likelihoods.observation import ClassLikelihood, Likelihood, checked_targets, sum_events


@dataclass(frozen=True)
class Categorical(ClassLikelihood):
    r"""The softmax likelihood of a class, $\propto \exp(\widehat y_c)$ [GG16, eq:generative_model_class].

    Args:
        class_axis: The axis of the classes in the network's output, rows first. By default 1, as in torch's losses:
            `[row, class]`, `[row, class, h, w]`. An output of three axes needs it: 1 for `[row, class, length]`, -1
            for `[row, token, class]`.
        probabilities: Whether the network ends in a softmax, so that its outputs are probabilities, not logits.
    """

    class_axis: int | None = None
    probabilities: bool = False

    def for_output(self, n_axes: int) -> Self:
        """This likelihood with its class axis counted from the end."""
        axis = self.class_axis
        if axis is None and n_axes == 3:
            length = "Categorical(class_axis=1) for [row, class, length], as in torch's losses"
            tokens = "Categorical(class_axis=-1) for [row, token, class]"
            raise ValueError(f"`class_axis` must be given for an output of three axes: {length}; {tokens}.")
        axis = min(1, n_axes - 1) if axis is None else axis
        if n_axes > 1 and (not hasattr(axis, "__index__") or not -n_axes <= axis < n_axes or axis % n_axes == 0):
            rule = f"be an axis after the rows of an output of {n_axes} axes"
            raise ValueError(f"`class_axis` must {rule}; got {self.class_axis!r}.")
        return replace(self, class_axis=axis - n_axes if axis >= 0 else axis)

    @property
    def axis(self) -> int:
        """The axis of the classes, counted from the end; without `for_output`, the last by default."""
        if self.class_axis is not None and self.class_axis >= 0:
            what = f"{self.class_axis} counts from the rows, and this output may have draws before them"
            raise ValueError(f"`class_axis` {what}: count it from the end, or call for_output(n_axes) first.")
        return -1 if self.class_axis is None else self.class_axis

    def _check_classes(self, output: Tensor, axis: int) -> None:
        if output.dim() < -axis or output.shape[axis] < 2:
            rule = f"Categorical needs a logit for each of at least two classes along class_axis={axis}"
            got = f"an output of shape {tuple(output.shape)}"
            raise ValueError(f"`likelihood` {rule}; got {got}. For one logit (yes or no) use Bernoulli().")

    def mean(self, output: Tensor) -> Tensor:
        self._check_classes(output, self.axis)
        return output if self.probabilities else output.softmax(self.axis)

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        axis = self.for_output(min(y.dim() + 1, output.dim())).axis
        self._check_classes(output, axis)
        if y.is_floating_point() or y.is_complex():
            remedy = f"Pass y.long(), or y.argmax({axis}) of one-hot rows."
            raise ValueError(f"`y` must hold class labels (integers); got {y.dtype}. {remedy}")
        log_probabilities = (output.log() if self.probabilities else output.log_softmax(axis)).movedim(axis, -1)
        row_axes = log_probabilities.shape[:-1]
        if not 1 <= y.dim() <= len(row_axes) or y.shape != row_axes[-y.dim() :]:
            rule = "have the output's shape less its class axis"
            got = f"y {tuple(y.shape)} against output {tuple(output.shape)} with class_axis={axis}"
            raise ValueError(f"`y` must {rule}; got {got}. One-hot rows are y.argmax({axis}), a column y[:, 0].")
        try:
            found = log_probabilities.gather(-1, y.long().expand(row_axes)[..., None])
        except RuntimeError:
            self.check(output, y)  # names labels out of range
            raise
        return sum_events(found.squeeze(-1), y)

    def check(self, output: Tensor, y: Tensor | None = None) -> None:
        axis = self.axis if y is None else self.for_output(min(y.dim() + 1, output.dim())).axis
        self._check_classes(output, axis)
        total = output.sum(axis)
        normalised = bool((output >= 0).all()) and torch.allclose(total, torch.ones_like(total), atol=1e-3)
        _check_link(self, "softmax", "are positive and sum to 1 over the classes", normalised)
        if y is not None and len(y) and not (int(y.min()) >= 0 and int(y.max()) < output.shape[axis]):
            rule = f"hold class labels from 0 to {output.shape[axis] - 1}, the network's classes"
            raise ValueError(f"`y` must {rule}; got labels from {int(y.min())} to {int(y.max())}.")

    def class_probabilities(self, mean: Tensor) -> Tensor:
        return mean.movedim(self.axis, -1)

    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        probabilities = self.class_probabilities(self.mean(output))
        rows = probabilities.reshape(-1, probabilities.shape[-1])
        return torch.multinomial(rows, 1, generator=generator).reshape(probabilities.shape[:-1])


@dataclass(frozen=True)
class Bernoulli(ClassLikelihood):
    r"""Yes or no: $p(y = 1 \mid \widehat y) = \sigma(\widehat y)$, independent for each element of the output.

    One output is a binary classifier (`BCEWithLogitsLoss`), several are labels that a row may have at once. `y` holds
    0 and 1 (or fractions between them) in the output's shape. With `probabilities` the network ends in a sigmoid.

    Example:
        >>> Bernoulli().mean(torch.tensor([[0.0], [2.0]]))
        tensor([[0.5000],
                [0.8808]])
    """

    probabilities: bool = False

    def mean(self, output: Tensor) -> Tensor:
        return output if self.probabilities else functional.logsigmoid(output).exp()  # `sigmoid` rounds by place

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        y = checked_targets(output, y)
        loss = functional.binary_cross_entropy if self.probabilities else functional.binary_cross_entropy_with_logits
        return -sum_events(loss(output, y.to(output.dtype).expand_as(output), reduction="none"), y)

    def check(self, output: Tensor, y: Tensor | None = None) -> None:
        bounded = bool(((output >= 0) & (output <= 1)).all())
        if self.probabilities or output.numel() >= 32:  # fewer logits may all lie in [0, 1] by chance
            _check_link(self, "sigmoid", "lie in [0, 1]", bounded)
        if y is not None and not bool(((y >= 0) & (y <= 1)).all()):
            got = f"values from {y.min().item():g} to {y.max().item():g}"
            remedy = "Several classes in one column are Categorical()"
            raise ValueError(f"`y` must hold 0 and 1 for Bernoulli; got {got}. {remedy}.")

    def class_probabilities(self, mean: Tensor) -> Tensor:
        return torch.stack([1 - mean, mean], -1)

    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.bernoulli(self.mean(output), generator=generator)


def _check_link(likelihood: Categorical | Bernoulli, link: str, rule: str, holds: bool) -> None:
    """Warns of probabilities that would be taken for logits, and raises for logits taken for probabilities."""
    name = type(likelihood).__name__
    if holds and not likelihood.probabilities:
        why = f"as probabilities do: if it ends in a {link}, {name}() takes a second {link} of them"
        remedy = f"Use {name}(probabilities=True), or leave out the network's last {link}"
        warnings.warn(f"the network's outputs {rule}, {why}. {remedy}.", stacklevel=3)
    if likelihood.probabilities and not holds:
        what = f"{name}(probabilities=True) needs outputs that {rule}; the network's do not. Use {name}() for logits"
        other = 'of probabilities the linear approximation may leave that range: use method="sampling"'
        raise ValueError(f"`likelihood` {what}; {other}.")


@dataclass(frozen=True)
class Poisson(Likelihood):
    r"""Counts: $p(y \mid \widehat y) = e^{-\lambda} \lambda^y / y!$ with the rate $\lambda = \exp(\widehat y)$.

    The network gives the log of the rate, as for `PoissonNLLLoss` by default; `y` holds counts in the output's shape.

    Example:
        >>> Poisson().mean(torch.zeros(1, 1)), Poisson().variance(torch.zeros(1, 1))
        (tensor([[1.]]), tensor([[1.]]))
    """

    def mean(self, output: Tensor) -> Tensor:
        return output.exp()

    def variance(self, output: Tensor) -> Tensor:
        return output.exp()

    def log_density(self, output: Tensor, y: Tensor) -> Tensor:
        counts = checked_targets(output, y).to(output.dtype)
        return sum_events(counts * output - output.exp() - torch.lgamma(counts + 1), y)

    def check(self, output: Tensor, y: Tensor | None = None) -> None:
        wrong = None if y is None else y[~((y >= 0) & (y == y.round()))]
        if wrong is not None and len(wrong):
            raise ValueError(f"`y` must hold counts (whole numbers, 0 or more) for Poisson; got {wrong[0].item():g}.")

    def sample(self, output: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.poisson(output.exp(), generator=generator)
