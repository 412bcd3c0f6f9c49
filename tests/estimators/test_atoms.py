"""Atoms of targets that repeat some values."""

import numpy as np
import pytest
import torch

from dropbayes.estimators import DropoutRegressor
from dropbayes.estimators.atoms import AtomMixture, Atoms, fit_atoms
from dropbayes.estimators.recalibration import fit_recalibration, with_recalibration
from dropbayes.predictive.mixtures import Mixture
from tests.estimators.samples import QUICK


def rows(n=4000):
    """Outcomes that are a latent value, zero below 0.3 and a whole number above 1."""
    source = torch.Generator().manual_seed(0)
    centre = torch.randn(n, generator=source).double()
    latent = centre + 0.5 * torch.randn(n, generator=source).double()
    y = torch.where(latent < 0.3, 0.0, torch.where(latent > 1, latent.round(), latent))
    return Mixture(centre[None], torch.tensor(0.5).double()), y


def test_cells_have_the_share_of_their_atoms():
    mixture, y = rows()
    atoms = fit_atoms(mixture, y, torch.ones(len(y)))
    mapped = AtomMixture(mixture, atoms)
    for value in (0.0, 1.0, 2.0):
        at, below = torch.full_like(y, value), torch.full_like(y, value - 1e-9)
        assert float((mapped.pit(at) - mapped.pit(below)).mean()) == pytest.approx(
            float((y == value).double().mean()), abs=0.01
        )


def test_an_outcome_is_an_atom_in_its_cell_where_the_distribution_function_jumps():
    zero = Atoms(torch.tensor([0.0]), torch.tensor([-torch.inf]), torch.tensor([0.3]))
    assert zero.inverse(torch.tensor([-1.0, 0.2, 0.5])).tolist() == [0.0, 0.0, 0.5]
    torch.testing.assert_close(zero.forward(torch.tensor([-1.0, 0.0, 0.5])), torch.tensor([-torch.inf, 0.3, 0.5]))
    grades = Atoms(torch.tensor([1.0, 2.0]), torch.tensor([-torch.inf, 0.0]), torch.tensor([0.0, torch.inf]))
    surely_two = AtomMixture(Mixture(torch.full((1, 1), 1.5), torch.tensor(1.0)), grades)  # 1 has 7 %
    assert [end.item() for end in surely_two.interval(0.9)] == [2.0, 2.0]


@pytest.mark.slow
def test_the_crps_is_that_of_the_quantiles_and_better_than_the_density_s():
    mixture, y = rows(300)
    held_out, outcomes = rows()
    mapped = AtomMixture(mixture, fit_atoms(held_out, outcomes, torch.ones(4000)))
    levels = (np.arange(100) + 0.5) / 100
    error = y - torch.stack([mapped.quantile(float(level)) for level in levels])
    level = torch.from_numpy(levels)[:, None]
    expected = 2 * torch.maximum(level * error, (level - 1) * error).mean(0)
    torch.testing.assert_close(mapped.crps(y), expected, atol=0.02, rtol=0)
    assert mapped.crps(y).mean() < 0.9 * mixture.crps(y).mean()


def test_the_crps_of_grades_is_the_sum_over_the_steps_of_their_distribution_function():
    ends, infinity = torch.tensor([-0.3, 0.4, 1.5]).double(), torch.tensor([torch.inf]).double()
    grades = torch.tensor([-1.0, 0.0, 1.0, 3.0]).double()
    mixture = Mixture(torch.tensor([[0.2], [1.1]]).double(), torch.tensor(0.3))
    mapped = AtomMixture(mixture, Atoms(grades, torch.cat([-infinity, ends]), torch.cat([ends, infinity])))
    level = torch.stack([mixture.pit(end[None]) for end in ends])[:, 0]
    for y in (-1.0, 1.0, 3.0):
        expected = ((level - (grades[:-1] >= y).double()).square() * grades.diff()).sum()
        assert float(mapped.crps(torch.tensor([y]))) == pytest.approx(float(expected), rel=1e-6)


def test_intervals_hold_as_nearly_the_coverage_as_leaving_out_an_end_allows():
    """Against all intervals of grades with known probabilities."""
    ends = torch.tensor([-1.2, 0.1, 0.4, 1.5]).double()
    infinity = torch.tensor([torch.inf]).double()
    atoms = Atoms(torch.arange(5.0).double(), torch.cat([-infinity, ends]), torch.cat([ends, infinity]))
    mixture = AtomMixture(Mixture(torch.linspace(-3, 3, 25).double()[None], torch.tensor(1.0).double()), atoms)
    for coverage in (0.5, 0.8, 0.9, 0.95):
        low, high = mixture.interval(coverage)
        mass = mixture.pit(high) - mixture.pit(low - 1e-9)
        shorter = torch.maximum(
            mixture.pit(high) - mixture.pit(low), mixture.pit(high - 1e-9) - mixture.pit(low - 1e-9)
        )
        nearer = (mass - coverage).abs() <= (shorter - coverage).abs() + 1e-9
        assert bool(nearer[(low < high) & (mass > coverage)].all())
        assert 0.4 < float((mass >= coverage).double().mean()) < 1
        central = mixture.quantile((1 - coverage) / 2), mixture.quantile((1 + coverage) / 2)
        assert bool((low >= central[0]).all() and (high <= central[1]).all())
        assert bool(((high - low) < (central[1] - central[0])).any())


def test_an_interval_between_atoms_is_the_central_one():
    mixture, _ = rows()
    zero = Atoms(torch.zeros(1).double(), torch.tensor([-torch.inf]).double(), torch.tensor([0.3]).double())
    far = AtomMixture(mixture.rows(mixture.mean > 2), zero)
    for end, expected in zip(far.interval(0.9), far.base.interval(0.9), strict=True):
        torch.testing.assert_close(end, expected)


def test_values_that_do_not_repeat_have_no_atoms():
    mixture, _ = rows()
    assert fit_atoms(mixture, torch.randn(4000).double(), torch.ones(4000)) is None


def test_a_weight_of_two_counts_twice():
    mixture, y = rows(1000)
    twice = torch.arange(1000) % 2 == 0
    weighted = fit_atoms(mixture, y, torch.where(twice, 2.0, 1.0))
    index = torch.cat([torch.arange(1000), twice.nonzero()[:, 0]])
    repeated = fit_atoms(mixture.rows(index), y[index], torch.ones(len(index)))
    torch.testing.assert_close(weighted.high[:-1], repeated.high[:-1], atol=0.02, rtol=0)


def test_a_regressor_of_grades_predicts_grades(tmp_path):
    source = np.random.default_rng(0)
    x = source.normal(size=(300, 2))
    y = np.clip(np.round(x[:, 0] + 0.5 * source.normal(size=300)), -1, 2) + 10
    model = DropoutRegressor(**QUICK, random_state=0).fit(x, y)
    assert set(np.unique(model.predict_interval(x, 0.5))) <= set(np.unique(y))
    assert set(np.unique(model.sample_y(x, 20))) <= set(np.unique(y))
    low, high = model.predict_interval(x, 0.9)
    assert ((low <= y) & (y <= high)).mean() > 0.85
    recalibrated = with_recalibration(model, fit_recalibration(model, x, y, method="conformal"))
    both_ends = [recalibrated.predictive(x).quantile(level) for level in (0.25, 0.75)]
    np.testing.assert_array_equal(recalibrated.predict_interval(x, 0.5), np.stack(both_ends))  # as guaranteed
    model.save(tmp_path / "model.safetensors")
    loaded = DropoutRegressor.load(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(loaded.predict_interval(x), model.predict_interval(x))
