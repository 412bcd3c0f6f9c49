"""The fields of a prediction: how an estimator, and a network with its likelihood, fill them; and beside outcomes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dropbayes.estimators.ensembles import Ensemble, check_finite
from dropbayes.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, output_tensor
from dropbayes.predictive import Mixture, RegressionOutcomes, draw_mean, outputs_by
from dropbayes.predictive.scoring import COVERAGE_LEVELS
from dropbayes.runtime.progress import ProgressBar
from dropbayes.runtime.validation import NumpyArray, check_type
from dropbayes.scores import information


class EnsembleFields:
    """Those of a fitted estimator, or of a model that has one, with the settings it was fitted with."""

    def __init__(self, model: Any) -> None:
        ensemble = getattr(model, "ensemble", model)
        check_type("model", ensemble, Ensemble, "be a dropout estimator, a network or the result of load(folder)")
        if not hasattr(ensemble, "population_"):
            raise ValueError("`model` must be fitted; call its fit first.")
        names = getattr(ensemble, "feature_names_in_", None)
        self.names = None if names is None else tuple(map(str, names))
        self.schema = getattr(model, "schema", None)
        self.classes = getattr(ensemble, "classes_", None)
        self.has_classes = self.classes is not None
        self.recalibration: Any = getattr(ensemble, "recalibration", None)
        self.n_inputs, self.n_networks = ensemble.n_features_in_, len(ensemble.population_)
        self.row_size = int(ensemble.population_.weights[-1].shape[-1])
        self.n_draws, self.seed = int(ensemble.n_draws), int(ensemble.seed_)
        self._ensemble = ensemble.with_draws()
        vars(self._ensemble).pop("feature_names_in_", None)  # the names are checked when the columns are ordered

    def __call__(self, x: NumpyArray, n_draws: int, seed: int, coverage: float, method: str) -> dict[str, NumpyArray]:
        ensemble: Any = self._ensemble.with_draws(n_draws=n_draws, seed=seed, method=method)
        fields = _information(ensemble.draws(x)) if self.has_classes else _moments(ensemble.predictive(x), coverage)
        if self.classes is not None:
            fields["predicted"] = self.classes[fields["predicted"]]
        return {name: round_digits(values) for name, values in fields.items()}


class NetworkFields:
    """Those of a network, its output read by a likelihood."""

    schema = classes = None
    recalibration: Any = None
    n_networks = row_size = 1
    n_draws, seed = 100, 0

    def __init__(self, net: nn.Module, likelihood: Likelihood | None, columns: Sequence[str] | None) -> None:
        if not isinstance(likelihood, Gaussian | HeteroscedasticGaussian | Categorical):
            known = "Gaussian(precision=...), HeteroscedasticGaussian() or Categorical()"
            raise ValueError(f"`likelihood` must say how the network's output is read: {known}; got {likelihood!r}.")
        if len(set(columns or ())) < len(columns or ()):
            raise ValueError(f"`columns` must name each input of the network once; got {list(columns or ())}.")
        self._net, self._likelihood = net, likelihood
        self.has_classes = isinstance(likelihood, Categorical)
        self.names = None if columns is None else tuple(columns)
        self.n_inputs = None if columns is None else len(columns)

    def __call__(self, x: NumpyArray, n_draws: int, seed: int, coverage: float, method: str) -> dict[str, NumpyArray]:
        like = next(self._net.parameters(), torch.empty(0))
        inputs = torch.tensor(x, device=like.device)
        inputs = inputs.to(like.dtype) if inputs.is_floating_point() else inputs
        output = output_tensor(outputs_by(method, self._net, inputs, n_draws=n_draws, seed=seed))
        likelihood: Any = self._likelihood.for_output(output.dim() - 1)
        mean = likelihood.mean(output.cpu()).double()
        if self.has_classes:
            return _information(mean.movedim(likelihood.axis, -1))
        scale = likelihood.variance(output.cpu()).double().sqrt()
        moments = _moments(Mixture(mean.flatten(1), scale.flatten(1)), coverage)
        return {name: values.reshape(mean.shape[1:]) for name, values in moments.items()}


def round_digits(values: NumpyArray) -> NumpyArray:
    """Floating-point numbers to 12 significant digits, more than a network has; others as they are."""
    if values.dtype.kind != "f":
        return values
    return np.array([float(f"{value:.12g}") for value in values.ravel().tolist()]).reshape(values.shape)


def _moments(mixture: Mixture, coverage: float) -> dict[str, NumpyArray]:
    """The moments of each row's predictive distribution, and the ends of its central interval, but of coverage 0."""
    ends = {} if coverage == 0 else dict(zip(("lower", "upper"), mixture.interval(coverage), strict=True))
    values = {"mean": mixture.mean, "std": mixture.std, "epistemic": mixture.epistemic, "aleatoric": mixture.aleatoric}
    return {name: value.numpy() for name, value in (values | ends).items()}


