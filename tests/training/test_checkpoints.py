"""Checkpoints under real kills, damage and mistaken identity."""

import hashlib
import io
import json
import pathlib
import random
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.layers import Prior
from dropbayes.training import Checkpoint, EarlyStopping, Objective, Optimization, checkpoints, fit
from tests.training.toys import network, toy

SOURCE = pathlib.Path(__file__).parent.parent.parent / "src"

RUN = r"""
import json, os, random, signal, subprocess, sys, time
import torch
from torch import nn
import dropbayes as db
from dropbayes.training import Checkpoint, EarlyStopping, Optimization, fit

torch.set_num_threads(1)
folder, kills, epochs, way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
path, result = os.path.join(folder, "run.ckpt"), os.path.join(folder, "result.pt")

def run(checkpoint):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Dropout(0.2), nn.Linear(30, 1))
    x, y = torch.randn(300, 4), torch.randn(300, 1)
    history = fit(net, x[:200], y[:200], likelihood=db.Gaussian(2.0), epochs=epochs, batch_size=32, seed=3,
                  stopping=EarlyStopping((x[200:], y[200:]), patience=1000, n_draws=4), checkpoint=checkpoint,
                  optimization=Optimization(learning_rate=3e-3), device="cpu")
    torch.manual_seed(1)
    prediction = torch.stack([net(x) for _ in range(3)])
    return {"weights": [p.detach() for p in net.state_dict().values()], "prediction": prediction.detach(),
            "history": vars(history)}

def work():
    torch.save(run(path), result)
"""

KILLED = (
    RUN
    + r"""
def same(a, b):
    return (all(torch.equal(p, q) for p, q in zip(a["weights"], b["weights"], strict=True))
            and torch.equal(a["prediction"], b["prediction"]) and a["history"] == b["history"])

def start():
    "A child that trains: a fork of this process, or an interpreter of its own."
    if way == "fresh":
        return subprocess.Popen([sys.executable, "-c", os.environ["RUN"] + "work()", *sys.argv[1:]]).pid
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child

def version():
    return os.stat(path).st_mtime_ns if os.path.exists(path) else None

begin = time.perf_counter()
whole = run(None)
epoch = (time.perf_counter() - begin) / epochs
done, chance, reached = 0, random.Random(0), set()
while done < kills:
    child, seen, wanted = start(), version(), chance.randint(0, 2 * epochs // kills)
    while wanted and not os.path.exists(result):  # so many checkpoints are written, however busy the machine is
        time.sleep(0.001)
        wanted, seen = wanted - (version() != seen), version()
    time.sleep(chance.uniform(0, 2 * epoch))
    os.kill(child, signal.SIGKILL)
    done += os.waitpid(child, 0)[1] == signal.SIGKILL
    reached.add(version())
    if os.path.exists(result):
        os.remove(result); os.remove(path)  # it finished too soon: begin again
assert os.waitpid(start(), 0)[1] == 0
resumed = torch.load(result)
print(json.dumps({"kills": done, "same": same(whole, resumed), "epochs": len(resumed["history"]["loss"]),
                  "reached": len(reached)}))
"""
)


def test_a_checkpoint_of_another_run_is_refused_and_a_longer_run_continues(tmp_path):
    x, y = toy()
    path = tmp_path / "run.ckpt"
    short, long = network(), network()
    fit(short, x, y, likelihood=db.Gaussian(4.0), epochs=3, checkpoint=path, device="cpu")
    with pytest.raises(ValueError, match=r"`checkpoint` .* belongs to another run"):
        fit(network(), x, y, likelihood=db.Gaussian(4.0), epochs=3, checkpoint=path, seed=5, device="cpu")
    with pytest.raises(ValueError, match=r"`checkpoint` .* belongs to another run"):
        fit(network(), x + 1, y, likelihood=db.Gaussian(4.0), epochs=3, checkpoint=path, device="cpu")
    fit(short, x, y, likelihood=db.Gaussian(4.0), epochs=6, checkpoint=path, device="cpu")
    fit(long, x, y, likelihood=db.Gaussian(4.0), epochs=6, device="cpu")
    assert torch.equal(short[0].weight, long[0].weight)


