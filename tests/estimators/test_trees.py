"""Tests of the trees beside the networks: against scikit-learn's own predictions, their fit and their files."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.ensemble import (
    ExtraTreesClassifier,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)

from dropbayes.estimators import DropoutClassifier, DropoutRegressor, regressor, trees
from dropbayes.estimators.recalibration import class_log_probabilities, pool_weights


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
    forest = ExtraTreesClassifier(5, random_state=3).fit(x, y)
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
    first, second = (trees.grow_trees((x, labels, np.ones(200), part), 200, 3, shares, 0)[1] for labels in (y, changed))
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
    best = class_log_probabilities(draws.log(), temperature, shares, a * evidence[0])[torch.arange(4000), codes]
    assert score == pytest.approx(float(best.mean()))


def test_a_few_rows_that_were_all_predicted_well_do_not_make_a_pool_sure():
    """The best of several candidates may be right on all of a few rows by luck; on all of many it is not luck."""
    shares = np.full(2, 0.5)

    def temperature(n_rows):
        codes = torch.arange(n_rows) % 2
        draws = torch.tensor([[0.999, 0.001], [0.001, 0.999]]).double()[codes][None]
        return pool_weights(draws, codes, torch.ones(n_rows).double(), shares, torch.zeros(0, n_rows, 2).double())[0]

    assert temperature(20) > 1.5 and temperature(2000) < 1.01


def test_thresholds_are_found_by_trees_which_survive_a_file(tmp_path):
    x, y = steps(300)
    new, truth = steps(400, seed=1)
    settings = {"hidden": (10,), "n_networks": 2, "n_draws": 20, "n_steps": 50, "random_state": 0, "device": "cpu"}
    model = DropoutClassifier(**settings).fit(x, y)
    assert model.boosted_ is not None and float(model.boosted_.weight) > 0.2
    alone = DropoutClassifier(**settings, warm_start=True).fit(x, y)
    assert alone.boosted_ is None and alone.forest_ is None
    assert model.log_likelihood(new, truth) > alone.log_likelihood(new, truth) + 0.05
    model.save(tmp_path / "m.safetensors")
    loaded = DropoutClassifier.load(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(loaded.predict_proba(new), model.predict_proba(new))


@pytest.mark.slow
def test_trees_do_not_depend_on_the_order_of_rows_nor_a_row_on_its_batch():
    x, y = steps(200)
    shuffled = np.random.default_rng(1).permutation(200)
    settings = {"random_state": 0, "n_steps": 50, "device": "cpu"}
    model, other = DropoutClassifier(**settings).fit(x, y), DropoutClassifier(**settings).fit(x[shuffled], y[shuffled])
    assert model.boosted_ is not None or model.forest_ is not None
    together = model.predict_proba(x[:5])
    np.testing.assert_array_equal(together, other.predict_proba(x[:5]))
    np.testing.assert_array_equal(together, np.concatenate([model.predict_proba(x[row : row + 1]) for row in range(5)]))


def test_rows_in_temporal_order_have_no_trees_of_the_future():
    x, y = steps(200)
    model = DropoutClassifier(random_state=0, n_steps=50, device="cpu").fit(x, y, times=np.arange(200))
    assert model.boosted_ is None and model.forest_ is None


@pytest.mark.parametrize("children", [[[1, 2], [0, 0], [2, 2]], [[1, 9], [1, 1], [2, 2]], [[-1, 2], [1, 1], [2, 2]]])
def test_nodes_that_lead_back_or_outside_are_refused(children):
    stump = np.zeros(3), np.zeros(3), np.array(children), np.ones((3, 2))
    with pytest.raises(ValueError, match="nodes that lead to later ones"):
        trees._joined([stump], boosted=False)


# --- numbers ------------------------------------------------------------------------------------------------------------


def jumps(n_rows=200, seed=0):
    """Numbers that jump at thresholds, with noise that jumps too."""
    source = np.random.default_rng(seed)
    x = source.normal(size=(n_rows, 6))
    mean = 2.0 * (x[:, 0] > 0.5) - 2.0 * (x[:, 1] > 0) * (x[:, 2] > 0)
    return x, mean + np.where(x[:, 3] > 0, 1.0, 0.1) * source.normal(size=n_rows)


@pytest.fixture(scope="module")
def among_trees():
    return DropoutRegressor(random_state=0, n_steps=50, device="cpu").fit(*jumps())


@pytest.mark.parametrize("greedy", [False, True])
def test_each_draw_of_a_forest_is_what_scikit_learns_tree_predicts(greedy):
    x, y = jumps(200)
    x, part = trees._rounded(x), np.arange(200) % 4
    forest, held_out = trees.grow_forest((x, y, np.ones(200), part), [2], 3, seed=5, greedy=greedy)
    features = 1.0 if greedy else 1 / 3
    settings = {"min_samples_leaf": 5, "max_features": features, "bootstrap": greedy, "random_state": 7}
    expected = RandomForestRegressor(3, **settings).fit(x[part != 2], y[part != 2])
    expected = np.stack([tree.predict(x) for tree in expected.estimators_])
    np.testing.assert_allclose(forest.draws(x)[..., 0], expected, atol=1e-6)
    np.testing.assert_array_equal(held_out[:, part == 2], forest.draws(x)[:, part == 2])


def test_held_out_rows_choose_a_share_of_trees_that_know_more_and_none_of_others():
    source = torch.Generator().manual_seed(0)
    y = torch.randn(500, 1, generator=source).double()
    good = y + 0.3 * torch.randn(8, 500, 1, generator=source).double()
    poor = y.roll(1, 0) + 0.3 * torch.randn(8, 500, 1, generator=source).double()
    assert trees.tree_share(poor, good, y, torch.ones(500).double()) == 0.5
    assert trees.tree_share(good, poor, y, torch.ones(500).double()) == 0
    known = (torch.arange(500) < 250).double()[
        :, None
    ]  # either side knows half of the rows; the weights say which count
    left, right = torch.where(known == 1, good, poor), torch.where(known == 1, poor, good)
    assert trees.tree_share(left, right, y, known[:, 0]) == 0
    assert trees.tree_share(left, right, y, 1 - known[:, 0]) == 0.5


def test_boosted_trees_are_the_mean_of_scikit_learns_without_each_part():
    x, y = jumps(200)
    x, part = trees._rounded(x), np.arange(200) % 2
    grown, held_out = trees.grow_boosted((x, y, np.ones(200), part), range(2), seed=5)
    settings = {"max_leaf_nodes": 16, "min_samples_leaf": 10, "l2_regularization": 1.0, "early_stopping": False}
    models = [HistGradientBoostingRegressor(**settings).fit(x[part != out], y[part != out]) for out in range(2)]
    predicted = np.stack([model.predict(x) for model in models])
    np.testing.assert_allclose(grown.total(x)[:, 0], predicted.mean(0), atol=1e-5)
    np.testing.assert_allclose(held_out[:, 0], predicted[part, np.arange(200)], atol=1e-5)


def test_held_out_rows_prefer_boosted_trees_that_halve_the_error_and_no_others():
    y, weight = torch.randn(200, 1, generator=torch.Generator().manual_seed(0)).double(), torch.ones(200).double()
    draws, share = (y + 0.5).expand(4, -1, -1), torch.tensor(100.0)
    assert trees.prefers_boosted(draws, y - 0.5, y, weight)  # either is wrong by a half, their mean by nothing
    assert not trees.prefers_boosted(draws, y + 0.5, y, weight)
    assert not trees.prefers_boosted(draws, y + 0.5 - 1 / share, y, weight)  # their mean: a hundredth, less rounding
    assert trees.prefers_boosted(draws, y + 0.5 - 1.1 / share, y, weight)
    first = (torch.arange(200) < 100).double()
    better_first = torch.where(first[:, None] == 1, y - 0.5, y + 5)
    assert trees.prefers_boosted(draws, better_first, y, first)
    assert not trees.prefers_boosted(draws, better_first, y, 1 - first)


def test_boosted_trees_are_half_of_every_draw(among_trees):
    x, _ = jumps(20, seed=2)
    assert float(among_trees.boosted_.weight) == 0.5
    without = among_trees.with_draws()
    without.boosted_ = None
    y_mean, y_scale = among_trees._target_moments
    boosted = among_trees.boosted_.total(x)[:, 0] * y_scale + y_mean
    ours, theirs = among_trees.predictive(x), without.predictive(x)
    torch.testing.assert_close(ours.location, (theirs.location + boosted) / 2)


@pytest.mark.slow
def test_wide_tables_have_no_boosted_trees(monkeypatch, among_trees):
    monkeypatch.setattr(regressor, "_MAX_BOOSTED", 5)
    wide = DropoutRegressor(random_state=0, n_steps=50, device="cpu").fit(*jumps())
    assert among_trees.boosted_ is not None and wide.boosted_ is None and wide.forest_ is not None


@pytest.mark.slow
def test_trees_among_the_draws_are_better_where_outcomes_jump(among_trees, tmp_path):
    new, truth = jumps(400, seed=1)
    assert among_trees.forest_ is not None
    alone = DropoutRegressor(random_state=0, n_steps=50, device="cpu", warm_start=True).fit(*jumps())
    assert alone.forest_ is None
    assert among_trees.log_likelihood(new, truth) > alone.log_likelihood(new, truth) + 0.05
    among_trees.save(tmp_path / "m.safetensors")
    loaded = DropoutRegressor.load(tmp_path / "m.safetensors")
    for ours, theirs in zip(
        among_trees.predict(new, return_std=True), loaded.predict(new, return_std=True), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_trees_have_their_share_of_the_draws_by_every_method(among_trees):
    x, _ = jumps(20, seed=2)
    share = float(among_trees.forest_.weight)
    n_networks = len(among_trees.population_)
    for view in (among_trees, among_trees.with_draws(method="linear"), among_trees.without_dropout()):
        mixture, n_drawn = view.predictive(x), view._n_drawn * n_networks
        assert mixture.n_draws - n_drawn == round(n_drawn * share / (1 - share))
    mean, covariance = among_trees.predict(x, return_cov=True)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), among_trees.predict(x, return_std=True)[1])
    assert np.linalg.eigvalsh(covariance).min() > 0
    np.testing.assert_array_equal(mean, among_trees.predict(x))


@pytest.mark.slow
def test_numbers_by_trees_do_not_depend_on_the_order_of_rows_nor_a_row_on_its_batch(among_trees):
    x, y = jumps()
    weight = np.ones(200)
    weight[:3] = 2
    shuffled = np.random.default_rng(1).permutation(200)
    settings = {"random_state": 0, "n_steps": 50, "device": "cpu"}
    together = np.stack(among_trees.predict(x[:5], return_std=True))
    other = DropoutRegressor(**settings).fit(x[shuffled], y[shuffled])
    np.testing.assert_array_equal(together, np.stack(other.predict(x[:5], return_std=True)))
    single = [np.stack(among_trees.predict(x[row : row + 1], return_std=True)) for row in range(5)]
    np.testing.assert_array_equal(together, np.concatenate(single, 1))
    weighted = DropoutRegressor(**settings).fit(x, y, sample_weight=weight)
    copied = DropoutRegressor(**settings).fit(np.concatenate([x, x[:3]]), np.concatenate([y, y[:3]]))
    assert weighted.forest_ is not None
    np.testing.assert_array_equal(weighted.predict(x), copied.predict(x))


@pytest.mark.slow
def test_a_matrix_of_one_column_has_the_trees_of_a_vector(among_trees):
    x, y = jumps()
    matrix = DropoutRegressor(random_state=0, n_steps=50, device="cpu").fit(x, y[:, None])
    np.testing.assert_array_equal(matrix.predict(x)[:, 0], among_trees.predict(x))


@pytest.mark.parametrize(("n_rows", "n_steps"), [(200, 50), (5200, 100)])
def test_the_noise_of_a_large_table_has_more_steps(monkeypatch, n_rows, n_steps):
    monkeypatch.setattr(regressor, "fit_noise", lambda *_, **how: pytest.fail(f"asked for {how['n_steps']} steps"))
    x = np.random.default_rng(0).normal(size=(n_rows, 2))
    model = DropoutRegressor((4,), drop_prob=0.1, weight_decay=1e-4, n_steps=5, n_networks=1, random_state=0)
    with pytest.raises(pytest.fail.Exception, match=f"asked for {n_steps} steps"):
        model.fit(x, x.sum(1))


def test_numbers_in_temporal_order_have_no_trees_of_the_future():
    x, y = jumps(100)
    model = DropoutRegressor((10,), random_state=0, n_steps=5, device="cpu")
    assert model.fit(x, y, times=np.arange(100)).forest_ is None


def test_a_file_with_an_impossible_share_of_trees_is_refused(among_trees, tmp_path):
    broken = among_trees.with_draws()
    broken.forest_ = replace(among_trees.forest_, weight=torch.tensor(1.0).double())
    broken.save(tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="the share of trees among the draws must lie between 0 and 1"):
        DropoutRegressor.load(tmp_path / "m.safetensors")


def stairs(n_rows, seed=0):
    """Targets that jump at thresholds of three of five columns, with little noise."""
    source = np.random.default_rng(seed)
    x = source.uniform(size=(n_rows, 5))
    jumps = np.floor(4 * x[:, 0]) + 2 * (x[:, 1] > 0.3) * (x[:, 2] < 0.6)
    return x, jumps + 0.1 * source.normal(size=n_rows)


@pytest.mark.slow
def test_a_forest_of_all_columns_is_most_of_the_mixture_where_it_knows_far_more():
    model = DropoutRegressor(random_state=0, n_steps=50, device="cpu").fit(*stairs(400))
    new, truth = stairs(400, seed=1)
    alone = DropoutRegressor(random_state=0, n_steps=50, device="cpu", warm_start=True).fit(*stairs(400))
    assert float(model.forest_.weight) == trees.GREEDY_SHARE
    assert np.abs(model.predict(new) - truth).mean() < 0.7 * np.abs(alone.predict(new) - truth).mean()
    lower, upper = model.predict_interval(new, 0.9)
    assert 0.84 < ((lower <= truth) & (truth <= upper)).mean() < 0.97


@pytest.mark.slow
def test_few_rows_do_not_choose_a_forest_of_all_columns():
    model = DropoutRegressor(random_state=0, n_steps=50, device="cpu").fit(*stairs(200))
    assert model.forest_ is None or float(model.forest_.weight) <= 0.5
