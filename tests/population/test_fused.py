"""Tests of the CUDA kernel against the stacked operations."""

import os
import subprocess
import sys

import pytest
import torch

FUSED = """
import torch
from dropbayes.population import Member, Task, fitting, fused, randomness
from dropbayes.population.heads import HEADS
from dropbayes.population.standardisation import stacked_table

source = torch.Generator().manual_seed(0)
for activation, schedule, n_features, width, batch_size in (
    ("relu", "constant", 13, 50, 32), ("tanh", "cosine", 3, 20, 70), ("relu", "cosine", 20, 100, 128)
):
    tasks = [Task(torch.randn(n, n_features, generator=source), torch.randn(n, 1, generator=source)) for n in (90, 71)]
    members = [
        Member(task=s % 2, epochs=3, seed=s, drop_prob=(0.05 * s, 0.1 * s), weight_decay=1e-2 * s, learning_rate=0.01)
        for s in range(4)
    ]
    table = stacked_table(tasks, HEADS["gaussian"], torch.float32)
    programs = []
    for _ in range(2):
        program = fitting._program(
            table, members, (width,), HEADS["gaussian"], activation, batch_size, schedule, False, DEVICE, torch.float32
        )
        program.load(0, randomness.chunk_of(0, batch_size, sorted(set(table.n_rows)), program.widths), 0)
        programs.append(program)
    stacked, kernel = programs
    assert fused.suits(kernel)
    for _ in range(4):
        stacked.step()
    fused.advance(kernel, 3)
    fused.advance(kernel, 1)
    assert stacked.step_in_chunk == kernel.step_in_chunk
    for name in ("vector", "first", "second"):
        torch.testing.assert_close(getattr(stacked, name), getattr(kernel, name), rtol=1e-4, atol=1e-6)
print("equal")
"""


@pytest.mark.slow
def test_the_kernel_takes_the_same_steps_as_the_stacked_operations():
    pytest.importorskip("triton", reason="the kernel needs Triton, which comes with torch's CUDA builds")
    on_device = torch.cuda.is_available()
    # Without a CUDA device Triton's interpreter runs the kernel's own source, block by block.
    environment = os.environ | ({} if on_device else {"TRITON_INTERPRET": "1"})
    script = FUSED.replace("DEVICE", "torch.device('cuda')" if on_device else "torch.device('cpu')")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "equal", done.stderr
