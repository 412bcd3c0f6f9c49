"""Draws: reproducible, independent of how the work is cut, and safe to make from many threads."""

import hashlib
import os
import pathlib
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import dropbayes as db
from dropbayes.sampling import Sampling
from dropbayes.sampling import plan as planning
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.strategies import evaluate
from dropbayes.tracing import RowLayout
from tests.cases import crossed
from tests.sampling.zoo import Module, ScaledAttention, build


def made(seed, net):
    torch.manual_seed(seed)
    for parameter in net.parameters():
        nn.init.normal_(parameter, 0, 0.4)
    return net.eval()


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3), nn.Linear(6 * 4, 3)
        self.drop, self.norm = nn.Dropout(0.3), nn.BatchNorm2d(4)

    def forward(self, x):
        h = self.drop(F.relu(self.norm(self.a(x))))
        return self.c(self.drop(F.max_pool2d(self.b(h), 2).flatten(1)))


PERCEPTRON = made(0, nn.Sequential(nn.Dropout(0.1), nn.Linear(5, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 2)))
NETS = {
    "perceptron": (PERCEPTRON, (5,)),
    "mapped perceptron": (
        made(
            0,
            Module(
                lambda m, x: m.b(m.d(torch.tanh(m.a(x)))), a=nn.Linear(5, 24), b=nn.Linear(24, 2), d=nn.Dropout(0.2)
            ),
        ),
        (5,),
    ),
    "convolution": (made(1, Convolutional()), (1, 8, 8)),
    "attention": (made(2, nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)), (4, 8)),
    "scaled attention": (made(3, ScaledAttention()), (4, 8)),
}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(
    name=st.sampled_from(sorted(NETS)),
    n_rows=st.integers(1, 40),
    data=st.data(),
    n_draws=st.sampled_from([5, 20, 33]),
    seed=st.integers(0, 5),
)
def test_a_row_has_the_same_bits_alone_in_a_batch_permuted_or_split(name, n_rows, data, n_draws, seed):
    net, shape = NETS[name]
    x = torch.randn((n_rows, *shape), generator=torch.Generator().manual_seed(n_rows))
    whole = db.predict(net, x, n_draws=n_draws, seed=seed)
    order = torch.tensor(data.draw(st.permutations(range(n_rows))))
    permuted = db.predict(net, x[order], n_draws=n_draws, seed=seed)
    assert torch.equal(permuted.mean, whole.mean[order]) and torch.equal(permuted.epistemic, whole.epistemic[order])
    cut = data.draw(st.integers(0, n_rows - 1))
    alone = db.predict(net, x[cut : cut + 1], n_draws=n_draws, seed=seed)
    assert torch.equal(alone.mean[0], whole.mean[cut]) and torch.equal(alone.epistemic[0], whole.epistemic[cut])
    if cut:
        parts = [db.predict(net, part, n_draws=n_draws, seed=seed) for part in (x[:cut], x[cut:])]
        assert torch.equal(torch.cat([part.std for part in parts]), whole.std)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(sorted(NETS)),
    n_rows=st.integers(1, 12),
    kilobytes=st.integers(1, 400),
    masks=st.sampled_from(planning.MASKS),
)
def test_a_memory_limit_changes_no_draw(name, n_rows, kilobytes, masks):
    net, shape = NETS[name]
    x = torch.randn((n_rows, *shape), generator=torch.Generator().manual_seed(n_rows))
    limited = db.draws(net, x, n_draws=20, masks=masks, sampling=db.Sampling(max_bytes=kilobytes * 1024))
    torch.testing.assert_close(limited, db.draws(net, x, n_draws=20, masks=masks), rtol=1e-4, atol=2e-5)


def test_recurrent_rows_depend_on_their_batch_by_rounding_only():
    net = nn.LSTM(3, 16, 2, dropout=0.3, batch_first=True).eval()
    x = torch.randn(20, 7, 3)
    whole, alone = db.draws(net, x, n_draws=10)[0], db.draws(net, x[4:5], n_draws=10)[0]
    assert (whole[:, 4] - alone[:, 0]).abs().max() < 1e-6


