r"""Recurrent layers whose dropout masks are drawn once per sequence (Gal and Ghahramani 2016, the variational RNN).

A recurrent network uses the same weights at every time step, so a draw of $\mathbf W = \mathbf z \mathbf M$ is one mask
for all of them: new masks at every step, as in `nn.LSTM(dropout=)`, are not draws from any $q(\mathbf W)$. With
`dropbayes.layers.Embedding` before them, inputs, recurrent state and word types are all dropped this way.
"""

from abc import ABC, abstractmethod
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import has_torch_function
from torch.utils._pytree import PyTree

from dropbayes.layers.noise import Dropping, check_drop_prob
from dropbayes.layers.structure import is_bias

States = tuple[Tensor, ...]  # of one layer and direction: h, and for an LSTM c
_pass: ContextVar[tuple[int, dict[Any, Tensor]] | None] = ContextVar("forward pass", default=None)
"""The nesting depth of hooked networks in the current forward pass, and the masks drawn in it."""


def _begin_forward_pass(net: nn.Module, args: Any) -> None:
    depth, masks = _pass.get() or (0, {})
    _pass.set((depth + 1, masks))


def _end_forward_pass(net: nn.Module, args: Any, output: PyTree) -> None:
    depth, masks = _pass.get() or (1, {})
    _pass.set((depth - 1, masks) if depth > 1 else None)


def share_masks(net: nn.Module) -> None:
    """Makes the recurrent layers and cells of a network draw their masks once for each of its forward passes."""
    if _begin_forward_pass not in net._forward_pre_hooks.values():
        net.register_forward_pre_hook(_begin_forward_pass)
        net.register_forward_hook(_end_forward_pass, always_call=True)  # also after an error


def _mask(layer: nn.Module, key: str, ones: Tensor, drop_prob: float) -> Tensor:
    """A mask shaped like `ones`: inside a hooked forward pass, the layer's mask of that pass."""
    _, masks = _pass.get() or (0, {})
    full_key = (id(layer), key, tuple(ones.shape))
    if full_key not in masks:
        masks[full_key] = F.dropout(ones, drop_prob, layer.training)
    return masks[full_key]


def is_random(layer: nn.Module, x: PyTree) -> bool:
    """Whether masks are needed: in training or when operations are intercepted. Otherwise torch's kernel runs."""
    return layer.training or has_torch_function((x,))


class _LSTMStep:
    n_states = 2

    def _step(self, gates: Tensor, recurrent: Tensor, state: States) -> States:
        enter, forget, content, leave = (gates + recurrent).chunk(4, -1)
        c = torch.sigmoid(forget) * state[1] + torch.sigmoid(enter) * torch.tanh(content)
        return torch.sigmoid(leave) * torch.tanh(c), c


class _GRUStep:
    def _step(self, gates: Tensor, recurrent: Tensor, state: States) -> States:
        reset, update, content = gates.chunk(3, -1)
        # Only the factors of weights are masked: the carried-over state below is not.
        reset_h, update_h, content_h = recurrent.chunk(3, -1)
        z = torch.sigmoid(update + update_h)
        return ((1 - z) * torch.tanh(content + torch.sigmoid(reset + reset_h) * content_h) + z * state[0],)


class _RNNStep:
    nonlinearity: str

    def _step(self, gates: Tensor, recurrent: Tensor, state: States) -> States:
        return ((torch.tanh if self.nonlinearity == "tanh" else torch.relu)(gates + recurrent),)


