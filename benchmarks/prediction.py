"""How fast a prediction is, against what others do: the plain loop of forwards, and the batch repeated.

Every figure is a ratio of times taken alternately in one process; the median of several. Each case has a process of its
own, with one thread unless told otherwise; *first call* is the first prediction of that process, inspection included,
in units of the loop. Run `python -m benchmarks.prediction [case ...] [--threads N] [--busy]`: it
prints a Markdown table and the goals it missed, and writes `benchmarks/results/prediction.json` when all cases ran
(`prediction_N_threads.json`, `prediction_busy.json` and so on for other conditions). `--busy` keeps every core at work
with something else meanwhile.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import copy
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dropbayes as db
from benchmarks import history
from benchmarks.networks import UNet
from benchmarks.networks import perceptron as perceptron_of

DRAWS = 100
MOST_MEMORY_MB = 50


@torch.inference_mode()
def plain_loop(net: nn.Module, x: Tensor, n_draws: int) -> tuple[Tensor, Tensor]:
    """The moments by a loop of forward passes, as most people write it."""
    draws = torch.stack([net(x) for _ in range(n_draws)])
    return draws.mean(0), draws.var(0)


@torch.inference_mode()
def repeated_batch(net: nn.Module, x: Tensor, n_draws: int) -> tuple[Tensor, Tensor]:
    """The moments by one forward pass over a repeated batch, as other libraries compute them."""
    draws = net(x.repeat(n_draws, *(1,) * (x.dim() - 1))).unflatten(0, (n_draws, -1))
    return draws.mean(0), draws.var(0)


# The networks ---------------------------------------------------------------------------------------------------------


def perceptron(drop_prob: float = 0.1) -> nn.Module:
    return nn.Sequential(nn.Dropout(drop_prob), nn.Linear(13, 50), nn.ReLU(), nn.Dropout(drop_prob), nn.Linear(50, 1))


def wide(drop_prob: float) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(2, 1024), nn.ReLU(), nn.Dropout(drop_prob)]
    for _ in range(4):
        layers += [nn.Linear(1024, 1024), nn.ReLU(), nn.Dropout(drop_prob)]
    return nn.Sequential(*layers, nn.Linear(1024, 1))


class LeNet(nn.Module):
    def __init__(self, *, every_layer: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5)
        self.fc1, self.fc2 = nn.Linear(800, 500), nn.Linear(500, 10)
        self.early, self.late = nn.Dropout(0.5 if every_layer else 0.0), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.early(F.max_pool2d(self.conv1(x), 2))
        h = self.early(F.max_pool2d(self.conv2(h), 2))
        return self.fc2(self.late(F.relu(self.fc1(h.flatten(1)))))


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        same = stride == 1 and width_in == width
        self.skip = nn.Identity() if same else nn.Conv2d(width_in, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.skip(x))


def resnet(width: int = 32) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    width_in = width
    for factor, stride in ((1, 1), (2, 2), (4, 2), (8, 2)):
        layers += [Block(width_in, width * factor, stride), Block(width * factor, width * factor, 1)]
        width_in = width * factor
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(width_in, 10))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 128, 2, dropout=0.3, batch_first=True), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Residual(nn.Module):
    """Residual layers of vectors, with dropout in each."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return self.head(x)


def transformer(width: int = 256, depth: int = 6) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True), depth)


class Tokens(nn.Module):
    """A Hugging Face encoder as a function of vectors of tokens to its first output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x).last_hidden_state[:, 0]


def bert(width: int = 256, depth: int = 4) -> nn.Module:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": width, "num_hidden_layers": depth, "intermediate_size": 4 * width}
    return Tokens(BertModel(BertConfig(num_attention_heads=4, **sizes)))


class Images(nn.Module):
    """A Hugging Face vision transformer as a function of images."""

    def __init__(self) -> None:
        from transformers import ViTConfig, ViTModel

        super().__init__()
        sizes = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 768}
        rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
        self.model = ViTModel(ViTConfig(image_size=96, patch_size=16, **sizes, **rates), add_pooling_layer=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).last_hidden_state[:, 0]


# Networks whose draws run one at a time: a batch repeated for all draws would give them one coin, or one expert's rows.


class RandomDepth(nn.Module):
    """Residual layers, each skipped by a coin of its own."""

    def __init__(self, layers: list[nn.Module], width: int, *, residual: bool) -> None:
        super().__init__()
        self.layers, self.head, self.drop = nn.ModuleList(layers), nn.Linear(width, 2), nn.Dropout(0.1)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.training and torch.rand(1) < 0.2:
                continue
            x = x + self.drop(torch.tanh(layer(x))) if self.residual else layer(x)
        return self.head(x.flatten(1, -2).mean(1) if x.dim() > 2 else x)


def layer_drop(width: int) -> nn.Module:
    layers = [nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True) for _ in range(4)]
    return RandomDepth(layers, width, residual=False)


def random_depth(width: int) -> nn.Module:
    return RandomDepth([nn.Linear(width, width) for _ in range(4)], width, residual=True)


class Packed(nn.Module):
    """An LSTM on packed sequences, whose lengths follow from the input."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(32, 128, 2, dropout=0.4, batch_first=True), nn.Linear(128, 1)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (2 + 9 * x[:, 0, 0].abs()).long().clamp(max=x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])


