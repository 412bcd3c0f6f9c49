"""The mode that hands stochastic operations to a source, in one thread and for a time."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dropbayes.tracing import Interception, Ones, SiteNames, UnsupportedStrategy, view_at_sites
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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(3, 3), nn.Dropout(0.5)

    def forward(self, x):
        return F.dropout(self.drop(self.inner(x)), 0.25, self.training)


def with_blocks():
    return nn.Sequential(nn.Linear(3, 3), Block(), nn.ReLU(), nn.Dropout(0.1))


def test_a_mode_at_sites_sees_their_modules_alone_and_each_operation_once():
    class Watching(FixedSource):
        def after(self, func, args, kwargs, result):
            seen.append(func)

    seen, net = [], with_blocks()
    view = view_at_sites(net, lambda name, module: True, {"1", "1.drop", "3"}, Ones())
    with Interception(Watching()).at_sites():
        view.net(torch.ones(2, 3))
    assert [func for func in seen if func in HANDLERS] == [F.linear, F.dropout, F.dropout, F.dropout]
    assert F.relu not in seen, "between the sites there is no mode"
    assert not any("forward" in module.__dict__ for module in net.modules()), "the network itself stays as it is"


@pytest.mark.parametrize("paths, elsewhere", [({"1.drop", "3"}, True), ({"1", "3"}, False)])
def test_a_mode_at_sites_tells_whether_random_numbers_were_drawn_elsewhere(paths, elsewhere):
    view, mode = view_at_sites(with_blocks(), lambda name, module: True, paths, Ones()), Interception(Ones())
    with mode.at_sites():
        view.net(torch.ones(2, 3))
    assert mode.drawn_elsewhere == elsewhere, "by the block's own call of dropout"


def test_a_refusal_that_the_network_catches_ends_a_pass_at_sites():
    class Refusing(FixedSource):
        def dropout(self, *args):
            raise UnsupportedStrategy("a mask")

    class Catching(nn.Sequential):
        def forward(self, x):
            try:
                return super().forward(x)
            except Exception:
                return x

    view = view_at_sites(Catching(nn.Dropout(0.5)), lambda name, module: True, {"0"}, Ones())
    with pytest.raises(UnsupportedStrategy, match="a mask"), Interception(Refusing()).at_sites():
        view.net(torch.ones(2, 3))


def test_a_dropout_has_its_name_at_its_site_however_it_is_called():
    class Naming(FixedSource):
        def dropout(self, *args):
            named.append(names.next("dropout"))
            return super().dropout(*args)

    class Calling(nn.Sequential):
        def forward(self, x):
            return self[0].forward(self[0](x))

    named, net = [], nn.Sequential(Calling(nn.Dropout(0.5)), nn.ReLU())
    view = view_at_sites(net, lambda name, module: True, {"0.0"}, Ones())
    for run, paths in ((net, {id(m): name for name, m in net.named_modules()}), (view.net, view.paths)):
        names, mode = SiteNames(paths), Interception(Naming())
        with mode if run is net else mode.at_sites():
            run(torch.ones(2, 3))
    assert named == ["0.0 dropout 0", "0.0 dropout 1"] * 2


def test_there_is_no_mode_at_the_sites_of_a_hook_or_of_the_network_itself():
    hooked, patched = with_blocks(), with_blocks()
    hooked[3].register_forward_hook(lambda module, args, out: F.dropout(out))
    patched[3].forward = lambda x: F.dropout(x)
    for net, path in ((hooked, "3"), (patched, "3"), (with_blocks(), ""), (with_blocks(), "no module")):
        assert view_at_sites(net, lambda name, module: True, {path}, Ones()) is None


def test_a_view_with_a_mode_at_sites_holds_no_cycle():
    view = view_at_sites(with_blocks(), lambda name, module: True, {"1", "3"}, Ones())
    gc.disable()
    try:
        left = weakref.ref(view.net[1])
        del view
        assert left() is None, "a cycle would keep the weights until garbage is collected"
    finally:
        gc.enable()
