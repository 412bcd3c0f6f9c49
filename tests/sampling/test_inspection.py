"""Finding the sites of a network, and refusing what cannot be looked into."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.inspection import _inspections, inspect
from tests.sampling.zoo import Module, build


@pytest.mark.parametrize(
    "name, count",
    [("bert_sdpa", 8), ("bert_eager", 8), ("gpt2", 7), ("t5", 24), ("transformer_encoder", 8), ("lstm_with_states", 2)],
)
def test_all_sites_of_larger_networks_are_found(name, count):
    net, x = build(name)
    assert len(db.sites(net, x)) == count


@pytest.mark.parametrize("call", [db.draws, db.predict, lambda net, x: db.function_draw(net)(x)])
def test_no_dropout_is_an_error_that_names_the_remedy(call):
    with pytest.raises(ValueError, match=r"no dropout.*add_dropout"):
        call(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.zeros(1, 2))


@pytest.mark.parametrize("descending", [True, False])
def test_rows_that_come_out_sorted_are_an_error_whatever_their_order(descending):
    def forward(m, x):
        return m.o(m.d(m.a(x)))[x.mean(1).argsort(descending=descending)]

    net = Module(forward, a=nn.Linear(4, 8), d=nn.Dropout(0.3), o=nn.Linear(8, 2))
    rows = torch.randn(5, 4)
    with pytest.raises(ValueError, match="depend on each other"):
        db.predict(net, rows[rows.mean(1).argsort(descending=descending)])
    assert db.predict(net, rows[:1]).mean.shape == (1, 2)


def test_dropout_of_probability_zero_is_an_error():
    with pytest.raises(ValueError, match="add_dropout"):
        db.predict(nn.Sequential(nn.Dropout(0.0), nn.Linear(2, 2)), torch.zeros(1, 2))
    net = Module(lambda m, x: F.dropout(m.a(x), 0.0, m.training), a=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="add_dropout"):
        db.predict(net, torch.zeros(1, 2))


def test_dropout_that_is_switched_off_later_is_noticed():
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.Linear(2, 1))
    assert db.predict(net, torch.ones(1, 2)).std > 0
    net[1].p = 0.0
    with pytest.raises(ValueError, match="add_dropout"):
        db.predict(net, torch.ones(1, 2))


def test_dropout_that_drops_everything_is_no_randomness():
    with pytest.raises(ValueError, match="It is the paper's p"):
        db.predict(nn.Sequential(nn.Dropout(1.0), nn.Linear(2, 2)), torch.zeros(1, 2))


def test_masks_that_change_nothing_are_warned_of():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    with pytest.warns(db.predictive.UncertaintyWarning, match="same output"):
        db.predict(net, torch.zeros(3, 2), sampling=db.Sampling(integrate_last_layer=False))


def test_scripted_networks_are_refused_with_the_reason():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    for net in (scripted, nn.Sequential(scripted)):
        with pytest.raises(TypeError, match="scripted or traced"):
            db.predict(net, torch.zeros(1, 2))


def test_compiled_networks_are_drawn_from_uncompiled():
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)).eval()
    x = torch.randn(3, 2)
    expected = db.draws(net, x, n_draws=5)
    assert torch.equal(db.draws(torch.compile(net), x, n_draws=5), expected)
    inner = nn.Sequential(torch.compile(net[:2]), *net[2:])
    torch.testing.assert_close(db.draws(inner, x, n_draws=5), expected)


def test_compiled_functions_that_a_network_calls_run_uncompiled():
    drop = torch.compile(lambda h, training: nn.functional.dropout(h, 0.5, training), backend="eager")
    net, x = Module(lambda m, v: m.o(drop(v, m.training)), o=nn.Linear(2, 1)).eval(), torch.randn(3, 2)
    plain = nn.Sequential(nn.Dropout(0.5), net.o)
    torch.testing.assert_close(db.draws(net, x, n_draws=5), db.draws(plain, x, n_draws=5))


def test_exported_networks_are_refused_with_the_reason():
    exported = torch.export.export(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), (torch.zeros(3, 2),)).module()
    with pytest.raises(TypeError, match="exported"):
        db.predict(exported, torch.zeros(3, 2))


def test_networks_under_ddp_are_drawn_from(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        x = torch.randn(3, 2)
        assert torch.equal(
            db.draws(nn.parallel.DistributedDataParallel(net), x, n_draws=5), db.draws(net, x, n_draws=5)
        )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_layers_that_torch_fuses_in_evaluation_are_drawn_from_as_they_are_in_training():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)
    net = nn.TransformerEncoder(layer, 1).eval()
    x, padded = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    arguments = {"src": x, "src_key_padding_mask": padded}
    with torch.no_grad():
        assert (net(**arguments)[1, 2:] == 0).all()  # fused
    with pytest.warns(UserWarning, match="torch fuses the transformer layers"):
        ours = db.predict(net, arguments, n_draws=640, sampling=db.Sampling(sampler="independent"))
    net.train()  # nothing in it depends on the mode but dropout
    with torch.no_grad():
        loop = torch.stack([net(**arguments) for _ in range(640)])
    error = (2 * loop.var(0) / 640).sqrt()
    assert ((ours.mean - loop.mean(0)).abs() < 4 * error).all() and (ours.mean[1, 2:] != 0).all()


def test_hooks_of_the_user_run_during_a_prediction():
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    net[0].register_forward_hook(lambda m, args, out: out + 1)
    x = torch.zeros(1, 2)
    expected = net.eval()(x)
    torch.testing.assert_close(db.predict(net, x).mean, expected)


def test_what_is_remembered_of_a_network_goes_with_it():
    net = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.LayerNorm(4), nn.Linear(4, 1))
    db.predict(net, torch.zeros(1, 2))
    before = len(_inspections)
    del net
    gc.collect()
    assert len(_inspections) < before


class ScalesOrShifts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.drop = nn.Linear(3, 3), nn.Dropout(0.3)

    def forward(self, x, scale=None, shift=None):
        h = self.layer(x)
        return self.drop(h * scale) if scale is not None else self.drop(h) + shift


def test_arguments_of_the_same_shapes_and_other_names_are_inspected_apart():
    net, x, other = ScalesOrShifts(), torch.randn(4, 3), torch.randn(4, 3)
    records = [inspect(net, as_inputs({"x": x, name: other}, row_axis=0)) for name in ("scale", "shift", "scale")]
    assert records[0] is records[2] is not records[1]
    for name in ("scale", "shift"):
        expected = [db.function_draw(net, i, n_draws=5)(x=x, **{name: other}) for i in range(5)]
        torch.testing.assert_close(db.draws(net, {"x": x, name: other}, n_draws=5), torch.stack(expected))


ALIKE = {"zeros": torch.zeros_like, "ones": torch.ones_like, "one row": lambda x: x[:1].expand_as(x).clone()}


def copies_that_lie_apart():
    def forward(m, x):
        h = torch.tanh(m.a(x)).repeat(2, 1)
        h = h * F.dropout(torch.ones_like(h), 0.3, m.training)
        return (m.o(h).view(2, len(x), 2) * torch.tensor([1.0, 3.0])[:, None, None]).sum(0)

    return Module(forward, a=nn.Linear(6, 8, bias=False), o=nn.Linear(8, 2, bias=False))


@pytest.mark.parametrize(("first", "n_rows"), [("zeros", 3), ("zeros", 1), ("ones", 3), ("one row", 3)])
def test_a_strategy_that_was_tried_on_rows_that_are_alike_is_tried_again_on_others(first, n_rows):
    torch.manual_seed(0)
    net, x = copies_that_lie_apart(), torch.randn(n_rows, 6)
    expected = db.draws(copy.deepcopy(net), x, n_draws=6)
    db.draws(net, ALIKE[first](x), n_draws=6)
    torch.testing.assert_close(db.draws(net, x, n_draws=6), expected)
    later = copy.deepcopy(net)
    db.sites(later, x)
    db.draws(later, ALIKE[first](x), n_draws=6, masks="row")  # inspected on other rows, and tried on these
    expected = db.draws(copy.deepcopy(net), x, n_draws=6, masks="row")
    torch.testing.assert_close(db.draws(later, x, n_draws=6, masks="row"), expected)


@pytest.mark.parametrize("first", ALIKE)
def test_rows_that_are_alike_hide_that_others_depend_on_each_other_for_one_call_only(first):
    net, x = Module(lambda m, x: m.o(m.d(x - x.mean(0))), d=nn.Dropout(0.3), o=nn.Linear(6, 2)), torch.randn(3, 6)
    db.draws(net, ALIKE[first](x), n_draws=6)
    with pytest.raises(ValueError, match="its rows depend on each other"):
        db.draws(net, x, n_draws=6)


def test_rows_that_are_alike_are_inspected_once_and_others_once_more():
    passes = []
    net = Module(lambda m, x: (passes.append(len(x)), m.o(m.d(x)))[1], d=nn.Dropout(0.3), o=nn.Linear(6, 2))

    def passes_of(x):
        passes.clear()
        db.draws(net, x, n_draws=6)
        return len(passes)

    zeros, others = torch.zeros(3, 6), torch.randn(3, 6)
    counts = [passes_of(x) for x in (zeros, zeros, others, zeros, others + 1)]
    assert counts[1] == counts[3] == counts[4] < counts[0] == counts[2]


def with_weights_of_zero(function):
    torch.manual_seed(0)
    net = Module(function, a=nn.Linear(6, 8), d=nn.Dropout(0.3), e=nn.Dropout(0.3), b=nn.Linear(8, 2))
    net.o = nn.Linear(8, 2)
    nn.init.zeros_(net.b.weight)
    return net


def of_copies(m, x):
    h = m.d(torch.tanh(m.a(x)).repeat(2, 1))
    return (m.b(h).view(2, len(x), 2) * torch.tensor([1.0, 3.0])[:, None, None]).sum(0)


def beside_a_layer(m, x):
    return m.o(m.e(torch.tanh(m.a(x)))) + of_copies(m, x)


@pytest.mark.parametrize(("function", "n_rows"), [(of_copies, 3), (of_copies, 1), (beside_a_layer, 3)])
def test_weights_that_are_learned_from_zero_hide_no_misplaced_mask(function, n_rows):
    net, x = with_weights_of_zero(function), torch.randn(n_rows, 6)
    db.draws(net, x, n_draws=6)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for _ in range(3):
        (net(x) - 5).square().sum().backward()
        optimizer.step()
    found = db.draws(net, x, n_draws=6)
    torch.testing.assert_close(found, db.draws(copy.deepcopy(net), x, n_draws=6))
    torch.testing.assert_close(found[:, :1], db.draws(copy.deepcopy(net), x[:1], n_draws=6))


def test_a_gate_of_zero_that_is_opened_hides_no_misplaced_mask():
    net, x = (
        with_weights_of_zero(lambda m, x: m.o(m.e(torch.tanh(m.a(x)))) + m.gate * of_copies(m, x)),
        torch.randn(3, 6),
    )
    net.register_buffer("gate", torch.zeros(()))
    nn.init.normal_(net.b.weight)
    db.draws(net, x, n_draws=6)
    net.gate.fill_(1.0)
    torch.testing.assert_close(db.draws(net, x, n_draws=6), db.draws(copy.deepcopy(net), x, n_draws=6))


def test_a_network_that_is_trained_is_inspected_less_and_less_often():
    net, inputs, seen = with_weights_of_zero(of_copies), as_inputs(torch.randn(3, 6)), []
    for _ in range(100):
        inspection = inspect(net, inputs)
        assert inspect(net, inputs) is inspection
        seen += [] if any(one is inspection for one in seen) else [inspection]
        with torch.no_grad():
            net.b.weight += 0.1
    assert 5 <= len(seen) <= 8


def test_a_token_at_a_time_is_inspected_once():
    net = Module(lambda m, i: m.o(m.d(m.e(i))), e=nn.Embedding(9, 6), d=nn.Dropout(0.3), o=nn.Linear(6, 2))
    steps = [as_inputs(torch.tensor([[token]])) for token in (3, 5, 1, 3)]
    assert len({id(one) for one in [inspect(net, step) for step in steps]}) == 1
