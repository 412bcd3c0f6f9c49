r"""Missing values as inputs: imputed by the mean, with an indicator column."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dropbayes.runtime.arrays import Numbers


@dataclass(frozen=True, eq=False)
class MissingValues:
    """The encoding of missing values, determined by the training rows.

    Example:
        >>> values = MissingValues.of(np.array([[1.0, 5.0], [3.0, np.nan]]))
        >>> values.encode(np.array([[np.nan, np.nan]]))
        array([[2., 5., 1.]])
    """

    fill: Numbers  # the mean of the present values of each column; 0 for a column without any
    columns: npt.NDArray[np.int64]  # the indices of those with missing values in training; each has an indicator

    @classmethod
    def of(cls, x: Numbers) -> MissingValues:
        """The encoding for training rows."""
        absent = np.isnan(x)
        count = (~absent).sum(0)
        fill = np.where(absent, 0.0, x).sum(0) / np.maximum(count, 1)
        return cls(fill, np.flatnonzero(absent.any(0)))

    def encode(self, x: Numbers) -> Numbers:
        """The columns filled, followed by the indicators: 1 where a value was missing.

        A value missing in a column that was complete in training is filled without an indicator.
        """
        absent = np.isnan(x)
        return np.column_stack([np.where(absent, self.fill, x), absent[:, self.columns].astype(np.float64)])
