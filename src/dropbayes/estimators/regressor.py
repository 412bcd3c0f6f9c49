r"""The scikit-learn regressor."""

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_random_state
from torch import Tensor

from dropbayes.estimators.atoms import fit_atoms
from dropbayes.estimators.ensembles import RegressionEnsemble
from dropbayes.estimators.extrapolation import Bounds, Gap, find_gap, fit_extrapolation
from dropbayes.estimators.frames import as_array
from dropbayes.estimators.learning import DropoutEstimator
from dropbayes.estimators.noise import fit_noise
from dropbayes.estimators.parameters import FOLDS
from dropbayes.estimators.process import MAX_ROWS, Offset, fit_process, offset_draws
from dropbayes.estimators.transforms import candidate_transforms
from dropbayes.estimators.trees import GREEDY_SHARE, among, grow_boosted, grow_forest, prefers_boosted, tree_share
from dropbayes.population import EnsembleChoice, Population, Task, draws
from dropbayes.population.standardisation import moments
from dropbayes.runtime.devices import cpu_threads, on_cpu
from dropbayes.runtime.validation import check_count, row_weights

_GAP_ROWS, _GAP_DRAWS = 1000, 32  # of a gap, and draws for each, to which the spread far from the rows is fitted
_GREEDY_ROWS = 50  # fewer held-out rows do not show which forest is better
_MAX_BOOSTED = 64  # columns: of more, boosted trees would take as long as all else


