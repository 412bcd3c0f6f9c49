"""Small networks, one for each mechanism by which a PyTorch network can be random."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Specimen:
    make: Callable[[], tuple[nn.Module, Any]]
    raw: bool = False  # draws bare random numbers, so no mask can be left out
    always: bool = False  # random in evaluation, too
    row_axis: int = 0


ZOO: dict[str, Specimen] = {}


def specimen(**traits: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        ZOO[make.__name__] = Specimen(make, **traits)
        return make

    return register


def flat(n: int = 4, width: int = 6) -> Tensor:
    return torch.randn(n, width)


class Module(nn.Module):
    """A module around a function of itself and its input."""

    def __init__(self, forward: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


# Dropout modules ----------------------------------------------------------------------------------------------------


@specimen()
def dropout_mlp():
    return nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)), flat()


@specimen()
def dropout_only_before_last_layer():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)), flat()


@specimen()
def nested_sequential():
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.GELU()), nn.Sequential(nn.Dropout(0.4), nn.Linear(8, 2))
    ), flat()


@specimen()
def dropout1d():
    return nn.Sequential(nn.Conv1d(2, 5, 3), nn.Dropout1d(0.4), nn.Flatten(), nn.Linear(20, 2)), torch.randn(4, 2, 6)


@specimen()
def dropout2d():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(16, 2)), torch.randn(
        3, 1, 4, 4
    )


@specimen()
def dropout3d():
    net = nn.Sequential(nn.Conv3d(1, 4, 2), nn.Dropout3d(0.4), nn.Flatten(), nn.Linear(32, 2))
    return net, torch.randn(3, 1, 3, 3, 3)


@specimen()
def alpha_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(8, 2)), flat()


@specimen()
def feature_alpha_dropout():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.SELU(), nn.FeatureAlphaDropout(0.3), nn.Flatten(), nn.Linear(16, 2))
    return net, torch.randn(3, 1, 4, 4)


@specimen()
def in_place_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3, inplace=True), nn.Linear(8, 2)), flat()


@specimen()
def in_place_dropout_of_the_input():
    return Module(lambda m, x: m.b(F.dropout(x, 0.4, m.training, inplace=True)), b=nn.Linear(6, 2)), flat()


@specimen()
def in_place_result_ignored():
    def forward(m, x):
        h = m.a(x)
        m.drop(h)
        return m.b(h)

    return Module(forward, a=nn.Linear(6, 8), drop=nn.Dropout(0.5, inplace=True), b=nn.Linear(8, 2)), flat()


@specimen()
def module_used_twice():
    drop = nn.Dropout(0.3)
    return Module(
        lambda m, x: m.b(m.drop(F.relu(m.a(m.drop(x))))), a=nn.Linear(6, 8), b=nn.Linear(8, 2), drop=drop
    ), flat()


@specimen(always=True)
def dropout_made_in_forward():
    return Module(lambda m, x: m.b(nn.Dropout(0.4)(torch.relu(m.a(x)))), a=nn.Linear(6, 8), b=nn.Linear(8, 2)), flat()


# Functional dropout ---------------------------------------------------------------------------------------------------


@specimen()
def functional_dropout():
    return Module(
        lambda m, x: m.b(F.dropout(F.relu(m.a(x)), 0.3, m.training)), a=nn.Linear(6, 8), b=nn.Linear(8, 2)
    ), flat()


@specimen(always=True)
def functional_dropout_hard_coded():
    return Module(
        lambda m, x: m.b(F.dropout(F.relu(m.a(x)), 0.3, training=True)), a=nn.Linear(6, 8), b=nn.Linear(8, 2)
    ), flat()


@specimen()
def torch_dropout():
    return Module(
        lambda m, x: m.b(torch.dropout(m.a(x), 0.3, m.training)), a=nn.Linear(6, 8), b=nn.Linear(8, 2)
    ), flat()


@specimen()
def functional_feature_dropouts():
    def forward(m, x):
        h = F.dropout2d(m.a(x), 0.3, m.training)
        h = F.feature_alpha_dropout(h, 0.2, m.training)
        return m.b(F.alpha_dropout(h.flatten(1), 0.2, m.training))

    return Module(forward, a=nn.Conv2d(1, 4, 3), b=nn.Linear(16, 2)), torch.randn(3, 1, 4, 4)


@specimen()
def drop_connect():
    return Module(lambda m, x: F.linear(x, F.dropout(m.a.weight, 0.3, m.training), m.a.bias), a=nn.Linear(6, 3)), flat()


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


# Stochastic depth and raw random numbers ------------------------------------------------------------------------------


class DropPath(nn.Module):
    """Stochastic depth, by either of its two usual spellings."""

    def __init__(self, drop_prob: float, spelling: str) -> None:
        super().__init__()
        self.drop_prob, self.spelling = drop_prob, spelling

    def forward(self, x: Tensor) -> Tensor:
        if self.drop_prob == 0.0 or not self.training:
            return x
        keep_prob = 1 - self.drop_prob
        shape = (x.shape[0],) + (1,) * (x.dim() - 1)
        if self.spelling == "bernoulli":
            return x * x.new_empty(shape).bernoulli_(keep_prob).div_(keep_prob)
        return x / keep_prob * (keep_prob + torch.rand(shape, dtype=x.dtype, device=x.device)).floor_()


@specimen()
def drop_path_bernoulli():
    return Module(lambda m, x: x + m.p(m.a(x)), a=nn.Linear(6, 6), p=DropPath(0.3, "bernoulli")), flat()


@specimen(raw=True)
def drop_path_rand():
    return Module(lambda m, x: x + m.p(m.a(x)), a=nn.Linear(6, 6), p=DropPath(0.3, "rand")), flat()


@specimen(raw=True)
def gaussian_noise():
    return Module(
        lambda m, x: m.b(m.a(x) + 0.3 * torch.randn_like(m.a(x))), a=nn.Linear(6, 8), b=nn.Linear(8, 2)
    ), flat()


@specimen(raw=True)
def noise_in_a_buffer():
    def forward(m, x):
        noise = x.new_empty(x.shape[0], 8)
        noise.normal_(0, 0.5)
        return m.b(m.a(x) + noise)

    return Module(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 2)), flat()


@specimen(raw=True)
def bernoulli_of_probabilities():
    return Module(
        lambda m, x: m.b(torch.bernoulli(torch.sigmoid(m.a(x)))), a=nn.Linear(6, 8), b=nn.Linear(8, 2)
    ), flat()


@specimen(raw=True)
def gumbel_softmax():
    return Module(lambda m, x: m.b(F.gumbel_softmax(m.a(x), tau=1.0)), a=nn.Linear(6, 8), b=nn.Linear(8, 2)), flat()


# Networks that also do other things -----------------------------------------------------------------------------------


@specimen()
def convnet_with_batch_norm():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(4, 2),
    )  # fmt: skip
    net.train()
    for _ in range(3):
        net(torch.randn(8, 1, 4, 4))
    return net, torch.randn(3, 1, 4, 4)


@specimen()
def residual_with_norms():
    def forward(m, x):
        h = m.norm(x)
        return x + m.drop(m.b(F.gelu(m.a(h))))

    return Module(forward, norm=nn.LayerNorm(6), a=nn.Linear(6, 12), b=nn.Linear(12, 6), drop=nn.Dropout(0.3)), flat()


@specimen()
def embedding_bag_of_words():
    def forward(m, x):
        return m.head(m.drop(m.emb(x)).mean(1))

    return Module(forward, emb=nn.Embedding(10, 6), head=nn.Linear(6, 2), drop=nn.Dropout(0.3)), torch.randint(
        0, 10, (4, 5)
    )


@specimen()
def writes_into_a_buffer():
    def forward(m, x):
        out = torch.zeros(x.shape[0], 2, 3)
        for place in range(2):
            out[:, place] = m.b(m.drop(m.a(x)))
        return out

    return Module(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3), drop=nn.Dropout(0.3)), flat()


@specimen()
def branches_on_its_shape():
    def forward(m, x):
        return m.b(m.drop(m.a(x))) if float(x.new_ones(x.shape[1]).sum()) > 3 else x

    return Module(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 3), drop=nn.Dropout(0.3)), flat()


@specimen()
def reads_batch_size():
    return Module(lambda m, x: m.b(m.drop(m.a(x).view(x.shape[0], 2, 4).reshape(x.size(0), -1))),
                  a=nn.Linear(6, 8), b=nn.Linear(8, 2), drop=nn.Dropout(0.3)), flat()  # fmt: skip


@specimen()
def auxiliary_output_in_training():
    def forward(m, x):
        h = m.drop(F.relu(m.a(x)))
        return (m.b(h), m.aux(h)) if m.training else m.b(h)

    net = Module(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 2), aux=nn.Linear(8, 2), drop=nn.Dropout(0.3))
    return net, flat()


# Structured inputs and outputs ----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


@dataclass
class Record:
    logits: Tensor
    note: str


@specimen()
def tuple_in_named_tuple_out():
    def forward(m, a, b):
        h = m.drop(m.a(a) + m.b(b))
        return Pair(h, h.square())

    return Module(forward, a=nn.Linear(6, 3), b=nn.Linear(2, 3), drop=nn.Dropout(0.3)), (flat(), flat(4, 2))


@specimen()
def dict_in_dict_out():
    def forward(m, x, scale):
        h = m.drop(m.a(x))
        return {"h": h * scale, "nested": [h.sum(-1)]}

    return Module(forward, a=nn.Linear(6, 3), drop=nn.Dropout(0.3)), {"x": flat(), "scale": 2.0}


@specimen()
def dataclass_out():
    return Module(lambda m, x: Record(m.drop(m.a(x)), "kept"), a=nn.Linear(6, 3), drop=nn.Dropout(0.3)), flat()


# Parallel and compiled hulls ------------------------------------------------------------------------------------------


@specimen()
def data_parallel():
    return nn.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))), flat()


# Hugging Face, with random weights ------------------------------------------------------------------------------------


def ids() -> Tensor:
    return torch.randint(1, 50, (3, 5))


@functools.cache
def huggingface() -> Any:
    transformers = __import__("transformers")
    transformers.logging.set_verbosity_error()
    return transformers


def bert(attention: str) -> tuple[nn.Module, Any]:
    hf = huggingface()
    config = hf.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                           max_position_embeddings=16, attn_implementation=attention)  # fmt: skip
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[0, 3:] = 0
    return hf.BertForSequenceClassification(config), {"input_ids": ids(), "attention_mask": mask}


@specimen()
def bert_sdpa():
    return bert("sdpa")


@specimen()
def bert_eager():
    return bert("eager")


@specimen()
def gpt2():
    hf = huggingface()
    config = hf.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    return hf.GPT2Model(config), {"input_ids": ids(), "use_cache": False}


@specimen()
def distilbert():
    hf = huggingface()
    config = hf.DistilBertConfig(
        vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=16
    )
    return hf.DistilBertModel(config), {"input_ids": ids()}


@specimen()
def vit():
    hf = huggingface()
    config = hf.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8,
                          patch_size=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)  # fmt: skip
    return hf.ViTForImageClassification(config), {"pixel_values": torch.randn(3, 3, 8, 8)}


@specimen()
def t5():
    hf = huggingface()
    config = hf.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return hf.T5Model(config), {"input_ids": ids(), "decoder_input_ids": ids(), "use_cache": False}


def build(name: str) -> tuple[nn.Module, Any]:
    """The specimen with fixed weights and inputs, in evaluation."""
    with torch.random.fork_rng():
        torch.manual_seed(sum(map(ord, name)))
        net, x = ZOO[name].make()
    return net.eval(), x
