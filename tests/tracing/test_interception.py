"""The mode that hands stochastic operations to a source, in one thread and for a time."""

import threading

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropbayes.tracing import Interception, Ones
from dropbayes.tracing.interception import HANDLERS
from tests.tracing.fixed_source import FixedSource, run_with_fixed_source


def test_deterministic_operations_pass_through():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4))
    x = torch.randn(2, 3)
    out, source = run_with_fixed_source(net, x)
    assert torch.equal(out, net(x)) and source.kinds == []


def test_a_source_sees_every_operation_with_its_result():
    class Watching(FixedSource):
        def after(self, func, args, kwargs, result):
            results.append(result)

    results = []
    with Interception(Watching()):
        product = torch.ones(2) * 3
    assert any(result is product for result in results)


def test_it_ends_with_its_context_and_after_an_error():
    try:
        with Interception(Ones()):
            raise KeyError
    except KeyError:
        pass
    assert len(torch.overrides._get_current_function_mode_stack()) == 0


def test_other_threads_are_not_intercepted():
    source, seen = FixedSource(), []
    with Interception(source):
        worker = threading.Thread(target=lambda: seen.append(torch.rand(3)))
        worker.start()
        worker.join()
    assert source.kinds == [] and len(seen) == 1


def test_the_innermost_source_is_asked():
    outer, inner = FixedSource(), FixedSource()
    with Interception(outer), Interception(inner):
        F.dropout(torch.ones(4), 0.5)
    assert len(inner.kinds) == 1 and outer.kinds == []


def test_every_kind_of_dropout_and_random_number_has_a_handler():
    functions = {F.dropout, F.dropout2d, F.alpha_dropout, F.scaled_dot_product_attention, torch.lstm, torch.rand}
    assert functions | {torch.bernoulli, Tensor.normal_, Tensor.exponential_, F.rrelu} <= HANDLERS.keys()