def test_independent_draws_do_not_depend_on_how_many_follow():
    x = torch.randn(3, 5)
    few, many = (db.draws(PERCEPTRON, x, n_draws=n, sampling=db.Sampling(sampler="independent")) for n in (50, 100))
    torch.testing.assert_close(few, many[:50], rtol=1e-4, atol=2e-5)


def test_rows_share_a_mask_only_when_told_to():
    x = torch.ones(8, 5)
    shared, own = (db.draws(PERCEPTRON, x, n_draws=6, masks=masks) for masks in planning.MASKS)
    assert torch.equal(shared, shared[:, :1].expand_as(shared))
    assert (own != own[:, :1]).any()


def test_running_out_of_memory_halves_the_chunk_and_changes_nothing(monkeypatch):
    net, x = build("transformer_encoder")
    expected = db.predict(net, x, n_draws=40)
    original, refused = planning.Plan._block, []

    def scarce(self, inputs, rows, first_row, draws):
        if len(draws) > 6:
            refused.append(len(draws))
            raise torch.OutOfMemoryError("too large")
        return original(self, inputs, rows, first_row, draws)

    monkeypatch.setattr(planning.Plan, "_block", scarce)
    ours = db.predict(net, x, n_draws=40)
    assert refused[-3:] == [40, 20, 10]
    torch.testing.assert_close(ours.mean, expected.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.epistemic, expected.epistemic, rtol=1e-5, atol=1e-7)


class Short(nn.Module):
    """A network that has memory for few rows."""

    def __init__(self, most=2**31):
        super().__init__()
        self.hidden, self.dropout, self.out, self.most = nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1), most

    def forward(self, x):
        if len(x) > self.most:
            raise torch.OutOfMemoryError("too large")
        return self.out(torch.sin(self.dropout(self.hidden(x))))


@pytest.mark.parametrize("most", [64, 7, 4])
@pytest.mark.parametrize("masks", ["shared", "row"])
def test_memory_for_few_rows_of_one_draw_is_enough(most, masks):
    net, x = made(0, Short()), torch.randn(100, 3)
    expected = db.draws(net, x, n_draws=20, seed=1, masks=masks)
    short = Short(most)
    short.load_state_dict(net.state_dict())
    torch.testing.assert_close(db.draws(short, x, n_draws=20, seed=1, masks=masks), expected)


class HungryInTraining(Short):
    def forward(self, x):
        if self.training:
            raise torch.OutOfMemoryError("too large")
        return super().forward(x)


def test_too_little_memory_for_a_training_branch_is_not_taken_for_a_branch_that_fails():
    with pytest.raises(torch.OutOfMemoryError):
        db.predict(HungryInTraining(), torch.randn(5, 3), n_draws=5)


