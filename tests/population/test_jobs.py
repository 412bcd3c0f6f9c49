"""A population trained by several workers is the population."""

import contextlib

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
            assert torch.equal(divided.precision, whole.precision)


@contextlib.contextmanager
def joblib_backend(name):
    """joblib told of its own processes, or of a cluster of Dask or Ray on this machine."""
    with contextlib.ExitStack() as stack:
        if name == "dask":
            distributed = pytest.importorskip("distributed", reason="the extra `dask` is not installed")
            cluster = stack.enter_context(
                distributed.LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None)
            )
            stack.enter_context(distributed.Client(cluster))
        elif name == "ray":
            ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
            from ray.util.joblib import register_ray

            ray.init(
                address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1"
            )
            stack.callback(ray.shutdown)
            register_ray()
        stack.enter_context(joblib.parallel_config(backend=name))
        yield


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("backend", ["loky", "dask", "ray"])
def test_a_search_finds_the_same_model_on_one_and_on_two_workers(backend):
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
    with joblib_backend(backend):
        two = db.DropoutRegressor((8,), **settings, n_jobs=2).fit(x, x[:, 0])
    assert np.array_equal(one.search_scores_, two.search_scores_)
    assert np.array_equal(one.predict(x), two.predict(x))
