"""What the dispatcher sees of a pass: randomness, reads, writes and memory."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dropbayes.tracing import SharedWrite, Watch, reads_of
from dropbayes.tracing.watch import check_indices


def watched(function, *rows, shared=None):
    watch = Watch(rows, shared)
    with torch.no_grad(), watch:
        function(*rows)
    return watch


# Randomness -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.ops.aten.dropout(x, 0.5, True),
        lambda x: torch.binomial(torch.ones_like(x), torch.full_like(x, 0.5)),
        lambda x: torch.distributions.Gamma(1.0, 1.0).sample(x.shape),
        lambda x: torch.rand(2),
        lambda x: x.bernoulli_(0.5),
        lambda x: torch.randperm(3),
    ],
)
def test_random_operations_draw_from_torchs_generator(draw):
    watch = watched(draw, torch.ones(2, 3))
    assert watch.draws_by_generator and not watch.unaccounted


def test_random_operations_that_take_no_generator_are_named():
    watch = watched(lambda x: torch.ops.aten.native_dropout(x, 0.5, True), torch.ones(2, 3))
    assert watch.unaccounted == ["native_dropout"] and not watch.draws_by_generator


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: torch.rand(2, generator=torch.Generator().manual_seed(1)),
        lambda x: x.sum(),
    ],
)
def test_operations_that_draw_nothing_with_these_arguments_are_not_named(function):
    watch = watched(function, torch.ones(2, 3, 4))
    assert not watch.unaccounted and not watch.draws_by_generator


def test_numbers_after_a_seed_within_the_pass_are_fixed():
    def seeded(x):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return torch.rand(2)

    assert not watched(seeded, torch.ones(2)).draws_by_generator


# Reads ----------------------------------------------------------------------------------------------------------------


def reads(function):
    """The reads of a pass in which the first tensor holds rows and the second is the result of a site."""
    rows, drawn = torch.arange(1.0, 4.0), torch.arange(3.0)
    watch = Watch([rows])
    with torch.no_grad(), watch:
        watch.mark_drawn([drawn])
        function(rows, drawn)
    return watch.reads


READS = {
    "a branch on a draw": (lambda rows, drawn: bool(drawn.sum() > 0), {(True, False, False)}),
    "a branch on a row": (lambda rows, drawn: bool(rows.max() > 9), {(False, True, False)}),
    "a branch on both": (lambda rows, drawn: bool((rows + drawn).max() > 9), {(True, True, False)}),
    "a number of a row": (lambda rows, drawn: rows.sum().item(), {(False, True, True)}),
    "a number of a draw": (lambda rows, drawn: int(drawn[0] * 2), {(True, False, True)}),
    "a comparison of all values": (lambda rows, drawn: torch.equal(rows, rows.clone()), {(False, True, False)}),
    "a number of neither": (lambda rows, drawn: torch.arange(3.0).sum().item(), set()),
    "whether any": (lambda rows, drawn: bool((rows + drawn > 2).any()), {(True, True, False)}),
    "how many": (lambda rows, drawn: (rows > 2).sum().item(), {(False, True, True)}),
    "where some are": (lambda rows, drawn: [int(i) for i in (drawn > 1).nonzero()], {(True, False, True)}),
    "nothing": (lambda rows, drawn: rows + drawn, set()),
    "a result that depends on neither": (lambda rows, drawn: torch.zeros(3).add_(1).max().item(), set()),
    "a write makes the target depend": (lambda rows, drawn: torch.zeros(3).add_(drawn).max().item(), {(True, False, True)}),
}  # fmt: skip


@pytest.mark.parametrize("name", READS)
def test_values_that_python_reads_are_told_by_what_they_depend_on(name):
    function, expected = READS[name]
    assert reads(function) == expected


ASKED = {
    "whether any are sent": (lambda big: bool(big.any()), False),
    "how many are sent": (lambda big: big.sum().item(), True),
    "whether some are sent": (lambda big: bool(big.sum() > 0), False),
    "where those are that are sent": (lambda big: [int(i) for i in big.nonzero()], True),
    "which of two have some": (lambda big: [int(i) for i in (torch.stack([big, ~big]).sum(1) > 0).nonzero()], True),
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("sends", [True, False])
def test_which_experts_have_rows_sets_draws_apart_and_not_rows(name, sends):
    ask, number = ASKED[name]

    def watched_rows(values):
        rows, drawn = torch.tensor(values), torch.ones(1)
        watch = Watch([rows])
        with torch.no_grad(), watch:
            watch.mark_drawn([drawn])
            big = rows * drawn > 2
            ask(big)
            if sends:
                rows[big]
        return watch

    batch, other, alike = (watched_rows(values) for values in ([1.0, 3.0], [1.0, 1.0], [1.0, 4.0]))
    strict = {(True, True, number)}
    assert reads_of(batch) == reads_of(batch, alike) == batch.reads == strict, "no other answer was seen to do no harm"
    sends |= name.startswith(("where", "which"))  # nonzero() alone gives a shape that depends on values
    assert reads_of(batch, other) == ({(True, False, False), (False, True, False)} if sends else strict)


LENGTHS = {
    "of a draw, selected by the rows": (lambda rows, drawn: drawn[rows > 1], {(False, True, False)}),
    "of a row, selected by a draw": (lambda rows, drawn: rows[drawn > 0], {(True, False, False)}),
    "selected by both": (lambda rows, drawn: rows[rows * drawn > 1], {(True, False, False), (False, True, False)}),
    "selected by neither": (lambda rows, drawn: drawn[torch.tensor([True, False, True])], set()),
    "taken by a mask of the rows": (lambda rows, drawn: drawn.masked_select(rows > 1), {(False, True, False)}),
    "of places in the rows": (lambda rows, drawn: (rows > 1).nonzero() + drawn.sum(), {(False, True, False)}),
    "of what was computed of those": (lambda rows, drawn: drawn[rows > 1].exp() * 2, {(False, True, False)}),
    "of a draw that nothing selects": (lambda rows, drawn: drawn * 2, set()),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_a_length_depends_on_what_selects_and_not_on_what_is_selected(name):
    function, expected = LENGTHS[name]
    rows, drawn = torch.arange(1.0, 4.0), torch.arange(3.0)
    with torch.no_grad(), Watch([rows]) as watch:
        watch.mark_drawn([drawn])
        watch.note_length(function(rows, drawn))
    assert watch.reads == expected


def test_a_line_that_reads_the_same_in_every_pass_does_not_ask_which_experts_have_rows():
    def watched_rows(values):
        rows, drawn = torch.tensor(values), torch.ones(1)
        with torch.no_grad(), Watch([rows]) as watch:
            watch.mark_drawn([drawn])
            rows[rows * drawn > 2] if (rows * drawn > 2).any() else rows
            bool((rows * drawn > 0).any())
        return watch

    apart = {(True, False, False), (False, True, False)}
    assert reads_of(watched_rows([1.0, 3.0]), watched_rows([3.0, 3.0])) == {(True, True, False)}
    assert reads_of(watched_rows([1.0, 3.0]), watched_rows([1.0])) == apart | {(True, True, False)}


def test_a_read_that_the_dispatcher_does_not_see_can_be_noted():
    rows = torch.ones(2)
    watch = Watch([rows])
    watch.note_read(rows, number=True)
    watch.note_read("no tensor", number=True)
    assert watch.reads == {(False, True, True)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64])
def test_numbers_of_the_rows_are_kept_to_tell_one_row_from_another(dtype):
    def numbers(value):
        return watched(lambda x: x.sum().item(), torch.tensor([[value, 1]], dtype=dtype)).numbers

    assert len(numbers(3)) == 1 and numbers(3) == numbers(3) != numbers(4)


def test_numbers_of_a_tensor_that_is_not_contiguous_are_kept():
    rows = torch.arange(6.0).reshape(2, 3)
    watch = Watch([rows])
    watch.note_read(rows.t()[1], number=True)
    assert watch.numbers == [rows.t()[1].contiguous().numpy().tobytes()]


def test_shapes_that_depend_on_values_of_the_rows_are_noticed():
    assert watched(lambda x: x[x > 0], torch.ones(3)).has_dynamic_shapes
    assert not watched(lambda x: torch.ones(3).nonzero(), torch.ones(3)).has_dynamic_shapes
    assert not watched(lambda x: x[torch.tensor([0, 2])], torch.ones(3)).has_dynamic_shapes


# Writes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda x: x.mul_(2), True),
        (lambda x: x[0].zero_(), True),
        (lambda x: F.relu(x, inplace=True), True),
        (lambda x: torch.add(x, 1, out=x), True),
        (lambda x: (x * 2).add_(1), False),
    ],
)
def test_a_write_to_the_input_is_noticed(write, expected):
    assert watched(write, torch.ones(2, 3)).writes_input == expected


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.add_(1),
        lambda weight: weight[0].zero_(),
        lambda weight: weight.view(-1).copy_(torch.zeros(4)),
        lambda weight: torch.add(weight, 1, out=weight),
        lambda weight: torch._foreach_add_([torch.ones(1), weight], 1),
    ],
)
def test_a_write_to_a_shared_parameter_is_an_error_before_anything_is_written(write):
    weight = nn.Parameter(torch.ones(2, 2))
    with torch.no_grad(), pytest.raises(SharedWrite, match=r"a\.weight"), Watch(shared={"a.weight": weight}):
        write(weight)
    assert torch.equal(weight, torch.ones(2, 2))


def test_reading_a_shared_parameter_is_allowed():
    weight = nn.Parameter(torch.ones(2, 2))
    with torch.no_grad(), Watch(shared={"weight": weight}):
        (weight * 2).add_(1)


# Memory ---------------------------------------------------------------------------------------------------------------


def test_memory_counts_what_is_alive_at_once():
    def forward(x):
        for _ in range(10):
            x = x + 1  # the tensor before is gone
        return x

    assert 4000 <= watched(forward, torch.ones(1000)).peak_bytes <= 2 * 4000


def test_inputs_weights_and_their_views_take_no_memory():
    weight = torch.ones(100, 100)
    watch = watched(lambda x: (x.view(10, 10), weight.t()), torch.ones(100), shared={"w": weight})
    assert watch.peak_bytes == 0


def test_memory_from_the_first_site_on_is_counted_apart():
    x = torch.ones(1000)
    watch = Watch([x])
    with torch.no_grad(), watch:
        before = x + 1
        drawn = before * 2
        watch.mark_drawn([drawn])
        after = drawn + 1
    assert (watch.peak_bytes, watch.peak_suffix_bytes) == (3 * 4000, 4000)
    assert after.shape == before.shape


def test_a_mark_ends_with_its_memory_and_not_with_the_tensor_that_was_marked():
    array, watch = np.ones(4), Watch()
    drawn = torch.from_numpy(array)
    watch.mark_drawn([drawn])
    view = drawn[1:]
    del drawn
    watch.note_read(view, number=True)
    assert watch.reads == {(True, False, True)}
    del view
    watch.note_read(torch.from_numpy(array), number=False)  # another tensor at the same address
    assert watch.reads == {(True, False, True)}


def test_an_operation_on_functions_is_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"`net` must not call cond, .* Use `if`"):
        watched(lambda x: torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), torch.ones(2))


# Indices --------------------------------------------------------------------------------------------------------------


class Checked(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        check_indices(func.overloadpacket.__name__, args)
        return func(*args, **kwargs or {})


BY_INDEX = {
    "index": lambda x, i: x[i],
    "index of the second axis": lambda x, i: x[:, i],
    "index beside a mask": lambda x, i: x[torch.eye(4, 5) > 0][i],
    "index behind a mask": lambda x, i: x[torch.tensor([True, True, False, False]), i[:1]],
    "index_put": lambda x, i: x.clone().index_put_((i,), torch.zeros(5)),
    "assignment": lambda x, i: x.clone().__setitem__((slice(None), i), 0.0),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_add": lambda x, i: x.index_add(0, i, torch.ones(2, 5)),
    "index_copy": lambda x, i: x.index_copy(0, i, torch.ones(2, 5)),
    "index_fill": lambda x, i: x.index_fill(0, i, 1.0),
    "gather": lambda x, i: x.gather(1, i.expand(4, 2)),
    "scatter": lambda x, i: x.scatter(0, i.view(2, 1), 1.0),
    "scatter_add": lambda x, i: x.clone().scatter_add_(0, i.view(2, 1), torch.ones(2, 1)),
    "embedding": lambda x, i: F.embedding(i, x),
    "embedding bag": lambda x, i: F.embedding_bag(i.view(1, 2), x),
}


@pytest.mark.parametrize("last", [3, 4, 5, -1, -4, -5, -6])
@pytest.mark.parametrize("name", BY_INDEX)
def test_an_index_is_out_of_range_where_a_cpu_says_so(name, last):
    def is_refused():
        try:
            BY_INDEX[name](torch.randn(4, 5), torch.tensor([last, 0]))
        except (IndexError, RuntimeError) as error:
            return str(error)
        return ""

    by_torch = is_refused()
    with Checked():
        found = is_refused()
    assert bool(found) == bool(by_torch)
    assert found.startswith("indices from") == bool(by_torch)


@pytest.mark.parametrize("offsets", [[4, 2], [0, 4, 2], [0, 7], [2, 4]])
def test_bags_that_do_not_follow_each_other_are_out_of_range(offsets):
    with Checked(), pytest.raises(IndexError, match=r"bags of 6 entries must begin at 0 .*; got \["):
        F.embedding_bag(torch.zeros(6, dtype=torch.int64), torch.randn(4, 5), torch.tensor(offsets))


def test_bags_that_follow_each_other_are_in_range():
    with Checked():
        for offsets in ([0, 2, 2, 6], [0]):
            F.embedding_bag(torch.zeros(6, dtype=torch.int64), torch.randn(4, 5), torch.tensor(offsets))


def test_no_index_at_all_is_in_range():
    with Checked():
        assert torch.randn(4, 5)[torch.empty(0, dtype=torch.int64)].shape == (0, 5)
