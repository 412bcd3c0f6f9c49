r"""Trees beside the networks: they find thresholds in a few of many columns, and the outcomes of close rows.

For classes, extremely randomised trees (Geurts, Ernst and Wehenkel 2006), which hold every row, and boosted trees
(Friedman 2001) are grown on the training rows of each fold.
With $g_j$ their log-probabilities, π the class shares and $z_t$ the logits of draw t of the networks, the draw has the
logits
$$\log \pi + \tfrac1\theta (z_t - \log \pi) + \sum_j a_j\, (g_j - \log \pi),$$
a logarithmic pool whose temperature θ and weights $a_j$ are fitted to rows that neither was trained on. Predictions are
means over the trees of all folds, stored as tensors: a file holds no code.

For numbers, every tree of a forest is a function, and so one more draw: a share of the mixture over the draws, which
rows that neither was trained on choose. Trees part where outcomes do, so that the mixture there is wide, or skewed.
Beside a forest, every draw may be moved half the way to what boosted trees predict. Where the target jumps at
thresholds of a few columns, a forest whose splits look at all columns knows far more than networks, and is most of the
mixture.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dropbayes.predictive import Mixture

BOOSTED_SHARE = 0.5  # of every draw: more would be surer between the rows than trees can be
Nodes = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # column, threshold, children and value of each


@dataclass(frozen=True, eq=False)
class Trees:
    """The nodes of several trees, one tree after another."""

    column: Tensor  # of each node: rows whose value there is at most the threshold go left
    threshold: Tensor
    children: Tensor  # the nodes to the left and the right, [node, 2], which follow it; a leaf is its own
    value: Tensor  # what each leaf adds to the outputs, [node, class]; of a forest for numbers, what it predicts
    roots: Tensor  # the first node of each tree
    boosted: Tensor  # whether the sums are logits; those of a forest are probabilities
    weight: Tensor  # a, their weight in the pool; for numbers, their share of the draws, or of every draw

    def __post_init__(self) -> None:
        n_nodes, finite = len(self.column), (self.threshold, self.value, self.weight)
        sizes = {len(values) for values in (self.threshold, self.children, self.value)}
        inside = all(bool(((nodes >= 0) & (nodes < n_nodes)).all()) for nodes in (self.children, self.roots))
        later = bool((self.children >= torch.arange(n_nodes)[:, None]).all())  # or rows would go round for ever
        if sizes != {n_nodes} or not (inside and later and all(bool(values.isfinite().all()) for values in finite)):
            raise ValueError("trees must have finite values, and nodes that lead to later ones")

    def probabilities(self, x: np.ndarray) -> Tensor:
        """The class probabilities of rows, `[row, class]`."""
        total = self.total(x)
        return total.softmax(-1) if bool(self.boosted) else total

    def total(self, x: np.ndarray) -> Tensor:
        """The sum over the trees for each row, `[row, output]`: what boosted trees predict."""
        return torch.nn.functional.embedding_bag(self._leaves(x), self.value.double(), mode="sum")

    def draws(self, x: np.ndarray) -> Tensor:
        """What each tree predicts for rows, `[tree, row, 1]`."""
        return self.value.double()[self._leaves(x).T]

    def _leaves(self, x: np.ndarray) -> Tensor:
        """The leaf of each row in each tree, `[row, tree]`."""
        inputs, node = torch.from_numpy(_rounded(x)), self.roots.long().expand(len(x), -1)
        while True:
            right = inputs.gather(1, self.column[node].long()) > self.threshold[node]
            below = self.children[node, right.long()].long()
            if torch.equal(below, node):
                return node
            node = below

    def evidence(self, x: np.ndarray, shares: np.ndarray) -> Tensor:
        r"""$g - \log \pi$ of rows, `[row, class]`: what the trees know beyond the class shares."""
        ratio = self.probabilities(x) / torch.as_tensor(shares)
        return torch.log(0.99 * ratio + 0.01)  # with a part of the class shares: trees are never sure


def grow_trees(
    rows: Sequence[np.ndarray], n_held: int, n_trees: int, shares: np.ndarray, seed: int
) -> tuple[tuple[Trees, ...], Tensor]:
    """A forest and boosted trees of rows, and their evidence on the first without their part, `[kind, row, class]`.

    The rows are inputs, class numbers, weights and the part of each; the `n_trees` of a part's forest are grown on the
    others. As many more make the evidence on `n_held` rows steadier, which the weights of the pool are fitted to.
    """
    grown: tuple[list[Nodes], list[Nodes]] = ([], [])
    evidence, parts = torch.zeros(2, n_held, len(shares)).double(), np.unique(rows[-1])
    for number, known, own in _without_parts(rows, parts):
        settings, held = (*known, len(shares), seed + number), np.flatnonzero(own[:n_held])
        forest = _forest(*settings, n_trees=2 * n_trees if len(held) else n_trees)
        for kind, nodes in enumerate((forest, _boosted(*settings))):
            evidence[kind, held] = _joined(nodes, boosted=kind == 1).evidence(rows[0][held], shares)
            kept = nodes if kind == 1 else nodes[:n_trees]
            scale = len(nodes) / (len(kept) * len(parts))
            grown[kind].extend((*rest, value * scale) for *rest, value in kept)
    return tuple(_joined(nodes, boosted=kind == 1) for kind, nodes in enumerate(grown)), evidence


def grow_forest(
    rows: Sequence[np.ndarray], parts: Sequence[int], n_trees: int, seed: int, *, greedy: bool = False
) -> tuple[Trees, Tensor]:
    """A forest of standardised targets without each of the `parts`, and its predictions for these, `[tree, row, 1]`.

    The rows are inputs, targets, weights and the part of each. A split looks at a third of the columns; with `greedy`
    at all of them, and the trees differ by their rows.
    """
    from sklearn.ensemble import RandomForestRegressor

    grown, held_out = [], torch.zeros(n_trees, len(rows[0]), 1).double()
    for number, known, held in _without_parts(rows, parts):
        few = len(known[0]) <= 2000  # rows of each tree: the time does not grow with the table
        sample = {"bootstrap": greedy or not few, "max_samples": None if few else 2000}
        settings = {"max_features": 1.0 if greedy else 1 / 3, "random_state": (seed + number) % 2**32}
        forest = RandomForestRegressor(n_trees, min_samples_leaf=5, **sample, **settings).fit(*known)
        nodes = [_tree_nodes(one.tree_, one.tree_.value[:, 0]) for one in forest.estimators_]
        held_out[:, held] = _joined(nodes, boosted=False).draws(rows[0][held])
        grown += nodes
    return _joined(grown, boosted=False), held_out


def grow_boosted(rows: Sequence[np.ndarray], parts: Sequence[int], seed: int) -> tuple[Trees, Tensor]:
    """The mean of boosted trees without each of the `parts`, and what these predict for their part, `[row, 1]`."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    grown, held_out = [], torch.zeros(len(rows[0]), 1).double()
    settings = {"max_leaf_nodes": 16, "min_samples_leaf": 10, "l2_regularization": 1.0, "early_stopping": False}
    for number, known, held in _without_parts(rows, parts):
        model = HistGradientBoostingRegressor(**settings, random_state=(seed + number) % 2**32).fit(*known)
        nodes = _boosted_nodes(model, model._baseline_prediction, np.ones((1, 1)))
        held_out[held] = _joined(nodes, boosted=True).total(rows[0][held])
        grown += [(*rest, value / len(parts)) for *rest, value in nodes]
    return replace(_joined(grown, boosted=True), weight=torch.tensor(BOOSTED_SHARE).double()), held_out