class _Dropped(Dropping, nn.Module, ABC):
    """The two drop probabilities of a recurrent layer, and the keep probabilities they imply for its parameters."""

    recurrent_drop_prob: float
    n_states = 1

    @abstractmethod
    def _step(self, gates: Tensor, recurrent: Tensor, state: States) -> States:
        """The next state, `h` first, from the products with the input and with the state, and the state."""

    def __init__(
        self, *args: Any, drop_prob: float = 0.1, recurrent_drop_prob: float | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)  # of the torch namesake
        if getattr(self, "dropout", 0):
            raise ValueError(f"`dropout` must be 0; got {self.dropout!r}. `drop_prob` drops the inputs of every layer.")
        self.set_drop_probs(drop_prob, recurrent_drop_prob)

    def set_drop_probs(self, drop_prob: float, recurrent_drop_prob: float | None = None) -> None:
        """Sets both probabilities; None takes `drop_prob` for the recurrent state too."""
        recurrent = drop_prob if recurrent_drop_prob is None else recurrent_drop_prob
        check_drop_prob(drop_prob)
        check_drop_prob(recurrent, "recurrent_drop_prob")
        self.drop_prob, self.recurrent_drop_prob = drop_prob, recurrent

    def parameter_keep_probs(self) -> dict[str, float]:
        keep = {True: 1.0 - self.recurrent_drop_prob, False: 1.0 - self.drop_prob}
        names = [name for name, _ in self.named_parameters()]
        return {name: 1.0 if is_bias(name) else keep[name.startswith(("weight_hh", "weight_hr"))] for name in names}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, drop_prob={self.drop_prob}, recurrent_drop_prob={self.recurrent_drop_prob}"


class _Recurrence(_Dropped, nn.RNNBase):
    """The base of the layers: masks, stacked layers, directions; the parameters are those of the torch namesake."""

    def forward(self, input: Any, hx: Any = None) -> PyTree:
        if not is_random(self, self.weight_ih_l0):
            return super().forward(input, hx)
        if not isinstance(input, (Tensor, PackedSequence)):
            raise TypeError(f"`input` must be a tensor or a PackedSequence; got {type(input).__name__}.")
        alone = self.n_states == 1  # torch then takes and returns the state itself, not a tuple
        states = (hx,) if alone and hx is not None else hx
        row_axis = 0 if self.batch_first else 1
        if isinstance(input, PackedSequence):
            padded, lengths = pad_packed_sequence(input, batch_first=self.batch_first)
            output, states = self._run(padded, states, lengths.to(padded.device))
            is_sorted = input.sorted_indices is None
            output = pack_padded_sequence(output, lengths, self.batch_first, enforce_sorted=is_sorted)
        elif input.dim() == 2:  # one sequence without the axis of rows
            states = None if states is None else tuple(state.unsqueeze(1) for state in states)
            output, states = self._run(input.unsqueeze(row_axis), states)
            output, states = output.squeeze(row_axis), tuple(state.squeeze(1) for state in states)
        else:
            output, states = self._run(input, states)
        return output, states[0] if alone else states

    def _run(self, x: Tensor, states: States | None, lengths: Tensor | None = None) -> tuple[Any, States]:
        """Maps `x` and states `[layer x direction, row, hidden]` to outputs in the layout of `x` and final states."""
        time_axis = 1 if self.batch_first else 0
        directions = ("", "_reverse") if self.bidirectional else ("",)
        widths = (self.proj_size or self.hidden_size, self.hidden_size)[: self.n_states]
        shapes = [(self.num_layers * len(directions), x.shape[1 - time_axis], width) for width in widths]
        states = tuple(x.new_zeros(shape) for shape in shapes) if states is None else states
        if [tuple(state.shape) for state in states] != shapes:
            raise ValueError(f"`hx` must have shape {shapes}; got {[tuple(state.shape) for state in states]}.")
        last: list[States] = []
        for layer in range(self.num_layers):
            # One mask per sequence, in the layout of x, so that the row axis does not move.
            masked = x * _mask(self, f"input {layer}", torch.ones_like(x.narrow(time_axis, 0, 1)), self.drop_prob)
            outputs = []
            for direction in directions:
                state = tuple(s[len(last)] for s in states)
                output, state = self._direction(masked, state, f"_l{layer}{direction}", time_axis, lengths)
                outputs.append(output)
                last.append(state)
            x = torch.cat(outputs, -1)
        return x, tuple(torch.stack(states) for states in zip(*last, strict=True))

    def _direction(
        self, x: Tensor, state: States, suffix: str, time_axis: int, lengths: Tensor | None
    ) -> tuple[Tensor, States]:
        def state_mask(key: str, width: int) -> Tensor:
            ones = x.new_ones([1 if axis == time_axis else size for axis, size in enumerate(x.shape[:2])])
            ones = ones[..., None].expand(-1, -1, width)
            return _mask(self, key + suffix, ones, self.recurrent_drop_prob).squeeze(time_axis)

        weights = [getattr(self, f"weight_{kind}{suffix}") for kind in ("ih", "hh")]
        biases = [getattr(self, f"bias_{kind}{suffix}", None) for kind in ("ih", "hh")]
        gates = F.linear(x, weights[0], biases[0]).movedim(time_axis, 0)
        mask = state_mask("state", state[0].shape[-1])
        if self.proj_size:  # a matrix from the cell's output to the state, with dropped inputs
            dropped, projection = state_mask("projection", self.hidden_size), getattr(self, f"weight_hr{suffix}")
        reverse = suffix.endswith("_reverse")
        outputs: list[Tensor] = []
        for time in reversed(range(len(gates))) if reverse else range(len(gates)):
            step = self._step(gates[time], F.linear(state[0] * mask, weights[1], biases[1]), state)
            if self.proj_size:
                step = (F.linear(step[0] * dropped, projection), *step[1:])
            if lengths is not None:  # a sequence that has ended (in reverse: not begun) keeps its state
                inside = (time < lengths)[:, None]
                step = tuple(torch.where(inside, new, old) for new, old in zip(step, state, strict=True))
            state = step
            outputs.append(state[0])
        return torch.stack(outputs[::-1] if reverse else outputs, time_axis), state


