"""One pass instead of a hundred on networks people train, on a GPU: how close, how fast, and what control saves.

*Speed*: a ResNet-18 with dropout in every block and BERT-base, with random weights: `predict(method="linear")` against 50
draws. *Digits*: ten networks trained on MNIST for a short time, judged on noisy test digits (their logits) by many draws:
the linear method, and the squared errors of mean and variance of a few draws with independent masks, relative to those
with stratified masks and with the linear part as a control variate.

Run `DROPBAYES_DATA=... python -m benchmarks.one_pass_gpu [--device cpu --quick]`; it prints tables and the goals missed,
and (unless quick) writes `one_pass_gpu.json`. MNIST is read from the folder; without it, scikit-learn's digits are used.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import pathlib
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import dropbayes as db
from benchmarks import history
from benchmarks.gpu import Clock, in_training
from benchmarks.history import Goal
from benchmarks.networks import bert, perceptron, tokens
from dropbayes.tracing.outputs import split
from experiments.datasets import digits

N_TRUE, N_FEW, N_SEEDS = 10_000, 50, 10
NOISE = 0.5  # the standard deviation of the noise on a test digit's pixels


# Comparison with many draws -------------------------------------------------------------------------------------------


def flat(tree: Any) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in split(tree)[0]])


def rank_correlation(one: Tensor, other: Tensor) -> float:
    if len(one) < 3:
        return 1.0
    return float(torch.stack([values.argsort().argsort().double() for values in (one, other)]).corrcoef()[0, 1])


def compared(found: db.Prediction, drawn: db.Prediction) -> dict[str, float]:
    """A prediction without draws against many draws: ratios of standard deviations, their ranks, and the means."""
    std, truth = flat(found.std), flat(drawn.std)
    varies = truth > 1e-6 * truth.max()
    low, median, high = (std / truth)[varies].quantile(torch.tensor([0.1, 0.5, 0.9]).to(std)).tolist()
    error = ((flat(found.mean) - flat(drawn.mean)).abs() / truth)[varies].median()
    rank = rank_correlation(std[varies], truth[varies])
    return {"median": median, "low": low, "high": high, "rank": rank, "mean_error": float(error)}


def cells(one: dict[str, float]) -> list[str]:
    spread = f"{one['median']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"
    return [spread, f"{one['rank']:.2f}", f"{one['mean_error']:.2f}"]


HEAD = ["network", "std / draws: median [10 %, 90 %]", "rank correlation", "error of the mean, in std"]


def table(rows: Iterable[list[str]], head: list[str]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# Speed ----------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions beside a shortcut, channels dropped between them."""

    def __init__(self, before: int, after: int, stride: int, drop_prob: float) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(),
            nn.Dropout2d(drop_prob), nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        plain = stride == 1 and before == after
        self.shortcut = nn.Identity() if plain else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.branch(x) + self.shortcut(x))


def resnet18(n_outputs: int) -> nn.Module:
    """A ResNet-18 for 224 x 224 pixels, with dropout of channels in each of its eight blocks."""
    widths, blocks = (64, 64, 128, 256, 512), []
    for before, after in itertools.pairwise(widths):
        blocks += [Residual(before, after, 1 if before == after else 2, 0.1), Residual(after, after, 1, 0.1)]
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, n_outputs))


def one_pass_by_hand(net: nn.Module, x: Tensor) -> Tensor:
    """The linear method by hand: a forward with a graph, and a backward to the masks for each output."""
    masks: list[Tensor] = []

    def masked(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        masks.append(torch.ones_like(output, requires_grad=True))
        return output * masks[-1]

    dropouts = [module for module in net.modules() if isinstance(module, (nn.Dropout, nn.Dropout2d))]
    hooks = [module.register_forward_hook(masked) for module in dropouts]
    output = net(x)
    for hook in hooks:
        hook.remove()
    for column in range(output.shape[1]):
        torch.autograd.grad(output[:, column].sum(), masks, retain_graph=True, allow_unused=True)
    return output


def speed(clock: Clock, quick: bool) -> dict[str, dict[str, float]]:
    """The linear method against 50 draws, in milliseconds."""
    pixels = 64 if quick else 224
    networks: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], str]] = {
        "ResNet-18, one output": (lambda: resnet18(1), lambda n: torch.randn(n, 3, pixels, pixels), "images"),
        "ResNet-18, 10 outputs": (lambda: resnet18(10), lambda n: torch.randn(n, 3, pixels, pixels), "images"),
        "BERT-base, 2 outputs": (bert, tokens(128, 30_000), "texts"),
    }
    sizes = {"images": (2,) if quick else (32, 128), "texts": (2,) if quick else (16, 64)}
    cases = [(*network, n) for network in networks.items() for n in sizes[network[1][2]]]
    found = {}
    for name, (make, inputs, rows), n_rows in cases:
        torch.manual_seed(0)
        net, x = make().to(clock.device).eval(), inputs(n_rows).to(clock.device)
        noisy = in_training(net)
        n_draws = 3 if quick else 50

        def loop(noisy: nn.Module = noisy, x: Tensor = x, n_draws: int = n_draws) -> Tensor:
            with torch.no_grad():
                return torch.stack([noisy(x) for _ in range(n_draws)])

        ways: dict[str, Callable[[], Any]] = {
            "linear": lambda net=net, x=x: db.predict(net, x, method="linear"),
            "by hand": lambda net=net, x=x: one_pass_by_hand(net, x),
            "shared": lambda net=net, x=x, n=n_draws: db.predict(net, x, n_draws=n),
            "row": lambda net=net, x=x, n=n_draws: db.predict(net, x, n_draws=n, masks="row"),
            "loop": loop,
        }
        times = {way: clock.median_ms(run)[0] for way, run in ways.items()}
        times["gain"] = min(times["shared"], times["row"]) / times["linear"]
        found[f"{name}, {n_rows} {rows}"] = times
        print(name, n_rows, {way: round(value, 2) for way, value in times.items()}, flush=True)
        del net, noisy, x, ways
    return found


