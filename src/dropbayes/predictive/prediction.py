"""The prediction of a network: the result of `dropbayes.predict`, its statistics and its display."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import PyTree

from dropbayes.predictive.statistics import CLASS_STATISTICS, DRAWS_FIRST
from dropbayes.runtime.formatting import Printed, Table, count
from dropbayes.runtime.validation import Array, NumpyArray, check_probability, needed_for
from dropbayes.tracing.outputs import split

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False)
class Prediction(Printed):
    """A network's prediction for each row; prints as a table of the first and last rows.

    Every statistic is a tensor. That of a network with several outputs has the structure of its output, with a tensor
    for each: `head` is the prediction of one of them.
    """

    mean: Tensor  #: The predictive mean; for `Categorical`, class probabilities.
    epistemic: Tensor  #: The variance over draws, which more data would reduce.
    aleatoric: Tensor  #: The expected variance given the function, which no data would reduce; 0 without a likelihood.
    n_draws: int  #: The number of draws made; 0 when the moments are exact, linear or propagated.
    method: str  #: The method: "exact", "linear", "moments", or the strategy of the draws.
    information: Mapping[str, Tensor] = field(default_factory=dict)
    """The statistics of classes by name: `entropy`, `expected_entropy`, `variation_ratio`."""
    quantiles: Tensor | None = None  #: Quantiles over draws, `[quantile, row, ...]`, if requested.
    quantile_levels: tuple[float, ...] = ()  #: Their levels.
    draws: Tensor | None = None  #: All draws, `[draw, row, ...]`, if requested.
    draws_used: Tensor | None = None  #: For `n_draws="auto"`: the number of draws of each row.
    standard_error: Tensor | None = None  #: For `n_draws="auto"`: the Monte Carlo standard error reached by the mean.
    row_axis: int | None = 0  #: The axis of the rows in the mean; None if the whole output is of one row.

    @classmethod
    def of(cls, statistics: Mapping[str, PyTree], **settings: Any) -> Prediction:
        """The prediction with these statistics by name."""
        information = {name: statistics[name] for name in CLASS_STATISTICS if name in statistics}
        others = {name: value for name, value in statistics.items() if name not in information}
        return cls(information=information, **others, **settings)

    @property
    def variance(self) -> Tensor:
        r"""The total variance, epistemic and aleatoric: $\tau^{-1} + \mathrm{Var}_t[\widehat y_t]$ for a Gaussian."""
        return _map_tensors(torch.add, self.epistemic, self.aleatoric)

    @property
    def std(self) -> Tensor:
        """The total standard deviation."""
        return _map_tensors(torch.sqrt, self.variance)

    @property
    def epistemic_std(self) -> Tensor:
        """The standard deviation over draws."""
        return _map_tensors(torch.sqrt, self.epistemic)

    @property
    def aleatoric_std(self) -> Tensor:
        """The standard deviation of the noise, 0 without a likelihood."""
        return _map_tensors(torch.sqrt, self.aleatoric)

    @property
    def covariance(self) -> Tensor:
        r"""The covariance between the outputs of each row, `[row, D, D]` [GG16, prop:var]; needs `keep_draws=True`.

        $\mathbb E[\widehat{\mathbf y}^T \widehat{\mathbf y}] - \mathbb E[\widehat{\mathbf y}]^T \mathbb
        E[\widehat{\mathbf y}]$ over draws, with the variance of the noise on the diagonal. Events of a row are flat.
        """
        if not isinstance(self.draws, Tensor):
            raise ValueError("`covariance` needs the draws of one tensor: predict(..., keep_draws=True).")
        average = self.draws.double().mean(0)  # in single precision, that of large draws around 0 has no digits
        if average.shape != self.mean.shape or not torch.allclose(average, self.mean.double(), atol=1e-4):
            raise ValueError("`covariance` needs a likelihood whose mean is the network's output, such as a Gaussian.")
        flat = self.draws.movedim((self.row_axis or 0) + 1, 1).reshape(len(self.draws), len(self), -1)
        centred, noise = flat - flat.mean(0), self.aleatoric.movedim(self.row_axis or 0, 0).reshape_as(flat[0]).to(flat)
        return torch.einsum("trd,tre->rde", centred, centred) / len(flat) + torch.diag_embed(noise)

    @property
    def entropy(self) -> Tensor:
        """For classes: the entropy of the mean probabilities, in nats."""
        return self._of_classes("entropy")

    @property
    def expected_entropy(self) -> Tensor:
        """For classes: the mean over draws of their entropies."""
        return self._of_classes("expected_entropy")

    @property
    def variation_ratio(self) -> Tensor:
        """For classes: the share of draws that disagree with the most frequent class."""
        return self._of_classes("variation_ratio")

    @property
    def mutual_information(self) -> Tensor:
        """For classes: the information a label would give about the function, in nats."""
        return _map_tensors(lambda total, noise: (total - noise).clamp(min=0), self.entropy, self.expected_entropy)

    def _of_classes(self, name: str) -> Tensor:
        if name not in self.information:
            remedy = "predict(net, x, likelihood=dropbayes.Categorical()), or Bernoulli() for one logit"
            needs = f"`{name}` needs a likelihood of classes: {remedy}"
            raise AttributeError(f"{needs}. A number has `variance` and `epistemic`.")
        return self.information[name]

    def interval(self, coverage: float = 0.95) -> tuple[Tensor, Tensor]:
        """The lower and upper ends of the central interval of a Gaussian with the predictive mean and variance.

        Example:
            >>> one = Prediction(torch.zeros(1), torch.ones(1), torch.zeros(1), n_draws=100, method="exact")
            >>> [round(float(end), 2) for end in one.interval(0.95)]
            [-1.96, 1.96]
        """
        check_probability("coverage", coverage)
        if self.information:
            raise ValueError("an interval needs a number to predict; classes have probabilities: read `mean`.")
        half = math.sqrt(2) * float(torch.erfinv(torch.tensor(coverage, dtype=torch.float64, device="cpu")))
        lower = _map_tensors(lambda mean, std: mean - half * std, self.mean, self.std)
        return lower, _map_tensors(lambda mean, std: mean + half * std, self.mean, self.std)

    def head(self, name: str | int) -> Prediction:
        """The prediction of one of several outputs, by its name or its place."""

        def part(tree: PyTree) -> PyTree:
            if isinstance(tree, Tensor):  # the classes of the only output, or the draws of each row
                return tree
            return getattr(tree, name) if isinstance(name, str) and not isinstance(tree, Mapping) else tree[name]

        try:
            if isinstance(self.mean, Tensor):
                raise KeyError(name)  # there are no several
            chosen = {key: part(value) for key, value in self._statistics().items()}
        except (AttributeError, KeyError, IndexError, TypeError):
            raise KeyError(f"`name` must be that of an output of the network; got {name!r}.") from None
        return Prediction.of({key: value for key, value in chosen.items() if value is not None}, **self._settings())

    def to(self, device: torch.device | str) -> Prediction:
        """The prediction with its tensors on a device; by this method, frameworks move what a step returns."""
        moved = {name: _map_tensors(lambda t: t.to(device), value) for name, value in self._statistics().items()}
        return Prediction.of(moved, **self._settings())

    def numpy(self) -> dict[str, PyTree]:
        """The statistics as NumPy arrays by name, without those that were not requested."""
        derived = ["variance", "std", *(["mutual_information"] if self.information else [])]
        statistics = self._statistics() | {name: getattr(self, name) for name in derived}
        return {name: _map_tensors(lambda t: t.detach().cpu().numpy(), value) for name, value in statistics.items()}

    def to_pandas(self) -> pandas.DataFrame:
        """A pandas table with one line per row and every statistic but the draws, numbered where a row has several."""
        with needed_for("`to_pandas`"):
            import pandas
        moments = ["mean"] if self.information else ["mean", "std", "epistemic_std", "aleatoric_std"]
        columns = self._columns(*moments, "standard_error", "draws_used")
        if self.quantiles is not None:
            levels = [f"quantile_{level:g}" for level in self.quantile_levels]
            columns |= self._columns(**dict(zip(levels, self.quantiles, strict=True)))
        classes = [*CLASS_STATISTICS, "mutual_information"] if self.information else []
        return pandas.DataFrame(columns | self._columns(*classes))

    def plot(self, x: Array | None = None, *, y: Array | None = None, ax: Axes | None = None) -> Axes:
        """The prediction as a picture on `ax`, by default new axes; needs matplotlib (the extra `plot`).

        For one number a row, the mean with bands of one and two standard deviations over `x`, one coordinate per row,
        by default its index; the outcomes `y` are points. For classes, the probabilities of each row as a bar, rows
        with the largest entropy last.
        """
        from dropbayes import plots

        n_rows = len(self)
        if self.information:
            p = self.mean.movedim(self.row_axis or 0, 0)
            p = torch.stack([1 - p.flatten(), p.flatten()], 1) if p.numel() == n_rows else p  # yes or no
            return plots.class_bars(p, self.entropy.reshape(n_rows, -1).squeeze(1), ax=ax)
        at: Array = torch.arange(n_rows, dtype=torch.float64, device="cpu") if x is None else x
        return plots.predictive_band(at, self.mean, std=self.std, observed=None if y is None else (at, y), ax=ax)

    def __len__(self) -> int:
        """The number of rows, if the output is one tensor."""
        if not isinstance(self.mean, Tensor) or self.mean.dim() == 0:
            what = "the prediction holds several tensors or no rows; read its fields, such as `mean`, or one output"
            raise TypeError(f"{what}: prediction.head(name).")
        return self.mean.shape[self.row_axis or 0]

    def __getitem__(self, index: Any) -> Prediction:
        """The prediction of some rows: an index, a slice, or a tensor of indices or booleans."""
        n_rows = len(self)
        try:
            rows = torch.arange(n_rows, device=self.mean.device)[(index,)].reshape(-1)
        except (IndexError, TypeError):
            raise IndexError(f"`index` must be one of the {n_rows} rows, 0 to {n_rows - 1}; got {index!r}.") from None
        chosen = {}
        for name, value in self._statistics().items():
            rows_first = name in (*CLASS_STATISTICS, "draws_used")
            axis = 0 if rows_first else (self.row_axis or 0) + (name in DRAWS_FIRST)
            chosen[name] = value.index_select(axis, rows.to(value.device))
        return Prediction.of(chosen, **self._settings())

    def __iter__(self) -> Iterator[Prediction]:
        return (self[row] for row in range(len(self)))

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("n_draws", "method", "row_axis", "quantile_levels")}

    def _statistics(self) -> dict[str, PyTree]:
        """The statistics that were computed, by name."""
        others = {"information", *self._settings()}
        stored = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in others}
        return {name: value for name, value in stored.items() if value is not None} | dict(self.information)

    def _columns(self, *names: str, **others: Tensor) -> dict[str, NumpyArray]:
        """The columns of a table: one for each number of a row, numbered where there are several."""
        n_rows, columns = len(self), dict[str, NumpyArray]()
        for name, value in ({name: getattr(self, name) for name in names} | others).items():
            if value is None:
                continue
            axis = 0 if name in (*CLASS_STATISTICS, "mutual_information", "draws_used") else self.row_axis or 0
            flat = value.movedim(axis, 0).reshape(n_rows, -1).detach().cpu().numpy().T
            label = "probability" if self.information and name == "mean" else name
            columns |= {label if len(flat) == 1 else f"{label}_{i}": column for i, column in enumerate(flat)}
        return columns

    @property
    def _has_rows(self) -> bool:
        """Whether there is a table to show: one real number or more for each row."""
        return isinstance(self.mean, Tensor) and self.mean.dim() > 0 and not self.mean.is_complex()

    def __repr__(self) -> str:
        how = f"{self.n_draws} draws, {self.method}" if self.n_draws else self.method
        if not self._has_rows:
            shapes = ", ".join(str(tuple(t.shape)) for t in split(self.mean)[0])
            return f"Prediction(outputs {shapes}; {how})"
        rows = count(len(self), "row")
        if self.information:
            information = float(self.mutual_information.mean())
            return f"Prediction({rows}, mean mutual information {information:.3g} nats; {how})"
        mean, std = float(self.mean.double().mean()), float(self.variance.double().mean().sqrt())
        return f"Prediction({rows} of shape {tuple(self.mean.shape[1:])}, mean {mean:.3g} ± {std:.3g}; {how})"

    def table(self) -> Table:
        """The first and last rows, and few columns; the title alone where there is no table to show."""
        if not self._has_rows:
            return Table(repr(self), [])
        names = ["std", "epistemic_std"]
        if self.information:
            names = ["entropy", "mutual_information"] if self.entropy.dim() == 1 else []
        n_rows, columns = len(self), dict(list(self._columns("mean", *names).items())[:8])
        shown = range(n_rows) if n_rows <= 10 else [*range(5), *range(n_rows - 5, n_rows)]
        rows = [[str(row), *(f"{column[row]:.4g}" for column in columns.values())] for row in shown]
        if n_rows > 10:
            rows.insert(5, ["…"] * (len(columns) + 1))
        return Table(repr(self), rows, ["row", *columns], align=">" * (len(columns) + 1))


def _map_tensors(function: Callable[..., Any], *trees: Any) -> PyTree:
    """The tree of `function` applied to corresponding tensors of trees of one structure."""
    if isinstance(trees[0], Tensor):
        return function(*trees)
    first, structure = split(trees[0])
    others = [split(tree)[0] for tree in trees[1:]]
    return structure.build([function(*tensors) for tensors in zip(first, *others, strict=True)])