@dataclass(eq=False, repr=False)
class DropoutRegressor(RegressorMixin, RegressionEnsemble, DropoutEstimator):
    r"""Regression by an ensemble of dropout networks, with uncertainty estimated from their draws [GG16].

    Inputs and targets are standardised inside. Candidates (drop probabilities and lengths of training) are trained on
    folds of the rows, all as one population. The few that add most to the held-out predictive log-likelihood and take
    most off the mean error are selected as an ensemble and trained on all rows. The noise is fitted to held-out draws:
    Student's t whose scale depends on the inputs, the predictive mean and the spread of the draws.

    Args:
        hidden: The widths of the hidden layers; "auto" leaves them to the effort.
        effort: "quick" for a first look, "standard", or "best" for a search of minutes: how many candidates are tried,
            how long they are trained, how many networks are kept.
        drop_prob: The probability of dropping a unit before each weight layer: a number, a tuple with one per layer,
            a list of these to try, or "search".
        weight_decay: λ, relative to half the mean squared error of standardised targets: a number, a list to try, or
            "search".
        noise: "student" (see above), "constant" for Gaussian noise of one precision τ, or "heteroscedastic" for
            Gaussian noise whose variance is an output of the networks.
        target_transform: The scale in which y is learned: "none" for that of y, "log" for positive targets over orders
            of magnitude, "arcsinh" for heavy tails of either sign, or "auto" to fit them all and keep the one of the
            best held-out log-likelihood. Predictions are in the units of y. In a transformed scale the noise of
            `noise="student"` is Gaussian.
        learn_drop_prob: Whether each layer's drop probability is learned (concrete dropout).
        activation: "relu" or "tanh".
        missing: "learn" to fill missing inputs with the column's mean and add an indicator column, so that the
            networks can learn from their absence; "auto" to do so where the training rows have missing inputs; "error"
            to refuse them.
        n_networks: The number of networks whose draws are pooled; "auto" leaves it to the effort.
        n_steps: The number of Adam steps on small tables; "auto" leaves it to the effort.
        min_epochs: The minimum number of epochs, which on large tables takes more steps than `n_steps`.
        learning_rate: The initial learning rate of Adam; it decays to zero along a cosine.
        batch_size: The number of rows per step.
        n_folds: The number of folds of the search; 1 is a single split. "auto" takes 5 below 2000 rows.
        n_draws: The number of draws (the paper's T) per prediction and network.
        warm_start: Whether another call of `fit` continues from the current weights, without a search.
        n_jobs: The number of workers of the search, as in joblib; the model does not depend on it.
        device: To train on: "auto" (CUDA where there is one), "cpu", "cuda" ... Predictions are made on the CPU.
        random_state: The seed of all randomness, an integer for reproducible results.
        verbose: Whether to show progress in a terminal.

    Attributes:
        population_: The trained networks.
        precision_: τ in units of 1/y² (of y as it is learned, if transformed): that of Gaussian noise, fitted to
            held-out draws of the first network's kind.
        drop_prob_: The drop probability before each weight layer of the first network.
        extrapolation_: How the draws part far from the training rows (`dropbayes.estimators.extrapolation`); None where
            a gap in the rows shows no need.
        transform_: The transform of the targets (`dropbayes.estimators.transforms`).
        process_: The Gaussian process whose errors some networks learn (`dropbayes.estimators.process`); None where
            held-out rows prefer networks alone.
        forest_: Trees whose predictions are a share of the draws (`dropbayes.estimators.trees`); None where held-out
            rows prefer networks alone.
        boosted_: Boosted trees that are half of every draw (`dropbayes.estimators.trees`); None where held-out rows do
            not prefer them.
        atoms_: Values that the targets repeat, which predictions then take (`dropbayes.estimators.atoms`), if any.
        noise_: The fitted noise model of `noise="student"`, in standardised units; None for the other kinds.
        search_scores_: The held-out log-likelihood of each candidate, with Gaussian noise, in the units of y.
        held_out_score_: The held-out log-likelihood of the ensemble with its noise, in the units of y.
        baseline_score_: That of the target's own mean and deviation.
        bounds_: The range beyond which mean predictions are pulled back (`dropbayes.estimators.extrapolation`).
        search_edges_: The best drop probability and weight decay, if they are the smallest or largest tried.

    Example:
        >>> x = np.linspace(-2, 2, 40)[:, None]
        >>> model = DropoutRegressor(drop_prob=0.05, weight_decay=1e-4, n_steps=50, random_state=0)
        >>> mean, std = model.fit(x, np.sin(x[:, 0])).predict(x, return_std=True)
        >>> mean.shape, std.shape
        ((40,), (40,))
    """

    _: KW_ONLY
    noise: Literal["student", "constant", "heteroscedastic"] = "student"
    target_transform: Literal["none", "log", "arcsinh", "auto"] = "none"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @on_cpu
    def fit(self, X: Any, y: Any, sample_weight: Any = None, groups: Any = None, times: Any = None) -> Self:
        """Searches, trains and fits the noise.

        Args:
            X: Inputs `[row, feature]`: numpy, pandas, polars, torch or lists.
            y: Targets `[row]` or `[row, output]`.
            sample_weight: The weight of each row, zero or more; a row of weight 2 counts twice in the objective, the
                noise and the choice of candidates.
            groups: The group of each row: the search holds whole groups out. By default, copies of a row form a group.
            times: The time of each row, of any sortable type: the search then trains on the past and holds out what
                follows (forward chaining), as in forecasting.
        """
        with self._all_or_nothing():
            warm = self._is_warm()
            x, y, weight = self._training_data(X, y, sample_weight, reset=not warm)
            fits = []
            for transform in [self.transform_] if warm else candidate_transforms(self.target_transform, y):
                if not warm:
                    self.noise_ = self.extrapolation_ = self.bounds_ = self.atoms_ = None
                    self.__dict__.pop("population_", None)  # of another scale
                self.transform_ = transform
                self._learn(x, self._transform(y), weight, groups, times)
                self._set_bounds(y[weight > 0])
                fits.append(dict(self.__dict__))
            if len(fits) > 1:
                # As trees must, a transform must gain a hundredth.
                gains = [fit["held_out_score_"] - 0.01 * (fit["transform_"].name != "none") for fit in fits]
                self.__dict__.update(fits[int(np.argmax(gains))])
        if not warm:
            self._warn_below_baseline("the target's own mean and deviation")
        return self

    def _transform(self, y: np.ndarray) -> np.ndarray:
        if not bool((z := self.transform_.forward(torch.tensor(y))).isfinite().all()):
            raise ValueError(f"`y` must be positive, as in the first fit; the smallest is {float(y.min()):.4g}.")
        return z.numpy()

    def _offset_and_gap(self, data: Task, *, in_groups: bool) -> tuple[Offset | None, Gap | None]:
        if self.noise != "student":
            return None, None
        # A process would see the rows of its own group, or of the future.
        suited = self._is_searched and self._effort.offset and not (in_groups or self.warm_start)
        columns, y, weight = torch.as_tensor(data.x), torch.tensor(data.y), torch.as_tensor(data.weight).double()
        mean, scale = moments(columns, weight)
        columns, offset = (columns - mean) / scale, None
        with cpu_threads(1):  # The bits of a product depend on the threads.
            if suited and y.numel() == len(columns) <= MAX_ROWS:
                settings = weight, self.seed_, self._effort.small_rows
                self.process_, offset = fit_process(columns, y.reshape(-1), *settings) or (None, None)
            return offset, find_gap(columns, self.seed_)

    def _task_targets(self, x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
        if self.process_ is None:
            return [y]
        mean, _ = self.process_.predict(self._standard_columns(x))
        return [y, y - (mean * self.process_.y_scale + self.process_.y_mean).numpy().reshape(y.shape)]

    def _fit_noise(self, choice: EnsembleChoice, offset: Offset | None, *, forward: bool) -> None:
        x, y, weight = choice.held_out_rows()
        in_units = self.transform_.inverse(y.double().reshape(len(x), -1))
        log_derivative = float((self.transform_.log_derivative(in_units).sum(1) * weight).sum() / weight.sum())
        self.search_scores_ = self.search_scores_ + log_derivative
        self.held_out_score_ = float(self.search_scores_.max())
        _, deviation = moments(in_units, weight)
        self.baseline_score_ = float(-(deviation * math.sqrt(2 * math.pi * math.e)).log().sum())
        if self.noise != "student":
            return
        effort, (y_mean, y_scale) = self._effort, self._target_moments
        shift = None if offset is None else offset_draws(offset.mean, offset.deviation, effort.noise_draws)[..., None]
        draws = (choice.held_out_draws(effort.noise_draws, shift).cpu() - y_mean) / y_scale
        x = self._standard_columns(x.double())
        outcome, y = y.double(), self._standard_targets(y)
        if y.shape[1] == 1 and not forward and self._n_trees:
            draws = self._with_trees(choice, draws, y, weight)
        rows = torch.randperm(len(x), generator=torch.Generator().manual_seed(self.seed_))[: effort.noise_rows]
        many = len(choice.held_out) == 1 and len(rows) > 1000  # one part of a large table
        self.noise_, score = fit_noise(
            draws[:, rows].permute(2, 0, 1).float(),
            x[rows].float(),
            y[rows].T.float(),
            weight=weight[rows],
            gaussian=self.transform_.name != "none",
            n_steps=max(effort.noise_steps, 100) if many else effort.noise_steps,
            seed=self.seed_,
        )
        self.held_out_score_ = float((score - y_scale.log()).sum()) + log_derivative
        if self.one_column_ and self.transform_.name == "none":
            mixture = self.noise_.mixture(draws[:, rows], x[rows], y_mean, y_scale).output(0)
            self.atoms_ = fit_atoms(mixture, outcome[rows], weight[rows])

    def _with_trees(self, choice: EnsembleChoice, draws: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """The held-out draws, with trees among them and as half of each where that is better; sets both trees."""
        x, targets, weights, part = self._rows_and_parts(choice)
        rows, n_folds = (x, self._standard_targets(targets)[:, 0].numpy(), weights, part), len(choice.held_out)
        forest, predicted = grow_forest(rows, range(n_folds), self._n_trees, self.seed_)
        trees = predicted[:, : len(y)]
        share, greedy, first = tree_share(draws, trees, y, weight), False, slice(len(choice.held_out[0]))
        if first.stop >= _GREEDY_ROWS:
            _, tested = grow_forest(rows, [0], self._n_trees, self.seed_, greedy=True)
            means = torch.lerp(draws.mean(0), trees.mean(0), share), tested.mean(0)
            error, greedy_error = (float(weight[first] @ (y[first] - mean[first]).abs()) for mean in means)
            greedy = greedy_error < 0.8 * error
        if greedy:
            forest, predicted = grow_forest(rows, range(n_folds), self._n_trees, self.seed_, greedy=True)
            trees, share = predicted[:, : len(y)], GREEDY_SHARE
        if share == 0:
            return draws
        if n_folds == 1:  # the share is chosen by the trees of one part; those of no part know all rows
            forest, _ = grow_forest(rows, [FOLDS], 2 * self._n_trees, self.seed_, greedy=greedy)
        self.forest_ = replace(forest, weight=torch.tensor(share).double())
        n_members = len(choice.members)
        n_kept = n_members * max(1, round(len(draws) / n_members * (1 - share)))  # the time does not grow
        draws = among(draws[:n_kept], trees, share)
        if greedy or x.shape[1] > _MAX_BOOSTED:
            return draws
        boosted, predicted = grow_boosted(rows, range(n_folds), self.seed_)
        if not prefers_boosted(draws, predicted[: len(y)], y, weight):
            return draws
        if n_folds == 1:  # chosen by the trees without one part: a mean over all parts knows all rows
            boosted, _ = grow_boosted(rows, range(FOLDS), self.seed_)
        self.boosted_ = boosted
        return torch.lerp(draws, predicted[: len(y)], float(boosted.weight))

    def _standard_targets(self, y: np.ndarray | Tensor) -> Tensor:
        y_mean, y_scale = self._target_moments
        return (torch.as_tensor(y).double().reshape(len(y), -1) - y_mean) / y_scale

    def _set_bounds(self, y: np.ndarray) -> None:
        """Sets the bounds of the predictions, or widens them by the targets of more rows."""
        known = () if self.bounds_ is None else (self.bounds_.low[None], self.bounds_.high[None])
        targets = torch.cat([self._standard_targets(self._transform(y)), *known])
        self.bounds_ = Bounds(targets.amin(0), targets.amax(0))

    def _standard_columns(self, x: Any) -> Tensor:
        """The standardised inputs, without those of the bins."""
        standard, columns = self.population_, slice(self._n_columns)
        return (torch.as_tensor(x[:, columns]) - standard.x_mean[0, columns]) / standard.x_scale[0, columns]

    def _fit_extrapolation(self, gap: Gap, without_gap: Population, data: Task) -> None:
        if self.noise_ is None or bool(without_gap.diverged.any()):
            return
        x, source = data.x, torch.Generator().manual_seed(self.seed_)
        inside = gap.rows.nonzero()[:, 0]
        rows = inside[torch.randperm(len(inside), generator=source)[:_GAP_ROWS]]
        y_mean, y_scale = self._target_moments
        sampled, _ = draws(without_gap, torch.as_tensor(x[:, : without_gap.x_mean.shape[1]])[rows], n_draws=_GAP_DRAWS)
        columns, functions = self._standard_columns(x), (sampled[:, 0] - y_mean) / y_scale
        outcome = self._standard_targets(data.y)
        if self.forest_ is not None:
            table = x[:, : self._n_columns], outcome[:, 0].numpy(), data.weight, gap.rows.numpy().astype(int)
            share = float(self.forest_.weight)
            _, trees = grow_forest(table, [1], self._n_trees, self.seed_, greedy=share == GREEDY_SHARE)
            functions = among(functions, trees[:, rows], share)
        unit = torch.zeros_like(y_mean), torch.ones_like(y_scale)
        mixture = self.noise_.mixture(functions, columns[rows], *unit)
        weight = torch.as_tensor(data.weight)[rows]
        self.extrapolation_ = fit_extrapolation(gap, columns, mixture, outcome[rows], rows, weight)

    def _set_precision(self, precision: Tensor) -> None:
        if self.noise_ is not None:  # the scale of the noise follows the Gaussian's
            self.noise_ = self.noise_.rescale((self.population_.precision[0] / precision[0]).sqrt())
        super()._set_precision(precision)

    def _training_data(self, X: Any, y: Any, sample_weight: Any, *, reset: bool) -> tuple[np.ndarray, ...]:
        x, y = self._arrays(X, y, reset=reset, multi_output=True, y_numeric=True)
        x = self._encode(x, reset=reset)
        if y.dtype.kind in "mM":
            remedy = "Pass the days: (y - y.min()) / np.timedelta64(1, 'D')."
            raise ValueError(f"`y` must hold numbers; got {y.dtype}. {remedy}")
        try:
            y = np.asarray(y, dtype=np.float64, order="C")
        except ValueError as error:
            raise ValueError(f"`y` must hold numbers; {error}. DropoutClassifier takes texts as classes.") from None
        if np.isnan(y).any():  # of an object that scikit-learn lets pass
            raise ValueError("`y` must hold a number for every row; some are missing. Leave out such rows.")
        if not reset and (y.ndim == 1) != self.one_column_:
            raise ValueError(f"`y` must be {'[row]' if self.one_column_ else '[row, output]'}, as in the first fit.")
        self.one_column_ = y.ndim == 1
        return x, y, row_weights(as_array(sample_weight), len(x)).numpy()

    @on_cpu
    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """One pass over more rows, from the current weights; the first call standardises and does not search.

        The rows of each call update a running estimate of τ before the networks are trained on them.
        """
        first = not hasattr(self, "population_")
        with self._all_or_nothing():
            x, y, weight = self._training_data(X, y, sample_weight, reset=first)
            self._check_parameters()
            if first:
                if self.target_transform == "auto":
                    raise ValueError("`target_transform` 'auto' is chosen by `fit`; name one for `partial_fit`.")
                (self.transform_,) = candidate_transforms(self.target_transform, y)
                self.noise_ = self.extrapolation_ = self.atoms_ = None  # Gaussian until a search has held rows out
            self._partial_fit(x, self._transform(y), weight)
            if self.bounds_ is not None:  # the first rows of a stream are too few for bounds
                self._set_bounds(y)
        return self

    @on_cpu
    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Samples of outcomes, `[row, sample]` or `[row, output, sample]`: function draws with noise added."""
        check_count("n_samples", n_samples, at_least=0)
        mixture = self.with_draws(method="sampling").predictive(X)  # each draw is one function of all rows
        source = check_random_state(random_state)
        chosen = source.randint(mixture.n_draws, size=n_samples)
        location, scale = mixture.location[chosen].numpy(), mixture.scale[chosen].numpy()
        freedom = np.broadcast_to(mixture.freedom, location.shape[2:])
        noise = source.standard_normal(location.shape)
        if np.isfinite(freedom).all():
            noise = source.standard_t(freedom, size=location.shape)
        return np.moveaxis(mixture.outcomes(torch.from_numpy(location + scale * noise)).numpy(), 0, -1)