class SentRows(nn.Module):
    """Four experts, each of which sees the rows that a gate sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)
        self.experts = nn.ModuleList([perceptron_of(16, 64, 2, drop_prob=0.3) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = self.gate(x).argmax(-1), x.new_zeros(len(x), 2)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]))
        return out


ONE_AT_A_TIME: dict[str, Any] = {
    "LayerDrop 4x32, S=10, N=16": (lambda: layer_drop(32), (16, 10, 32), 50, 5, {}, 1 / 1.3),
    "LayerDrop 4x128, S=20, N=16": (lambda: layer_drop(128), (16, 20, 128), 50, 5, {}, 1 / 1.3),
    "random depth 4x64, N=16": (lambda: random_depth(64), (16, 64), 50, 9, {}, 1 / 1.3),
    "random depth 4x512, N=64": (lambda: random_depth(512), (64, 512), 50, 5, {}, 1 / 1.3),
    "packed LSTM 2x128, S=20, N=32": (Packed, (32, 20, 32), 50, 5, {}, 1 / 1.3),
    "rows sent to 4 experts, N=64": (SentRows, (64, 16), 50, 9, {}, 1 / 1.3),
}

# name: (network, rows, draws, repeats, keywords of predict, the goal)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int, dict[str, Any], float]] = {
    "MLP 13-50-1, N=1": (perceptron, (1, 13), DRAWS, 31, {}, 20),
    "MLP 13-50-1, N=100": (perceptron, (100, 13), DRAWS, 21, {}, 14),
    "MLP 13-50-1, N=1000": (perceptron, (1000, 13), DRAWS, 11, {}, 6),
    "MLP 13-50-1, N=10000": (perceptron, (10_000, 13), DRAWS, 5, {}, 4.3),
    "MLP 13-50-1, N=1000, draws only": (perceptron, (1000, 13), DRAWS, 11, {"sampling": db.Sampling(integrate_last_layer=False)}, 6),
    "MLP 13-50-1, N=10000, draws only": (perceptron, (10_000, 13), DRAWS, 5, {"sampling": db.Sampling(integrate_last_layer=False)}, 4.3),
    "MLP 13-50-1, N=1000, row masks": (perceptron, (1000, 13), DRAWS, 11, {"masks": "row"}, 1),
    "MLP 2-1024x5-1, N=200, row masks": (lambda: wide(0.1), (200, 2), DRAWS, 2, {"masks": "row"}, 1.3),
    "MLP 2-1024x5-1, p=.5, N=200, shared": (lambda: wide(0.5), (200, 2), DRAWS, 2, {}, 1),
    "MLP 2-1024x5-1, p=.5, N=1": (lambda: wide(0.5), (1, 2), DRAWS, 3, {}, 1),
    "LeNet, last layer, N=32": (lambda: LeNet(every_layer=False), (32, 1, 28, 28), DRAWS, 3, {}, 60),
    "LeNet, last layer, softmax": (lambda: LeNet(every_layer=False), (32, 1, 28, 28), DRAWS, 3, {"likelihood": db.Categorical()}, 1),
    "LeNet, every layer, N=32": (lambda: LeNet(every_layer=True), (32, 1, 28, 28), DRAWS, 3, {}, 2.2),
    "LeNet, every layer, N=1": (lambda: LeNet(every_layer=True), (1, 1, 28, 28), DRAWS, 5, {}, 1),
    "ResNet18-like, one dropout, N=4": (resnet, (4, 3, 32, 32), DRAWS, 3, {}, 90),
    "Transformer 6x256, S=64, N=4": (transformer, (4, 64, 256), 12, 3, {}, 1.1),
    "LSTM 2x128, S=50, N=16": (Recurrent, (16, 50, 32), DRAWS, 3, {}, 2.5),
    "MLP 13-50-1, N=1, row masks": (perceptron, (1, 13), DRAWS, 31, {"masks": "row"}, 1),
    "MLP 50-256-256-1, N=2000": (lambda: perceptron_of(50, 256, 256, 1, drop_prob=0.1), (2000, 50), 20, 3, {}, 1),
    "MLP 50-256-256-1, N=20000": (lambda: perceptron_of(50, 256, 256, 1, drop_prob=0.1), (20_000, 50), 20, 2, {}, 1),
    "MLP 50-512-512-1, N=2000": (lambda: perceptron_of(50, 512, 512, 1, drop_prob=0.1), (2000, 50), 20, 3, {}, 1),
    "MLP 50-512-512-1, N=20000": (lambda: perceptron_of(50, 512, 512, 1, drop_prob=0.1), (20_000, 50), 20, 2, {}, 1),
    "MLP 50-256-256-1, N=2000, row masks": (lambda: perceptron_of(50, 256, 256, 1, drop_prob=0.1), (2000, 50), 20, 3, {"masks": "row"}, 1),
    "U-Net 16 wide, 64x64, N=2": (lambda: UNet(16, 3, 0.5), (2, 3, 64, 64), 20, 3, {"sampling": db.Sampling(batch_invariant=False)}, 1),
    "BERT-like 4x256, S=64, N=4": (bert, (4, 64, 256), 12, 3, {}, 1),
    "ViT-like 4x192, 96x96, N=4": (Images, (4, 3, 96, 96), 12, 3, {}, 1),
    "Transformer 4x128, S=32, N=4": (lambda: transformer(128, 4), (4, 32, 128), 20, 5, {}, 1),
    "BERT-like 6x128, S=32, N=16": (lambda: bert(128, 6), (16, 32, 128), 50, 3, {}, 1),
    "BERT-like 6x128, S=32, N=1": (lambda: bert(128, 6), (1, 32, 128), 20, 5, {}, 1),
    "residual 4x256, N=1": (lambda: Residual(256, 4), (1, 256), 50, 9, {}, 1),
    "residual 4x256, N=64": (lambda: Residual(256, 4), (64, 256), 50, 5, {}, 1),
    "residual 4x256, N=1024": (lambda: Residual(256, 4), (1024, 256), 50, 3, {}, 1),
    "LSTM 2x128, S=50, N=256": (Recurrent, (256, 50, 32), 20, 2, {}, 1),
    "Transformer 4x128, S=32, N=256": (lambda: transformer(128, 4), (256, 32, 128), 20, 2, {}, 1),
    **ONE_AT_A_TIME,
}  # fmt: skip


# What others do -------------------------------------------------------------------------------------------------------


def in_training(net: nn.Module) -> nn.Module:
    """What others run: dropout on, normalisation frozen."""
    net = copy.deepcopy(net).train()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.eval()
    return net


def measure(name: str) -> dict[str, Any]:
    make, shape, n_draws, repeats, keywords, goal = CASES[name]
    torch.manual_seed(0)
    net, x = make().eval(), torch.randn(shape)
    noisy = in_training(net)
    fits = shape[0] * n_draws <= 400_000 and name not in ONE_AT_A_TIME
    ways: dict[str, Callable[[], Any]] = {
        "loop": lambda: plain_loop(noisy, x, n_draws),
        "ours": lambda: db.predict(net, x, n_draws=n_draws, **keywords),
    }
    if fits:
        ways["repeat"] = lambda: repeated_batch(noisy, x, n_draws)
    times: dict[str, list[float]] = {way: [] for way in ways}
    plain_loop(noisy, x, 2)  # torch's own first call is not ours
    start = time.perf_counter()
    method = db.predict(net, x, n_draws=n_draws, **keywords).method
    first = time.perf_counter() - start
    for _ in range(repeats):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            times[way].append(time.perf_counter() - start)
    medians = {way: statistics.median(values) for way, values in times.items()}
    return {
        "case": name,
        "draws": n_draws,
        "goal": goal,
        "against_loop": medians["loop"] / medians["ours"],
        "against_repeat": medians["repeat"] / medians["ours"] if fits else None,
        "loop_ms": 1e3 * medians["loop"],
        "ours_ms": 1e3 * medians["ours"],
        "first_ms": 1e3 * first,
        "method": method,
    }


# Memory and accuracy --------------------------------------------------------------------------------------------------

MEMORY = """
import gc, threading, time, psutil, torch, dropbayes as db
from benchmarks.prediction import perceptron
torch.set_num_threads(1)
net, x = perceptron().eval(), torch.randn(100_000, 13)
gc.collect()
process, seen, done = psutil.Process(), [], threading.Event()
before = process.memory_info().rss
def watch():
    while not done.is_set():
        seen.append(process.memory_info().rss)
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
db.predict(net, x, n_draws=1000)
done.set()
thread.join()
print((max(seen) - before) / 2**20)
"""


def peak_memory() -> float:
    """MB of resident memory that a prediction of 100,000 rows with 1000 draws adds."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    return float(done.stdout)


