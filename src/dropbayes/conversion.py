r"""Dropout before every weight layer of an existing network, as a copy [GG16, section "Applications"].

The copy has the same modules and the same state dict: dropout is attached to the weight layers, not put between them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from dropbayes.layers import row_mask
from dropbayes.weight_layers import is_bias, weight_layers

__all__ = ["add_dropout"]


class InputDropout:
    """A forward pre-hook that drops the input of the layer it is attached to."""

    def __init__(self, drop_prob: float) -> None:
        self.drop_prob = drop_prob

    @property
    def keep_prob(self) -> float:
        return 1.0 - self.drop_prob

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        n_inputs = 2 if isinstance(layer, nn.Bilinear) else 1  # what follows the inputs (states, sizes) is not dropped
        names = list(kwargs)[: max(n_inputs - len(args), 0)]
        dropped = (self.drop(layer, x) for x in args[:n_inputs])
        return (*dropped, *args[n_inputs:]), kwargs | {name: self.drop(layer, kwargs[name]) for name in names}

    def drop(self, layer: nn.Module, x: Any) -> Any:
        if isinstance(layer, nn.RNNBase):
            return self.drop_sequences(layer, x)
        return F.dropout(x, self.drop_prob, layer.training)

    def drop_sequences(self, layer: nn.RNNBase, x: Tensor | PackedSequence) -> Tensor | PackedSequence:
        """One mask per sequence, the same at all its time steps (Gal and Ghahramani 2016, variational RNN)."""
        if isinstance(x, PackedSequence):
            mask = F.dropout(torch.ones_like(x.data[: int(x.batch_sizes[0])]), self.drop_prob, layer.training)
            row = torch.cat([torch.arange(int(size)) for size in x.batch_sizes]).to(x.data.device)
            return x._replace(data=x.data * mask[row])
        time_axis = 1 if layer.batch_first and x.dim() == 3 else 0
        return x * F.dropout(torch.ones_like(x.narrow(time_axis, 0, 1)), self.drop_prob, layer.training)


class RowDropout:
    """A forward hook that drops whole rows of an embedding table: a word type is dropped wherever it stands."""

    def __init__(self, drop_prob: float) -> None:
        self.drop_prob = drop_prob

    @property
    def keep_prob(self) -> float:
        return 1.0 - self.drop_prob

    def __call__(self, layer: nn.Embedding, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor:
        indices = args[0] if args else kwargs["input"]

        def mask(*shape: int) -> Tensor:
            ones = torch.ones(shape, dtype=output.dtype, device=output.device)
            return F.dropout(ones, self.drop_prob, layer.training)

        return output * row_mask(indices, layer.num_embeddings, mask)


class DroppedAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with dropout before each of its four projections; made by `add_dropout` alone."""

    drop_prob: float

    @property
    def keep_prob(self) -> float:
        return 1.0 - self.drop_prob

    def parameter_keep_probs(self) -> dict[str, float]:
        """The keep probability of every parameter: biases are not dropped."""
        names = [name for name, _ in self.named_parameters()]
        return {name: 1.0 if is_bias(name) else self.keep_prob for name in names}

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention`, with a mask each for query, key, value and the output projection."""
        q, k, v = (F.dropout(x, self.drop_prob, self.training) for x in (query, key, value))
        swap = self.batch_first and query.dim() == 3
        if swap:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        # torch's function ends with the output projection: given the identity, it stops before it (exactly).
        identity = torch.eye(self.embed_dim, dtype=q.dtype, device=q.device)
        heads, weights = F.multi_head_attention_forward(
            q,
            k,
            v,
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            identity,
            None,
            training=self.training,
            key_padding_mask=key_padding_mask,
            need_weights=need_weights,
            attn_mask=attn_mask,
            use_separate_proj_weight=not self._qkv_same_embed_dim,
            q_proj_weight=self.q_proj_weight,
            k_proj_weight=self.k_proj_weight,
            v_proj_weight=self.v_proj_weight,
            average_attn_weights=average_attn_weights,
            is_causal=is_causal,
        )
        if swap:
            heads = heads.transpose(0, 1)
        return self.out_proj(F.dropout(heads, self.drop_prob, self.training)), weights


def _has_dropout_before(net: nn.Module) -> set[nn.Module]:
    """The weight layers that follow an `nn.Dropout` in an `nn.Sequential`: there order of use is certain."""
    found: set[nn.Module] = set()
    layers = {module for _, module in weight_layers(net)}
    for sequence in net.modules():
        dropped = False
        for module in sequence if isinstance(sequence, nn.Sequential) else ():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                dropped = dropped or module.p > 0
            elif module in layers:
                found |= {module} if dropped else set()
                dropped = False
            elif any(part in layers for part in module.modules()):
                dropped = False
    return found


def _chosen(where: Any, net: nn.Module) -> Callable[[str, nn.Module], bool]:
    """`where` as a predicate of (name, module)."""
    if where is None:
        return lambda name, module: True
    if callable(where):
        return lambda name, module: bool(where(name, module))
    names = {where} if isinstance(where, str) else set(where)
    known = {name for name, _ in net.named_modules()}
    if names - known:
        raise ValueError(
            f"`where` must name modules of `net`; got {sorted(names - known)}. List them with net.named_modules()."
        )
    return lambda name, module: any(name == chosen or name.startswith(f"{chosen}.") for chosen in names)


def add_dropout(
    net: nn.Module,
    drop_prob: float = 0.1,
    *,
    where: Callable[[str, nn.Module], bool] | Collection[str] | None = None,
) -> nn.Module:
    r"""A copy of `net` with dropout before every weight layer: $q(\omega)$ over all its weights [GG16, section 3].

    Linear and convolution layers drop their input's elements; recurrent layers drop their input with one mask per
    sequence; an attention drops the inputs of its query, key, value and output projections; an `nn.Embedding` drops
    whole rows of its table, that is word types, with one mask per row of indices. In evaluation mode the copy computes
    what `net` computes; in training mode, and under `dropbayes.predict`, it is random.

    The original is untouched. The copy has the same state dict keys and can be copied and pickled. Layers that have
    dropout already (an `nn.Dropout` before them in an `nn.Sequential`, a layer of `dropbayes.layers`) keep theirs; a
    second call replaces the probability of the first rather than stacking on it. An `nn.EmbeddingBag`, which looks
    up and sums in one operation, is left as it is. `dropbayes.precision.keep_probs_by_order` reads the result.

    Args:
        net: Any network.
        drop_prob: The probability of dropping a unit, in [0, 1): `p` of `nn.Dropout`, one minus the paper's p.
        where: Limits the change: a predicate of (name, module), or module names (a name includes its submodules).

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).eval()
        >>> bayesian = add_dropout(net, 0.2)
        >>> torch.equal(bayesian(torch.ones(3, 4)), net(torch.ones(3, 4)))
        True
        >>> bayesian.state_dict().keys() == net.state_dict().keys()
        True
    """
    if not 0 <= drop_prob < 1:
        raise ValueError(
            f"`drop_prob` must lie in [0, 1); got {drop_prob!r}. It is the probability of dropping a unit, not of "
            "keeping it."
        )
    result = copy.deepcopy(net)
    chosen = _chosen(where, result)
    already = _has_dropout_before(result)
    for name, layer in list(weight_layers(result)):
        if chosen(name, layer) and layer not in already:
            _attach(layer, drop_prob)
    for module in result.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # nested tensors only exist on the fused path, which skips submodules
    return result


def _attach(layer: nn.Module, drop_prob: float) -> None:
    if isinstance(layer, nn.MultiheadAttention):
        layer.__class__ = DroppedAttention
        layer.drop_prob = drop_prob  # type: ignore[assignment]
        return
    if hasattr(layer, "parameter_keep_probs") or isinstance(layer, nn.EmbeddingBag):
        return
    for hook in (*layer._forward_pre_hooks.values(), *layer._forward_hooks.values()):
        if isinstance(hook, (InputDropout, RowDropout)):
            hook.drop_prob = drop_prob
            return
    if isinstance(layer, nn.Embedding):
        layer.register_forward_hook(RowDropout(drop_prob), with_kwargs=True)
    else:
        layer.register_forward_pre_hook(InputDropout(drop_prob), with_kwargs=True)
