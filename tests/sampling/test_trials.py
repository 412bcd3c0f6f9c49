"""The strategy and the block sizes that a network is seen to allow."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.runtime.devices import is_out_of_memory
from dropbayes.sampling import Sampling, trials
from dropbayes.sampling import plan as planning
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.inspection import inspect
from dropbayes.sampling.plan import make_plan
from tests.cases import crossed
from tests.sampling.loop import assert_law
from tests.sampling.zoo import Module, build


def method(net, x, **options):
    sampling = db.Sampling(integrate_last_layer=False, **options.pop("sampling", {}))
    return db.predict(net, x, n_draws=6, sampling=sampling, **options).method


def test_an_operation_without_a_batching_rule_is_not_mapped():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

    net = Module(lambda m, x: Doubled.apply(m.d(torch.relu(m.a(x)))), a=nn.Linear(3, 64), d=nn.Dropout(0.3))
    assert method(net, torch.randn(4, 3)) == "folded"


def test_control_flow_on_a_draw_runs_path_by_path_if_it_is_a_comparison():
    def forward(m, x):
        return m.a(x) if torch.rand([]) < 0.5 else -m.a(x)

    def by_number(m, x):
        return m.a(x) if torch.rand([]).item() < 0.5 else -m.a(x)

    assert method(Module(by_number, a=nn.Linear(3, 2)), torch.randn(4, 3)) == "draw by draw"
    net = Module(forward, a=nn.Linear(3, 2))
    assert method(net, torch.randn(4, 3)) == "path by path"
    assert method(net, torch.randn(4, 3), masks="row") == "branch by branch"


def doubling_large_batches(limit=8):
    return Module(
        lambda m, x: m.o(m.d(m.a(x)) * (1 if len(x) < limit else 2)),
        a=nn.Linear(4, 8),
        d=nn.Dropout(0.3),
        o=nn.Linear(8, 2),
    )


@pytest.mark.parametrize(("rows", "masks"), crossed([3, 1], ["shared", "row"]))
def test_a_network_that_does_otherwise_with_many_rows_has_the_law_of_the_rows_given(rows, masks):
    torch.manual_seed(0)
    assert_law(doubling_large_batches(), torch.randn(rows, 4), masks=masks)


def test_a_batch_that_differs_from_its_rows_by_its_size_is_refused():
    with pytest.raises(ValueError, match="in its batch of 12 in evaluation mode: its rows depend on each other"):
        db.predict(doubling_large_batches(), torch.randn(12, 4))


def with_room(most, failed):
    def forward(m, x):
        if x.shape[0] > most or x.isnan().any():
            failed.append(x.shape[0])
            raise ValueError("no room, or NaN")
        return torch.tanh(m.o(m.d(torch.tanh(m.a(x)))))

    torch.manual_seed(0)
    return Module(forward, a=nn.Linear(4, 8), d=nn.Dropout(0.3), o=nn.Linear(8, 2))


@pytest.mark.parametrize(("most", "masks"), crossed([3, 1, 20, 200], ["shared", "row"]))
def test_a_network_with_room_for_few_rows_is_given_no_more(most, masks):
    net, x, failed = with_room(most, failed := []), torch.randn(min(most, 33), 4), failed
    assert_law(net, x, masks=masks, seed=1)
    ours = db.draws(net, x, n_draws=40, masks=masks)
    assert torch.equal(db.draws(net, x[:1], n_draws=40, masks=masks), ours[:, :1])
    failed.clear()
    db.draws(net, x, n_draws=40, masks=masks)
    assert not failed  # what it takes is remembered


def test_the_error_of_a_network_on_one_of_many_rows_is_its_own():
    x, net, sizes = torch.randn(20, 4), with_room(999, []), []
    net.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    bad = x.clone()
    bad[9] = math.nan
    with pytest.raises(ValueError, match="no room, or NaN"):
        db.draws(net, bad, n_draws=10)
    sizes.clear()
    db.draws(net, x, n_draws=10)
    assert max(sizes) >= 200  # it is not taken for a network with room for few


def copied(k, before):
    def forward(m, x):
        h = before(m, x).repeat(k, 1)  # the copies of a row lie apart
        return m.o(m.d(h)).view(k, len(x), 2).mean(0)

    return Module(forward, a=nn.Linear(4, 8), d=nn.Dropout(0.3), o=nn.Linear(8, 2))


BEFORE = {
    "a layer": lambda m, x: torch.tanh(m.a(x)),
    "dropped weights": lambda m, x: torch.tanh(F.linear(x, F.dropout(m.a.weight, 0.3, m.training))),
    "a layer that is skipped": lambda m, x: m.a(x) if m.training and torch.rand([]) < 0.3 else torch.tanh(m.a(x)),
}


@pytest.mark.parametrize(("k", "before"), crossed([3, 2, 5], BEFORE))
def test_copies_of_a_row_that_lie_apart_have_masks_of_their_own_in_a_batch_of_any_size(k, before):
    torch.manual_seed(0)
    net, x = copied(k, BEFORE[before]), torch.randn(16, 4)
    expected = db.draws(net, x, n_draws=6)
    for n in (15, 6, 1):
        for sampling in (Sampling(), Sampling(batch_invariant=False)):
            torch.testing.assert_close(db.draws(net, x[:n], n_draws=6, sampling=sampling), expected[:, :n])
        torch.testing.assert_close(db.function_draw(net, 2, n_draws=6)(x[:n]), expected[2, :n])


GATES = {
    "booleans": lambda like: torch.empty_like(like, dtype=torch.bool).bernoulli_(0.9),
    "zeros and ones, as booleans": lambda like: torch.bernoulli(torch.full_like(like, 0.9)).bool(),
    "zeros and ones, as integers": lambda like: torch.bernoulli(torch.full_like(like, 0.9)).long(),
    "ones": lambda like: torch.bernoulli(torch.full_like(like, 0.9)) == 1,
    "one of ten": lambda like: torch.randint(0, 10, like.shape) != 4,
    "more than a rate": lambda like: torch.rand_like(like) > 0.1,
}


@pytest.mark.parametrize("gate", GATES)
def test_the_few_gates_of_copies_that_lie_apart_are_told_apart_however_they_are_read(gate):
    def forward(m, x):
        h = torch.tanh(m.a(x)).repeat(4, 1)
        h = h * GATES[gate](h[:, :1]) / 0.9 if m.training else h
        return (m.o(h).view(4, len(x), 2) * torch.arange(1.0, 5.0)[:, None, None]).tanh().sum(0)

    torch.manual_seed(0)
    net, x = Module(forward, a=nn.Linear(4, 8), o=nn.Linear(8, 2)), torch.randn(4, 4)
    expected = db.draws(net, x, n_draws=40)
    for row in range(4):
        torch.testing.assert_close(db.draws(net, x[row : row + 1], n_draws=40)[:, 0], expected[:, row])


READINGS = {
    "as booleans": lambda h: torch.where(F.dropout(torch.ones_like(h), 0.3).bool(), h, 0.5),
    "one for all units, as booleans": lambda h: torch.where(F.dropout(torch.ones_like(h[:, :1]), 0.3).bool(), h, 0.5),
    "by its logarithm": lambda h: (h + torch.bernoulli(torch.full_like(h, 0.9)).log()).softmax(-1),
    "by its root": lambda h: h * F.dropout(torch.ones_like(h), 0.3).sqrt(),
    "by its root, where few are dropped": lambda h: h * F.dropout(torch.ones_like(h), 0.01).sqrt(),
    "as a probability": lambda h: h * F.binary_cross_entropy(torch.bernoulli(torch.full_like(h, 0.9)), h * 0 + 0.5),
    "of one unit, before a threshold": lambda h: h + torch.relu(F.dropout(h[:, :1], 0.3)) - torch.relu(h[:, :1]),
}


@pytest.mark.parametrize(("reading", "masks"), crossed(READINGS, ["shared", "row"]))
def test_a_mask_that_is_read_as_zeros_and_ones_is_not_misplaced(reading, masks):
    def forward(m, x):
        h = torch.tanh(m.a(x)).repeat(2, 1)  # the copies of a row lie apart
        h = READINGS[reading](h) if m.training else h
        return (m.o(h.expand(-1, 8)).view(2, len(x), 2) * torch.tensor([1.0, 3.0])[:, None, None]).tanh().sum(0)

    for seed in range(4):
        torch.manual_seed(seed)
        net, x = Module(forward, a=nn.Linear(4, 8), o=nn.Linear(8, 2)), torch.randn(3, 4)
        options = {"n_draws": 100, "masks": masks}
        whole = db.draws(net, x, **options)
        alone = [db.draws(net, x[i : i + 1], **options, sampling=Sampling(row_offset=i)) for i in range(3)]
        torch.testing.assert_close(torch.cat(alone, 1), whole)


@pytest.mark.parametrize("masks", ["shared", "row"])
def test_a_mask_before_a_choice_by_probability_is_not_misplaced(masks):
    def forward(m, x):
        h = m.d(torch.tanh(m.a(x)).transpose(0, 1).flatten(0, 1)).unflatten(0, (3, len(x)))  # steps outermost
        chance = torch.sigmoid(3 * h.sum(0))
        return m.o(torch.bernoulli(chance) if m.training else chance)

    torch.manual_seed(0)
    net, x = Module(forward, a=nn.Linear(4, 16), d=nn.Dropout(0.5), o=nn.Linear(16, 2)), torch.randn(3, 3, 4)
    whole = db.draws(net, x, n_draws=20, masks=masks)
    alone = [db.draws(net, x[i : i + 1], n_draws=20, masks=masks, sampling=db.Sampling(row_offset=i)) for i in range(3)]
    torch.testing.assert_close(torch.cat(alone, 1), whole)


@pytest.mark.parametrize("descending", [True, False])
def test_the_masks_of_rows_that_are_sorted_meanwhile_stay_with_them(descending):
    def forward(m, x):
        order = x.mean(1).argsort(descending=descending)
        return m.o(m.d(m.a(x[order])))[order.argsort()]

    net = Module(forward, a=nn.Linear(4, 8), d=nn.Dropout(0.3), o=nn.Linear(8, 2))
    x = torch.randn(5, 4)
    assert method(net, x, masks="row") == "folded"
    expected = torch.cat([db.predict(net, row[None], method="linear").std for row in x])
    torch.testing.assert_close(db.predict(net, x, method="linear").std, expected)


PUT_BACK = {
    "index": lambda h, order: h[order.argsort()],
    "index_copy": lambda h, order: torch.empty_like(h).index_copy(0, order, h),
    "scatter": lambda h, order: torch.empty_like(h).scatter(0, order[:, None].expand_as(h), h),
}


@pytest.mark.parametrize(("way", "by_draw"), [("index", True), ("index_copy", False), ("scatter", True)])
def test_rows_that_are_sorted_among_those_of_all_draws_keep_their_masks(way, by_draw):
    def forward(m, x):
        h = m.a(m.d(x))
        order = (h if by_draw else x)[:, 0].argsort()
        return m.o(PUT_BACK[way](m.d(torch.tanh(h[order])), order))

    for seed in range(3):  # of other rows, some come to stand where they were
        torch.manual_seed(seed)
        net, x = Module(forward, a=nn.Linear(4, 8), d=nn.Dropout(0.5), o=nn.Linear(8, 2)), torch.randn(3, 4)
        assert {method(net, x[:1]), method(net, x)} == {"folded"}  # each is followed through the order of all draws
        torch.testing.assert_close(db.draws(net, x[:1], n_draws=6), db.draws(net, x, n_draws=6)[:, :1])


def test_the_masks_of_rows_that_are_reversed_meanwhile_stay_with_them():
    net = Module(
        lambda m, x: m.o(m.d(m.a(x).flip(0)).flip(0)), a=nn.Linear(4, 8), d=nn.Dropout(0.01), o=nn.Linear(8, 2)
    )
    x = torch.randn(5, 4)
    assert method(net, x, masks="row") == "mapped over rows"
    whole = db.draws(net, x, n_draws=50, masks="row")
    alone = [db.draws(net, x[i : i + 1], n_draws=50, masks="row", sampling=Sampling(row_offset=i)) for i in range(5)]
    torch.testing.assert_close(torch.cat(alone, 1), whole)


@pytest.mark.parametrize("same_bits", [True, False])
def test_a_larger_block_is_taken_only_if_its_rows_have_the_same_bits(same_bits, monkeypatch):
    monkeypatch.setitem(planning._MAX_ROWS, "cpu", 16)

    def forward(m, x):
        gates = [torch.rand([]).item() < 0.5 for _ in range(3)]  # of any number, a draw of all rows runs alone
        h = torch.tanh(x) if sum(gates) > 1 else x
        return h if same_bits else h * (1 + 1e-6 * math.log(x.shape[0]))  # a difference like that of rounding

    net, inputs = Module(forward), as_inputs(torch.randn(99, 8))
    plan = make_plan(net, inputs, keys=Sampling().keys(50, 0), masks="shared")
    assert plan.strategy.name == "draw by draw" and plan.block_rows == (99 if same_bits else 16)
    assert [row for block in plan.run(inputs) for row in block.rows] == list(range(99))


@pytest.mark.parametrize("same_bits", [True, False])
def test_many_rows_have_larger_blocks_only_if_they_have_the_same_bits(same_bits, monkeypatch):
    monkeypatch.setitem(planning._FREE_OPERATIONS_SMALL, "cpu", 1.0)

    def forward(m, x):
        h = m.d(torch.tanh(x)) + 1
        return h if same_bits else h * (1 + 1e-6 * math.log(x.shape[0]))

    net, inputs = Module(forward, d=nn.Dropout(0.1)), as_inputs(torch.randn(99, 8))
    plan = make_plan(net, inputs, keys=Sampling().keys(50, 0), masks="shared")
    few = make_plan(net, inputs.block(0, 1), keys=Sampling().keys(50, 0), masks="shared")
    assert few.block_rows < 4 and (plan.block_rows > 4 * few.block_rows) == same_bits
    assert torch.equal(few.collected(inputs.block(98, 99))[0][0], plan.collected(inputs)[0][0][:, 98:])


@pytest.mark.parametrize(
    "error, expected",
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("can't allocate memory"), True),
        (ValueError(), False),
    ],
)
def test_running_out_of_memory_is_recognised(error, expected):
    assert is_out_of_memory(error) == expected


@pytest.mark.parametrize("name", ["transformer_encoder", "gpt2", "convnet_with_batch_norm"])
def test_rounding_under_autocast_hides_no_strategy(name):
    net, x = build(name)
    plain = db.predict(net, x, n_draws=6, sampling=db.Sampling(integrate_last_layer=False))
    with torch.autocast("cpu", torch.bfloat16):
        rounded = db.predict(net, x, n_draws=6, sampling=db.Sampling(integrate_last_layer=False))
    assert rounded.method == plain.method


def test_a_mapped_linear_layer_has_the_precision_of_autocast():
    def forward(m, x):
        position = m.a(m.d(m.position))  # shared by the rows: draws cannot be folded into them
        scores = m.a(x) @ position.T
        return scores.masked_fill(scores > 0, torch.finfo(position.dtype).min).softmax(-1)

    net = Module(forward, a=nn.Linear(3, 64), d=nn.Dropout(0.3))
    net.position = nn.Parameter(torch.randn(5, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert method(net, torch.randn(4, 3)) == "mapped"


def test_a_mapped_last_layer_is_integrated_under_autocast(monkeypatch):
    def forward(m, x):
        return m.b(m.d(m.a(x) * m.a(m.d(m.position)).sum(0)))

    net = Module(forward, a=nn.Linear(3, 64), d=nn.Dropout(0.3), b=nn.Linear(64, 2))
    net.position = nn.Parameter(torch.randn(5, 3))
    monkeypatch.setattr(planning.Plan, "_renewed", lambda *_, **__: pytest.fail("the network was inspected again"))
    with torch.autocast("cpu", torch.bfloat16):
        assert db.predict(net, torch.randn(4, 3), n_draws=6).method == "last layer integrated, mapped"


def test_a_network_that_needs_autocast_is_inspected_under_it():
    net = Module(
        lambda m, x: m.b(m.d(m.n(m.a(x)))),
        a=nn.Linear(3, 64),
        n=nn.LayerNorm(64),
        d=nn.Dropout(0.3),
        b=nn.Linear(64, 2),
    )
    net.a.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert method(net, torch.randn(4, 3)) in ("folded", "mapped")


def test_a_strategy_that_lays_a_mask_in_the_wrong_place_is_not_taken():
    def forward(m, x):  # the mask of a batch is cut by the place of a row in it
        mask = F.dropout(torch.ones(x.shape[0], 4), 0.5, m.training)
        return x * mask.flip(0)

    net, x = Module(forward), torch.randn(4, 4)
    expected = torch.stack([db.function_draw(net, i, n_draws=5, masks="row")(x) for i in range(5)])
    torch.testing.assert_close(db.draws(net, x, n_draws=5, masks="row"), expected)


def test_the_trial_of_a_strategy_is_made_once():
    net, x = build("transformer_encoder")
    db.draws(net, x, n_draws=3)
    known = dict(inspect(net, as_inputs(x)).strategies)
    db.draws(net, x, n_draws=3, seed=4)
    assert known and inspect(net, as_inputs(x)).strategies == known


def test_memory_that_does_not_grow_with_the_rows_is_not_counted_for_each():
    def forward(m, x):
        return m.d(m.a(x)) @ m.w.t().clone()  # a copy of the weights in every pass

    net = Module(forward, a=nn.Linear(3, 64), d=nn.Dropout(0.3))
    net.w = nn.Parameter(torch.randn(4000, 64))
    plan = make_plan(net, as_inputs(torch.randn(5, 3)), keys=Sampling().keys(20, 0), masks="shared")
    assert 4 * 4000 <= plan.profile.pass_bytes < 4 * 4000 * 3


def test_a_row_whose_units_are_all_zero_hides_no_misplaced_mask():
    def forward(self, x):  # two copies of all rows, one below the other: entries of a row do not lie side by side
        return self.last(self.dropout(torch.relu(self.first(torch.cat([x, x]))))).chunk(2)

    net = Module(forward, first=nn.Linear(4, 8), dropout=nn.Dropout(0.3), last=nn.Linear(8, 2)).eval()
    with torch.no_grad():
        net.first.weight.fill_(-1.0)
        net.first.bias.zero_()
    x = torch.tensor([[3.0], [-1.0], [-2.0]]).expand(3, 4) * torch.linspace(0.5, 1.5, 4)  # the first row is tried
    together, alone = db.draws(net, x, n_draws=10), db.draws(net, x[1:2], n_draws=10)
    for several, one in zip(together, alone, strict=True):
        torch.testing.assert_close(several[:, 1:2], one)


def test_a_network_that_saturates_hides_no_misplaced_mask():
    def forward(m, x):
        h = m.d(m.d(x).flip(0)).flip(0)
        for _ in range(3):
            h = m.e(torch.tanh(m.a(h)))
        return m.o(h)

    parts = {"d": nn.Dropout(0.8), "e": nn.Dropout(0.05)}
    for seed in range(8):
        torch.manual_seed(seed)
        net, x = Module(forward, a=nn.Linear(4, 4), o=nn.Linear(4, 2), **parts).eval(), torch.randn(2, 4)
        net.a.weight.data.mul_(3)
        whole = db.draws(net, x, n_draws=20, masks="row")
        alone = [db.draws(net, x[i : i + 1], n_draws=20, masks="row", sampling=Sampling(row_offset=i)) for i in (0, 1)]
        torch.testing.assert_close(torch.cat(alone, 1), whole)


def test_one_number_that_agrees_but_for_its_last_digits_is_compared_in_double(monkeypatch):
    net, x = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Dropout(0.5), nn.Flatten(), nn.Linear(9, 1)), torch.randn(3, 2, 4)
    right, factors = trials.evaluate, {torch.float32: 1 + 5e-5, torch.float64: 1.0}

    def rounded(strategy, spec, work):
        outputs = right(strategy, spec, work)
        return [out * factors[out.dtype] if strategy.rows == "together" else out for out in outputs]

    monkeypatch.setattr(trials, "evaluate", rounded)
    assert method(copy.deepcopy(net), x) in ("folded", "mapped")
    factors[torch.float64] = factors[torch.float32]
    assert method(net, x) == "mapped over rows"


def test_units_that_rounding_alone_keeps_from_zero_are_no_reason_to_run_rows_apart():
    def forward(self, x):  # mathematically zero: rounding, which depends on the size of the batch, decides the sign
        noise = torch.relu(x @ self.weight - x[:, self.order] @ self.weight[self.order])
        return self.last(self.dropout(noise) + x[:, :64])

    torch.manual_seed(0)
    net = Module(forward, dropout=nn.Dropout(0.2), last=nn.Linear(64, 3)).eval()
    net.weight, net.order = nn.Parameter(torch.randn(256, 64)), torch.randperm(256)
    assert db.predict(net, torch.randn(20, 256), n_draws=10).method == "mapped"


def test_a_unit_that_is_zero_in_one_row_is_no_reason_to_run_rows_of_the_second_axis_apart():
    def forward(self, x):  # units first: a unit is zero in a row alone, though not in all of a batch
        return self.last @ F.dropout(torch.relu(self.second @ torch.relu(self.first @ x)), 0.2, self.training)

    torch.manual_seed(0)
    net = Module(forward).eval()
    net.first, net.second, net.last = (nn.Parameter(torch.randn(n, m)) for n, m in ((64, 4), (64, 64), (2, 64)))
    assert method(net, torch.randn(4, 9), sampling={"row_axis": 1}) == "mapped"


# Many rows ------------------------------------------------------------------------------------------------------------


def test_many_rows_whose_masks_are_those_of_others_are_seen_though_two_masks_of_few_units_may_be_one():
    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        return self.b(self.d(hidden.flip(0)).flip(0) if len(x) > 9 else self.d(hidden))

    x = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    for seed in range(16):  # in three of these the last and the first row have one mask in the last draw
        torch.manual_seed(0)
        net = Module(forward, a=nn.Linear(6, 16), d=nn.Dropout(0.1), b=nn.Linear(16, 2)).eval()
        alone = db.draws(net, x[3:4], n_draws=6, masks="row", seed=seed, sampling=db.Sampling(row_offset=3))
        net = copy.deepcopy(net)  # which was never seen with few rows
        torch.testing.assert_close(db.draws(net, x, n_draws=6, masks="row", seed=seed)[:, 3:4], alone)


@pytest.mark.parametrize("units, drop_prob, seed", [(16, 0.05, 4), (8, 0.1, 7), (16, 0.1, 8)])
def test_many_rows_whose_masks_are_those_of_others_are_seen_though_these_change_little(units, drop_prob, seed):
    def forward(self, x):
        hidden = torch.relu(self.a(x)) if seed == 8 else torch.tanh(self.a(x))
        return self.b(self.d(hidden.flip(0)).flip(0) if len(x) > 9 else self.d(hidden))

    torch.manual_seed(0)
    net = Module(forward, a=nn.Linear(6, units), d=nn.Dropout(drop_prob), b=nn.Linear(units, 2)).eval()
    x, few = torch.randn(20, 6, generator=torch.Generator().manual_seed(0)), copy.deepcopy(net)
    alone = db.draws(few, x[3:6], n_draws=6, masks="row", seed=seed, sampling=db.Sampling(row_offset=3))
    torch.testing.assert_close(db.draws(net, x, n_draws=6, masks="row", seed=seed)[:, 3:6], alone)


def test_the_masks_of_a_lone_row_of_few_units_are_its_own_among_its_copies():
    def forward(self, x):
        hidden = torch.tanh(self.a(x))
        masked = self.d(hidden.flip(0)).flip(0) if len(x) > 9 else self.d(hidden)
        return torch.tanh(self.b(masked))

    for seed in range(16):  # in one of ten, one draw of another row's mask was near enough
        torch.manual_seed(seed)
        net = Module(forward, a=nn.Linear(6, 8), d=nn.Dropout(0.3), b=nn.Linear(8, 2)).eval()
        x = torch.randn(1, 6)
        expected = torch.stack([db.function_draw(net, i, n_draws=5, masks="row")(x) for i in range(5)])
        torch.testing.assert_close(db.draws(net, x, n_draws=5, masks="row"), expected)
