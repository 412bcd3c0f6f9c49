r"""LSTM and GRU whose dropout masks are drawn once per sequence (Gal and Ghahramani 2016, the variational RNN).

A recurrent network uses the same weights at every time step, so a draw of $\mathbf W = \mathbf z \mathbf M$ is one mask
for all of them: fresh masks at every step, as `nn.LSTM(dropout=)` draws them, are draws from no $q(\mathbf W)$. With
`dropbayes.layers.Embedding` before them, inputs, recurrent state and word types are all dropped this way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropbayes.weight_layers import is_bias

__all__ = ["GRU", "LSTM"]


class _Recurrence(nn.RNNBase, ABC):
    """What LSTM and GRU share: masks, layers and directions; the parameters are those of the torch namesake."""

    drop_prob: float
    recurrent_drop_prob: float

    def _set_drop_probs(self, drop_prob: float, recurrent_drop_prob: float | None) -> None:
        self.drop_prob = drop_prob
        self.recurrent_drop_prob = drop_prob if recurrent_drop_prob is None else recurrent_drop_prob
        for name in ("drop_prob", "recurrent_drop_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"`{name}` must lie in [0, 1); got {getattr(self, name)!r}.")
        if self.dropout or self.proj_size:
            raise ValueError(
                "`dropout` and `proj_size` must be left at 0; got "
                f"{self.dropout!r} and {self.proj_size!r}. Use `drop_prob`: it drops the inputs of every layer."
            )

    @property
    def keep_prob(self) -> float:
        return 1.0 - self.drop_prob

    def parameter_keep_probs(self) -> dict[str, float]:
        """The keep probability of every parameter: of inputs, of the recurrent state, and 1 for biases."""
        keep = {True: 1.0 - self.recurrent_drop_prob, False: 1.0 - self.drop_prob}
        names = [name for name, _ in self.named_parameters()]
        return {name: 1.0 if is_bias(name) else keep[name.startswith("weight_hh")] for name in names}

    @abstractmethod
    def _steps(self, gates: Tensor, state: tuple[Tensor, ...], mask: Tensor, weight: Tensor, bias: Any) -> Any:
        """Runs over the time axis (0) of the projected inputs; returns the outputs and the last state."""

    def _run(self, x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`x` in its own layout and states `[layer x direction, row, hidden]`, to outputs in that layout and states."""
        time_axis = 1 if self.batch_first else 0
        directions = 2 if self.bidirectional else 1
        last: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            # One mask per sequence, in the layout of x so that the row axis stays where the network has it.
            masked = x * F.dropout(torch.ones_like(x.narrow(time_axis, 0, 1)), self.drop_prob, self.training)
            outputs = []
            for direction in range(directions):
                suffix = f"_l{layer}" + ("_reverse" if direction else "")
                gates = F.linear(masked, self._get(f"weight_ih{suffix}"), self._get(f"bias_ih{suffix}"))
                gates = gates.movedim(time_axis, 0)
                ones = x.new_ones([1 if axis == time_axis else size for axis, size in enumerate(x.shape[:2])])
                ones = ones[..., None].expand(-1, -1, self.hidden_size)
                mask = F.dropout(ones, self.recurrent_drop_prob, self.training).squeeze(time_axis)
                state = tuple(s[layer * directions + direction] for s in states)
                output, state = self._steps(
                    gates.flip(0) if direction else gates,
                    state,
                    mask,
                    self._get(f"weight_hh{suffix}"),
                    self._get(f"bias_hh{suffix}"),
                )
                outputs.append(output.flip(0) if direction else output)
                last.append(state)
            x = torch.cat(outputs, -1).movedim(0, time_axis)
        return x, tuple(torch.stack(parts) for parts in zip(*last, strict=True))

    def _get(self, name: str) -> Any:
        return getattr(self, name) if name.startswith("weight") or self.bias else None

    def _forward(self, x: Any, states: tuple[Tensor, ...] | None, n_states: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not isinstance(x, Tensor):
            raise TypeError(
                f"`input` must be a tensor; got {type(x).__name__}. Pad the sequences (pad_packed_sequence) instead."
            )
        batch_axis = 0 if self.batch_first else 1
        unbatched = x.dim() == 2
        if unbatched:
            x = x.unsqueeze(batch_axis)
            states = None if states is None else tuple(s.unsqueeze(1) for s in states)
        if states is None:
            n_cells = self.num_layers * (2 if self.bidirectional else 1)
            states = (x.new_zeros(n_cells, x.shape[batch_axis], self.hidden_size),) * n_states
        output, states = self._run(x, states)
        if unbatched:
            return output.squeeze(batch_axis), tuple(s.squeeze(1) for s in states)
        return output, states

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, drop_prob={self.drop_prob}, recurrent_drop_prob={self.recurrent_drop_prob}"


class LSTM(_Recurrence, nn.LSTM):
    r"""`nn.LSTM` with one dropout mask per sequence for the inputs of every layer and one for its recurrent state.

    All gates share a unit's mask (the paper's tied weights), so a draw is $\mathbf z \mathbf M$ on the stacked matrices
    torch stores. Parameters, arguments and results are those of `nn.LSTM`, and with both probabilities 0 so are the
    numbers.

    Args:
        *args: As for `nn.LSTM`.
        drop_prob: Of input units, in every layer.
        recurrent_drop_prob: Of the recurrent state's units; None takes `drop_prob`.
        **kwargs: As for `nn.LSTM`; `dropout` and `proj_size` must be 0.

    Example:
        >>> output, (h, c) = LSTM(3, 4, drop_prob=0.2, batch_first=True)(torch.zeros(2, 5, 3))
        >>> output.shape, h.shape
        (torch.Size([2, 5, 4]), torch.Size([1, 2, 4]))
    """

    def __init__(
        self, *args: Any, drop_prob: float = 0.1, recurrent_drop_prob: float | None = None, **kwargs: Any
    ) -> None:
        nn.LSTM.__init__(self, *args, **kwargs)
        self._set_drop_probs(drop_prob, recurrent_drop_prob)

    def _steps(self, gates: Tensor, state: tuple[Tensor, ...], mask: Tensor, weight: Tensor, bias: Any) -> Any:
        h, c = state
        outputs = []
        for step in gates:
            enter, forget, content, leave = (step + F.linear(h * mask, weight, bias)).chunk(4, -1)
            c = torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(content)
            h = torch.sigmoid(leave) * torch.tanh(c)
            outputs.append(h)
        return torch.stack(outputs), (h, c)

    def forward(self, input: Any, hx: Any = None) -> Any:
        output, (h, c) = self._forward(input, hx, n_states=2)
        return output, (h, c)


class GRU(_Recurrence, nn.GRU):
    r"""`nn.GRU` with one dropout mask per sequence for the inputs of every layer and one for its recurrent state.

    Args:
        *args: As for `nn.GRU`.
        drop_prob: Of input units, in every layer.
        recurrent_drop_prob: Of the recurrent state's units; None takes `drop_prob`.
        **kwargs: As for `nn.GRU`; `dropout` must be 0.
    """

    def __init__(
        self, *args: Any, drop_prob: float = 0.1, recurrent_drop_prob: float | None = None, **kwargs: Any
    ) -> None:
        nn.GRU.__init__(self, *args, **kwargs)
        self._set_drop_probs(drop_prob, recurrent_drop_prob)

    def _steps(self, gates: Tensor, state: tuple[Tensor, ...], mask: Tensor, weight: Tensor, bias: Any) -> Any:
        (h,) = state
        outputs = []
        for step in gates:
            reset, update, content = step.chunk(3, -1)
            # Only what a weight multiplies is masked: the carried-over state below is not.
            reset_h, update_h, content_h = F.linear(h * mask, weight, bias).chunk(3, -1)
            z = torch.sigmoid(update + update_h)
            h = (1 - z) * torch.tanh(content + torch.sigmoid(reset + reset_h) * content_h) + z * h
            outputs.append(h)
        return torch.stack(outputs), (h,)

    def forward(self, input: Any, hx: Any = None) -> Any:
        output, (h,) = self._forward(input, None if hx is None else (hx,), n_states=1)
        return output, h