@pytest.mark.slow
@pytest.mark.parametrize(("kills", "epochs", "way"), [(200, 600, "forked"), (20, 60, "fresh")])
def test_kills_then_resume_give_bit_identical_weights_history_and_predictions(tmp_path, kills, epochs, way):
    result = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(kills), str(epochs), way],
        capture_output=True, text=True, timeout=60 * kills,
        env={"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "RUN": RUN},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    outcome = json.loads(result.stdout)
    assert outcome.pop("reached") >= kills // 2  # the kills fell in different epochs
    assert outcome == {"kills": kills, "same": True, "epochs": epochs}


def constant(step):
    return 1.0


def interrupted(path, **changes):
    """Three epochs of a run with a checkpoint; with changes, what a later call would be."""
    x, y = toy()
    options = {"net": network(), "x": x, "y": y, "likelihood": db.Gaussian(4.0), "epochs": 3, "checkpoint": path}
    options |= {
        "device": "cpu",
        "sample_weight": torch.ones(64),
        "stopping": EarlyStopping((x[:16], y[:16]), n_draws=4),
    }
    options["optimization"] = Optimization(schedule=constant)
    return fit(**options | changes)


def tanh_network():
    net = network()
    net[1] = nn.Tanh()
    return net


X, Y = toy()
CHANGES = {
    "drop probability": {"net": network(0.6)},
    "activation": {"net": tanh_network()},
    "one target": {"y": Y.index_fill(0, torch.tensor([7]), 0.0)},
    "row weights": {"sample_weight": torch.arange(1.0, 65.0)},
    "held-out rows": {"stopping": EarlyStopping((X[:16], Y[:16] + 1), n_draws=4)},
    "no held-out rows": {"stopping": EarlyStopping(n_draws=4)},
    "held-out draws": {"stopping": EarlyStopping((X[:16], Y[:16]), n_draws=5)},
    "schedule": {"optimization": Optimization(schedule=lambda step: 0.5)},
    "optimiser": {"optimization": Optimization("sgd", schedule=constant)},
    "learning rate": {"optimization": Optimization(schedule=constant, learning_rate=0.1)},
    "divergence": {"objective": Objective(alpha=0.5)},
    "seed": {"seed": 1},
    "prior": {"prior": Prior(length_scale=3.0)},
    "likelihood": {"likelihood": db.Gaussian(5.0)},
    "batch size": {"batch_size": 32},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "c"
    interrupted(path)
    return path


@pytest.mark.parametrize("change", CHANGES)
def test_a_checkpoint_of_a_run_that_differs_in_anything_is_refused(checkpoint, change):
    before = checkpoint.read_bytes()
    with pytest.raises(ValueError, match=r"`checkpoint` .* belongs to another run"):
        interrupted(checkpoint, **CHANGES[change])
    assert checkpoint.read_bytes() == before


def test_a_checkpoint_that_was_refused_serves_its_own_run(checkpoint, tmp_path):
    path = shutil.copy(checkpoint, tmp_path)
    with pytest.raises(ValueError, match=r"`checkpoint` .* belongs to another run"):
        interrupted(path, seed=1)
    assert interrupted(path, epochs=4).loss[:3]


def test_a_checkpoint_of_other_initial_weights_or_more_epochs_is_refused_and_changes_nothing(tmp_path):
    interrupted(tmp_path / "c")
    other = network(seed=1)
    before = other[0].weight.clone()
    with pytest.raises(ValueError, match=r"`checkpoint` .* belongs to a run from other initial weights"):
        interrupted(tmp_path / "c", net=other, epochs=6)
    assert torch.equal(other[0].weight, before)
    with pytest.raises(ValueError, match=r"`checkpoint` .* has 3 epochs, more than the `epochs` asked for, 2. Delete"):
        interrupted(tmp_path / "c", epochs=2)


def test_a_run_may_be_continued_by_the_network_that_it_trained(tmp_path):
    net = network()
    interrupted(tmp_path / "c", net=net)
    assert interrupted(tmp_path / "c", net=net, epochs=5) == interrupted(None, epochs=5)


def test_a_finished_run_is_returned_to_the_network_that_has_its_best_weights(tmp_path):
    x, y = toy()
    net, wrong = network(), EarlyStopping((x[:16], -y[:16]), patience=2, n_draws=4)
    history = interrupted(tmp_path / "run.ckpt", net=net, stopping=wrong, epochs=20)
    assert history.best_epoch < len(history.loss)
    assert interrupted(tmp_path / "run.ckpt", net=net, stopping=wrong, epochs=20) == history


@pytest.mark.parametrize(("every", "stop"), [(1, 2), (2, 2), (2, 1), (5, 1)])
@pytest.mark.parametrize("own", [False, True])
def test_an_interrupted_network_resumes_its_own_run(tmp_path, every, stop, own):
    def interrupt(progress):
        if progress.epoch == stop:
            raise KeyboardInterrupt

    def call(net, optimizer, **changes):
        optimization = Optimization(optimizer or "adam", schedule=constant)
        file = None if changes.pop("plain", False) else Checkpoint(tmp_path / "c", every=every)
        return interrupted(file, net=net, optimization=optimization, **changes)

    nets = [network(), network()]
    optimizers = [torch.optim.Adam(net.parameters()) if own else None for net in nets]
    with pytest.raises(KeyboardInterrupt):
        call(nets[0], optimizers[0], callbacks=[interrupt])
    n_saved = (stop - 1) // every * every  # the callback comes before its epoch is saved
    start = network()
    assert torch.equal(nets[0][0].weight, start[0].weight) == (n_saved == 0)
    assert call(nets[0], optimizers[0]) == call(nets[1], optimizers[1], plain=True)
    assert torch.equal(nets[0][0].weight, nets[1][0].weight)


def test_a_folder_that_is_lacking_is_noticed_before_the_first_epoch(tmp_path):
    net, seen = network(), []
    with pytest.raises(FileNotFoundError):
        interrupted(tmp_path / "no" / "c", net=net, callbacks=[lambda progress: seen.append(progress)])
    assert not seen and torch.equal(net[0].weight, network()[0].weight)


@pytest.mark.slow
def test_every_bit_flip_and_truncation_is_refused_with_one_class_of_error(tmp_path):
    interrupted(tmp_path / "c", epochs=1)
    contents, chance = (tmp_path / "c").read_bytes(), random.Random(0)
    optimizer = torch.optim.Adam(network().parameters())
    damaged = [contents[: chance.randrange(len(contents))] for _ in range(50)] + [b"", contents + b"\0"]
    for _ in range(300):
        flipped = bytearray(contents)
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        damaged.append(bytes(flipped))
    for one in damaged:
        (tmp_path / "c").write_bytes(one)
        with pytest.raises(ValueError, match=r"`checkpoint` .* is damaged") as caught:
            checkpoints.load(tmp_path / "c", network(), optimizer, fingerprint="", epochs=3)
        assert type(caught.value) is ValueError


@pytest.mark.parametrize(
    "contents",
    [[1], {"fingerprint": ""}, {"fingerprint": "", "net": {}, "optimizer": {}, "run": {"history": {"losses": []}}}],
)
def test_a_signed_file_of_other_contents_is_refused_alike(tmp_path, contents):
    buffer = io.BytesIO()
    torch.save(contents, buffer)
    signed = checkpoints._MAGIC + hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue()
    (tmp_path / "c").write_bytes(signed)
    net = network()
    with pytest.raises(ValueError, match="is damaged"):
        checkpoints.load(tmp_path / "c", net, torch.optim.Adam(net.parameters()), fingerprint="", epochs=3)
    assert torch.equal(net[0].weight, network()[0].weight)


def test_a_folder_or_a_foreign_file_is_refused(tmp_path):
    torch.save({"format": 1}, tmp_path / "c")
    for path in (tmp_path, tmp_path / "c"):
        with pytest.raises(ValueError, match="is damaged"):
            interrupted(path)


def test_resuming_in_one_process_gives_the_same_history_and_weights_at_every_epoch(tmp_path):
    whole = network()
    expected = interrupted(None, net=whole, epochs=6)
    for stop in range(1, 6):
        path = tmp_path / str(stop)
        interrupted(path, epochs=stop)
        net = network()
        assert interrupted(path, net=net, epochs=6) == expected
        assert torch.equal(net[0].weight, whole[0].weight)
