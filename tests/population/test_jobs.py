"""A population trained by several workers is the population."""

import joblib
import numpy as np
import pytest
import torch

import dropbayes as db
from dropbayes.population import Member, Task, train, train_in_jobs


@pytest.fixture(scope="module")
def tasks():
    x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    return [Task(x[:40], x[:40, 0].sin(), held_out=(x[40:], x[40:, 0].sin(), None)), Task(x, x[:, 1].cos())]


def test_members_have_the_same_bits_whichever_worker_trains_them(tasks):
    members = [Member(task=i % 2, epochs=3 + i, drop_prob=0.1, seed=i) for i in range(5)]
    settings = {"hidden": (8,), "batch_size": 16, "device": "cpu", "progress": False}
    whole = train(tasks, members, **settings)
    with joblib.parallel_config(backend="threading"):
        for n_jobs in (2, 3, 9):
            divided = train_in_jobs(tasks, members, n_jobs=n_jobs, **settings)
            assert divided.members == whole.members
            assert all(torch.equal(a, b) for a, b in zip(divided.weights, whole.weights, strict=True))
            assert torch.equal(divided.precision, whole.precision) and torch.equal(divided.epochs, whole.epochs)


@pytest.mark.slow
def test_a_search_finds_the_same_model_on_one_and_on_two_workers():
    x = np.random.default_rng(0).normal(size=(80, 2))
    settings = {
        "drop_prob": [0.05, 0.2],
        "weight_decay": 1e-4,
        "n_steps": 40,
        "n_networks": 2,
        "random_state": 0,
        "device": "cpu",
    }
    one = db.DropoutRegressor((8,), **settings).fit(x, x[:, 0])
    two = db.DropoutRegressor((8,), **settings, n_jobs=2).fit(x, x[:, 0])
    assert np.array_equal(one.search_scores_, two.search_scores_)
    assert np.array_equal(one.predict(x), two.predict(x))
