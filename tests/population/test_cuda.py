"""A population is the same on a CPU and on a GPU, where its steps are a captured graph."""

import pytest
import torch

from dropbayes.population import Member, Task, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("learned", [False, True], ids=["stated drop probabilities", "learned ones"])
@pytest.mark.parametrize("likelihood", ["gaussian", "heteroscedastic", "categorical"])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_networks_trained_on_a_gpu_are_those_of_a_cpu(likelihood, schedule, learned):
    torch.manual_seed(0)
    x = torch.randn(300, 5).double()
    y = x[:, :1].sin() + 0.3 * x[:, 1:2] * x[:, 2:3] + 0.1 * torch.randn(300, 1)
    y = (y[:, 0] > 0).long() + (y[:, 0] > 0.7).long() if likelihood == "categorical" else y
    settings = [(0.1, 12, 1e-2), (0.05, 20, 3e-3), (0.3, 20, 1e-2)]  # members of other lengths leave the stack
    members = [
        Member(drop_prob=p, weight_decay=1e-4, epochs=n, learning_rate=r, seed=s)
        for s, (p, n, r) in enumerate(settings)
    ]
    common = {"hidden": (20, 20), "likelihood": likelihood, "schedule": schedule, "learn_drop_prob": learned}
    here, there = (
        train([Task(x, y)], members, batch_size=64, device=device, dtype=torch.float64, **common)
        for device in ("cpu", "cuda")
    )
    for one, other in zip(
        (*here.weights, *here.biases, here.drop_prob), (*there.weights, *there.biases, there.drop_prob), strict=True
    ):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-6, atol=1e-8)
