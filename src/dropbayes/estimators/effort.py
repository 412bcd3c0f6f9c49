r"""The effort of a fit: its candidates, the length of their training, and the size of the ensemble."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """The settings of a search, which do not depend on the table.

    Attributes:
        candidates: The drop probability of the inputs, that of all other layers, and the fraction of the steps. A short
            training costs little and also guards against over-fitting.
        binned: The same for candidates that see the bins of the columns too (see `estimators.bins`): better where the
            target jumps or bends, worse where it is smooth.
        offset: The same for candidates that learn what a Gaussian process leaves (see `estimators.process`); without
            any, no process is fitted.
        n_finalists: The number of best candidates that are trained again for all steps; 0 for none.
        hidden: The widths of the hidden layers; multiples of 16 fill a processor's vectors (50 takes as long as 64).
        wide_rows: The number of rows from which the hidden layers are twice as wide.
        learning_rate: The initial learning rate of Adam; it decays to zero along a cosine.
        betas: The decay rates of Adam's moments. A second moment that forgets sooner saves a third of the steps.
        large_batch: The number of rows per step from 3,000 rows on. Steps of 256 rows rather than 128 are half as many,
            at a learning rate greater by the root of two.
        weight_decays: The candidate values of λ, relative to half the mean squared error of standardised targets.
        steps, steps_per_row: A network is trained for `steps` + `steps_per_row` · N steps.
        max_steps: The maximum number of steps, unless the minimum number of epochs needs more.
        bin_inputs: The maximum number of inputs from the bins of all columns.
        n_members: The number of candidates selected for the ensemble.
        n_networks: The number of networks trained on all rows, which the members share.
        large_networks: Their number from 2,000 rows on, where a network more costs most and adds least.
        search_draws: The number of draws per network and held-out row in the choice among candidates.
        noise_draws: The number of draws per member and held-out row to which the noise model is fitted.
        noise_steps: The number of steps of the noise model's fit; more of them over-fit a few hundred held-out rows. In
            a large table, with more than 1,000 of them, at least 100.
        noise_rows: The maximum number of held-out rows to which the noise model is fitted.
        n_trees: The number of trees of the forest of each fold beside the networks; 0 for none.
    """

    candidates: tuple[tuple[float, float, float], ...]
    binned: tuple[tuple[float, float, float], ...] = ()
    offset: tuple[tuple[float, float, float], ...] = ()
    n_finalists: int = 0
    hidden: tuple[int, ...] = (48, 48)
    wide_rows: int = 10**9
    learning_rate: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    large_batch: int = 128
    weight_decays: tuple[float, ...] = (1e-6,)
    steps: int = 2000
    steps_per_row: float = 0.0
    max_steps: int = 10**9
    bin_inputs: int = 32
    n_members: int = 3
    n_networks: int = 6
    large_networks: int = 6
    search_draws: int = 32
    noise_draws: int = 8
    noise_steps: int = 50
    noise_rows: int = 2000
    n_trees: int = 0


EFFORTS = {
    "quick": Effort(
        candidates=((0.0, 0.01, 1.0), (0.0, 0.05, 1.0), (0.05, 0.1, 1.0), (0.1, 0.2, 0.5)),
        hidden=(50, 50),
        steps=500,
        n_members=2,
        n_networks=2,
        large_networks=2,
        noise_steps=60,
        noise_rows=500,
    ),
    "standard": Effort(
        candidates=(
            *((0.0, 0.0, 0.2), (0.0, 0.01, 0.2), (0.0, 0.05, 0.2), (0.0, 0.1, 0.2)),
            *((0.05, 0.1, 0.2), (0.1, 0.2, 0.2)),
        ),
        binned=((0.0, 0.01, 0.2), (0.0, 0.05, 0.2), (0.05, 0.1, 0.2)),
        offset=((0.0, 0.01, 0.2), (0.0, 0.1, 0.2), (0.1, 0.2, 0.2)),
        n_finalists=2,
        betas=(0.9, 0.99),
        large_batch=256,
        steps=1700,
        steps_per_row=0.2,
        max_steps=6000,
        large_networks=4,
        search_draws=16,
        n_trees=20,
    ),
    "best": Effort(
        candidates=(
            *((0.0, 0.0, 0.2), (0.0, 0.01, 0.2), (0.0, 0.05, 0.2), (0.0, 0.1, 0.2), (0.02, 0.05, 0.2)),
            *((0.05, 0.1, 0.2), (0.0, 0.05, 0.04), (0.05, 0.1, 0.04), (0.1, 0.2, 0.1)),
        ),
        binned=((0.0, 0.0, 0.2), (0.0, 0.01, 0.2), (0.0, 0.05, 0.2), (0.05, 0.1, 0.2), (0.05, 0.1, 0.04)),
        offset=((0.0, 0.01, 0.2), (0.0, 0.05, 0.1), (0.05, 0.1, 0.1), (0.1, 0.2, 0.04)),
        n_finalists=3,
        bin_inputs=64,
        hidden=(100, 100),
        wide_rows=20_000,
        learning_rate=5e-3,
        steps=15_000,
        steps_per_row=6.0,
        n_networks=9,
        large_networks=9,
        search_draws=64,
        noise_draws=16,
        noise_steps=300,
        noise_rows=20_000,
        n_trees=100,
    ),
}
"""The efforts by name; "best" is the method of the UCI table."""
