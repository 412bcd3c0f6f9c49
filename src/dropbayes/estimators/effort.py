r"""The effort of a fit: its candidates, the length of their training, and the size of the ensemble."""

from __future__ import annotations

from dataclasses import dataclass

Candidate = tuple[float, float, float]
"""The drop probability of the inputs, that of all other layers, and the fraction of the steps.

A short training costs little and also guards against over-fitting.
"""


@dataclass(frozen=True)
class Effort:
    """The settings of a search, which do not depend on the table."""

    candidates: tuple[Candidate, ...]
    # Candidates that see the bins of the columns too: better where the target jumps or bends, worse where it is smooth.
    binned: tuple[Candidate, ...] = ()
    # Candidates that learn what a Gaussian process leaves; without any, no process is fitted.
    offset: tuple[Candidate, ...] = ()
    n_finalists: int = 0  # the best candidates, which are trained again for all steps
    hidden: tuple[int, ...] = (48, 48)  # widths: multiples of 16 fill a processor's vectors (50 takes as long as 64)
    wide_rows: int = 10**9  # from so many rows on, the hidden layers are twice as wide
    learning_rate: float = 0.01  # that of Adam at first; it decays to zero along a cosine
    # The decay rates of Adam's moments. A second moment that forgets sooner saves a third of the steps.
    betas: tuple[float, float] = (0.9, 0.999)
    # The number of rows per step from 3,000 rows on. Steps of 256 rows rather than 128 are half as many, at a learning
    # rate greater by the root of two.
    large_batch: int = 128
    weight_decays: tuple[float, ...] = (1e-6,)  # λ, relative to half the mean squared error of standardised targets
    # A network is trained for `steps` + `steps_per_row` · N steps, at most `max_steps` unless the epochs need more.
    steps: int = 2000
    steps_per_row: float = 0.0
    max_steps: int = 10**9
    bin_inputs: int = 32  # the maximum number of inputs from the bins of all columns
    n_members: int = 3  # candidates selected for the ensemble
    n_networks: int = 6  # those trained on all rows, which the members share
    large_networks: int = 6  # the same from 2,000 rows on, where a network more costs most and adds least
    search_draws: int = 32  # per network and held-out row, in the choice among candidates
    noise_draws: int = 8  # per member and held-out row, to which the noise model is fitted
    # The steps of the noise model's fit, at least 100 for more than 1,000 rows of a large table; more over-fit a few
    # hundred held-out rows.
    noise_steps: int = 50
    noise_rows: int = 2000  # the maximum number of held-out rows to which the noise model is fitted
    n_trees: int = 0  # of the forest of each fold beside the networks


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
