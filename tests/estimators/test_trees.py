"""Tests of the trees beside the networks: against scikit-learn's own predictions, their fit and their files."""

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier

from dropbayes.estimators import DropoutClassifier, trees
from dropbayes.estimators.recalibration import class_log_density, pool_weights


def steps(n_rows=600, n_columns=8, seed=0):
    """Classes that jump at thresholds of two of many columns."""
    source = np.random.default_rng(seed)
    x = source.normal(size=(n_rows, n_columns))
    y = (x[:, 0] > 0.5).astype(int) + ((x[:, 0] > 0.5) & (x[:, 1] > 0))
    return x, np.where(source.random(n_rows) < 0.05, 2, y)


@pytest.mark.parametrize("labels", [[0, 1, 2], [0, 2]])  # with a class that the rows lack
def test_the_probabilities_are_those_of_scikit_learn(labels):
    x, y = steps()
    x, y = trees._rounded(x[np.isin(y, labels)]), y[np.isin(y, labels)]
    forest = RandomForestClassifier(5, min_samples_leaf=2, max_samples=len(x), random_state=3).fit(x, y)
    ours = trees._joined(trees._forest(x, y, None, 3, 3, n_trees=5), boosted=False).probabilities(x)
    np.testing.assert_allclose(ours[:, labels], forest.predict_proba(x), atol=1e-6)
    settings = {"max_iter": 20, "max_leaf_nodes": 8, "min_samples_leaf": 10, "l2_regularization": 1.0}
    boosted = HistGradientBoostingClassifier(**settings).fit(x, y)
    ours = trees._joined(trees._boosted(x, y, None, 3, 3), boosted=True).probabilities(x)
    np.testing.assert_allclose(ours[:, labels], boosted.predict_proba(x), atol=1e-6)


def test_the_evidence_on_a_row_is_that_of_trees_grown_without_its_part():
    x, y = steps(200)
    part, shares = np.arange(200) % 4, np.full(3, 1 / 3)
    changed = np.where(part == 1, 2 - y, y)  # other outcomes of one part
    first, second = (trees.grow_trees(x, labels, np.ones(200), part, 3, shares, 0)[1] for labels in (y, changed))
    torch.testing.assert_close(first[:, part == 1], second[:, part == 1])
    assert not torch.equal(first[:, part == 0], second[:, part == 0])


def test_weights_of_a_pool_find_what_made_the_outcomes():
    """Outcomes from the evidence alone: the draws, which know nothing, get no weight."""
    source = torch.Generator().manual_seed(0)
    evidence = 2 * torch.randn(1, 4000, 3, generator=source).double()
    codes = torch.multinomial(evidence[0].softmax(-1), 1, generator=source)[:, 0]
    draws = torch.randn(4, 4000, 3, generator=source).double().softmax(-1)
    weight, shares = torch.ones(4000).double(), np.full(3, 1 / 3)
    temperature, (a,), score = pool_weights(draws, codes, weight, shares, evidence)
    assert temperature > 4 and a == pytest.approx(1, abs=0.1)
    best = class_log_density(draws, codes, temperature, shares, a * evidence[0])
    assert score == pytest.approx(float(best.mean()))


def test_thresholds_are_found_by_trees_which_survive_a_file(tmp_path):
    x, y = steps()
    new, truth = steps(400, seed=1)
    model = DropoutClassifier(random_state=0, n_steps=200, device="cpu").fit(x, y)
    assert model.boosted_ is not None and float(model.boosted_.weight) > 0.2
    alone = DropoutClassifier(random_state=0, n_steps=200, device="cpu", warm_start=True).fit(x, y)
    assert alone.boosted_ is None and alone.forest_ is None
    assert model.log_likelihood(new, truth) > alone.log_likelihood(new, truth) + 0.05
    model.save(tmp_path / "m.safetensors")
    loaded = DropoutClassifier.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(loaded.predict_proba(new), model.predict_proba(new))


def test_trees_do_not_depend_on_the_order_of_rows_nor_a_row_on_its_batch():
    x, y = steps(300)
    shuffled = np.random.default_rng(1).permutation(300)
    settings = {"random_state": 0, "n_steps": 50, "device": "cpu"}
    model, other = DropoutClassifier(**settings).fit(x, y), DropoutClassifier(**settings).fit(x[shuffled], y[shuffled])
    assert model.boosted_ is not None or model.forest_ is not None
    together = model.predict_proba(x[:5])
    np.testing.assert_array_equal(together, other.predict_proba(x[:5]))
    np.testing.assert_array_equal(together, np.concatenate([model.predict_proba(x[row : row + 1]) for row in range(5)]))


def test_rows_in_temporal_order_have_no_trees_of_the_future():
    x, y = steps(300)
    model = DropoutClassifier(random_state=0, n_steps=50, device="cpu").fit(x, y, times=np.arange(300))
    assert model.boosted_ is None and model.forest_ is None


@pytest.mark.parametrize("children", [[[1, 2], [0, 0], [2, 2]], [[1, 9], [1, 1], [2, 2]], [[-1, 2], [1, 1], [2, 2]]])
def test_nodes_that_lead_back_or_outside_are_refused(children):
    stump = np.zeros(3), np.zeros(3), np.array(children), np.ones((3, 2))
    with pytest.raises(ValueError, match="nodes that lead to later ones"):
        trees._joined([stump], boosted=False)
