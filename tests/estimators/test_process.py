"""The process whose errors networks learn."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, DotProduct

from dropbayes.estimators import DropoutRegressor, process
from dropbayes.estimators.process import Process, fit_process
from tests.estimators.samples import QUICK


def rows(n=120, n_columns=3, seed=0):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(n, n_columns, generator=source).double()
    y = x[:, 0] - 0.5 * x[:, 1] + torch.sin(2 * x[:, 2]) + 0.1 * torch.randn(n, generator=source).double()
    return x, y


UNITS = torch.zeros(1), torch.ones(1)
NO_RANKS = torch.empty(0, dtype=torch.long), torch.empty(0, 2).double(), torch.empty(0, 2).double()


def fit(x, y):
    fitted, offset = fit_process(x, y, torch.ones(len(x)).double(), 0)
    return fitted, offset.mean, offset.deviation


def test_the_factors_of_a_loaded_process_have_the_bits_of_the_fit_in_any_number_of_threads():
    x, y = rows(500, 40)
    torch.set_num_threads(1)
    fitted, _ = fit_process(x, y, torch.ones(500).double(), 0)
    expected = fitted._factors
    torch.set_num_threads(2)
    assert torch.equal(replace(fitted)._factors, expected)


@pytest.fixture
def unclipped(monkeypatch):
    monkeypatch.setattr(process, "_CLIP", 1e9)


def test_the_posterior_is_that_of_scikit_learn(unclipped):
    x, y = rows(40)
    scales = torch.tensor([0.3, 0.2, -0.1, 0.1, -0.4, -1.0]).double()
    kernel = ConstantKernel(np.exp(0.2)) * RBF(np.exp([0.3, 0.2, -0.1]))
    kernel += ConstantKernel(np.exp(-0.8) / 3) * DotProduct(sigma_0=0.0, sigma_0_bounds="fixed")
    alpha = np.exp(-2.0) / np.full(40, 2.0) + process._JITTER
    exact = GaussianProcessRegressor(kernel, alpha=alpha, optimizer=None).fit(x, y)
    one = Process(x, y, torch.full((40,), 2.0).double(), torch.stack([scales, scales]), *UNITS, *NO_RANKS)
    mean, deviation = one.predict(x[:7] + 0.3)
    expected = exact.predict(x[:7] + 0.3, return_std=True)
    np.testing.assert_allclose(mean, expected[0], rtol=1e-6)
    np.testing.assert_allclose(deviation, expected[1], rtol=1e-6)


def test_an_anchor_is_predicted_without_itself():
    x, y = rows(30)
    scales = torch.tensor([0.3, 0.2, -0.1, 0.1, -0.4, -1.0]).double().expand(2, -1)
    weight = torch.ones(30).double()
    anchors = process._inputs(x, *NO_RANKS)
    all_rows = Process(anchors, y, weight, scales, *UNITS, *NO_RANKS)
    mean, deviation = all_rows.leave_one_out(torch.arange(30), torch.zeros(30, dtype=torch.long), x)
    for left in (0, 17):
        others = torch.arange(30) != left
        without = Process(anchors[others], y[others], weight[others], scales, *UNITS, *NO_RANKS)
        expected = without.predict(x[left : left + 1])
        torch.testing.assert_close(mean[left], expected[0][0])
        torch.testing.assert_close(deviation[left], expected[1][0])


def test_the_gradient_of_the_marginal_likelihood_finds_the_noise_and_the_column_without_effect():
    x, y = rows(200)
    y = y - torch.sin(2 * x[:, 2])
    fitted, mean, deviation = fit(x, y)
    noise = fitted.log_scales[:, -1].exp() * fitted.y_scale
    assert ((noise > 0.08) & (noise < 0.13)).all()
    assert (mean - y).square().mean().sqrt() < 0.13 and deviation.max() < 0.2


def test_what_is_smooth_in_the_ranks_of_skewed_columns_is_found():
    source = torch.Generator().manual_seed(0)
    counts = torch.randn(400, 2, generator=source).double().mul(1.5).exp().mul(20).round()
    x, y = (counts - counts.mean(0)) / counts.std(0), counts.sum(1).add(1).log()
    fitted, mean, _ = fit(x, y)
    assert fitted.ranked.tolist() == [0, 1]
    assert (mean - y).abs().mean() < 0.03 * y.std()  # 0.07 of it without the ranks
    humps, y = rows()
    humps[:, 0] = humps[:, 0].sign() * (1 + 0.1 * humps[:, 0].abs())  # of which ranks would close the gap
    assert not len(fit(humps, y)[0].ranked)


def test_far_values_and_values_never_seen_are_ranked_within_the_rows():
    x = torch.cat([torch.zeros(50), torch.linspace(1, 9, 50).exp()]).double()[:, None]
    ranks = process._ranks(x)
    scores = process._inputs(torch.tensor([[-1e9], [0.0], [0.5], [1e9]]).double(), *ranks)[:, 1]
    assert scores[0] == scores[1] < scores[2] < scores[3] == ranks[2].max()


def test_outliers_of_a_sum_do_not_hide_it():
    x, _ = rows(200)
    y = x.sum(1)
    outlier = torch.arange(200) % 40 == 0
    fitted, offset = fit_process(x, y + 10 * outlier, torch.ones(200).double(), 0)
    found = fitted.predict(x)[0] * fitted.y_scale + fitted.y_mean
    assert (found - y).abs().mean() < 0.02  # 0.29 where all rows count as much
    assert offset.trust[outlier].max() < 0.01 and offset.trust[~outlier].mean() > 0.9


def noisy(y, seed=1):
    return y + 0.1 * torch.randn(len(y), generator=torch.Generator().manual_seed(seed)).double()


def test_a_small_table_that_is_linear_has_nothing_smooth():
    x, new, shares = rows(60, 12)[0], rows(300, 12, seed=1)[0], []
    for seed in range(3):
        y = 10 * noisy(0.1 * x[:, :4].sum(1), seed)
        linear = torch.linalg.lstsq(x, (y - y.mean())[:, None]).solution[:, 0]
        errors = [y.mean() + new @ linear - new[:, :4].sum(1)]
        for small in (61, 60):
            fitted, _ = fit_process(x, y, torch.ones(60).double(), 0, small)
            errors.append(fitted.predict(new)[0] * fitted.y_scale + fitted.y_mean - new[:, :4].sum(1))
        shares.append(torch.stack(errors[1:]).norm(dim=1) / errors[0].norm())
    chosen, given = torch.stack(shares).mean(0)
    assert chosen < 1.1 and given > 1.3


@pytest.mark.parametrize("smooth", [True, False])
def test_a_small_table_keeps_what_is_smooth(smooth):
    x, _ = rows(60)
    y = noisy((torch.sin(2 * x) if smooth else x)[:, 0])
    fitted, _ = fit_process(x, y, torch.ones(60).double(), 0, 61)
    assert bool((fitted.log_scales[:, -3] > -3).all()) == smooth


def test_outliers_do_not_hide_that_columns_differ_in_their_length_scales():
    x, _ = rows(100, 8)
    y = torch.sin(2 * x[:, 0]) + 0.02 * x[:, 1]
    y[::40] += 5 * y.std()
    fitted, _ = fit_process(x, y, torch.ones(100).double(), 0, 101)
    assert (fitted.log_scales[:, 1] > fitted.log_scales[:, 0] + 3).all()


def test_noise_has_no_outliers():
    x, y = rows()
    assert fit_process(x, y, torch.ones(len(x)).double(), 0)[1].trust.eq(1).all()


def test_codes_of_groups_leave_distances_that_can_be_computed():
    """A code wants a length-scale of no measure, under which squares cancel."""
    source = torch.Generator().manual_seed(0)
    group = torch.randint(40, (500,), generator=source)
    level, slope = torch.randn(2, 40, generator=source).double()
    time = torch.rand(500, generator=source).double()
    x = torch.stack([group.double(), time, *torch.randn(6, 500, generator=source).double()], 1)
    fitted, mean, _ = fit((x - x.mean(0)) / x.std(0), level[group] + slope[group] * time)
    assert torch.stack(fitted.errors()).isfinite().all() and mean.isfinite().all()


def test_errors_of_the_training_rows_are_those_of_new_rows():
    # 60 columns and 150 rows: scales that had seen a row would predict it far too well.
    x, y = rows(150, 60)
    fitted, mean, _ = fit(x, y)
    new, truth = rows(400, 60, seed=1)
    error, expected = (
        (mean - y).abs().mean(),
        (fitted.predict(new)[0] * fitted.y_scale + fitted.y_mean - truth).abs().mean(),
    )
    assert error > 0.85 * expected


def test_copies_of_a_row_do_not_give_it_away():
    x, _ = rows(60)
    noise = torch.randn(60, generator=torch.Generator().manual_seed(3)).double()
    _, mean, _ = fit(x.repeat(3, 1), noise.repeat(3))
    assert (mean - noise.repeat(3)).square().mean() > 0.8 * noise.var()


def test_the_bits_of_a_row_do_not_depend_on_its_batch():
    x, y = rows()
    fitted, _, _ = fit(x, y)
    whole, alone = fitted.predict(x), fitted.predict(x[77:78])
    assert all(torch.equal(a[77:78], b) for a, b in zip(whole, alone, strict=True))


@pytest.fixture(scope="module")
def linear():
    source = np.random.default_rng(0)
    x = source.normal(size=(200, 5))
    return x, x @ np.array([3.0, -2.0, 1.0, 0.5, 0.0]) + 0.01 * source.normal(size=200)


@pytest.fixture(scope="module")
def fitted(linear):
    x, y = linear
    return DropoutRegressor(n_steps=20, random_state=0).fit(x[:150], y[:150])


def test_a_linear_relation_is_found_to_its_noise(linear, fitted):
    x, y = linear
    assert fitted.process_ is not None and all(member.offset for member in fitted.population_.members)
    mixture = fitted.predictive(x[150:])
    assert (mixture.mean - torch.from_numpy(y[150:])).square().mean().sqrt() < 0.02
    low, high = mixture.interval(0.9)
    assert 0.75 <= ((low.numpy() <= y[150:]) & (y[150:] <= high.numpy())).mean() <= 1


@pytest.mark.slow
def test_targets_in_a_column_are_predicted_as_those_in_a_row(linear, fitted):
    x, y = linear
    column = DropoutRegressor(n_steps=20, random_state=0).fit(x[:150], y[:150, None])
    np.testing.assert_array_equal(column.predict(x[150:]).ravel(), fitted.predict(x[150:]))


def test_networks_with_a_process_are_unsure_in_a_gap():
    """The process alone trusts that the function is as smooth there as at the rows."""
    source = np.random.default_rng(0)
    level = source.permutation(np.repeat([-4.0, -3.0, -2.0, 2.0, 3.0, 4.0], 40))
    x = np.column_stack([level, source.normal(size=240)])
    model = DropoutRegressor(n_steps=20, random_state=0)
    model.fit(x, np.sin(level) + x[:, 1] + 0.01 * source.normal(size=240))
    assert all(member.offset for member in model.population_.members)
    deviation = model.predict(np.column_stack([np.zeros(20), x[:20, 1]]), return_std=True)[1].mean()
    model.extrapolation_ = None
    assert deviation > 2 * model.predict(np.column_stack([np.zeros(20), x[:20, 1]]), return_std=True)[1].mean()


def test_a_model_with_a_process_survives_a_file_and_more_rows(tmp_path, linear, fitted):
    x, y = linear
    fitted.save(tmp_path / "model.safetensors")
    loaded = DropoutRegressor.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded.predict(x), fitted.predict(x))
    loaded.partial_fit(x[150:], y[150:])
    assert np.abs(loaded.predict(x[150:]) - y[150:]).mean() < 0.1


@pytest.mark.parametrize("settings", [QUICK, {"warm_start": True}, {"noise": "constant"}])
def test_no_process_where_it_was_not_asked_for(linear, settings):
    x, y = linear
    assert DropoutRegressor(**{"hidden": (10,), "n_steps": 5, **settings}).fit(x[:30], y[:30]).process_ is None


def test_huge_outliers_on_one_side_do_not_move_quick_intervals():
    source = np.random.default_rng(0)
    x = source.standard_normal((400, 3))
    y = 2 * x[:, 0] + x[:, 1] + 0.3 * source.standard_normal(400)
    y[::40] += 1000 * (1 + source.random(10))
    model = DropoutRegressor(effort="quick", n_steps=100, random_state=0).fit(x[:200], y[:200])
    lower, upper = model.predict_interval(x[200:], coverage=0.5)
    assert 0.35 < ((lower <= y[200:]) & (y[200:] <= upper)).mean() < 0.8
    assert np.median(upper - lower) < 10


def test_no_process_where_rows_are_not_exchangeable(linear, fitted):
    x, y = linear
    model = copy.copy(fitted)  # which has one
    model.set_params(hidden=(10,), n_steps=5)
    assert model.fit(x[:32], y[:32], groups=np.arange(32) // 2).process_ is None
    assert model.fit(x[:32], y[:32], times=np.arange(32)).process_ is None


def test_a_smooth_relation_without_noise_is_predicted_surely():
    source = torch.Generator().manual_seed(0)
    x = torch.rand(400, 3, generator=source).double() * 3.4 - 1.7
    y = (x + 1.7).prod(1)
    y = (y - y.mean()) / y.std()
    fitted, offset = fit_process(x[:300], y[:300], torch.ones(300).double(), 0)
    mean, deviation = fitted.predict(x[300:])
    scale, centre = fitted.y_scale, fitted.y_mean
    assert float((mean * scale + centre - y[300:]).abs().max()) < 0.01
    assert float(deviation.max() * scale) < 10 * float(offset.deviation.max()) < 0.1  # as sure as of rows held out
    alone = torch.cat([fitted.predict(row)[1] for row in x[300:].split(1)])
    assert torch.equal(alone, deviation)
