"""Rows of another kind, told from known ones by their uncertainty."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dropbayes.predictive.prediction import Prediction
from dropbayes.runtime.formatting import Printed, Table
from dropbayes.scores import auroc, average_precision, fpr_at_tpr


@dataclass(frozen=True)
class Detection(Printed):
    """How well each uncertainty tells rows of another kind from known ones; prints as a table."""

    scores: dict[str, dict[str, float]]
    """By uncertainty: `auroc`, `fpr_at_95` (the share of the other rows that pass where 95 % of the known ones do) and
    `average_precision`."""
    n_known: int  #: The number of known rows.
    n_other: int  #: The number of rows of another kind.

    def table(self) -> Table:
        """The scores of each uncertainty, in one line."""
        rows = [(name.replace("_", " "), *(f"{v:.3f}" for v in found.values())) for name, found in self.scores.items()]
        head = ("uncertainty", "AUROC", "FPR at 95 % TPR", "average precision")
        return Table(f"{self.n_other:,} rows among {self.n_known:,} known ones", rows, head, align="<>>>")


def detect_outliers(known: Prediction, other: Prediction) -> Detection:
    """How well the uncertainties of a network's predictions tell out-of-distribution rows from known ones.

    `known` are rows like those of the training, `other` rows of another kind. For classes the entropy, the mutual
    information, the variation ratio and the variance of the probabilities over draws; for numbers the total and the
    epistemic variance. A row of several numbers has their mean.

    Example:
        >>> zeros = torch.zeros(3, 1)
        >>> known = Prediction(zeros, torch.tensor([[1.0], [2.0], [3.0]]), zeros, n_draws=9, method="folded")
        >>> other = Prediction(zeros, torch.tensor([[2.5], [8.0], [9.0]]), zeros, n_draws=9, method="folded")
        >>> print(detect_outliers(known, other))
        3 rows among 3 known ones
        uncertainty  AUROC  FPR at 95 % TPR  average precision
        variance     0.889            0.333              0.917
        epistemic    0.889            0.333              0.917
    """
    ours, theirs = _uncertainties(known), _uncertainties(other)
    if ours.keys() != theirs.keys():
        raise ValueError(f"`other` must have the likelihood of `known`; got {list(theirs)} beside {list(ours)}.")
    scores = {}
    for name, inside in ours.items():
        uncertainty = torch.cat([inside, theirs[name].to(inside)])
        event = torch.arange(len(uncertainty), device=uncertainty.device) >= len(inside)
        scores[name] = {
            "auroc": float(auroc(uncertainty, event)),
            "fpr_at_95": float(fpr_at_tpr(uncertainty, event, tpr=0.95)),
            "average_precision": float(average_precision(uncertainty, event)),
        }
    return Detection(scores, len(known), len(other))


def _uncertainties(prediction: Prediction) -> dict[str, Tensor]:
    n_rows, axis = len(prediction), prediction.row_axis or 0
    classes = ("entropy", "mutual_information", "variation_ratio") if prediction.information else ()
    found = {name: getattr(prediction, name) for name in classes}
    for name in ("epistemic",) if prediction.information else ("variance", "epistemic"):
        found[name] = getattr(prediction, name).movedim(axis, 0)
    return {name: value.reshape(n_rows, -1).double().mean(1) for name, value in found.items()}
