"""Attention and recurrence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sampling.zoo.specimens import Module, specimen

# Attention ------------------------------------------------------------------------------------------------------------


@specimen()
def multi_head_attention():
    attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    return Module(lambda m, x: m.att(x, x, x)[0], att=attention), torch.randn(3, 4, 8)


@specimen()
def multi_head_attention_without_weights():
    attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    return Module(lambda m, x: m.att(x, x, x, need_weights=False)[0], att=attention), torch.randn(3, 4, 8)


@specimen(row_axis=1)
def multi_head_attention_sequence_first():
    attention = nn.MultiheadAttention(8, 2, dropout=0.3)
    return Module(lambda m, x: m.att(x, x, x)[0], att=attention), torch.randn(4, 3, 8)


class ScaledAttention(nn.Module):
    """Attention as users write it: the functional form, its dropout behind the training flag."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.kwargs = nn.Linear(8, 24), nn.Linear(8, 8), kwargs

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-2, -3)
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0, **self.kwargs)
        return self.out(h.transpose(-2, -3).flatten(-2))


@specimen()
def scaled_dot_product_attention():
    return ScaledAttention(), torch.randn(3, 4, 8)


@specimen()
def causal_attention():
    return ScaledAttention(is_causal=True), torch.randn(3, 4, 8)


@specimen()
def transformer_encoder_layer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True), torch.randn(3, 4, 8)


@specimen()
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2), torch.randn(3, 4, 8)


@specimen()
def transformer_decoder_layer():
    return nn.TransformerDecoderLayer(8, 2, 16, dropout=0.2, batch_first=True), (
        torch.randn(3, 4, 8),
        torch.randn(3, 5, 8),
    )


@specimen(row_axis=1)
def transformer_sequence_first():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2), torch.randn(4, 3, 8)


# Recurrence -----------------------------------------------------------------------------------------------------------


def recurrent(kind: Callable[..., nn.Module], **kwargs: Any) -> tuple[nn.Module, Tensor]:
    rnn = kind(3, 5, 2, dropout=0.4, **kwargs)
    return Module(lambda m, x: m.rnn(x)[0], rnn=rnn), torch.randn(4, 6, 3)


@specimen()
def lstm():
    return recurrent(nn.LSTM, batch_first=True)


@specimen()
def lstm_bidirectional():
    return recurrent(nn.LSTM, batch_first=True, bidirectional=True)


@specimen()
def lstm_projected():
    return recurrent(nn.LSTM, batch_first=True, proj_size=2)


@specimen(row_axis=1)
def lstm_sequence_first():
    net, x = recurrent(nn.LSTM)
    return net, x.transpose(0, 1).contiguous()


@specimen()
def lstm_with_states():
    return nn.LSTM(3, 5, 3, dropout=0.4, batch_first=True, bias=False), torch.randn(4, 6, 3)


@specimen()
def gru():
    return recurrent(nn.GRU, batch_first=True)


@specimen()
def gru_bidirectional():
    return recurrent(nn.GRU, batch_first=True, bidirectional=True)


@specimen()
def rnn():
    return recurrent(nn.RNN, batch_first=True)


@specimen()
def lstm_cell_with_dropout():
    def forward(m, x):
        h = c = x.new_zeros(x.shape[0], 5)
        for step in x.unbind(1):
            h, c = m.cell(F.dropout(step, 0.3, m.training), (h, c))
        return h

    return Module(forward, cell=nn.LSTMCell(3, 5)), torch.randn(4, 4, 3)
