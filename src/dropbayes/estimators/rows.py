r"""The training rows of an estimator: their times and groups, and their canonical order."""

from typing import Any

import numpy as np

# Larger weights enter the objective: as repeated rows they would cost memory. A table with more copies of each row
# than that has few distinct rows, which are repeated observations and not copies.
_MAX_COPIES = 10


def missing_rows(names: Any, *, none: bool = False) -> np.ndarray:
    """The rows whose name is NaN, NaT or pandas.NA, or None if `none`."""

    def is_missing(name: object) -> bool:
        try:
            return (none and name is None) or bool(name != name)
        except TypeError:  # of pandas.NA, nothing is true or false
            return True

    # As objects: NumPy would turn a NaN among the texts of a list into a text.
    return np.flatnonzero([is_missing(name) for name in np.asarray(names, dtype=object).ravel()])


def group_numbers(name: str, given: Any, n_rows: int, *, ordered: bool = False) -> np.ndarray:
    """The number of each row's group, or where they are `ordered` of its time: rows of one are held out together."""
    one = name.removesuffix("s")
    if len(missing := missing_rows(given, none=ordered)):
        raise ValueError(f"`{name}` must hold a {one} for every row; row {missing[0]} has none.")
    if (values := np.asarray(given)).shape != (n_rows,):
        raise ValueError(f"`{name}` must hold one {one} for each of the {n_rows} rows; got {values.shape}.")
    try:
        numbers = np.unique(values, return_inverse=True)[1].reshape(-1)
    except TypeError:  # names of several kinds, None among them, have no order
        if ordered:
            raise
        numbers = np.unique([repr(value) for value in values], return_inverse=True)[1].reshape(-1)
    if numbers.max() == 0:
        raise ValueError(f"`{name}` must hold at least 2 {name}, to learn from one and hold out the other; got 1.")
    return numbers


def canonical_rows(x: np.ndarray, y: np.ndarray, weight: np.ndarray, groups: Any) -> tuple[Any, Any, Any, Any]:
    """The rows in sorted order, with integer weights expanded to repeated rows.

    The fit then does not depend on the order of the rows, and a row of weight 2 equals a row given twice.
    """
    groups = None if groups is None else group_numbers("groups", groups, len(x))
    rows = np.flatnonzero(weight > 0)
    if len(counts := weight[rows]) and np.all(counts == np.round(counts)) and counts.max() <= _MAX_COPIES:
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
    return np.where(np.bincount(inputs)[inputs[copy]] > 1, len(rows) + np.arange(len(table)), copy)
