r"""Conformal prediction: intervals, sets and distributions with a coverage that holds for any model.

Every method needs rows that neither trained nor tuned the model. It guarantees coverage for new rows *exchangeable*
with them, on average over rows and held-out sets. A better uncertainty makes the answers narrower, not more valid.

| you have | use | guarantee |
|---|---|---|
| a mean and a standard deviation | `conformal_interval` | coverage at least the level |
| predicted quantiles | `conformal_quantile_interval` | the same; widths follow the quantiles |
| class probabilities | `conformal_sets`, `adaptive_conformal_sets` | the same, for sets of classes |
| classes or groups that must each be covered | `class_thresholds`, `group_thresholds` | the same within each |
| new rows of another input distribution | `conformal_threshold` with weights | the same, for the right density ratio |
| no rows to spare | `cross_conformal_interval` (jackknife+, CV+) | at least 1 - 2 (1 - level) |
| a stream that may drift | `OnlineLevel` | long-run coverage for any sequence |
| a need for probabilities, not one interval | `conformal_distribution` | calibrated in probability |
"""

from dropbayes.conformal.classification import (
    adaptive_conformal_sets,
    adaptive_label_scores,
    adaptive_scores,
    conformal_sets,
    label_scores,
)
from dropbayes.conformal.regression import (
    ConformalDistribution,
    conformal_distribution,
    conformal_interval,
    conformal_quantile_interval,
    cross_conformal_interval,
    quantile_residuals,
    standardised_residuals,
)
from dropbayes.conformal.thresholds import OnlineLevel, class_thresholds, conformal_threshold, group_thresholds

__all__ = [
    "ConformalDistribution",
    "OnlineLevel",
    "adaptive_conformal_sets",
    "adaptive_label_scores",
    "adaptive_scores",
    "class_thresholds",
    "conformal_distribution",
    "conformal_interval",
    "conformal_quantile_interval",
    "conformal_sets",
    "conformal_threshold",
    "cross_conformal_interval",
    "group_thresholds",
    "label_scores",
    "quantile_residuals",
    "standardised_residuals",
]
