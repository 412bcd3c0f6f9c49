"""Networks that also do other things, structured inputs and outputs, wrapped networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.sampling.zoo.specimens import Module, flat, specimen

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
