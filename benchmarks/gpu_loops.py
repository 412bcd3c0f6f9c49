"""The variance of a plain loop on a GPU, by several of torch's kernels, beside that of `predict`.

python -m benchmarks.gpu_loops, on a machine with a GPU.

A loop of passes in training mode drops by whatever kernel torch chooses. All should have one law. Each figure is the
variance of the outputs, summed over rows and columns, divided by that of the loop on the CPU; with as many passes, its
standard error is about 0.02.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import dropbayes as db
from benchmarks import history

N_PASSES = 4_000


class Encoder(nn.Module):
    """Two layers of attention over nine tokens."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean(1))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Three layers in both directions, with dropout between them."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(32, 16, 3, dropout=0.4, batch_first=True, bidirectional=True)  # type: ignore[call-arg]
        self.head = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])  # type: ignore[no-any-return]


CASES = {
    "encoder, float32": (Encoder, torch.float32),
    "encoder, float16": (Encoder, torch.float16),
    "encoder, bfloat16": (Encoder, torch.bfloat16),
    "LSTM": (lambda: Recurrent(nn.LSTM), torch.float32),
    "GRU": (lambda: Recurrent(nn.GRU), torch.float32),
}


@torch.no_grad()
def loop_variance(net: nn.Module, x: Tensor) -> float:
    """The variance over passes in training mode, summed."""
    trained = copy.deepcopy(net).train()
    return float(torch.stack([trained(x) for _ in range(N_PASSES)]).double().var(0).sum())


def measured(make: object, dtype: torch.dtype) -> dict[str, float]:
    """The variances of a network, relative to those of the loop on the CPU."""
    torch.manual_seed(5)
    net, x = make().eval(), torch.randn(6, 9, 32)  # type: ignore[operator]
    on_gpu, there = copy.deepcopy(net).to("cuda", dtype), x.to("cuda", dtype)
    expected, chosen = loop_variance(net, x), loop_variance(on_gpu, there)
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=False):
        plain = loop_variance(on_gpu, there)
    ours = float(db.predict(on_gpu, there, n_draws=N_PASSES).epistemic.double().sum())
    return {"loop": chosen / expected, "loop_plain": plain / expected, "predict": ours / expected}


def main() -> None:
    figures = {name: measured(*case) for name, case in CASES.items()}
    print("| network | loop | loop without flash attention and cuDNN | predict |\n|---|---|---|---|")
    for name, row in figures.items():
        print(f"| {name} | {row['loop']:.2f} | {row['loop_plain']:.2f} | {row['predict']:.2f} |")
    history.write("gpu_loops", {"variances": figures})


if __name__ == "__main__":
    main()
