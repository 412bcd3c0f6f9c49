r"""Columns of numbers as inputs of networks: missing values filled and flagged, and columns cut into bins.

A missing value is imputed by the mean, with an indicator column. Bins let a network bend a column's effect at every
quantile as trees can, by piecewise linear encoding (Gorishniy, Rubachev and Babenko 2022, "On Embeddings for Numerical
Features in Tabular Deep Learning"): a value x becomes one input for each bin $[b_k, b_{k+1}]$ of its column,
$$\min\big(\max\big((x - b_k) / (b_{k+1} - b_k),\; 0\big),\; 1\big),$$
beside x itself.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from dropbayes.runtime.validation import Numbers

_MAX_BINS = 16
_ROWS_PER_BIN = 20
_CODES, _CODED_COLUMNS = 6, 64  # a column of so few values has a bin between any two, in tables of so few columns


@dataclass(frozen=True, eq=False)
class MissingValues:
    """The encoding of missing values, determined by the training rows."""

    fill: Numbers  # the mean of the present values of each column; 0 for a column without any
    columns: npt.NDArray[np.int64]  # the indices of those with missing values in training; each has an indicator

    @classmethod
    def of(cls, x: Numbers) -> Self:
        """The encoding for training rows."""
        absent = np.isnan(x)
        return cls(np.where(absent, 0.0, x).sum(0) / np.maximum((~absent).sum(0), 1), np.flatnonzero(absent.any(0)))

    def encode(self, x: Numbers) -> Numbers:
        """The columns filled, then for each that lacked values in training an indicator: 1 where one is missing."""
        absent = np.isnan(x)
        return np.column_stack([np.where(absent, self.fill, x), absent[:, self.columns].astype(np.float64)])


@dataclass(frozen=True, eq=False)
class Bins:
    """The bins of each column."""

    edges: tuple[Numbers, ...]  # of each column's bins, in increasing order; empty for a column without bins

    @classmethod
    def of(cls, x: Numbers, *, max_inputs: int) -> Self:
        """Bins that hold equal numbers of training rows; between all values of a column that has few, such as codes.

        The bins of all others have at most `max_inputs` inputs: of many columns, each has fewer bins or none.
        """
        n_rows, n_columns = x.shape
        n_bins = min(max_inputs // max(1, n_columns), n_rows // _ROWS_PER_BIN, _MAX_BINS)
        levels = np.linspace(0, 1, n_bins + 1) if n_bins > 1 else np.empty(0)
        most = max(n_bins, _CODES if n_columns <= _CODED_COLUMNS else 0)

        def edges(column: Numbers) -> Numbers:
            values = np.unique(column)
            coded = len(values) <= most and n_rows >= _ROWS_PER_BIN * len(values)
            found = values if coded else np.unique(np.quantile(column, levels, method="nearest"))
            return found if len(found) > 2 else found[:0]  # fewer than two bins are none

        return cls(tuple(edges(column) for column in x.T))

    @property
    def n_inputs(self) -> int:
        """The number of inputs that encode the bins."""
        return sum(max(0, len(edges) - 1) for edges in self.edges)

    def encode(self, x: Numbers) -> Numbers:
        """The columns, followed by the inputs of their bins."""
        columns = zip(x.T[:, :, None], self.edges, strict=True)
        pieces = [np.clip((column - edges[:-1]) / np.diff(edges), 0.0, 1.0) for column, edges in columns]
        return np.column_stack([x, *pieces])
