r"""Fitted ensembles of dropout networks: the prediction of an estimator, without its training.

They do not import scikit-learn, which takes as long to import as torch: a model folder is read as an ensemble, and the
estimators are ensembles that can be fitted.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from dropbayes import linear
from dropbayes.estimators import files
from dropbayes.estimators.atoms import AtomMixture, Atoms
from dropbayes.estimators.extrapolation import Bounds, Extrapolation
from dropbayes.estimators.frames import as_array, frame_inputs
from dropbayes.estimators.inputs import Bins, MissingValues
from dropbayes.estimators.noise import StudentNoise
from dropbayes.estimators.process import Process, in_blocks, offset_draws
from dropbayes.estimators.recalibration import tempered
from dropbayes.estimators.transforms import MappedMixture, TargetTransform, TransformedMixture
from dropbayes.estimators.trees import Trees, among
from dropbayes.population import Population, network
from dropbayes.population.evaluation import in_units
from dropbayes.predictive import Mixture, draw_mean, outputs_by
from dropbayes.runtime.devices import on_cpu
from dropbayes.runtime.validation import check_choice, check_count, check_probability, finite_tensor
from dropbayes.scores import information
from dropbayes.scores.averages import weighted_mean

if TYPE_CHECKING:
    from dropbayes.estimators.columns.schema import Schema

_BLOCK_ROWS, _BLOCK_ELEMENTS = 4096, 2**20  # predicted at a time, and values of their draws: both bound the memory
METHODS = ("sampling", "linear", "moments")  #: The methods of a prediction.


class Ensemble(ABC):
    """The common base of regression and classification ensembles, with the parameters that these were fitted with."""

    saved_as: ClassVar[str]  #: The kind written to its model file.
    records: ClassVar[dict[str, tuple[str, Any]]] = {"forest_": ("forest", Trees), "boosted_": ("boosted", Trees)}
    """The attributes that a file holds as tensors if they are not None, with their name there and their class."""

    population_: Population  #: The networks, on the CPU.
    seed_: int
    n_draws: int
    method: str = "sampling"  #: That, or what predicts without draws: "linear" or "moments" (`dropbayes.predict`).
    n_features_in_: int
    frame_columns_: Schema | None
    missing_values_: MissingValues | None
    bins_: Bins | None
    forest_: Trees | None = None
    boosted_: Trees | None = None
    recalibration: Any = None  #: What corrects the predictions (`dropbayes.estimators.recalibration`), if anything.

    def __init__(self, **parameters: Any) -> None:
        self._names = tuple(parameters)
        vars(self).update(parameters)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters that the estimator was fitted with, by name."""
        return {name: getattr(self, name) for name in self._names}

    @property
    def drop_prob_(self) -> tuple[float, ...]:
        """The drop probability before each weight layer of the first network."""
        return tuple(self.population_.drop_prob[0].tolist())

    @property
    def hidden_(self) -> tuple[int, ...]:
        """The widths of the networks' hidden layers."""
        return tuple(weight.shape[2] for weight in self.population_.weights[:-1])

    @property
    def networks_(self) -> list[nn.Module]:
        """The networks, as torch modules of standardised inputs and outputs (`population_.x_mean`, `x_scale` ...).

        If `bins_` is not None, the inputs are the columns encoded by `bins_.encode`.
        """
        return [network(self.population_, index) for index in range(len(self.population_))]

    def with_draws(self, *, n_draws: int | None = None, seed: int | None = None, method: str | None = None) -> Any:
        """A view of this fitted estimator that predicts from `n_draws` per network, of another seed, or without any.

        The method is "sampling", or "linear" or "moments" for the moments of each network without draws.
        """
        self._check_fitted()
        check_count("n_draws", self.n_draws if n_draws is None else n_draws)
        check_choice("method", self.method if method is None else method, METHODS)
        view, given = copy.copy(self), {"method": method, "n_draws": n_draws, "seed_": seed}
        vars(view).update({name: value for name, value in given.items() if value is not None})
        return view

    def without_dropout(self) -> Any:
        """A view of this fitted estimator that drops nothing: one function per network."""
        self._check_fitted()
        view = copy.copy(self)
        view.population_ = replace(self.population_, drop_prob=torch.zeros_like(self.population_.drop_prob))
        return view

    def _check_fitted(self) -> None:
        """Raises scikit-learn's `NotFittedError` for an estimator that was not fitted."""
        if not hasattr(self, "population_"):
            from sklearn.utils.validation import check_is_fitted

            check_is_fitted(self)

    def _inputs(self, X: Any) -> np.ndarray:
        """The inputs of the networks for rows `[row, feature]`, without those of the bins."""
        if self.frame_columns_ is not None:
            x = frame_inputs(self.frame_columns_, X, learn_missing=self.missing_values_ is not None)
        else:
            x = np.asarray(as_array(X), dtype=np.float64, order="C")
            if x.ndim != 2 or x.shape[1] != self.n_features_in_:
                raise ValueError(f"`X` must be shaped [row, {self.n_features_in_}]; got {list(x.shape)}.")
        if not np.isfinite(x).all() and (self.missing_values_ is None or np.isinf(x).any()):
            raise ValueError("`X` must hold finite numbers.")
        return x if self.missing_values_ is None else self.missing_values_.encode(x)

    def _with_bins(self, x: np.ndarray) -> np.ndarray:
        return x if self.bins_ is None else self.bins_.encode(x)

    @property
    def _n_columns(self) -> int:
        """The number of inputs of the networks without those of the bins."""
        return self.population_.x_mean.shape[1] - (0 if self.bins_ is None else self.bins_.n_inputs)

    def _output_blocks(self, x: np.ndarray) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, their standardised inputs, and the networks' outputs `[draw, network, row, output]`, block by block."""
        nets, population = self.networks_, self.population_
        random = [bool((p > 0).any()) for p in population.drop_prob]
        several = any(random) or any(member.offset for member in population.members)  # else each is one function
        n_rows, n_draws = self.block_rows, self._n_drawn if several else 1
        for start in range(0, len(x), n_rows):
            rows = slice(start, min(start + n_rows, len(x)))
            standard = self._standard(x[rows])
            outputs = []
            with torch.no_grad():
                for i, net in enumerate(nets):
                    drawn = functools.partial(outputs_by, self.method, net, n_draws=n_draws, seed=self.seed_ + i)
                    if not random[i]:  # nothing is dropped: one function
                        sampled = in_blocks(net.eval(), standard).expand(n_draws, -1, -1)
                    else:  # the other methods have products of one size by themselves
                        sampled = in_blocks(drawn, standard, 256) if self.method == "linear" else drawn(standard)
                    outputs.append(sampled)
            yield rows, standard, torch.stack(outputs, 1)

    def _standard(self, x: np.ndarray) -> Tensor:
        """The inputs as the networks read them; trained on the same rows, they share one standardisation."""
        population, inputs = self.population_, torch.tensor(self._with_bins(x)).to(self.population_.device)
        return ((inputs - population.x_mean[0]) / population.x_scale[0]).to(population.weights[0].dtype)

    @property
    def _n_drawn(self) -> int:
        """The number of draws of each network, or of points in their place."""
        return int(self.n_draws) if self.method == "sampling" else linear.N_POINTS

    @property
    def block_rows(self) -> int:
        """The rows per block, which depend only on the model and its draws: a row is always in the same block."""
        per_row = self._n_drawn * len(self.population_) * self.population_.weights[-1].shape[-1]
        return max(16, min(_BLOCK_ROWS, _BLOCK_ELEMENTS // per_row))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the fitted estimator to one file (see `dropbayes.runtime.storage`); `load` reads it back."""
        self._check_fitted()
        files.save(self, path)

    @classmethod
    @on_cpu
    def load(cls, path: str | os.PathLike[str]) -> Any:
        """The estimator or ensemble that a file holds, fitted; an error if it is damaged or holds something else."""
        return files.load(cls, path)

    @abstractmethod
    def _head(self) -> str:
        """The likelihood of the networks."""

    @property
    def _trees(self) -> list[Trees]:
        """The trees beside the networks."""
        return [trees for trees in (self.forest_, self.boosted_) if trees is not None]

    def _check_trees(self, n_outputs: int) -> None:
        """Raises unless the trees of a file fit the inputs and the outputs."""
        for trees in self._trees:
            known = (trees.column >= 0) & (trees.column < self._n_columns)
            if trees.value.shape[1] != n_outputs or not bool(known.all()):
                raise ValueError(f"trees must compare {self._n_columns} columns and have {n_outputs} outputs")


def check_finite(prediction: Mapping[str, np.ndarray], at: Callable[[int], str]) -> None:
    """Raises ValueError if a row is so far from the training rows that single precision overflows."""
    for values in prediction.values():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            row = int((~np.isfinite(values)).reshape(len(values), -1).any(1).argmax())
            raise ValueError(f"{at(row)}: the prediction is not finite; a value is too far from those of training.")


def _finite(values: Tensor) -> np.ndarray:
    check_finite({"": values.numpy()}, "`X`, row {}".format)
    return values.numpy()


class RegressionEnsemble(Ensemble):
    """An ensemble that predicts numbers."""

    saved_as = "DropoutRegressor"
    records = Ensemble.records | {"noise_": ("noise", StudentNoise), "extrapolation_": ("distance", Extrapolation)}
    records |= {"bounds_": ("bounds", Bounds), "process_": ("process", Process), "atoms_": ("atoms", Atoms)}
    noise: str
    noise_: StudentNoise | None
    extrapolation_: Extrapolation | None = None
    transform_: TargetTransform = TargetTransform()
    bounds_: Bounds | None = None
    process_: Process | None = None
    atoms_: Atoms | None = None
    one_column_: bool

    def _head(self) -> str:
        check_choice("noise", self.noise, ("student", "constant", "heteroscedastic"))
        return "heteroscedastic" if self.noise == "heteroscedastic" else "gaussian"

    @property
    def precision_(self) -> Any:
        """τ in units of 1/y²: a number, or one per output."""
        precision = self.population_.precision[0].numpy()
        return float(precision[0]) if self.one_column_ else precision

    @on_cpu
    def predictive(self, X: Any) -> Mixture:
        """The predictive distribution of each row: a mixture over the draws of all networks, in the units of y."""
        blocks = [mixture for _, mixture in self._uncalibrated_blocks(X)]
        location, scale = (torch.cat([getattr(m, name) for m in blocks], 1) for name in ("location", "scale"))
        return self._in_units(Mixture(location, scale, blocks[0].freedom))

    def predictive_blocks(self, X: Any) -> Iterator[tuple[slice, Mixture]]:
        """Yields each block of rows with its `predictive`, so that memory stays bounded."""
        for rows, mixture in self._uncalibrated_blocks(X):
            yield rows, self._in_units(mixture)

    def _in_units(self, mixture: Mixture) -> Mixture:
        """The predictive distribution in the units of y, recalibrated, from that in the scale of learning."""
        mixture = mixture if self.recalibration is None else self.recalibration.mixture(mixture)
        if self.atoms_ is not None:
            guaranteed = self.recalibration is not None and self.recalibration.method == "conformal"
            return (MappedMixture if guaranteed else AtomMixture)(mixture, self.atoms_)  # a guarantee needs both ends
        return mixture if self.transform_.name == "none" else TransformedMixture(mixture, self.transform_)

    def _uncalibrated_blocks(self, X: Any) -> Iterator[tuple[slice, Mixture]]:
        x = self._inputs(X)
        for rows, inputs, outputs in self._output_blocks(x):
            mixture = self._mixture(x[rows], inputs, outputs)
            yield rows, mixture.output(0) if self.one_column_ else mixture

    def _mixture(self, x: np.ndarray, inputs: Tensor, outputs: Tensor) -> Mixture:
        population, n_outputs = self.population_, self.population_.y_mean.shape[1]
        columns, (y_mean, y_scale) = inputs[:, : self._n_columns], self._target_moments
        if self.process_ is not None:  # in one standard, with its draws for the networks that learn what it leaves
            offset = offset_draws(*self.process_.predict(columns), len(outputs))[:, None, :, None]
            has_offset = torch.tensor([[[member.offset]] for member in population.members])
            values = outputs.double() * population.y_scale[:, None] + population.y_mean[:, None]
            outputs = torch.where(has_offset, values / y_scale + offset, (values - y_mean) / y_scale)
        if self.forest_ is not None:  # networks and trees as draws of one network, in one standard
            functions = outputs.expand(self._n_drawn, -1, -1, -1).double().flatten(0, 1)
            outputs = among(functions, self.forest_.draws(x), float(self.forest_.weight))[:, None]
        if self.boosted_ is not None:
            outputs = torch.lerp(outputs, self.boosted_.total(x).to(outputs), float(self.boosted_.weight))
        if self.bounds_ is not None:
            values, rest = outputs.split([n_outputs, outputs.shape[-1] - n_outputs], -1)
            shift = self.bounds_.shift(draw_mean(values.double().flatten(0, 1)))
            outputs = torch.cat([values.double() + shift, rest.double()], -1)
            if n_rows := int((shift != 0).any(-1).sum()):
                rows = "1 row is" if n_rows == 1 else f"{n_rows} rows are"
                message = f"{rows} predicted beyond the targets by more than their range; such predictions are bounded."
                warnings.warn(f"{message} Look for faulty values in these rows.", UserWarning, stacklevel=2)
        if self.noise_ is not None:
            mixture = self.noise_.mixture(outputs.double().flatten(0, 1), columns, y_mean, y_scale)
            spread = self.extrapolation_
            return mixture if spread is None else spread.spread(mixture, columns, y_scale)
        mean, variance = in_units(population, outputs)  # far from the data, a learned variance may be rounded to 0
        return Mixture(mean.flatten(0, 1), variance.flatten(0, 1).clamp_min(torch.finfo(variance.dtype).tiny).sqrt())

    @property
    def _target_moments(self) -> tuple[Tensor, Tensor]:
        """The mean and the scale of y, one per output; networks that learn what a process leaves have others."""
        if self.process_ is not None:
            return self.process_.y_mean, self.process_.y_scale
        return self.population_.y_mean[0], self.population_.y_scale[0]

    @on_cpu
    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        r"""The predictive mean; with `return_std` also the standard deviation, or with `return_cov` the covariance.

        Mean and variance are those of [GG16, prop:mean, prop:var]: the variance of the draws plus that of the noise.
        The covariance between rows is that of the draws, which are functions.
        """
        if return_std and return_cov:
            raise RuntimeError("At most one of return_std or return_cov can be requested.")
        if not return_cov:
            blocks = [(m.mean, m.std) if return_std else (m.mean,) for _, m in self.predictive_blocks(X)]
            moments = tuple(_finite(torch.cat(values)) for values in zip(*blocks, strict=True))
            return moments if return_std else moments[0]
        mixture = self.predictive(X)
        if self.method == "sampling":
            centred = mixture.component_means - mixture.mean
            covariance = torch.einsum("tn...,tm...->nm...", centred, centred) / mixture.n_draws
        else:  # the points of a row belong to no function: the rows' correlation is that of the linear networks
            std = mixture.epistemic.sqrt()
            covariance = self._linear_correlation(X).view(len(std), *std.shape) * std * std.unsqueeze(1)
        rows = torch.arange(len(mixture.mean))
        covariance[rows, rows] += mixture.aleatoric
        return mixture.mean.numpy(), covariance.numpy()

    def _linear_correlation(self, X: Any) -> Tensor:
        """The correlation between rows of each output, `[row, row, output]`, over the masks and the networks."""
        standard, nets = self._standard(self._inputs(X)), self.networks_
        means = torch.stack([in_blocks(net.eval(), standard).detach().double() for net in nets])
        total = torch.einsum("inj,imj->nmj", means - means.mean(0), means - means.mean(0))
        for net, drop_prob in zip(nets, self.population_.drop_prob, strict=True):
            if bool((drop_prob > 0).any()):
                total += linear.covariance(net, standard, between_rows=True).diagonal(dim1=1, dim2=3)
        std = total.diagonal().T.clamp(min=1e-300).sqrt()
        return (total / (std * std.unsqueeze(1)))[..., : self.population_.y_mean.shape[1]]

    @on_cpu
    def predict_interval(self, X: Any, coverage: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
        """The lower and upper ends of the central interval that holds the outcome with probability `coverage`.

        They are quantiles of the predictive distribution itself, the mixture over the draws.
        """
        check_probability("coverage", coverage)
        ends = [mixture.interval(coverage) for _, mixture in self.predictive_blocks(X)]
        lower, upper = (_finite(torch.cat(end)) for end in zip(*ends, strict=True))
        return lower, upper

    def log_likelihood(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        r"""The mean over rows of the predictive log-density [GG16, eq:predictive_dist].

        $\log \tfrac1T \sum_t p(\mathbf y \mid \widehat{\mathbf y}_t)$; the density of all outputs together where
        there are several. A row of weight 2 counts twice.
        """
        n_rows = len(self._inputs(X))
        shape = (n_rows,) if self.one_column_ else (n_rows, self.population_.y_mean.shape[-1])
        if (targets := finite_tensor("y", as_array(y, "y")).double()).shape != shape:
            raise ValueError(f"`y` must have the shape {shape}, that of the prediction; got {tuple(targets.shape)}.")
        densities = [mixture.log_density(targets[rows]) for rows, mixture in self.predictive_blocks(X)]
        return float(weighted_mean(torch.cat(densities), sample_weight))

    def _class_state(self) -> dict[str, Any]:
        return {"one_column": bool(self.one_column_), "transform": asdict(self.transform_)}

    def _set_class_state(self, settings: dict[str, Any]) -> None:
        self.one_column_ = settings["one_column"]
        self.transform_ = TargetTransform(**settings["transform"])
        self._check_trees(n_outputs=1)
        if not all(0 < float(trees.weight) < 1 for trees in self._trees):
            raise ValueError("the share of trees among the draws must lie between 0 and 1")


class ClassEnsemble(Ensemble):
    """An ensemble that predicts classes."""

    saved_as = "DropoutClassifier"
    classes_: np.ndarray
    class_shares_: np.ndarray
    temperature_: float

    def _head(self) -> str:
        return "categorical"

    @on_cpu
    def draws(self, X: Any) -> Tensor:
        """The class probabilities of every draw, `[draw, row, class]`: one function each."""
        return torch.cat([probabilities for _, probabilities in self.draw_blocks(X)], 1)

    def draw_blocks(self, X: Any) -> Iterator[tuple[slice, Tensor]]:
        """Yields each block of rows with its `draws`; see `RegressionEnsemble.predictive_blocks`."""
        x = self._inputs(X)
        for rows, _, outputs in self._output_blocks(x):
            shift = sum(trees.weight * trees.evidence(x[rows], self.class_shares_) for trees in self._trees)
            draws = tempered(outputs.double(), self.temperature_, self.class_shares_, shift).exp().flatten(0, 1)
            if self.recalibration is not None:
                draws = self.recalibration.probabilities(draws, self.class_shares_)
            yield rows, draws

    @on_cpu
    def predict_proba(self, X: Any) -> np.ndarray:
        """The class probabilities, a mean over draws, `[row, class]`."""
        return _finite(torch.cat([draw_mean(probabilities) for _, probabilities in self.draw_blocks(X)]))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """The logarithms of `predict_proba`."""
        return np.log(self.predict_proba(X))

    @on_cpu
    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        probabilities = self.predict_proba(X)
        return np.asarray(self.classes_[probabilities.argmax(1)])

    @on_cpu
    def predict_uncertainty(self, X: Any) -> tuple[np.ndarray, np.ndarray]:
        """The entropy of each row's class probabilities and its epistemic part, the mutual information, in nats."""
        drawn = (draws for _, draws in self.draw_blocks(X))
        blocks = [(information.entropy(draw_mean(draws)), information.mutual_information(draws)) for draws in drawn]
        entropy, mutual = (torch.cat(values).numpy() for values in zip(*blocks, strict=True))
        return entropy, mutual

    def log_likelihood(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """The mean log-probability of the true classes; a row of weight 2 counts twice."""
        probabilities = self.predict_proba(X)
        codes = self._codes(y, len(probabilities))
        densities = torch.from_numpy(np.log(probabilities[np.arange(len(codes)), codes]))
        return float(weighted_mean(densities, sample_weight))

    def _codes(self, y: Any, n_rows: int) -> np.ndarray:
        """The class indices of outcomes."""
        if (labels := np.asarray(as_array(y, "y"))).shape != (n_rows,):
            raise ValueError(f"`y` must hold one class for each of the {n_rows} rows; got the shape {labels.shape}.")
        if len(unknown := np.setdiff1d(labels, self.classes_)):
            raise ValueError(f"`y` must hold only the classes {self.classes_.tolist()}; got {unknown.tolist()[0]!r}.")
        return np.searchsorted(self.classes_, labels)

    def _class_state(self) -> dict[str, Any]:
        classes = self.classes_.astype(np.int64) if self.classes_.dtype.kind in "mM" else self.classes_  # for JSON
        learned = {"class_shares": self.class_shares_.tolist(), "temperature": self.temperature_}
        return {"classes": classes.tolist(), "classes_dtype": self.classes_.dtype.str, **learned}

    def _set_class_state(self, settings: dict[str, Any]) -> None:
        dtype, classes = np.dtype(settings["classes_dtype"]), settings["classes"]
        longest = max((len(label) for label in classes if isinstance(label, str)), default=0)
        # A string dtype wider than its labels would allocate memory that no label needs.
        if dtype.kind not in "biufUmMO" or (dtype.kind == "U" and dtype.itemsize > 4 * max(1, longest)):
            raise ValueError(f"classes of dtype {str(dtype)!r:.40} with labels of up to {longest} characters")
        self.classes_ = np.asarray(classes, dtype=np.int64 if dtype.kind in "mM" else dtype).astype(dtype)
        if self.classes_.ndim != 1 or len(self.classes_) != self.population_.weights[-1].shape[2]:
            raise ValueError(f"{len(self.classes_)} classes for {self.population_.weights[-1].shape[2]} outputs")
        self.temperature_, n_classes = float(settings["temperature"]), len(self.classes_)
        self.class_shares_ = np.asarray(settings["class_shares"], dtype=np.float64)
        if self.class_shares_.shape != (n_classes,) or not (self.class_shares_ > 0).all():
            raise ValueError(f"'class_shares' must hold a positive share for each of the {n_classes} classes")
        self._check_trees(n_classes)