def _information(probabilities: Tensor) -> dict[str, NumpyArray]:
    """The most probable class of each row, all class probabilities, entropy and mutual information."""
    mean = draw_mean(probabilities)
    values = {"predicted": mean.argmax(-1), "probabilities": mean, "entropy": information.entropy(mean)}
    values["mutual_information"] = information.mutual_information(probabilities)
    return {name: value.numpy() for name, value in values.items()}


Judged = tuple[NumpyArray, NumpyArray, Callable[[int], str]]
"""The inputs of some rows, their outcomes (for classes their numbers), and the location of each."""


def outcome_columns(
    ensemble: Any, parts: Iterable[Judged], *, n_rows: int | None = None, max_ranked: int = 2000
) -> tuple[int, dict[str, NumpyArray]]:
    """The number of draws, and what scores read of rows and their outcomes, with both parts of the uncertainty.

    The CRPS, whose cost grows with the square of the draws, is that of at most `max_ranked` rows, evenly spread: of
    every second, fourth ... where the number of rows is known only after the last.
    """
    drawn_blocks = ensemble.draw_blocks if hasattr(ensemble, "classes_") else ensemble.predictive_blocks
    blocks, crps = list[dict[str, Tensor]](), torch.empty(0, dtype=torch.float64)
    first, step, ranked = 0, 1, None if n_rows is None else even_selection(n_rows, max_ranked)
    with ProgressBar("predict", n_rows, unit="rows", show=None if n_rows else False) as bar:
        for x, y, at in parts:
            for rows, drawn in drawn_blocks(x):
                numbers = np.arange(first + rows.start, first + rows.stop)
                while ranked is None and first + rows.stop > max_ranked * step:
                    crps, step = crps[::2], 2 * step
                some = torch.from_numpy(numbers % step == 0 if ranked is None else np.isin(numbers, ranked))
                mean = draw_mean(drawn) if isinstance(drawn, Tensor) else drawn.mean
                check_finite({"mean": mean.numpy()}, lambda row, start=rows.start, at=at: at(start + row))
                blocks.append(_block_columns(drawn, mean, torch.from_numpy(y[rows]), some))
                crps = torch.cat([crps, blocks[-1].pop("crps", crps[:0])])
                bar.advance(len(numbers))
            first += len(x)
    joined = {name: torch.cat([block[name] for block in blocks]).numpy() for name in blocks[0]}
    recalibration = getattr(ensemble, "recalibration", None)
    if "labels" in joined and recalibration is not None and recalibration.method == "conformal":
        joined["sets"] = recalibration.label_sets(joined["probabilities"], COVERAGE_LEVELS[-1]).numpy()
    return drawn.n_draws if "y" in joined else len(drawn), joined | ({"crps": crps.numpy()} if "y" in joined else {})


def _block_columns(drawn: Mixture | Tensor, mean: Tensor, y: Tensor, ranked: Tensor) -> dict[str, Tensor]:
    """The columns of some rows, from their predictive distributions or from the class probabilities of their draws."""
    if not isinstance(drawn, Tensor):
        columns = RegressionOutcomes.columns(drawn, y, ranked=ranked)
        return columns | {"epistemic": drawn.epistemic, "aleatoric": drawn.aleatoric}
    parts = {"epistemic": information.mutual_information(drawn), "aleatoric": information.expected_entropy(drawn)}
    return {"labels": y, "probabilities": mean, "total": information.entropy(mean), **parts}


def even_selection(n_rows: int, max_rows: int) -> npt.NDArray[np.int64]:
    """The indices of at most so many rows, evenly spread."""
    return np.linspace(0, n_rows - 1, min(n_rows, max_rows)).round().astype(np.int64)
