"""Which device is used, and what capturing a CUDA graph leaves unchanged."""

import pytest
import torch

import dropbayes as db
from dropbayes.runtime.devices import (
    available_device,
    capture_graph,
    cpu_threads,
    flush_denormals,
    share_cores,
    tensor_cores,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
lacks_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")


def test_auto_is_a_device_that_works():
    assert torch.ones(2, device=available_device("auto")).sum().item() == 2


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meta", "mps:7", ""])
def test_a_device_that_cannot_be_used_is_refused_with_its_name_and_a_remedy(name):
    with pytest.raises(ValueError, match=rf"`device` must be one that works here; got '{name}' \(.+\)\. Use 'auto'"):
        available_device(name)


def test_a_device_object_is_taken_as_its_name_is():
    assert available_device(torch.device("cpu")) == available_device("cpu")


@lacks_cuda
def test_an_estimator_says_in_one_sentence_that_there_is_no_cuda():
    x = torch.linspace(-1, 1, 40)[:, None].numpy()
    with pytest.raises(ValueError, match="`device` must be one that works here; got 'cuda'"):
        db.DropoutRegressor(device="cuda").fit(x, x[:, 0])


@lacks_cuda
def test_fit_says_in_one_sentence_that_there_is_no_cuda():
    x = torch.linspace(-1, 1, 8)[:, None]
    with pytest.raises(ValueError, match="got 'cuda'"):
        db.fit(torch.nn.Linear(1, 1), x, x, likelihood=db.Gaussian(precision=1.0), epochs=1, device="cuda")


@needs_cuda
def test_the_callers_matmul_precision_survives_an_error():
    before = torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(KeyError), tensor_cores(torch.device("cuda")):
        raise KeyError
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch has one setting only")
def test_settings_of_precision_that_torch_cannot_reconcile_are_left_alone():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.matmul.allow_tf32 = False
        with tensor_cores(torch.device("cpu")):
            assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


def test_the_callers_number_of_threads_survives_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), cpu_threads(1):
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == before
    with cpu_threads(None):
        assert torch.get_num_threads() == before


@pytest.mark.parametrize(("n_workers", "threads"), [(1, 8), (2, 4), (3, 2), (20, 1)])
def test_workers_share_the_cores(monkeypatch, n_workers, threads):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    with cpu_threads(1):
        share_cores(n_workers)
        assert torch.get_num_threads() == threads


@needs_cuda
def test_products_use_tf32_within_the_context_alone():
    before = torch.backends.cuda.matmul.fp32_precision
    with tensor_cores(torch.device("cuda")):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


@needs_cuda
def test_a_captured_graph_repeats_the_call_and_leaves_no_trace():
    device = torch.device("cuda")
    count, noise = torch.zeros(1, device=device), torch.zeros(4, device=device)

    def call():
        count.add_(1)
        noise.uniform_()
        return count * 2

    before = torch.cuda.get_rng_state(device)
    graph, doubled = capture_graph(call, [count], device)
    assert count.item() == 0 and torch.equal(torch.cuda.get_rng_state(device), before)
    graph.replay()
    graph.replay()
    assert count.item() == 2 and doubled.item() == 4


@needs_cuda
def test_a_call_that_cannot_be_captured_leaves_state_and_random_numbers_unchanged():
    device = torch.device("cuda")
    count = torch.zeros(1, device=device)
    torch.manual_seed(0)
    expected = torch.rand(3, device=device)
    torch.manual_seed(0)
    with pytest.raises(RuntimeError):
        capture_graph(lambda: (torch.rand(2, device=device), count.add_(1).item()), [count], device)
    assert count.item() == 0
    assert torch.equal(torch.rand(3, device=device), expected)


def test_numbers_too_small_to_be_normal_are_zero_within_the_context_alone():
    tiny = torch.full((64,), 1e-30)
    with flush_denormals():
        assert not (tiny * 1e-10).any()
    assert (tiny * 1e-10).all()
