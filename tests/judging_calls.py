"""Every public function that judges predictions, with arguments that are right."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import dropbayes as db
from dropbayes import acquisition, calibration, conformal, decisions, information, population, scores
from dropbayes.predictive import scoring

MODULES = (scores, information, calibration, conformal, decisions, acquisition)

P = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3], [0.3, 0.3, 0.4], [0.2, 0.5, 0.3], [0.6, 0.3, 0.1]]).double()
LABELS = torch.tensor([0, 1, 2, 1, 2])
Y, MEAN = torch.linspace(-1, 1, 5).double(), torch.linspace(-0.8, 1.2, 5).double()
STD, WRONG = torch.linspace(0.5, 1.5, 5).double(), torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0])
DRAWS = torch.stack([MEAN, MEAN + 0.3, MEAN - 0.2])
PD = torch.stack([P, P.flip(0)])
UNIT = torch.linspace(0.1, 0.9, 5).double()
ENDS = {"lower": MEAN - 1, "upper": MEAN + 1}
CLASSES = {"probabilities": P, "labels": LABELS}
NET = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 1))


@dataclass(frozen=True)
class Call:
    """A public function with arguments that are right.

    Args:
        function: The function, or one of the same name that arranges its arguments.
        arguments: The arrays.
        settings: The numbers.
        free: Arguments that may have any shape.
        any_rows: Arguments that may have any number of rows: draws, new rows, rows of another set.
        scalar: Arguments of which one number stands for all rows.
        passed_on: Arguments that a network of the caller's judges.
        of: The public function, where `function` arranges its arguments.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    free: str = ""
    any_rows: str = ""
    scalar: str = ""
    passed_on: str = ""
    of: Callable[..., Any] | None = None

    @property
    def judged(self) -> dict[str, Any]:
        return {name: value for name, value in self.arguments.items() if name not in self.passed_on.split()}

    @property
    def public(self) -> Callable[..., Any]:
        return self.of or self.function

    def __call__(self, **changes: Any) -> Any:
        return self.function(**self.arguments | self.settings | changes)

    def accepts(self, name: str, change: str) -> bool:
        """Whether an argument of another shape is right."""
        return (
            name in self.free.split()
            or (change == "a row more" and name in self.any_rows.split())
            or (change == "a number" and name in self.scalar.split())
        )


def cascade_of(uncertainty: Any, threshold: float) -> Any:
    rows = torch.zeros(5, 2)
    return decisions.cascade(
        rows, lambda x: (torch.zeros(5), uncertainty), costly=lambda x: x[:, 0] + 1, threshold=threshold
    )


def band_of(claimed: Any, count: Any, level: float) -> Any:
    return calibration.reliability_band(calibration.ReliabilityCurve(claimed, claimed, count), level=level)


def posterior_of(n_outputs: int) -> Any:
    model = acquisition.botorch_model([lambda x: x[:, 0], lambda x: 2 * x[:, 0]], n_outputs=n_outputs)
    return model.posterior(torch.ones(1, 2, 1)).mean


def table_of(table: dict[str, scoring.Score], rows: Any) -> dict[str, torch.Tensor]:
    return {name: score.value(rows) for name, score in table.items()}


def regression_of(sample_weight: Any = None, **rows: Any) -> Any:
    return table_of(scoring.REGRESSION_SCORES, scoring.RegressionOutcomes(**rows, sample_weight=sample_weight))


def classes_of(sample_weight: Any = None, **rows: Any) -> Any:
    table = table_of(scoring.CLASS_SCORES, scoring.ClassOutcomes(**rows, sample_weight=sample_weight))
    return {name: value for name, value in table.items() if not name.startswith("set_")}  # there are no sets


def evaluation_of(x: Any, y: Any, n_draws: int, sample_weight: Any = None) -> Any:
    result = db.evaluate(
        NET, x, y, likelihood=db.Gaussian(1.0), n_draws=n_draws, sample_weight=sample_weight, masks="shared"
    )
    return {"log_likelihood": result.log_likelihood, **result.scores}