def test_memory_that_never_suffices_is_an_error(monkeypatch):
    def scarce(*_):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(planning.Plan, "_block", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        db.draws(PERCEPTRON, torch.ones(2, 5))


@pytest.mark.parametrize("n_threads", [1, 2, 8, 32])
def test_threads_that_predict_and_threads_that_call_are_all_right(n_threads):
    net, x = build("convnet_with_batch_norm")
    plain, drawn = net(x).detach(), db.draws(net, x, n_draws=4)
    wrong: list[str] = []

    def work(place: int) -> None:
        for _ in range(64 // n_threads):
            if place % 2:
                with torch.no_grad():
                    wrong.extend(["plain call"] if not torch.equal(net(x), plain) else [])
            else:
                wrong.extend(["draws"] if not torch.equal(db.draws(net, x, n_draws=4), drawn) else [])

    threads = [threading.Thread(target=work, args=(place,)) for place in range(n_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


SCRIPT = """
import hashlib, sys, torch
torch.set_num_threads(int(sys.argv[1]))
import dropbayes as db
from tests.sampling.test_plan import NETS
digest = hashlib.sha256()
for name in sorted(NETS):
    net, shape = NETS[name]
    x = torch.randn((9, *shape), generator=torch.Generator().manual_seed(0))
    prediction = db.predict(net, x, n_draws=20, seed=4)
    digest.update(prediction.mean.numpy().tobytes() + prediction.std.numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_another_process_and_another_number_of_threads_give_the_same_bits():
    root = pathlib.Path(__file__).parent.parent.parent
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"}
    threads = str(torch.get_num_threads() % 2 + 1)
    other = subprocess.run([sys.executable, "-c", SCRIPT, threads], capture_output=True, text=True, env=environment)
    digest = hashlib.sha256()
    for name in sorted(NETS):
        net, shape = NETS[name]
        x = torch.randn((9, *shape), generator=torch.Generator().manual_seed(0))
        prediction = db.predict(net, x, n_draws=20, seed=4)
        digest.update(prediction.mean.numpy().tobytes() + prediction.std.numpy().tobytes())
    assert other.stdout.strip() == digest.hexdigest(), other.stderr


class Interrupted(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.a, self.norm, self.drop, self.error, self.calls = (
            nn.Linear(3, 3),
            nn.BatchNorm1d(3),
            nn.Dropout(0.5),
            error,
            0,
        )

    def forward(self, x):
        self.calls += 1
        h = self.drop(self.norm(self.a(x)))
        if self.error is not None:
            raise self.error
        return h


@pytest.mark.parametrize("error", [RuntimeError("own"), KeyboardInterrupt(), ValueError("own")])
def test_an_interrupted_forward_leaves_everything_as_it_was(error):
    net = Interrupted(None).train()
    db.predict(net, torch.ones(2, 3), n_draws=3)
    before = (
        {k: v.clone() for k, v in net.state_dict().items()},
        [m.training for m in net.modules()],
        torch.get_rng_state(),
    )
    net.error = error
    with pytest.raises(type(error)):
        db.predict(net, torch.ones(2, 3), n_draws=3)
    assert all(torch.equal(value, before[0][key]) for key, value in net.state_dict().items())
    assert [m.training for m in net.modules()] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2]) and torch.is_grad_enabled()
    assert len(torch.overrides._get_current_function_mode_stack()) == 0


@pytest.mark.parametrize(
    ("name", "dtype"),
    crossed(["perceptron", "convolution", "attention"], [torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
def test_networks_of_every_floating_dtype_are_drawn_from(name, dtype):
    net, shape = NETS[name]
    x = torch.randn((3, *shape), generator=torch.Generator().manual_seed(0))
    import copy

    ours = db.predict(copy.deepcopy(net).to(dtype), x.to(dtype), n_draws=20)
    full = db.predict(copy.deepcopy(net).double(), x.double(), n_draws=20)
    assert ours.mean.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(ours.mean.double(), full.mean, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"n_draws": 0}, ValueError, "`n_draws` must be a whole number, at least 1; got 0"),
        ({"n_draws": -1}, ValueError, "`n_draws` must be a whole number, at least 1; got -1"),
        ({"n_draws": 1.5}, TypeError, "`n_draws` must be a whole number; got 1.5"),
        ({"n_draws": True}, TypeError, "`n_draws`"),
        ({"seed": "a"}, TypeError, "`seed` must be a whole number"),
        ({"masks": "all"}, ValueError, "`masks` must be one of 'shared', 'row'; got 'all'"),
    ],
)
@pytest.mark.parametrize("call", [db.draws, db.predict])
def test_bad_arguments_are_named_with_the_rule_and_the_value(call, arguments, error, words):
    with pytest.raises(error, match=words.replace("'", ".")):
        call(PERCEPTRON, torch.ones(2, 5), **arguments)


def test_padded_blocks_depend_on_the_batch_only_where_bits_do_not(monkeypatch):
    monkeypatch.setattr(planning, "_have_same_bits", lambda *_: False)
    for net, shape in NETS.values():
        sizes = set()
        for n_rows in (1, 7, 300):
            inputs = as_inputs(torch.zeros(n_rows, *shape))
            plan = planning.make_plan(net, inputs, keys=Sampling().keys(50, 0), masks="shared")
            sizes.add((plan.block_rows, plan.product_rows, plan.pairs, plan.chunk_draws))
        assert len(sizes) == 1


@pytest.mark.parametrize("name", sorted(NETS))
def test_shards_of_rows_have_the_masks_of_the_whole(name):
    net, shape = NETS[name]
    x = torch.randn((7, *shape), generator=torch.Generator().manual_seed(0))
    whole = db.predict(net, x, n_draws=20, masks="row", sampling=db.Sampling(integrate_last_layer=False))
    shards = [db.predict(net, x[cut], n_draws=20, masks="row", sampling=db.Sampling(integrate_last_layer=False, row_offset=cut.start or 0))
              for cut in (slice(0, 3), slice(3, None))]  # fmt: skip
    assert torch.equal(torch.cat([shard.std for shard in shards]), whole.std)


def test_the_number_of_threads_is_restored():
    before = torch.get_num_threads()
    db.predict(PERCEPTRON, torch.ones(2, 5))
    assert torch.get_num_threads() == before


def blocks_of(net, x, **options):
    inputs = as_inputs(x)
    plan = planning.make_plan(net, inputs, keys=Sampling().keys(8, 0), **options)
    return plan, list(plan.run(inputs))


def test_blocks_cover_every_row_and_draw_once():
    for net, shape in NETS.values():
        x = torch.randn(13, *shape)
        _, blocks = blocks_of(net, x, sampling=Sampling(max_bytes=4096))
        seen = [(row, draw) for block in blocks for row in block.rows for draw in block.draws]
        assert sorted(seen) == [(row, draw) for row in range(13) for draw in range(8)]
        whole = db.draws(net, x, n_draws=8)
        for block in blocks:
            expected = whole[block.draws.start : block.draws.stop, block.rows.start : block.rows.stop]
            torch.testing.assert_close(block.outputs[0], expected, rtol=1e-4, atol=2e-5)
            assert block.outputs[0].shape[:2] == (len(block.draws), len(block.rows))


def test_an_integrated_last_layer_gives_its_variances_with_each_block():
    _, blocks = blocks_of(PERCEPTRON, torch.randn(5, 5), moments_only=True)
    assert all(block.variances is not None and block.variances[0].shape == (5, 2) for block in blocks)


@pytest.mark.parametrize("before", ["nothing", "usual rows", "large rows"])
def test_a_row_that_takes_a_branch_of_its_own_has_the_draws_that_it_has_alone(before):
    def forward(m, x):
        h = m.d(m.a(x))
        return m.d(h) if m.d.training and (x > 100).any() else h

    torch.manual_seed(0)
    net, usual, large = (
        Module(forward, a=nn.Linear(3, 4), d=nn.Dropout(0.5)),
        torch.randn(6, 3),
        torch.full((6, 3), 2e2),
    )
    x = torch.cat([usual[:3], large[3:]])
    alone = torch.cat([db.draws(net, x[row : row + 1], n_draws=8) for row in range(6)], 1)
    if before != "nothing":
        db.draws(net, usual if before == "usual rows" else large, n_draws=8)
    torch.testing.assert_close(db.draws(net, x, n_draws=8), alone)


def test_replicates_are_independent_draws_of_the_same_plan():
    inputs = as_inputs(torch.ones(2, 5))
    plan = planning.make_plan(PERCEPTRON, inputs, keys=Sampling().keys(20, 0))
    first, again, other = (
        torch.cat([block.outputs[0] for block in p.run(inputs)]) for p in (plan, plan.replicate(0), plan.replicate(1))
    )
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize(
    ("layout", "expected"), [(None, (3, 5)), (RowLayout(0, 1), (3, 4, 5)), (RowLayout(1, 1), (3, 5, 4))]
)
def test_rows_go_back_to_the_networks_place(layout, expected):
    assert planning.move_row_axis(torch.zeros(3, 4, 5), layout, 1).shape == expected


def test_several_entries_of_a_row_go_back_into_one_axis():
    tensor = torch.arange(2 * 3 * 4).reshape(2, 3, 4)  # [row, entry, ...]
    moved = planning.move_row_axis(tensor.permute(0, 1, 2), RowLayout(0, 3), 0)
    assert torch.equal(moved, tensor.flatten(0, 1))


def test_a_dropped_output_without_rows_needs_shared_masks():
    children = {"a": nn.Linear(3, 2), "d": nn.Dropout(0.5), "c": nn.Parameter(torch.ones(4))}
    net, x = Module(lambda self, x: (self.a(self.d(x)), self.d(self.c)), **children), torch.randn(6, 3)
    whole, part = (db.draws(net.eval(), rows, n_draws=4)[1] for rows in (x, x[3:]))
    assert torch.equal(whole, part) and whole.shape == (4, 4)
    with pytest.raises(ValueError, match=r'no rows.*"shared"'):
        db.draws(net, x, n_draws=4, masks="row")


AUTOMATIC = db.Sampling(max_draws=256, tolerance=1e-9)


@pytest.mark.parametrize(
    ("run", "n_draws"),
    [
        pytest.param(lambda net, x: db.predict(net, x, n_draws=8), 8, id="predict"),
        pytest.param(lambda net, x: db.draws(net, x, n_draws=8), 8, id="draws"),
        pytest.param(lambda net, x: db.predict([net, net], x, n_draws=8), 16, id="ensemble"),
        pytest.param(lambda net, x: db.predict(net, x, n_draws="auto", sampling=AUTOMATIC), 256, id="auto"),
    ],
)
def test_a_second_prediction_runs_every_draw_once(monkeypatch, run, n_draws):
    net, x = build("transformer_encoder")
    run(net, x)
    made, original = [], planning.Plan._block

    def counted(self, inputs, rows, first_row, draws):
        made.append(len(rows) * len(draws))
        return original(self, inputs, rows, first_row, draws)

    monkeypatch.setattr(planning.Plan, "_block", counted)
    run(net, x)
    assert sum(made) == n_draws * len(x)


def test_an_error_on_the_only_row_is_not_taken_for_one_of_many_rows(monkeypatch):
    evaluate = planning.evaluate

    def fails(strategy, spec, work):
        if strategy == planning.ONE_BY_ONE:
            return evaluate(strategy, spec, work)
        raise LookupError("of the network")

    net = Module(lambda m, x: m.o(m.d(m.a(x)).mean(0)), a=nn.Linear(2, 4), d=nn.Dropout(0.3), o=nn.Linear(4, 1)).eval()
    monkeypatch.setattr(planning, "evaluate", fails)
    with pytest.raises(LookupError, match="of the network"):
        db.draws(net, torch.randn(3, 2), n_draws=4, sampling=Sampling(row_axis=None))


def test_rows_that_share_drawn_weights_are_a_block_of_few_draws():
    layers = [db.layers.Linear(64, 256, noise=db.layers.GaussianNoise()), nn.ReLU()]
    net = nn.Sequential(*layers, db.layers.Linear(256, 1, noise=db.layers.GaussianNoise())).eval()
    plan = planning.make_plan(net, as_inputs(torch.randn(3, 64), net), keys=Sampling().keys(1000, 0))
    n_weights = max(p.numel() for p in net.parameters() if p.dim())
    assert plan.block_rows >= 32, "all weights are drawn anew for each block"
    assert 24 * n_weights * plan.chunk_draws <= 32 * 2**20, "and those of one layer at a time held for all its draws"


class OfPositions(nn.Module):
    """Scores of rows by a table that is dropped once for all of them, as DeBERTa's are by that of its distances."""

    def __init__(self):
        super().__init__()
        self.table, self.drop = nn.Embedding(2048, 64), nn.Dropout(0.1)
        self.key, self.out = nn.Linear(64, 64), nn.Linear(64, 3)

    def forward(self, x):
        keys = self.key(self.drop(self.table.weight))
        return self.out(self.drop(torch.softmax(x @ keys.T, -1) @ keys))


def test_many_rows_share_what_a_draw_computes_once_with_the_bits_of_a_row_alone(monkeypatch):
    torch.manual_seed(0)
    net, x, work = OfPositions().eval(), torch.randn(48, 16, 64), []
    monkeypatch.setattr(planning, "evaluate", lambda *args: work.append(len(args[-1].rows)) or evaluate(*args))
    p = db.predict(net, x, n_draws=30)
    monkeypatch.undo()
    plans = [planning.make_plan(net, as_inputs(rows, net), keys=Sampling().keys(30, 0)) for rows in (x[:1], x)]
    assert plans[0].block_rows < plans[1].block_rows and max(work) == plans[1].block_rows
    for row in (0, 20, 47):
        alone = db.predict(net, x[row : row + 1], n_draws=30)
        assert torch.equal(alone.mean, p.mean[row : row + 1]) and torch.equal(alone.std, p.std[row : row + 1])


def test_the_chunks_of_a_block_differ_by_at_most_one_draw():
    net, x = OfPositions().eval(), torch.randn(2, 16, 64)
    plan = planning.make_plan(net, as_inputs(x, net), keys=Sampling().keys(50, 0))
    for chunk in (9, 7, 50, 1):
        sizes = [len(block.draws) for block in replace(plan, chunk_draws=chunk, block_rows=2).run(as_inputs(x, net))]
        assert sum(sizes) == 50 and max(sizes) <= chunk and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("error, agrees", [(0.02, True), (1.0, False)])
def test_the_rounding_of_a_small_output_is_not_taken_for_another_law_with_many_rows(monkeypatch, error, agrees):
    layers = {"a": nn.Linear(4, 16, bias=False), "d": nn.Dropout(0.3), "o": nn.Linear(16, 8, bias=False)}
    net, x = made(0, Module(lambda m, x: m.o(m.d(torch.tanh(m.a(x)))), **layers)), 3 * torch.randn(8, 4)
    x[0] = 0  # of which the output is nothing but its rounding
    evaluate, rows_alone, alone = planning.evaluate, planning.rows_alone, []

    def rounded(strategy, spec, work):
        outputs = evaluate(strategy, spec, work)
        if strategy != planning.ONE_BY_ONE:
            return [out + error for out in outputs]
        alone.append(len(work.rows) * len(work.draws))
        return outputs

    def noted(*args):
        rows = rows_alone(*args)
        alone.extend(one[0].shape[0] for one in rows.values())
        return rows

    monkeypatch.setattr(planning, "evaluate", rounded)
    monkeypatch.setattr(planning, "rows_alone", noted)
    inputs = as_inputs(x, net)
    list(planning.make_plan(net, inputs, keys=Sampling().keys(20, 0)).run(inputs))
    assert (alone == [1]) == agrees, "one row of one draw is compared; what differs goes on one by one"


@pytest.mark.parametrize("seed", [5, 7])
def test_a_network_of_half_precision_is_inspected_once(seed):
    torch.manual_seed(seed)
    layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    net = Module(lambda m, x: m.o(m.e(x)[:, 0]), e=encoder, o=nn.Linear(64, 2)).eval().bfloat16()
    x, rows = torch.randn(8, 12, 64).bfloat16(), []
    net.o.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    db.predict(net, x, n_draws=20)
    assert len(rows) < 20
    rows.clear()
    db.predict(net, x, n_draws=20)
    assert rows == [8]
