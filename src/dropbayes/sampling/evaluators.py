"""The evaluators of a block of rows: any network by a strategy, or a perceptron directly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from dropbayes.sampling.compaction import compact_draws, tensors_of_sites
from dropbayes.sampling.fusion import kernels_on
from dropbayes.sampling.graphs import graphs_of_perceptron, replay
from dropbayes.sampling.inspection import Inspection
from dropbayes.sampling.keyed import Masks, Unsuited
from dropbayes.sampling.looks import flags_up
from dropbayes.sampling.masks import Keys, tables
from dropbayes.sampling.perceptron import Perceptron
from dropbayes.sampling.perceptron_draws import PerceptronDraws, prepare
from dropbayes.sampling.strategies import Strategy, Work, evaluate
from dropbayes.sampling.streaming import Moments, mean_over_draws, result_dtype
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

    def moments(self, inputs: Inputs, first_row: int, draws: range) -> list[tuple[Tensor, Tensor]] | None:
        """The mean and variance of each output over draws, for all rows at once; None if draws must be streamed."""

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

    def _replay(
        self,
        inputs: Inputs,
        rows: range,
        first_row: int,
        draws: range,
        summarise: Callable[[list[Tensor]], list[Tensor]],
    ) -> list[Tensor] | None:
        """The summary of the outputs from a CUDA graph of the same evaluation; None without one."""
        masks, anatomy = self.masks, self.masks.anatomy
        depends = anatomy.stateful or anatomy.skips_layers or anatomy.seeds_itself
        if inputs.device.type != "cuda" or depends or masks.positions or len(rows) < inputs.n_rows:
            return None
        pairs = len(rows) * len(draws)
        mapped_bytes = pairs * anatomy.suffix_bytes + len(rows) * anatomy.pass_bytes
        drawn = (masks.keys, masks.per_row, masks.integrate, self.strategy, self.sizes, self.leave_out)
        return replay(
            self.record.graphs,
            inputs,
            (*drawn, first_row, draws, summarise),
            lambda own: summarise(self._evaluate(own, rows, first_row, draws)),
            held=tables(masks.keys, inputs.device),
            operations=len(rows) * anatomy.prefix_cost + pairs * anatomy.suffix_cost,
            n_bytes=mapped_bytes if self.strategy.draws == "mapped" else pairs * anatomy.pass_bytes,
        )

    def moments(self, inputs: Inputs, first_row: int, draws: range) -> list[tuple[Tensor, Tensor]] | None:
        """The mean and variance over draws of each output from a CUDA graph; None without one."""
        summarise = _integrated_moments if self.masks.integrate else _moments
        tensors = self._replay(inputs, range(inputs.n_rows), first_row, draws, summarise)
        return None if tensors is None else list(zip(tensors[::2], tensors[1::2], strict=True))

    def __call__(self, inputs: Inputs, rows: range, first_row: int, draws: range) -> Chunk:
        outputs = self._replay(inputs, rows, first_row, draws, list)
        if outputs is None:
            outputs = self._evaluate(inputs, rows, first_row, draws)
        if not self.masks.integrate:
            return Chunk(draws, outputs, None)
        return Chunk(draws, outputs[:-1], [mean_over_draws(outputs[-1])])


def _moments(outputs: list[Tensor]) -> list[Tensor]:
    """The mean and the variance over draws of each output, in turn."""
    return [tensor for output in outputs for tensor in _total_moments(output, None)]


def _integrated_moments(outputs: list[Tensor]) -> list[Tensor]:
    """The mean and the variance over draws of the one output, with the variance over its integrated last layer."""
    output, variance = outputs
    return _total_moments(output, mean_over_draws(variance))


def _total_moments(output: Tensor, within: Tensor | None) -> list[Tensor]:
    """The mean over draws, and the variance between them plus that within a draw, by the law of total variance."""
    if output.is_complex():
        raise Unsuited("complex outputs")
    moments = Moments()
    moments.add(output)
    moments.finish()
    variance = moments.variance if within is None else moments.variance + within * len(output) / moments.count
    return [moments.mean.to(result_dtype(output)), variance.to(result_dtype(output))]


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

    def moments(self, inputs: Inputs, first_row: int, draws: range) -> list[tuple[Tensor, Tensor]] | None:
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
        return [moments]

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

    def moments(self, inputs: Inputs, first_row: int, draws: range) -> list[tuple[Tensor, Tensor]] | None:
        """The mean and variance over draws from a CUDA graph; None without one."""
        layers, anatomy, pairs = self.perceptron.layers, self.perceptron.anatomy, inputs.n_rows * len(draws)

        def call(own: Inputs) -> list[Tensor]:
            chunk = self(own, range(own.n_rows), first_row, draws)
            return _total_moments(chunk.outputs[0], None if chunk.variances is None else chunk.variances[0])

        tensors = replay(
            graphs_of_perceptron(layers),
            inputs,
            (self.perceptron.form, self.keys, self.integrate, draws),
            call,
            held=tensors_of_sites(layers, inputs.leaves[0], self.keys, draws, self.integrate),
            operations=inputs.n_rows * anatomy.prefix_cost + pairs * anatomy.suffix_cost,
            n_bytes=pairs * anatomy.pass_bytes,
        )
        return None if tensors is None else [(tensors[0], tensors[1])]

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