def precision_of(x: Any, y: Any, n_draws: int, sample_weight: Any = None) -> Any:
    rows = (x, y) if sample_weight is None else (x, y, sample_weight)
    return population.fit_precision(MEMBERS, rows, n_draws=n_draws, seed=0).precision


def members() -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    task = population.Task(x, x[:, :1] + 0.1 * torch.randn(40, 1, generator=generator))
    return population.train(
        [task], [population.Member(drop_prob=0.0, epochs=2)], hidden=(5,), device="cpu", progress=False
    )


MEMBERS = members()
TINY = {
    "hidden": (4,),
    "n_steps": 3,
    "n_networks": 1,
    "n_draws": 2,
    "drop_prob": 0.1,
    "weight_decay": 1e-4,
    "device": "cpu",
}
REGRESSOR = db.DropoutRegressor(**TINY, random_state=0).fit(P.numpy(), Y.numpy())
CLASSIFIER = db.DropoutClassifier(**TINY, random_state=0).fit(P.numpy(), LABELS.numpy())


CALLS: dict[str, Call] = {}


def call(function: Callable[..., Any], arguments: dict[str, Any], name: str = "", **rest: Any) -> None:
    one = Call(function, arguments, **rest)
    CALLS[name or one.public.__name__] = one


ROWS = {"mean": MEAN, "y": Y}
call(scores.rmse, ROWS)
call(scores.mae, ROWS)
call(scores.sharpness, {"std": STD}, free="std")
call(scores.mixture_log_likelihood, {"log_density_draws": DRAWS}, free="log_density_draws")
call(scores.gaussian_mixture_log_likelihood, {"draws": DRAWS, "y": Y}, settings={"precision": 1.0}, any_rows="draws")
call(scores.gaussian_log_likelihood, {**ROWS, "variance": STD})
call(scores.crps, {"draws": DRAWS, "y": Y}, any_rows="draws")
call(
    scores.crps,
    {"draws": DRAWS, "y": Y, "noise_variance": STD},
    "crps with noise",
    any_rows="draws",
    scalar="noise_variance",
)
call(scores.fair_crps, {"draws": DRAWS, "y": Y}, any_rows="draws")
call(scores.energy_score, {"draws": PD, "y": P}, any_rows="draws")
call(scores.variogram_score, {"draws": PD, "y": P}, any_rows="draws", settings={"order": 0.5})
call(scores.interval_score, {**ENDS, "y": Y}, settings={"level": 0.9})
call(scores.coverage, {**ENDS, "y": Y})
call(scores.quantile_score, {"quantile": MEAN, "y": Y}, settings={"level": 0.9})
call(scores.class_log_likelihood, CLASSES)
call(scores.brier_score, CLASSES)
call(scores.accuracy, CLASSES)
call(scores.confidence_and_correctness, CLASSES)
call(scores.expected_calibration_error, CLASSES, settings={"n_bins": 3})
call(scores.adaptive_calibration_error, CLASSES, settings={"n_bins": 3})
call(scores.brier_decomposition, CLASSES)
call(scores.crps_decomposition, {"draws": DRAWS, "y": Y}, any_rows="draws")
call(scores.auroc, {"uncertainty": STD, "event": WRONG})
call(scores.fpr_at_tpr, {"uncertainty": STD, "event": WRONG})
call(scores.average_precision, {"uncertainty": STD, "event": WRONG})
call(scores.risk_coverage, {"uncertainty": STD, "loss": UNIT})
call(
    regression_of,
    {**ROWS, "std": STD, "pit": UNIT, "log_likelihood": -STD, "crps": STD, **ENDS},
    "regression scores",
    free="crps",
)
call(classes_of, {**CLASSES, "mutual_information": UNIT}, "class scores")
call(evaluation_of, {"x": P.float(), "y": Y[:, None].float()}, settings={"n_draws": 3}, of=db.evaluate, passed_on="x")
call(precision_of, {"x": P, "y": Y[:, None]}, settings={"n_draws": 3}, of=population.fit_precision)

