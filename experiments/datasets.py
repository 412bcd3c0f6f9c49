"""The experiments' data: from the folder `DROPBAYES_DATA`, else from a dependency, else a verified download."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from experiments.downloads import data_path, verified_contents
from experiments.record import Array

__all__ = ["Images", "Series", "atmospheric_co2", "digits", "monthly_co2", "solar_irradiance", "unrelated_images"]

N_CO2_TRAIN, N_CO2_TRUTH = 272, 156
"""The rows of the paper's training set and of the true continuation over its query range."""

# The rows of each missing segment of the paper's solar data: five of 20 points, 75 apart.
SOLAR_SEGMENTS = tuple(range(17 + 75 * k, 37 + 75 * k) for k in range(5))

# sha256 of the uncompressed idx files.
_MIRRORS = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
}
_DIGESTS = {
    "mnist/train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "mnist/train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "mnist/t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "mnist/t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "fashion_mnist/t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "fashion_mnist/t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


@dataclass(frozen=True)
class Series:
    """A function of one variable, standardised: its observed part and its hidden part.

    Attributes:
        x: The inputs of the observed part, `[row, 1]`.
        y: The observed values, `[row, 1]`.
        x_hidden: The inputs of the hidden part.
        y_hidden: The hidden values, which the predictions are scored against.
        source: A description of the data.
    """

    x: Tensor
    y: Tensor
    x_hidden: Tensor
    y_hidden: Tensor
    source: str


@dataclass(frozen=True)
class Images:
    """Labelled images `[row, 1, height, width]` with values in [0, 1]."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    source: str


# --- series --------------------------------------------------------------------------------------------------------


def monthly_co2() -> tuple[Array, str]:
    """Monthly CO2 at Mauna Loa in ppm from March 1958, missing months left out, and the name of the source."""
    path = data_path("co2/co2_mauna_monthly_1958_2003.csv")
    if path is not None:
        return np.loadtxt(path, delimiter=",", skiprows=1)[:, 1], "Mauna Loa, monthly, 1958-2003"
    try:
        from statsmodels.datasets import co2
    except ModuleNotFoundError as error:
        raise _no_data("the CO2 series", "co2/co2_mauna_monthly_1958_2003.csv", "pip install statsmodels") from error
    weekly = co2.load_pandas().data["co2"]
    return weekly.resample("MS").mean().dropna().to_numpy(), "Mauna Loa, monthly means of statsmodels' weekly data"


def atmospheric_co2() -> Series:
    """The paper's extrapolation data: 272 months less their linear trend, and the 156 months that followed.

    $x$ is the standardised row number, $y$ the standardised residual of a straight line; the same line and scale are
    applied to what followed.
    """
    ppm, source = monthly_co2()
    index = np.arange(N_CO2_TRAIN + N_CO2_TRUTH, dtype=float)
    seen = slice(N_CO2_TRAIN)
    x = (index - index[seen].mean()) / index[seen].std()
    slope, level = np.polyfit(x[seen], ppm[seen], 1)
    residual = ppm[: len(index)] - slope * x - level
    y = residual / residual[seen].std()
    return _series(x, y, np.arange(len(x)) >= N_CO2_TRAIN, source)


def solar_irradiance() -> Series:
    """The paper's interpolation data, five segments of 20 points missing; without them, yearly sunspot numbers."""
    path = data_path("solar/solar_gal.csv")
    if path is not None:
        x, y, hidden = np.loadtxt(path, delimiter=",", skiprows=1).T
        return _series(x, y, hidden > 0, "reconstructed solar irradiance, as in the paper")
    try:
        from statsmodels.datasets import sunspots
    except ModuleNotFoundError as error:
        raise _no_data("the solar series", "solar/solar_gal.csv", "pip install statsmodels (sunspots)") from error
    y = np.sqrt(sunspots.load_pandas().data["SUNACTIVITY"].to_numpy())  # the root stabilises their variance
    index = np.arange(len(y), dtype=float)
    hidden = np.isin(index, [row for segment in SOLAR_SEGMENTS for row in segment])
    return _series(
        (index - index.mean()) / index.std(),
        (y - y.mean()) / y.std(),
        hidden,
        "yearly sunspot numbers (square roots), in place of the paper's data",
    )


def _series(x: Array, y: Array, hidden: Array, source: str) -> Series:
    x_column, y_column = (torch.tensor(z, dtype=torch.float32)[:, None] for z in (x, y))
    seen = torch.tensor(~hidden)
    return Series(x_column[seen], y_column[seen], x_column[~seen], y_column[~seen], source)


# --- images --------------------------------------------------------------------------------------------------------


def digits(kind: Literal["auto", "mnist", "digits"] = "auto") -> Images:
    """Handwritten digits: MNIST, or scikit-learn's 1797 digits brought to MNIST's 28 x 28 pixels.

    Args:
        kind: "mnist" (from the data folder, else downloaded), "digits" (scikit-learn's), or "auto": MNIST where the
            data folder has it, else scikit-learn's.
    """
    if kind == "auto":
        kind = "mnist" if data_path("mnist/train-images-idx3-ubyte.gz") else "digits"
    if kind == "mnist":
        arrays = [_idx(f"mnist/{file}") for file in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")]
        arrays += [_idx(f"mnist/{file}") for file in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")]
        x, y, x_test, y_test = arrays
        # The authors divide by 256.
        return Images(x[:, None].float() / 256, y.long(), x_test[:, None].float() / 256, y_test.long(), "MNIST")
    if kind != "digits":
        raise ValueError(f'`kind` must be "auto", "mnist" or "digits"; got {kind!r}.')
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    small = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    # 8 x 8 become 20 x 20 within a margin of 4, as MNIST's digits sit in theirs.
    x = torch.nn.functional.interpolate(small, size=20, mode="bilinear", antialias=False).clamp(0, 1)
    x, y = torch.nn.functional.pad(x, (4, 4, 4, 4)), torch.tensor(data.target).long()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    train, test = order[:1297], order[1297:]
    return Images(x[train], y[train], x[test], y[test], "scikit-learn's digits")


def unrelated_images(known: Images, *, seed: int = 0) -> tuple[Tensor, str]:
    """Images of no digit at all: Fashion-MNIST's where the data folder has it, else digits with shuffled pixels."""
    if known.source == "MNIST" and data_path("fashion_mnist/t10k-images-idx3-ubyte.gz"):
        return _idx("fashion_mnist/t10k-images-idx3-ubyte")[:, None].float() / 256, "Fashion-MNIST"
    order = torch.randperm(known.x_test[0].numel(), generator=torch.Generator().manual_seed(seed))
    return known.x_test.flatten(1)[:, order].reshape(known.x_test.shape), "digits with shuffled pixels"


def _idx(name: str) -> Tensor:
    """The array in an idx file, after a check of its digest."""
    folder, file = name.split("/")
    contents = verified_contents(f"{name}.gz", f"{_MIRRORS[folder]}/{file}.gz", _DIGESTS[name])
    n_axes = contents[3]
    shape = np.frombuffer(contents, ">u4", count=n_axes, offset=4).astype(int)
    values = np.frombuffer(contents, np.uint8, offset=4 + 4 * n_axes)
    return torch.from_numpy(values.copy()).reshape(*shape.tolist())


def _no_data(what: str, relative: str, remedy: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"`DROPBAYES_DATA` must name a folder that holds {relative!r} for {what}; got "
        f"{os.environ.get('DROPBAYES_DATA')!r}. Set it, or {remedy}."
    )
