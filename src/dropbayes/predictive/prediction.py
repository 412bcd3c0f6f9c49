"""The prediction of a network: the result of `dropbayes.predict`, its statistics and its display."""

from __future__ import annotations

import html
import math
import operator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import PyTree

from dropbayes.predictive.covariance import output_covariance
from dropbayes.sampling import map_tensors, split

__all__ = ["Prediction"]

_SHOWN_ROWS = 5
_DRAWS_FIRST = ("draws", "quantiles")
_ROWS_FIRST = ("entropy", "expected_entropy", "variation_ratio", "draws_used")


@dataclass(frozen=True)
class Prediction:
    """A network's prediction for each row: tensors, or trees of them with the structure of the network's output."""

    mean: Any
    """The predictive mean; for `Categorical`, class probabilities."""
    epistemic: Any
    """The variance over draws, which more data would reduce."""
    aleatoric: Any
    """The expected variance given the function, which no data would reduce; 0 without a likelihood."""
    n_draws: int
    """The number of draws made; 0 when the moments are exact, linear or propagated."""
    method: str
    """The method: "exact", "linear", "moments", or the strategy of the draws."""
    entropy: Tensor | None = None
    """For `Categorical`: the entropy of the mean probabilities, in nats."""
    expected_entropy: Tensor | None = None
    """For `Categorical`: the mean over draws of their entropies."""
    variation_ratio: Tensor | None = None
    """For `Categorical`: the share of draws that disagree with the most frequent class."""
    quantiles: Any = None
    """Quantiles over draws, `[quantile, row, ...]`, if requested."""
    draws: Any = None
    """All draws, `[draw, row, ...]`, if requested."""
    draws_used: Tensor | None = None
    """For `n_draws="auto"`: the number of draws of each row."""
    standard_error: Any = None
    """For `n_draws="auto"`: the Monte Carlo standard error reached by the mean."""
    row_axis: int | None = 0
    """The axis of the rows in the mean; None if the whole output is of one row."""

    @property
    def variance(self) -> PyTree:
        r"""The total variance, epistemic and aleatoric: $\tau^{-1} + \mathrm{Var}_t[\widehat y_t]$ for a Gaussian."""
        return map_tensors(torch.add, self.epistemic, self.aleatoric)

    @property
    def std(self) -> PyTree:
        """The total standard deviation."""
        return map_tensors(torch.sqrt, self.variance)

    @property
    def covariance(self) -> Tensor:
        r"""The covariance between the outputs of each row, `[row, D, D]` [GG16, prop:var]; needs `keep_draws=True`."""
        if not isinstance(self.draws, Tensor):
            raise ValueError("`covariance` needs the draws of one tensor: predict(..., keep_draws=True).")
        if self.draws.shape[1:] != self.mean.shape or not torch.allclose(self.draws.mean(0), self.mean, atol=1e-4):
            raise ValueError("`covariance` needs a likelihood whose mean is the network's output, such as a Gaussian.")
        return output_covariance(self.draws, self.aleatoric)

    @property
    def mutual_information(self) -> Tensor | None:
        """For `Categorical`: the information a label would give about the function, in nats."""
        if self.entropy is None or self.expected_entropy is None:
            return None
        return (self.entropy - self.expected_entropy).clamp(min=0)

    @property
    def epistemic_std(self) -> PyTree:
        """The standard deviation over draws."""
        return map_tensors(torch.sqrt, self.epistemic)

    def interval(self, level: float = 0.9) -> tuple[Any, Any]:
        """The lower and upper ends of the central interval of a Gaussian with the predictive mean and variance.

        Args:
            level: The nominal coverage of the interval.

        Example:
            >>> one = Prediction(torch.zeros(1), torch.ones(1), torch.zeros(1), n_draws=100, method="exact")
            >>> [round(float(end), 2) for end in one.interval(0.95)]
            [-1.96, 1.96]
        """
        if not 0 < level < 1:
            raise ValueError(f"`level` must lie strictly between 0 and 1; got {level!r}.")
        if self.entropy is not None:
            raise ValueError("an interval needs a number to predict; classes have probabilities: read `mean`.")
        half = math.sqrt(2) * float(torch.erfinv(torch.tensor(level, dtype=torch.float64)))
        lower = map_tensors(lambda mean, std: mean - half * std, self.mean, self.std)
        return lower, map_tensors(lambda mean, std: mean + half * std, self.mean, self.std)

    def numpy(self) -> dict[str, Any]:
        """The statistics as NumPy arrays by name, without those that were not requested."""
        return {name: map_tensors(lambda t: t.detach().cpu().numpy(), value) for name, value in self._statistics()}

    def to_pandas(self) -> Any:
        """A pandas table with one line per row: mean and deviations, or class probabilities and information."""
        import pandas

        return pandas.DataFrame(self._columns())

    def __len__(self) -> int:
        """The number of rows, if the output is one tensor."""
        return self._tensor().shape[self.row_axis or 0]

    def __getitem__(self, index: Any) -> Prediction:
        """The prediction of some rows: an index, a slice, or a tensor of indices or booleans."""
        self._tensor()
        one = (
            index.dim() == 0 and index.dtype != torch.bool if isinstance(index, Tensor) else hasattr(index, "__index__")
        )
        if one:
            index = slice(operator.index(index), operator.index(index) + 1 or None)
        changed = {}
        for name, value in self._statistics(derived=False):
            # Statistics of classes have the rows first, whatever the layout of the probabilities.
            axis = 0 if name in _ROWS_FIRST else (self.row_axis or 0) + (name in _DRAWS_FIRST)
            changed[name] = value[(*[slice(None)] * axis, index)]
        return replace(self, **changed)

    def _statistics(self, *, derived: bool = True) -> list[tuple[str, Any]]:
        stored = [field.name for field in fields(self) if field.name not in ("n_draws", "method", "row_axis")]
        names = [*stored, *(("variance", "std", "mutual_information") if derived else ())]
        return [(name, value) for name in names if (value := getattr(self, name)) is not None]

    def _tensor(self) -> Tensor:
        if not isinstance(self.mean, Tensor) or self.mean.dim() == 0:
            raise TypeError(
                "the prediction holds several tensors or no rows; read its fields, such as `mean`, instead."
            )
        return self.mean

    def _columns(self) -> dict[str, Any]:
        """The columns of a table: one for each output of a row, numbered where there are several."""
        self._tensor()
        names = ("mean", "std", "epistemic_std") if self.entropy is None else ("mean",)
        columns: dict[str, Any] = {}
        for name in names:
            flat = getattr(self, name).movedim(self.row_axis or 0, 0).reshape(len(self), -1).cpu()
            label = "probability" if self.entropy is not None else name
            single = flat.shape[1] == 1
            columns |= {label if single else f"{label}_{i}": flat[:, i].numpy() for i in range(flat.shape[1])}
        for name in ("entropy", "mutual_information"):
            value = getattr(self, name)
            if value is not None and value.dim() == 1:
                columns[name] = value.cpu().numpy()
        return columns

    def __repr__(self) -> str:
        how = f"{self.n_draws} draws, {self.method}" if self.n_draws else self.method
        if not isinstance(self.mean, Tensor) or self.mean.is_complex() or self.mean.dim() == 0:
            shapes = ", ".join(str(tuple(t.shape)) for t in split(self.mean)[0])
            return f"Prediction(outputs {shapes}; {how})"
        if self.entropy is not None:
            information = float(self.mutual_information.mean()) if self.mutual_information is not None else 0.0
            return f"Prediction({len(self)} rows, mean mutual information {information:.3g} nats; {how})"
        mean, std = float(self.mean.double().mean()), float(self.variance.double().mean().sqrt())
        return f"Prediction({len(self)} rows of shape {tuple(self.mean.shape[1:])}, mean {mean:.3g} ± {std:.3g}; {how})"

    def __str__(self) -> str:
        rows = self._table()
        if rows is None:
            return repr(self)
        head, body = rows
        widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
        lines = ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in (head, *body)]
        return "\n".join([repr(self), *lines])

    def _repr_html_(self) -> str:
        rows = self._table()
        summary = f"<p>{html.escape(repr(self))}</p>"
        if rows is None:
            return summary
        head, body = rows
        heading = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        lines = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in row) + "</tr>" for row in body)
        return f"{summary}<table><thead><tr>{heading}</tr></thead><tbody>{lines}</tbody></table>"

    def _table(self) -> tuple[list[str], list[list[str]]] | None:
        """A table of the first and last rows and few columns as text; None if there is none to show."""
        if not isinstance(self.mean, Tensor) or self.mean.is_complex() or self.mean.dim() == 0:
            return None
        columns = dict(list(self._columns().items())[:8])
        n_rows = len(self)
        indices: list[int | None] = list(range(n_rows))
        if n_rows > 2 * _SHOWN_ROWS:
            indices = [*range(_SHOWN_ROWS), None, *range(n_rows - _SHOWN_ROWS, n_rows)]
        body = [
            ["…"] * (len(columns) + 1)
            if index is None
            else [str(index), *(f"{c[index]:.4g}" for c in columns.values())]
            for index in indices
        ]
        return ["row", *columns], body