call(REGRESSOR.log_likelihood, {"X": P, "y": Y}, "log-likelihood of numbers", passed_on="X")
call(CLASSIFIER.log_likelihood, {"X": P, "y": LABELS}, "log-likelihood of classes", passed_on="X")

for function in (information.predictive_entropy, information.expected_entropy, information.mutual_information,
                 information.variation_ratio):  # fmt: skip
    call(function, {"probability_draws": PD}, free="probability_draws")
call(information.entropy, {"probabilities": P}, free="probabilities")
call(
    information.joint_mutual_information,
    {"probability_draws": PD},
    settings={"max_outcomes": 9, "seed": 0},
    any_rows="probability_draws",
)

TRAINED = {"uncertainty": STD, "training_uncertainty": UNIT}
call(calibration.empirical_percentile, TRAINED, free="uncertainty training_uncertainty")
call(calibration.relative_uncertainty, TRAINED, free="uncertainty training_uncertainty")
call(calibration.uncertainty_reference, {"training_uncertainty": UNIT}, free="training_uncertainty")
call(calibration.class_reliability, CLASSES, settings={"n_bins": 3})
call(calibration.gaussian_pit, {**ROWS, "std": STD})
call(calibration.quantile_reliability, {"pit": UNIT}, settings={"n_levels": 3}, free="pit")
call(calibration.interval_reliability, {"pit": UNIT}, settings={"n_levels": 3}, free="pit")
call(calibration.uniformity_test, {"pit": UNIT}, free="pit")
call(calibration.std_scale, {**ROWS, "std": STD}, scalar="std")
call(calibration.isotonic_recalibration, {"pit": UNIT}, free="pit")
call(calibration.isotonic_recalibration(UNIT).observed, {"claimed": UNIT}, "observed", free="claimed")
call(calibration.isotonic_recalibration(UNIT).claimed, {"observed": UNIT}, "claimed", free="observed")
call(calibration.temperature, {"logit_draws": PD.log(), "labels": LABELS}, any_rows="logit_draws")
call(calibration.vector_scaling, {"probabilities": P.repeat(3, 1), "labels": torch.arange(15) % 3})
call(calibration.dirichlet_calibration, CLASSES, settings={"penalty": 0.1})
call(calibration.beta_calibration, {"probability": UNIT, "event": WRONG})
call(calibration.calibration_test, CLASSES, settings={"n_bins": 3, "n_resamples": 5, "seed": 0})
call(band_of, {"claimed": UNIT, "count": 9 * STD}, settings={"level": 0.9}, of=calibration.reliability_band)

call(conformal.standardised_residuals, {**ROWS, "std": STD}, scalar="std")
call(conformal.quantile_residuals, {**ENDS, "y": Y})
call(conformal.conformal_threshold, {"scores": STD}, settings={"level": 0.5}, any_rows="scores")
call(
    conformal.group_thresholds,
    {"scores": STD, "groups": LABELS, "new_groups": LABELS},
    settings={"level": 0.5},
    any_rows="new_groups",
)
call(conformal.class_thresholds, {"scores": STD, "labels": LABELS}, settings={"level": 0.5, "n_classes": 3})
call(conformal.conformal_interval, {"mean": MEAN, "std": STD, "threshold": UNIT}, scalar="std threshold")
call(conformal.conformal_quantile_interval, {**ENDS, "threshold": UNIT}, scalar="threshold")
call(conformal.label_scores, CLASSES)
call(
    conformal.conformal_sets, {"probabilities": P, "threshold": UNIT[:3]}, any_rows="probabilities", scalar="threshold"
)
call(conformal.adaptive_scores, {"probabilities": P, "uniform": UNIT}, settings={"penalty": 0.1, "free_classes": 1})
call(conformal.adaptive_label_scores, {**CLASSES, "uniform": UNIT}, settings={"penalty": 0.1, "free_classes": 1})
call(
    conformal.adaptive_conformal_sets,
    {"probabilities": P, "threshold": UNIT[:3], "uniform": UNIT},
    scalar="threshold",
)
call(
    conformal.conformal_distribution,
    {"mean": MEAN, "std": STD, "calibration_residuals": Y},
    any_rows="calibration_residuals",
    scalar="std",
)
call(conformal.conformal_distribution(MEAN, STD, calibration_residuals=Y).distribution, {"y": Y}, "distribution")
call(
    conformal.conformal_distribution(MEAN, STD, calibration_residuals=Y).quantile,
    {},
    "quantile",
    settings={"level": 0.5},
)
call(
    conformal.conformal_distribution(MEAN, STD, calibration_residuals=Y).interval,
    {},
    "interval",
    settings={"level": 0.5},
)
call(
    conformal.cross_conformal_interval,
    {"predictions": DRAWS.T, "residuals": STD},
    settings={"level": 0.5},
    any_rows="predictions",
)
call(conformal.OnlineLevel(0.5).threshold, {"scores": STD}, "threshold", any_rows="scores")
call(conformal.OnlineLevel, {}, settings={"target": 0.5, "rate": 0.1})

