"""The evaluators of a block of rows: any network by a strategy, or a perceptron directly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from dropbayes.sampling.compaction import compact_draws
from dropbayes.sampling.fusion import kernels_on
from dropbayes.sampling.graphs import replay
from dropbayes.sampling.inspection import Inspection
from dropbayes.sampling.keyed import Masks
from dropbayes.sampling.looks import flags_up
from dropbayes.sampling.masks import Keys, tables
from dropbayes.sampling.perceptron import Perceptron
from dropbayes.sampling.perceptron_draws import PerceptronDraws, prepare
from dropbayes.sampling.strategies import Strategy, Work, evaluate
from dropbayes.sampling.streaming import mean_over_draws
from dropbayes.sampling.trees import Inputs
from dropbayes.sampling.views import View

_PREPARED_CHUNKS = 2  # chunks of draws kept with a plan: each holds masked copies of weights


@dataclass(frozen=True)
class Chunk:
    """The outputs of some draws for a block of rows, `[draw, row, ...]`.

    If the last layer is integrated over, also the mean over these draws of its variance, `[row, ...]`.
    """

    draws: range
    outputs: list[Tensor]
    variances: list[Tensor] | None


class Evaluator(Protocol):
    """A function that computes the draws of a block of rows."""

    @property
    def name(self) -> str:
        """Its description in `Prediction.method`."""

    def __call__(self, inputs: Inputs, rows: range, first_row: int, draws: range) -> Chunk:
        """The draws of the rows `rows` of `inputs`, whose first one is keyed as `first_row`."""

    def replicate(self, number: int) -> Evaluator:
        """The same evaluator with independent draws."""


@dataclass(frozen=True)
class General:
    """Any network, by the strategy that passed its trial."""

    net: nn.Module
    record: Inspection
    masks: Masks
    strategy: Strategy
    leave_out: tuple[str, ...]
    sizes: tuple[int, ...]  # the sizes to which a block is padded; empty for no padding

    @property
    def name(self) -> str:
        return str(self.strategy)

    def replicate(self, number: int) -> General:
        keys = replace(self.masks.keys, replicate=number)
        return replace(self, masks=replace(self.masks, keys=keys))

    def _network(self) -> nn.Module:
        if self.masks.anatomy.stateful:  # every run starts from the network's state
            return View(self.net, flags_up(self.leave_out, self.masks.anatomy.lowered)).net
        return self.record.view.net

    def _evaluate(self, inputs: Inputs, rows: range, first_row: int, draws: range) -> list[Tensor]:
        padded = min((size for size in self.sizes if size >= len(rows)), default=len(rows))
        size = len(rows) if self.strategy.rows == "single" else padded
        leaves = inputs.padded_rows(rows.start, rows.stop, size)
        work = Work(self._network, inputs, leaves, draws, range(first_row, first_row + size))
        return [out[:, : len(rows)] for out in evaluate(self.strategy, self.masks, work)]

    def _replay(self, inputs: Inputs, rows: range, first_row: int, draws: range) -> list[Tensor] | None:
        """The outputs from a CUDA graph of the same evaluation; None without one."""
        masks, anatomy = self.masks, self.masks.anatomy
        depends = anatomy.stateful or anatomy.skips_layers or anatomy.seeds_itself
        if inputs.device.type != "cuda" or depends or masks.positions or len(rows) < inputs.n_rows:
            return None
        pairs = len(rows) * len(draws)
        return replay(
            self.record.graphs,
            self.net,
            inputs,
            (masks.keys, masks.per_row, masks.integrate, self.strategy, self.sizes, self.leave_out, first_row, draws),
            lambda own: self._evaluate(own, rows, first_row, draws),
            held=tables(masks.keys, inputs.device),
            operations=len(rows) * anatomy.prefix_cost + pairs * anatomy.suffix_cost,
            n_bytes=pairs * anatomy.pass_bytes,
        )

    def __call__(self, inputs: Inputs, rows: range, first_row: int, draws: range) -> Chunk:
        outputs = self._replay(inputs, rows, first_row, draws)
        if outputs is None:
            outputs = self._evaluate(inputs, rows, first_row, draws)
        if not self.masks.integrate:
            return Chunk(draws, outputs, None)
        return Chunk(draws, outputs[:-1], [mean_over_draws(outputs[-1])])


@dataclass(frozen=True)
class Direct:
    """A perceptron, evaluated layer by layer without interception."""

    perceptron: Perceptron
    keys: Keys
    per_row: bool
    integrate: bool
    rows: int
    prepared: dict[range, PerceptronDraws] | None = None  # of earlier calls; None for a network that may change

    name = "direct"

    def replicate(self, number: int) -> Direct:
        return replace(self, keys=replace(self.keys, replicate=number), prepared=None)

    def moments(self, inputs: Inputs, first_row: int, draws: range) -> tuple[Tensor, Tensor] | None:
        """The mean and variance over draws of all rows by one kernel; None if no kernel supports this perceptron."""
        x = inputs.leaves[0]
        kernels = kernels_on(x.device)
        if kernels is None or self.perceptron.kernel_layers is None or x.dtype != torch.float32:
            return None
        rows = range(first_row, first_row + inputs.n_rows) if self.per_row else None
        moments: tuple[Tensor, Tensor] = kernels.perceptron_moments(
            self.perceptron.kernel_layers,
            x.contiguous(),
            self.keys,
            draws=draws,
            rows=rows,
            integrate_last=self.integrate,
        )
        return moments

    def __call__(self, inputs: Inputs, rows: range, first_row: int, draws: range) -> Chunk:
        x = inputs.leaves[0][rows.start : rows.stop]
        outputs, variance = self.prepared_draws(draws, x)(x, first_row)
        return Chunk(draws, [outputs], None if variance is None else [variance])

    def prepared_draws(self, draws: range, x: Tensor) -> PerceptronDraws:
        """The prepared draws, remembered if the network cannot change: repeated calls with one seed prepare once."""
        known = None if self.prepared is None else self.prepared.get(draws)
        if known is not None:
            return known
        made = prepare(
            self.perceptron, self.keys, draws, block=self.rows, per_row=self.per_row, integrate=self.integrate,
            like=x[:0],
        )  # fmt: skip
        if self.prepared is not None:
            if len(self.prepared) == _PREPARED_CHUNKS:
                self.prepared.clear()
            self.prepared[draws] = made
        return made


@dataclass(frozen=True)
class Compacted:
    """A wide perceptron whose dropped units are left out of its products."""

    perceptron: Perceptron
    keys: Keys
    integrate: bool

    name = "direct, compacted"

    def replicate(self, number: int) -> Compacted:
        return replace(self, keys=replace(self.keys, replicate=number))

    def __call__(self, inputs: Inputs, rows: range, first_row: int, draws: range) -> Chunk:
        x = inputs.leaves[0][rows.start : rows.stop]
        # On a CPU, one draw at a time: its weights stay in the cache for all rows.
        chunks = [range(draw, draw + 1) for draw in draws] if x.device.type == "cpu" else [draws]
        results = [
            compact_draws(self.perceptron.layers, x, self.keys, draws=chunk, integrate_last=self.integrate)
            for chunk in chunks
        ]
        outputs = torch.cat([outputs for outputs, _ in results])
        if not self.integrate:
            return Chunk(draws, [outputs], None)
        shares = [variance.double() for _, variance in results if variance is not None]
        return Chunk(draws, [outputs], [torch.stack(shares).mean(0)])
