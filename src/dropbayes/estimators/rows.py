r"""The training rows of an estimator: their times and groups, and their canonical order."""

from __future__ import annotations

from typing import Any

import numpy as np

from dropbayes.estimators.frames import as_array

# Larger weights enter the objective: as repeated rows they would cost memory. A table with more copies of each row
# than that has few distinct rows, which are repeated observations and not copies.
_MAX_COPIES = 10


def missing_rows(names: Any, *, none: bool = False) -> np.ndarray:
    """The rows whose name is NaN, NaT or pandas.NA, or None if `none`.

    A list is read item by item: NumPy would turn a NaN among texts into a text.
    """

    def is_missing(name: object) -> bool:
        try:
            return (none and name is None) or bool(name != name)
        except TypeError:  # of pandas.NA, nothing is true or false
            return True

    return np.flatnonzero([is_missing(name) for name in np.asarray(names, dtype=object).ravel()])


def time_groups(times: Any, groups: Any, n_rows: int) -> np.ndarray:
    """The rank of each row's time: rows of one time are held out together."""
    if groups is not None:
        raise ValueError("`groups` and `times` are two ways to hold rows out; give one of them.")
    given = as_array(times, "times")
    if len(missing := missing_rows(given, none=True)):
        raise ValueError(f"`times` must hold a time for every row; some are missing, the first in row {missing[0]}.")
    times = np.asarray(given)
    if times.shape != (n_rows,):
        raise ValueError(f"`times` must hold one time for each of the {n_rows} rows; got {times.shape}.")
    ranks = np.unique(times, return_inverse=True)[1].reshape(-1)
    if ranks.max() == 0:
        raise ValueError("`times` must hold at least 2 times, to learn from the first and hold out the second; got 1.")
    return ranks


def canonical_rows(x: np.ndarray, y: np.ndarray, weight: np.ndarray, groups: Any) -> tuple[Any, Any, Any, Any]:
    """The rows in sorted order, with integer weights expanded to repeated rows.

    The fit then does not depend on the order of the rows, and a row of weight 2 equals a row given twice.
    """
    if groups is not None:
        if len(missing := missing_rows(groups)):
            raise ValueError(f"`groups` must name a group for every row; row {missing[0]} has none. Name one.")
        groups = np.asarray(groups)
        if groups.shape != (len(x),):
            raise ValueError(f"`groups` must name one group for each of the {len(x)} rows; got {groups.shape}.")
        try:
            groups = np.unique(groups, return_inverse=True)[1].reshape(-1)
        except TypeError:  # names of several kinds, None among them, have no order
            groups = np.unique([repr(group) for group in groups], return_inverse=True)[1].reshape(-1)
        if groups.max() == 0:
            raise ValueError("`groups` must name at least 2 groups, to learn from one and hold out another; got 1.")
    rows = np.flatnonzero(weight > 0)
    counts = weight[rows]
    if len(counts) and np.all(counts == np.round(counts)) and counts.max() <= _MAX_COPIES:
        rows, weight = np.repeat(rows, counts.astype(np.int64)), np.ones(len(x))
    order = rows[np.lexsort(np.vstack([x[rows].T, y[rows].reshape(len(rows), -1).T]))]
    return x[order], y[order], weight[order], None if groups is None else groups[order]


def row_groups(x: np.ndarray, y: np.ndarray) -> np.ndarray | None:
    """A group for each row: copies of a row must not be in both the training and the held-out rows.

    Rows of equal inputs and different outcomes are repeated observations, each its own group: a fold that held out all
    rows of one outcome would be trained on the other outcome alone. None where few distinct rows are repeated often.
    """
    table = np.column_stack([x, y.reshape(len(y), -1)])
    rows, copy = np.unique(table, axis=0, return_inverse=True)
    if len(rows) == 1 or len(table) > _MAX_COPIES * len(rows):
        return None
    inputs = np.unique(rows[:, : x.shape[1]], axis=0, return_inverse=True)[1].reshape(-1)
    copy = copy.reshape(-1)
    repeated = np.bincount(inputs)[inputs[copy]] > 1
    return np.where(repeated, len(rows) + np.arange(len(table)), copy)