call(decisions.deferral_for_workload, {"uncertainty": STD}, settings={"fraction": 0.5}, any_rows="uncertainty")
call(
    decisions.deferral_for_risk,
    {"uncertainty": STD, "loss": UNIT},
    settings={"target": 0.5, "confidence": 0.6, "largest_loss": 1.0, "n_candidates": 3, "seed": 0},
)
call(decisions.DeferralRule(0.5, "").defers, {"uncertainty": STD}, "defers", free="uncertainty")
call(
    decisions.cascade_frontier,
    {"uncertainty": STD, "cheap_loss": UNIT, "costly_loss": UNIT},
    settings={"cheap_cost": 1.0, "costly_cost": 2.0},
)
call(cascade_of, {"uncertainty": STD}, settings={"threshold": 0.7}, of=decisions.cascade)
call(decisions.action_probabilities, {"value_draws": PD}, any_rows="value_draws")
call(
    lambda state: decisions.thompson_action(lambda s: s, state),
    {"state": P},
    of=decisions.thompson_action,
    any_rows="state",
)
call(decisions.expected_cost, {"probabilities": P, "cost": torch.ones(3, 2)}, any_rows="probabilities")
call(decisions.least_cost_action, {"probabilities": P, "cost": torch.ones(3, 2)}, any_rows="probabilities")

call(acquisition.bald_queries, {"probability_draws": PD}, settings={"n_queries": 2}, any_rows="probability_draws")
call(
    acquisition.batch_bald_queries,
    {"probability_draws": PD},
    settings={"n_queries": 2, "max_outcomes": 9, "seed": 0},
    any_rows="probability_draws",
)
call(acquisition.variance_queries, {"draws": DRAWS}, settings={"n_queries": 2, "noise_variance": 1.0}, any_rows="draws")
call(acquisition.expected_information_gain, {"pool_draws": PD, "target_draws": PD})
call(acquisition.epig_queries, {"pool_draws": PD, "target_draws": PD}, settings={"n_queries": 1})
call(
    acquisition.stochastic_queries,
    {"scores": UNIT},
    settings={"n_queries": 1, "power": 1.0, "seed": 0},
    any_rows="scores",
)
call(acquisition.badge_queries, {"probabilities": P, "features": P}, settings={"n_queries": 2, "seed": 0})
call(acquisition.expected_improvement, {"draws": DRAWS}, settings={"best": 0.0}, any_rows="draws")
call(acquisition.probability_of_improvement, {"draws": DRAWS}, settings={"best": 0.0}, any_rows="draws")
call(acquisition.upper_confidence_bound, {"draws": DRAWS}, settings={"exploration": 2.0}, any_rows="draws")
call(posterior_of, {}, settings={"n_outputs": 1}, of=acquisition.botorch_model)


def public_functions() -> set[Callable[..., Any]]:
    own = [
        f
        for module in MODULES
        for name, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__.startswith(module.__name__) and not name.startswith("_")
    ]
    return {db.evaluate, population.fit_precision, *own}
