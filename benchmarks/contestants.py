"""The contestants of the league: a few lines each that fit a model and score its predictive distribution.

Every contestant has the settings its library gives it, and the loss that is scored where a library lets one choose: ten
quantiles for numbers, the log-likelihood for classes. Libraries are imported by the contestant that needs them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.stats import norm
from sklearn.ensemble import (
    ExtraTreesClassifier,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dropbayes.estimators import DropoutClassifier, DropoutRegressor

Array = np.ndarray
Scores = dict[str, float]

LEVELS = np.arange(0.05, 1, 0.1)  # the middle of every tenth; the outer two are the 90 % interval
LEVEL_LIST = ",".join(f"{level:.2f}" for level in LEVELS)
PROCESS_ROWS = 800
BEST_ROWS = 1000  # of tables for which effort "best" is affordable


def quantile_scores(
    y: Array,
    quantiles: Array,
    mean: Array,
    log_density: Array | None = None,
    interval: tuple[Array, Array] | None = None,
) -> Scores:
    """The scores of predicted quantiles `[level, row]`, means and log-densities, if there are any.

    The 90 % interval lies between the outer quantiles unless the contestant gives one.

    Example:
        >>> y = np.zeros(1)
        >>> quantile_scores(y, np.zeros((10, 1)), y)["CRPS"]
        0.0
    """
    error = y - quantiles
    pinball = np.maximum(LEVELS[:, None] * error, (LEVELS[:, None] - 1) * error)
    density = {} if log_density is None else {"log score": float(log_density.mean())}
    low, high = (quantiles[0], quantiles[-1]) if interval is None else interval
    return density | {
        "CRPS": float(2 * pinball.mean()),
        "coverage": float(((low <= y) & (y <= high)).mean()),
        "width": float((high - low).mean()),
        "RMSE": float(np.sqrt(((y - mean) ** 2).mean())),
    }


def gaussian_scores(y: Array, mean: Array, deviation: Array) -> Scores:
    """The scores of Gaussian predictions, by the same ten quantiles: one ruler for all.

    Example:
        >>> round(gaussian_scores(np.zeros(1), np.zeros(1), np.ones(1))["CRPS"], 3)  # in closed form: 0.234
        0.239
    """
    predicted = norm(mean, deviation)
    return quantile_scores(y, predicted.ppf(LEVELS[:, None]), mean, predicted.logpdf(y))


def class_scores(y: Array, probabilities: Array) -> Scores:
    """The scores of class probabilities `[row, class]`.

    Example:
        >>> class_scores(np.array([0]), np.array([[0.5, 0.5]]))["Brier"]
        0.5
    """
    truth = np.eye(probabilities.shape[1])[y]
    return {
        "NLL": float(-np.log(np.maximum(probabilities[truth == 1], 1e-12)).mean()),
        "Brier": float(((probabilities - truth) ** 2).sum(1).mean()),
        "accuracy": float((probabilities.argmax(1) == y).mean()),
    }


def filled(x: Array, new: Array) -> tuple[Array, Array]:
    """The rows without missing values, for libraries that refuse them."""
    imputer = SimpleImputer(keep_empty_features=True).fit(x)
    return imputer.transform(x), imputer.transform(new)


# --- numbers ------------------------------------------------------------------------------------------------------------


def dropout_numbers(x: Array, y: Array, new: Array, truth: Array, *, effort: Any = "standard") -> Scores:
    mixture = DropoutRegressor(effort=effort, device="cpu", random_state=0).fit(x, y).predictive(new)
    quantiles = np.stack([mixture.quantile(float(level)).numpy() for level in LEVELS])
    low, high = mixture.interval(0.9)
    density = mixture.log_density(truth).numpy()
    return quantile_scores(truth, quantiles, mixture.mean.numpy(), density, (low.numpy(), high.numpy()))


def boosted_numbers(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    models = [HistGradientBoostingRegressor(loss="quantile", quantile=level, random_state=0) for level in LEVELS]
    quantiles = np.sort([model.fit(x, y).predict(new) for model in models], axis=0)
    mean = HistGradientBoostingRegressor(random_state=0).fit(x, y).predict(new)
    return quantile_scores(truth, quantiles, mean)


def forest_numbers(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    """A quantile forest (Meinshausen 2006): quantiles of the training targets, weighted by the leaves they share."""
    forest = RandomForestRegressor(200, min_samples_leaf=5, max_features=1 / 3, bootstrap=False, random_state=0)
    known, met = forest.fit(x, y).apply(x), forest.apply(new)
    weight = np.zeros((len(new), len(x)))
    for leaf, met_leaf in zip(known.T, met.T, strict=True):
        same = met_leaf[:, None] == leaf
        weight += same / same.sum(1, keepdims=True)
    order = y.argsort()
    share = weight[:, order].cumsum(1) / len(known.T)
    index = np.stack([(share < level).sum(1) for level in LEVELS]).clip(max=len(y) - 1)
    return quantile_scores(truth, y[order][index], weight @ y / len(known.T))


def process_numbers(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    rows = np.random.default_rng(0).permutation(len(x))[:PROCESS_ROWS]
    kernel = ConstantKernel() * RBF(np.ones(x.shape[1])) + WhiteKernel()
    process = make_pipeline(
        SimpleImputer(keep_empty_features=True),
        StandardScaler(),
        GaussianProcessRegressor(kernel, normalize_y=True, random_state=0),
    )
    return gaussian_scores(truth, *process.fit(x[rows], y[rows]).predict(new, return_std=True))


def catboost_numbers(x: Array, y: Array, new: Array, truth: Array, *, loss: str) -> Scores:
    from catboost import CatBoostRegressor

    model = CatBoostRegressor(
        loss_function=loss, random_seed=0, thread_count=1, verbose=False, allow_writing_files=False
    )
    predicted = model.fit(x, y).predict(new).T
    if loss == "RMSEWithUncertainty":
        mean, variance = predicted
        return gaussian_scores(truth, mean, np.sqrt(variance))
    quantiles = np.sort(predicted, axis=0)
    return quantile_scores(truth, quantiles, quantiles.mean(0))


def ngboost_numbers(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    from ngboost import NGBRegressor

    x, new = filled(x, new)
    normal = NGBRegressor(random_state=0, verbose=False).fit(x, y).pred_dist(new)
    return gaussian_scores(truth, normal.loc, normal.scale)


def xgboostlss_numbers(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    import xgboost
    from xgboostlss.distributions.Gaussian import Gaussian
    from xgboostlss.model import XGBoostLSS

    model = XGBoostLSS(Gaussian())
    rows = xgboost.DMatrix(x, label=y, nthread=1)
    model.train({"nthread": 1, "seed": 0}, rows, verbose_eval=False)
    normal = model.predict(xgboost.DMatrix(new, nthread=1), pred_type="parameters")
    return gaussian_scores(truth, normal["loc"].to_numpy(), normal["scale"].to_numpy())


def pytabkit_numbers(x: Array, y: Array, new: Array, truth: Array, *, model: str) -> Scores:
    import pytabkit

    x, new = filled(x, new)
    loss = f"multi_pinball({LEVEL_LIST})"
    network = getattr(pytabkit, model)(
        device="cpu", n_threads=1, random_state=0, train_metric_name=loss, val_metric_name=loss
    )
    quantiles = np.sort(network.fit(x, y).predict(new).T, axis=0)
    return quantile_scores(truth, quantiles, quantiles.mean(0))


# --- classes ------------------------------------------------------------------------------------------------------------


def dropout_classes(x: Array, y: Array, new: Array, truth: Array, *, effort: Any = "standard") -> Scores:
    model = DropoutClassifier(effort=effort, device="cpu", random_state=0)
    return class_scores(truth, model.fit(x, y).predict_proba(new))


def boosted_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    return class_scores(truth, HistGradientBoostingClassifier(random_state=0).fit(x, y).predict_proba(new))


def trees_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    trees = ExtraTreesClassifier(300, min_samples_leaf=3, random_state=0)
    return class_scores(truth, make_pipeline(SimpleImputer(), trees).fit(x, y).predict_proba(new))


def logistic_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    logistic = make_pipeline(SimpleImputer(), StandardScaler(), LogisticRegression(max_iter=1000))
    return class_scores(truth, logistic.fit(x, y).predict_proba(new))


def catboost_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    from catboost import CatBoostClassifier

    model = CatBoostClassifier(random_seed=0, thread_count=1, verbose=False, allow_writing_files=False)
    return class_scores(truth, model.fit(x, y).predict_proba(new))


def ngboost_classes(x: Array, y: Array, new: Array, truth: Array) -> Scores:
    from ngboost import NGBClassifier
    from ngboost.distns import k_categorical

    x, new = filled(x, new)
    model = NGBClassifier(Dist=k_categorical(len(np.unique(y))), random_state=0, verbose=False)
    return class_scores(truth, model.fit(x, y.astype(np.int64)).predict_proba(new))


def pytabkit_classes(x: Array, y: Array, new: Array, truth: Array, *, model: str, **settings: Any) -> Scores:
    import pytabkit

    x, new = filled(x, new)
    network = getattr(pytabkit, model)(
        device="cpu", n_threads=1, random_state=0, val_metric_name="cross_entropy", **settings
    )
    return class_scores(truth, network.fit(x, y.astype(np.int64)).predict_proba(new))


class Contestant(NamedTuple):
    """How a contestant plays, the library it needs, and the most rows of a table it plays on."""

    play: Callable[[Array, Array, Array, Array], Scores]
    library: str = "sklearn"
    max_rows: int = 10**9

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.library) is not None


DEFAULT = "dropbayes"
EFFORTS = ("dropbayes quick", "dropbayes best")  # ranked in the place of the default
NUMBERS: dict[str, Contestant] = {
    DEFAULT: Contestant(dropout_numbers),
    "dropbayes quick": Contestant(partial(dropout_numbers, effort="quick")),
    "dropbayes best": Contestant(partial(dropout_numbers, effort="best"), max_rows=BEST_ROWS),
    "boosted quantiles": Contestant(boosted_numbers),
    "quantile forest": Contestant(forest_numbers),
    "Gaussian process": Contestant(process_numbers),
    "CatBoost quantiles": Contestant(
        partial(catboost_numbers, loss=f"MultiQuantile:alpha={LEVEL_LIST}"), library="catboost"
    ),
    "CatBoost Gaussian": Contestant(partial(catboost_numbers, loss="RMSEWithUncertainty"), library="catboost"),
    "NGBoost": Contestant(ngboost_numbers, library="ngboost"),
    "XGBoostLSS": Contestant(xgboostlss_numbers, library="xgboostlss"),
    "TabM": Contestant(partial(pytabkit_numbers, model="TabM_D_Regressor"), library="pytabkit"),
    "RealMLP": Contestant(partial(pytabkit_numbers, model="RealMLP_TD_Regressor"), library="pytabkit"),
}
CLASSES: dict[str, Contestant] = {
    DEFAULT: Contestant(dropout_classes),
    "dropbayes quick": Contestant(partial(dropout_classes, effort="quick")),
    "dropbayes best": Contestant(partial(dropout_classes, effort="best"), max_rows=BEST_ROWS),
    "boosting": Contestant(boosted_classes),
    "extra trees": Contestant(trees_classes),
    "logistic regression": Contestant(logistic_classes),
    "CatBoost": Contestant(catboost_classes, library="catboost"),
    "NGBoost": Contestant(ngboost_classes, library="ngboost"),
    "TabM": Contestant(partial(pytabkit_classes, model="TabM_D_Classifier"), library="pytabkit"),
    # Without label smoothing, as pytabkit advises where probabilities are scored.
    "RealMLP": Contestant(partial(pytabkit_classes, model="RealMLP_TD_Classifier", use_ls=False), library="pytabkit"),
}