def accuracy(drop_prob: float, *, repeats: int = 60) -> dict[str, float]:
    """How many times smaller the error variance of a mean of 100 draws is than with independent draws."""
    torch.manual_seed(0)
    net, x = perceptron(drop_prob).eval(), torch.randn(32, 13)
    truth = db.predict(net, x, n_draws=200_000, sampling=db.Sampling(sampler="independent")).mean
    errors = {}
    for name, keywords in {
        "independent": {"sampling": db.Sampling(sampler="independent", integrate_last_layer=False)},
        "stratified": {"sampling": db.Sampling(integrate_last_layer=False)},
        "stratified, last layer integrated": {},
    }.items():
        means = [db.predict(net, x, n_draws=100, seed=seed, **keywords).mean for seed in range(1, repeats + 1)]  # type: ignore[arg-type]
        errors[name] = float((torch.stack(means) - truth).square().mean())
    return {name: errors["independent"] / error for name, error in errors.items()}


def in_a_process_of_its_own(name: str, threads: int) -> dict[str, Any]:
    """`measure(name)` where no case before has left the allocator in a state of its own."""
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        1, mp_context=fresh, initializer=torch.set_num_threads, initargs=(threads,)
    ) as pool:
        return pool.submit(measure, name).result()


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keeps every core at work with something else."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help="The cases to run; all if none is named.")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", action="store_true", help="Keep every core at work with something else.")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.cases if name not in CASES]:
        parser.error(f"no case is named {unknown[0]!r}; those there are: {', '.join(CASES)}.")
    torch.set_num_threads(1)
    with busy_cores() if arguments.busy else contextlib.nullcontext():
        rows = measured(arguments.cases or list(CASES), arguments.threads)
    if arguments.cases:
        return
    goals = [history.Goal(row["case"], row["against_loop"], at_least=row["goal"]) for row in rows]
    goals += [history.Goal(f"{row['case']}, against the repeated batch", row["against_repeat"], at_least=0.95) for row in rows if row["against_repeat"]]  # fmt: skip
    conditions = [f"{arguments.threads}_threads"] * (arguments.threads > 1) + ["busy"] * arguments.busy
    if conditions:
        history.write("_".join(["prediction", *conditions]), {"speed": rows}, goals)
        return
    memory = peak_memory()
    print(f"\nMemory added by T=1000, N=100,000: {memory:.0f} MB (goal: at most {MOST_MEMORY_MB}).")
    gains = {str(p): accuracy(p) for p in (0.5, 0.2, 0.05)}
    for p, gain in gains.items():
        print(f"Error variance at drop_prob {p}: " + ", ".join(f"{k} 1/{v:.1f}" for k, v in gain.items()) + ".")
    goals.append(history.Goal("memory added (MB)", memory, at_most=MOST_MEMORY_MB))
    history.write("prediction", {"speed": rows, "memory_mb": memory, "error_variance_gain": gains}, goals)


def measured(wanted: list[str], threads: int) -> list[dict[str, Any]]:
    rows = []
    print("| case | against the loop | against the repeated batch | first call / loop | goal | method |")
    print("|---|---|---|---|---|---|")
    for name in wanted:
        row = in_a_process_of_its_own(name, threads)
        rows.append(row)
        repeat = "-" if row["against_repeat"] is None else f"{row['against_repeat']:.1f}x"
        first = f"{row['first_ms'] / row['loop_ms']:.2g}"
        cells = (name, f"{row['against_loop']:.1f}x", repeat, first, f"{row['goal']:g}x", row["method"])
        print(f"| {' | '.join(cells)} |", flush=True)
    return rows


if __name__ == "__main__":
    main()
