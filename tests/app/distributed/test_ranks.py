"""Draws and rows over processes: the same bits for one, two and three of them."""

import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import dropbayes as db
from dropbayes.app.distributed import predict_across_ranks
from tests.app.forks import FORKS


def network(n_outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, n_outputs))  # fmt: skip


def inputs():
    return torch.randn(10, 3, generator=torch.Generator().manual_seed(1))


CASES: dict[str, dict[str, Any]] = {
    "draws": {"n_outputs": 2, "likelihood": db.Gaussian(precision=4.0), "divide": "draws", "n_draws": 37},
    "classes": {"n_outputs": 3, "likelihood": db.Categorical(), "divide": "draws", "n_draws": 20},
    "rows": {"n_outputs": 2, "likelihood": None, "divide": "rows", "n_draws": 20},
    "rows with masks of their own": {"n_outputs": 1, "likelihood": None, "divide": "rows", "n_draws": 9, "masks": "row"},
}  # fmt: skip


def predicted(case, group=None):
    settings = dict(CASES[case])
    found = predict_across_ranks(network(settings.pop("n_outputs")), inputs(), seed=5, group=group, **settings)
    return [found.mean, found.epistemic, found.aleatoric, *found.information.values()]


def one_rank(rank, n_ranks, folder):
    """What each process of the test does: predict in groups of one to all of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=n_ranks)
    groups = {size: dist.new_group(list(range(size))) for size in range(1, n_ranks + 1)}
    found = {(size, case): predicted(case, group) for size, group in groups.items() if rank < size for case in CASES}
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def across(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.start_processes(one_rank, (3, str(folder)), nprocs=3, start_method=FORKS.get_start_method())
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(3)]


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_the_same_for_any_number_of_processes(across, case):
    expected = predicted(case)
    for rank, found in enumerate(across):
        for size in range(rank + 1, 4):
            assert all(torch.equal(a, b) for a, b in zip(found[size, case], expected, strict=True)), (rank, size)


@pytest.mark.parametrize("case", CASES)
def test_the_prediction_is_that_of_one_call(case):
    settings = {name: value for name, value in CASES[case].items() if name not in ("n_outputs", "divide")}
    whole = db.predict(
        network(CASES[case]["n_outputs"]),
        inputs(),
        seed=5,
        sampling=db.Sampling(integrate_last_layer=case.startswith("rows")),
        **settings,
    )
    found = predicted(case)
    assert all(torch.equal(*pair) for pair in zip(found, (whole.mean, whole.epistemic, whole.aleatoric), strict=False))


def test_an_unknown_division_is_refused():
    with pytest.raises(ValueError, match="`divide` must be 'draws' or 'rows'"):
        predict_across_ranks(network(1), inputs(), divide="layers")


@pytest.mark.slow
def test_torchrun_needs_no_setting_up(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import torch
        from tests.app.distributed.test_ranks import predicted
        found = predicted("draws")
        if torch.distributed.get_rank() == 0:
            torch.save(found, {str(tmp_path / "found.pt")!r})
        torch.distributed.destroy_process_group()
    """)
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(command, check=True, env=environment, timeout=300)
    assert all(torch.equal(a, b) for a, b in zip(torch.load(tmp_path / "found.pt"), predicted("draws"), strict=True))