# Digits ---------------------------------------------------------------------------------------------------------------


def lenet(drop_prob: float, everywhere: bool) -> nn.Module:
    between = [nn.Dropout(drop_prob)] if everywhere else []
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.ReLU(), *between, nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), *between, nn.Linear(800, 500), nn.ReLU(), nn.Dropout(drop_prob), nn.Linear(500, 10),
    )  # fmt: skip


def residual(drop_prob: float) -> nn.Module:
    blocks = [Residual(a, b, s, drop_prob) for a, b, s in ((16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2))]
    first = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Vision(nn.Module):
    """A small vision transformer: patches of 7 x 7, attention and feed-forward dropped."""

    def __init__(self, drop_prob: float = 0.1, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, 7)
        self.places = nn.Parameter(torch.randn(16, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 128, drop_prob, "gelu", batch_first=True, norm_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x).flatten(2).transpose(1, 2) + self.places).mean(1))


class Reader(nn.Module):
    """A GRU cell that reads the lines of an image, its input and its state dropped."""

    def __init__(self, drop_prob: float = 0.1, width: int = 96) -> None:
        super().__init__()
        self.cell, self.drop, self.head = nn.GRUCell(28, width), nn.Dropout(drop_prob), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.cell.hidden_size)
        for line in x.squeeze(1).unbind(1):
            state = self.cell(self.drop(line), self.drop(state))
        return self.head(state)


def flattened(*widths: int, drop_prob: float) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *perceptron(784, *widths, 10, drop_prob=drop_prob))  # type: ignore[misc]


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "perceptron 3x512, p 0.1": lambda: flattened(512, 512, 512, drop_prob=0.1),
    "perceptron 3x512, p 0.5": lambda: flattened(512, 512, 512, drop_prob=0.5),
    "perceptron 6x256, p 0.2": lambda: flattened(*[256] * 6, drop_prob=0.2),
    "LeNet, last layer, p 0.5": lambda: lenet(0.5, everywhere=False),
    "LeNet, every layer, p 0.1": lambda: lenet(0.1, everywhere=True),
    "LeNet, every layer, p 0.5": lambda: lenet(0.5, everywhere=True),
    "residual, channels, p 0.1": lambda: residual(0.1),
    "residual, channels, p 0.3": lambda: residual(0.3),
    "vision transformer, p 0.1": Vision,
    "recurrent cell, p 0.1": Reader,
}


def trained(net: nn.Module, x: Tensor, y: Tensor, n_steps: int) -> nn.Module:
    """The network after a few hundred steps of Adam, batches of 256."""
    optimiser = torch.optim.Adam(net.train().parameters(), lr=1e-3)
    for _ in range(n_steps):
        rows = torch.randint(0, len(y), (256,), device=x.device)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
        optimiser.step()
    return net.eval()


WAYS: dict[str, dict[str, Any]] = {
    "independent": {"sampling": db.Sampling(sampler="independent")},
    "independent, controlled": {"method": "controlled", "sampling": db.Sampling(sampler="independent")},
    "stratified": {},
    "stratified, controlled": {"method": "controlled"},
}


