"""Which device is used, and what capturing a CUDA graph leaves unchanged."""

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes import calibration, decisions, processes
from dropbayes.decisions import acquisition
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


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2)).eval()


ROWS = torch.linspace(-1, 1, 36, dtype=torch.float64).reshape(12, 3)
LABELS = torch.arange(12) % 3
PROBABILITIES = (4 * ROWS).softmax(-1)

ON_EITHER_DEVICE = {
    "draws until the tolerance": lambda to: db.predict(to(perceptron()), to(ROWS.float()), n_draws="auto").mean,
    "a precision of the CPU": lambda to: (
        db.predict(to(perceptron()), to(ROWS.float()), n_draws=5, likelihood=db.Gaussian(torch.tensor([1.0, 4.0]))).std
    ),
    "a softmax process": lambda to: processes.softmax_process(processes.ReLU(), to(ROWS), LABELS).probabilities(
        to(ROWS), n_draws=50
    ),
    "an exact process": lambda to: processes.exact_process(
        processes.TanH(), to(ROWS), to(ROWS[:, :2]), precision=9.0, output_bias=torch.tensor([1.0, 2.0])
    ).mean(to(ROWS)),
    "the evidence": lambda to: torch.tensor(
        processes.network_evidence(
            processes.ReLU(), to(ROWS), to(ROWS[:, 0]), width=2, precision=9.0, n_draws=50
        ).log_evidence
    ),
}


@needs_cuda
@pytest.mark.parametrize("name", ON_EITHER_DEVICE)
def test_what_a_cpu_gives_a_gpu_gives(name):
    there, here = (ON_EITHER_DEVICE[name](lambda value, to=to: value.to(to)) for to in ("cuda", "cpu"))
    torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)


ON_THE_CPU = {
    "calibration_test": lambda: calibration.calibration_test(PROBABILITIES, LABELS, n_resamples=20).expected,
    "vector_scaling": lambda: calibration.vector_scaling(PROBABILITIES, LABELS)(PROBABILITIES),
    "dirichlet_calibration": lambda: calibration.dirichlet_calibration(PROBABILITIES, LABELS)(PROBABILITIES),
    "beta_calibration": lambda: calibration.beta_calibration(PROBABILITIES[:, 0], LABELS == 0).a,
    "deferral_for_risk": lambda: (
        decisions.deferral_for_risk(ROWS[:, 0], (LABELS == 0).double(), target=0.9, confidence=0.5).threshold
    ),
    "stochastic_queries": lambda: acquisition.stochastic_queries(PROBABILITIES[:, 0], 3),
    "badge_queries": lambda: acquisition.badge_queries(PROBABILITIES, ROWS, 3),
    "the kernel of a process": lambda: processes.NetworkKernel(processes.Erf())(ROWS.numpy(), eval_gradient=True)[1],
    "predict": lambda: db.predict(perceptron(), ROWS.float(), n_draws=5).std,
}


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_another_default_device_changes_nothing(name):
    expected = ON_THE_CPU[name]()
    net = perceptron()
    with torch.device("meta"), pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "perceptron", lambda: net)
        found = ON_THE_CPU[name]()
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=0)


@needs_cuda
@pytest.mark.parametrize("kind", [db.DropoutRegressor, db.DropoutClassifier])
def test_an_estimator_trained_on_a_gpu_predicts_the_bits_that_it_has_when_loaded(kind, tmp_path):
    x = np.random.default_rng(0).normal(size=(80, 2))
    y = x[:, 0] if kind is db.DropoutRegressor else x[:, 0] > 0
    model = kind(device="cuda", n_steps=20, warm_start=True, random_state=0)
    for learn in (model.fit, model.fit, model.partial_fit):  # anew, from the weights it has, and from more rows
        learn(x, y)
        model.save(tmp_path / "model")
        assert np.array_equal(kind.load(tmp_path / "model").predict(x), model.predict(x))