def _without_parts(rows: Sequence[np.ndarray], parts: Iterable[int]) -> Iterator[tuple[int, Any, np.ndarray]]:
    """Each of the parts, with inputs, targets and weights of all other rows, and which rows are its own."""
    x, y, weight, part = rows
    for number in parts:
        learned = part != number
        # Equal weights are none: quantiles with weights take ten times as long as the trees.
        weights = weight[learned] if weight.min() < weight.max() else None
        yield int(number), (_rounded(x[learned]), y[learned], weights), ~learned


def prefers_boosted(draws: Tensor, boosted: Tensor, y: Tensor, weight: Tensor) -> bool:
    """Whether boosted trees, as their share of each draw, take a hundredth off the mean error of held-out rows."""
    mean = draws.mean(0)
    errors = [float(weight @ (y - one).abs()) for one in (mean, torch.lerp(mean, boosted, BOOSTED_SHARE))]
    return errors[1] < 0.99 * errors[0]


def among(draws: Tensor, trees: Tensor, share: float) -> Tensor:
    """The draws, and as many of trees `[tree, row, 1]`, some left out or repeated, as make up their share."""
    n_more = round(len(draws) * share / (1 - share))
    return torch.cat([draws, trees[torch.arange(n_more) * len(trees) // max(1, n_more)].to(draws)])


GREEDY_SHARE = 0.75  # that of a forest whose splits look at all columns


def tree_share(draws: Tensor, trees: Tensor, y: Tensor, weight: Tensor) -> float:
    """The share of trees among the draws of numbers that held-out rows prefer: none, a third or half.

    As in the choice of members, the best has the greatest sum of the pool's log-likelihood and of the mean's under
    Laplace noise; trees must gain a hundredth, or are not worth their time. Either side has noise of Student's t, whose
    scale is its own. Draws of the networks and trees that were grown without the row are `[draw, row, 1]`.
    """
    part, shares = weight / weight.sum(), torch.tensor([0.0, 1 / 3, 1 / 2]).double()
    errors = torch.stack([(y - values.mean(0))[:, 0] for values in (draws, trees)])
    densities = []
    for values, error in zip((draws, trees), errors, strict=True):
        deviation = (error.square() * part).sum().sqrt().clamp_min(1e-9)
        mixtures = [Mixture(values[..., 0], factor * deviation, 4.0) for factor in torch.logspace(-1, 0, 8)]
        densities.append(max((one.log_density(y[:, 0]) for one in mixtures), key=lambda density: float(density @ part)))
    pooled = torch.logaddexp((1 - shares).log()[:, None] + densities[0], shares.log()[:, None] + densities[1]) @ part
    mean_error = torch.lerp(errors[0], errors[1], shares[:, None]).abs() @ part
    return float(shares[(pooled - mean_error.clamp_min(1e-30).log() - 0.01 * (shares > 0)).argmax()])


def _rounded(x: np.ndarray) -> np.ndarray:
    """The inputs in single precision, in which forests are grown; the largest are as large as it knows."""
    largest = np.finfo(np.float32).max
    return x.clip(-largest, largest).astype(np.float32).astype(np.float64)


def _joined(trees: Sequence[Any], *, boosted: bool) -> Trees:
    column, threshold, children, value = zip(*trees, strict=True)
    roots = np.cumsum([0, *map(len, column[:-1])])
    shifted = [own + root for own, root in zip(children, roots, strict=True)]
    kinds = (column, "i4"), (threshold, "f8"), (shifted, "i4"), (value, "f4"), ([roots], "i4")
    nodes = [torch.from_numpy(np.concatenate(parts).astype(kind)) for parts, kind in kinds]
    return Trees(*nodes, boosted=torch.tensor(boosted), weight=torch.tensor(1.0).double())


def _nodes(column: Any, threshold: Any, left: Any, right: Any, is_leaf: Any, value: np.ndarray) -> Nodes:
    own = np.arange(len(is_leaf))
    children = np.column_stack([np.where(is_leaf, own, left), np.where(is_leaf, own, right)])
    return np.where(is_leaf, 0, column), np.where(is_leaf, 0.0, threshold), children, value * is_leaf[:, None]


def _tree_nodes(tree: Any, value: np.ndarray) -> Nodes:
    left = tree.children_left
    return _nodes(tree.feature, tree.threshold, left, tree.children_right, left < 0, value)


def _forest(
    x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, n_classes: int, seed: int, *, n_trees: int
) -> list[Nodes]:
    from sklearn.ensemble import ExtraTreesClassifier

    few = len(x) <= 2000  # rows of each tree: the time does not grow with the table
    sample = {"bootstrap": not few, "max_samples": None if few else 2000}
    forest = ExtraTreesClassifier(n_trees, **sample, random_state=seed % 2**32).fit(x, y, weight)
    outputs = np.eye(n_classes)[forest.classes_] / n_trees
    return [_tree_nodes(one.tree_, one.tree_.value[:, 0] @ outputs) for one in forest.estimators_]


def _boosted(x: np.ndarray, y: np.ndarray, weight: np.ndarray | None, n_classes: int, seed: int) -> list[Nodes]:
    from sklearn.ensemble import HistGradientBoostingClassifier

    rounds = 60 if n_classes == 2 else max(60 // n_classes, 10)  # a round grows a tree for each of several classes
    settings = {"max_leaf_nodes": 8, "min_samples_leaf": 10, "l2_regularization": 1.0, "early_stopping": False}
    model = HistGradientBoostingClassifier(max_iter=rounds, random_state=seed % 2**32, **settings).fit(x, y, weight)
    outputs = np.eye(n_classes)[model.classes_]
    outputs = outputs[1:] if len(outputs) == 2 else outputs  # of two classes, the second has the logit
    known = np.isin(np.arange(n_classes), model.classes_)
    start = model._baseline_prediction @ outputs + np.where(known, 0.0, -20.0)  # no row is of the unknown
    return _boosted_nodes(model, start, outputs)


def _boosted_nodes(model: Any, start: np.ndarray, outputs: np.ndarray) -> list[Nodes]:
    """The trees of scikit-learn's histogram boosting; a tree of each round adds to each of the `outputs`."""
    first = _nodes(np.zeros(1), np.zeros(1), 0, 0, np.ones(1, dtype=bool), start)
    grown = [(tree.nodes, output) for trees in model._predictors for tree, output in zip(trees, outputs, strict=True)]
    return [first] + [
        _nodes(n["feature_idx"], n["num_threshold"], n["left"], n["right"], n["is_leaf"] == 1, n["value"][:, None] * o)
        for n, o in grown
    ]