def digit_networks(clock: Clock, quick: bool) -> dict[str, dict[str, Any]]:
    """Each of the ten networks: how close the linear method is, and the gain of each way over independent masks."""
    data, device = digits("auto"), clock.device
    n_true, n_rows, n_seeds, n_steps = (200, 8, 2, 20) if quick else (N_TRUE, 200, N_SEEDS, 600)
    torch.manual_seed(0)
    x_test = (data.x_test[:n_rows] + NOISE * torch.randn_like(data.x_test[:n_rows])).to(device)
    x, y = data.x.to(device), data.y.to(device)
    found = {}
    for name, make in NETWORKS.items():
        began = time.perf_counter()
        torch.manual_seed(0)
        net = trained(make().to(device), x, y, n_steps)
        drawn = db.predict(net, x_test, n_draws=n_true)
        one: dict[str, Any] = dict(compared(db.predict(net, x_test, method="linear"), drawn))
        errors = {way: torch.zeros(2, dtype=torch.float64) for way in WAYS}
        for way, arguments in WAYS.items():
            for seed in range(n_seeds):
                few = db.predict(net, x_test, n_draws=N_FEW, seed=seed, **arguments)
                pairs = [(few.mean, drawn.mean), (few.epistemic, drawn.epistemic)]
                errors[way] += torch.stack([(a - b).double().square().mean().cpu() for a, b in pairs])
        one["exact"] = drawn.method == "exact"
        # Squared errors of independent draws fall as 1 / T: a ratio of 4 is worth four times the draws.
        base = errors["independent"]
        one["gains"] = {} if one["exact"] else {way: (base / error).tolist() for way, error in errors.items()}
        runs = {way: functools.partial(db.predict, net, x_test, n_draws=N_FEW, **rest) for way, rest in WAYS.items()}
        runs["independent, 4 times the draws"] = functools.partial(
            db.predict, net, x_test, n_draws=4 * N_FEW, **WAYS["independent"]
        )
        runs["linear"] = functools.partial(db.predict, net, x_test, method="linear")
        one["ms"] = {way: clock.median_ms(run)[0] for way, run in runs.items()}
        found[name] = one
        gains = {way: [round(gain, 1) for gain in pair] for way, pair in one["gains"].items()}
        print(name, cells(one), gains, f"{time.perf_counter() - began:.0f} s", flush=True)
    return found


def gain_cells(one: dict[str, Any], ways: list[str]) -> list[str]:
    return ["exact" if one["exact"] else " / ".join(f"{gain:.1f}" for gain in one["gains"][way]) for way in ways]


def speed_rows(found: dict[str, Any]) -> list[list[str]]:
    """Milliseconds of the linear method, by hand too, and of 50 draws, and the gain over these."""
    ways = ["linear", "by hand", "shared", "loop", "gain"]
    return [
        [name, *(f"{times[way]:.3g}" if times[way] < 1000 else f"{times[way]:,.0f}" for way in ways)]
        for name, times in found["speed"].items()
    ]


def close_rows(found: dict[str, Any]) -> list[list[str]]:
    return [[name, *cells(one)] for name, one in found["digits"].items()]


def gain_rows(found: dict[str, Any]) -> list[list[str]]:
    """The gains over independent masks, and the milliseconds of plain and of controlled draws."""
    rest = ("stratified", "stratified, controlled")
    return [
        [name, *gain_cells(one, list(WAYS)[1:]), *(f"{one['ms'][way]:.3g}" for way in rest)]
        for name, one in found["digits"].items()
    ]


def goals_of(found: dict[str, Any]) -> list[Goal]:
    networks = found["digits"].values()
    least = {"ResNet-18, one output": 12, "BERT-base, 2 outputs": 10}
    goals = [
        Goal(f"{case}, times faster than 50 draws", times["gain"], gain)
        for name, gain in least.items()
        for case, times in found["speed"].items()
        if case.startswith(name)
    ]
    for index, (what, draws) in enumerate((("mean", 4), ("variance", 2))):
        met = sum(one["exact"] or any(gain[index] >= draws for gain in one["gains"].values()) for one in networks)
        goals.append(Goal(f"networks whose {what} needs {draws} times fewer draws", met, 7))
    return goals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="Few rows, draws and steps: does it run?")
    parser.add_argument("--out", type=pathlib.Path, default=history.RESULTS, help="The folder to write to.")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    clock = Clock(torch.device(arguments.device), arguments.quick)
    found: dict[str, Any] = {"speed": speed(clock, arguments.quick), "digits": digit_networks(clock, arguments.quick)}
    print(table(speed_rows(found), ["ms", "linear", "by hand", "50 draws", "50 passes in a loop", "gain"]))
    print(table(close_rows(found), HEAD))
    print(table(gain_rows(found), ["gain of mean / variance", *list(WAYS)[1:], "ms of draws", "ms controlled"]))
    if not arguments.quick:
        history.write("one_pass_gpu", found, goals_of(found), folder=arguments.out)


if __name__ == "__main__":
    main()