class LSTM(_LSTMStep, _Recurrence, nn.LSTM):
    r"""`nn.LSTM` with one dropout mask per sequence for the inputs of every layer and one for its recurrent state.

    All gates share a unit's mask (the paper's tied weights), so a draw is $\mathbf z \mathbf M$ on the stacked matrices
    torch stores. Parameters, results and further arguments are those of `nn.LSTM`, whose `dropout` must be 0; with both
    probabilities 0 so are the numbers. `drop_prob` is that of input units, in every layer, `recurrent_drop_prob` that
    of the recurrent state's units, by default the same. Packed sequences have one mask each too.

    Example:
        >>> output, (h, c) = LSTM(3, 4, drop_prob=0.2, batch_first=True)(torch.zeros(2, 5, 3))
        >>> output.shape, h.shape
        (torch.Size([2, 5, 4]), torch.Size([1, 2, 4]))
    """


class GRU(_GRUStep, _Recurrence, nn.GRU):
    r"""`nn.GRU` with the masks and the further arguments of `LSTM`."""


class RNN(_RNNStep, _Recurrence, nn.RNN):
    r"""`nn.RNN` with the masks and the further arguments of `LSTM`."""


class _Cell(_Dropped, nn.RNNCellBase):
    """The common base of the cells, which compute one step; every call draws new masks, except under `share_masks`."""

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        if not is_random(self, input):
            return super().forward(input, hx)
        alone = self.n_states == 1  # torch then takes and returns the state itself, not a tuple
        zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
        state = (zeros,) * self.n_states if hx is None else (hx,) if alone else hx
        x = input * _mask(self, "input", torch.ones_like(input), self.drop_prob)
        h = state[0] * _mask(self, "state", torch.ones_like(state[0]), self.recurrent_drop_prob)
        gates, recurrent = F.linear(x, self.weight_ih, self.bias_ih), F.linear(h, self.weight_hh, self.bias_hh)
        state = self._step(gates, recurrent, state)
        return state[0] if alone else state


class LSTMCell(_LSTMStep, _Cell, nn.LSTMCell):
    """`nn.LSTMCell` with dropout on its input and recurrent state; under `add_dropout` a mask lasts a sequence."""


class GRUCell(_GRUStep, _Cell, nn.GRUCell):
    """`nn.GRUCell` with dropout on its input and recurrent state; under `add_dropout` a mask lasts a sequence."""


class RNNCell(_RNNStep, _Cell, nn.RNNCell):
    """`nn.RNNCell` with dropout on its input and recurrent state; under `add_dropout` a mask lasts a sequence."""
