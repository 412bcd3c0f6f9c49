"""Passes that depend on values: what a network returns, which rows it joins, what it compares a random number with."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from tests.cases import crossed, slow_except
from tests.sampling.loop import assert_functions, assert_law, assert_same_alone, cut, made, may_be_refused, network
from tests.sampling.training_loop import rows


def layers(p=0.5, outputs=3):
    return {"a": nn.Linear(6, 16), "d": nn.Dropout(p), "o": nn.Linear(16, outputs), "big": nn.Linear(6, outputs)}


def one_row():
    return 2 * torch.randn(1, 6, generator=torch.Generator().manual_seed(7))


# The output decides what is returned ----------------------------------------------------------------------------------


def confident(self, x):
    y = self.o(self.d(torch.relu(self.a(x))))
    return y if y.softmax(-1).max() > 0.42 else 5 * self.big(x)


def low_entropy(self, x):
    y = self.o(self.d(torch.relu(self.a(x))))
    p = y.softmax(-1)
    return y if float(-(p * p.log()).sum().detach()) < 1.0 else 5 * self.big(x)


def read_as_a_list(self, x):
    y = self.o(self.d(torch.relu(self.a(x))))
    return y if y[0].tolist()[0] > -0.4 else y - 3


def read_by_numpy(self, x):
    y = self.o(self.d(torch.relu(self.a(x))))
    return y if np.argmax(y.detach().numpy()) == 1 else 5 * self.big(x)


def read_by_dlpack(self, x):
    y = self.o(self.d(torch.relu(self.a(x))))
    return y if np.argmax(np.from_dlpack(y.detach())) == 1 else 5 * self.big(x)


def counted_by_a_length(self, x):
    h = self.d(torch.relu(self.a(x)))
    return self.o(h) if len(torch.nonzero(h[0])) > 3 else 5 + self.o(h)


def empty_when_nothing_is_dropped(self, x):
    h = self.d(torch.relu(self.a(x)) + 0.1)
    return self.o(h) / (1 + (h[0] == 0).nonzero().shape[0])


def clipped(self, x):
    h = self.d(torch.relu(self.a(x)))
    if h.max() > 1.5:
        h = h / h.max()
    return self.o(h)


def repeated_until_small(self, x):
    y = self.o(self.d(torch.relu(self.a(x))))
    while y.norm() > 0.6:
        y = y / 2
    return y


def scaled_by_its_sign(self, x):
    y = self.o(self.d(torch.relu(self.a(x))))
    return y * (1 if y.sum() > 0 else -4)


def asserted(self, x):
    y = self.o(self.d(torch.relu(self.a(x))))
    assert bool(torch.isfinite(y).all())
    return y


def returned_by_an_index(self, x):
    y = self.o(self.d(torch.relu(self.a(x))))
    return [y, 5 * self.big(x), y - 2][int(y.argmax())]


BRANCHES = [confident, low_entropy, read_as_a_list, read_by_numpy, read_by_dlpack, counted_by_a_length,
            empty_when_nothing_is_dropped, clipped, repeated_until_small, scaled_by_its_sign, asserted,
            returned_by_an_index]  # fmt: skip


@pytest.mark.parametrize(
    "forward", slow_except(BRANCHES, confident, read_by_numpy, counted_by_a_length, repeated_until_small, asserted)
)
@pytest.mark.parametrize("analytic", [True, False])
def test_a_pass_that_reads_its_own_dropped_values_has_the_law_of_the_loop(forward, analytic):
    net, x = made(lambda: (network(forward, **layers()), one_row()))
    expected = db.draws(net, x, n_draws=250)
    if analytic:
        assert_law(net, x, n_draws=170)
    ours = db.predict(net, x, n_draws=250, sampling=db.Sampling(integrate_last_layer=analytic))
    error = 6 * (expected.var(0) / 250).sqrt() + 1e-5
    assert ((ours.mean - expected.mean(0)).abs() <= error).all()
    assert_functions(net, x)


@pytest.mark.parametrize("forward", [confident, clipped, scaled_by_its_sign])
def test_several_rows_of_such_a_pass_are_each_as_alone_or_refused(forward):
    net, x = made(lambda: (network(forward, **layers()), 2 * rows(5)))
    with may_be_refused():
        assert_same_alone(net, x)


def halting():
    def forward(self, x):
        h, running = torch.tanh(self.a(x)), torch.ones(len(x), dtype=torch.bool)
        total = torch.zeros(len(x))
        for _ in range(4):
            if not running.any():
                break
            h = torch.where(running[:, None], torch.tanh(self.b(self.d(h))) + 0.1, h)
            total = total + running * self.h(h)[:, 0].sigmoid()
            running = running & (total < 1.0)
        return self.o(h)

    children = {"a": nn.Linear(6, 8), "b": nn.Linear(8, 8), "d": nn.Dropout(0.4), "h": nn.Linear(8, 1)}
    return network(forward, o=nn.Linear(8, 2), **children), rows(4)


@pytest.mark.slow
def test_rows_that_halt_by_themselves_are_each_as_alone():
    net, x = made(halting)
    assert_law(net, x, n_draws=170)
    assert_same_alone(net, x)


def head_by_sign():
    def forward(self, x):
        h = self.d(torch.relu(self.a(x)))
        return torch.where(h.sum(1, keepdim=True) > 3, self.o(h), 2 * self.big(x))

    return network(forward, **layers()), rows(4)


def test_a_choice_per_row_without_the_host_has_the_law_of_the_loop():
    net, x = made(head_by_sign)
    assert_law(net, x, n_draws=400)
    assert_same_alone(net, x)


# Rows that depend on each other, wherever they are --------------------------------------------------------------------


def branch_on_the_mean(self, x):
    return torch.tanh(self.o(self.d(torch.relu(self.a(x) if x.mean() > 0 else 5 * self.big(x)))))


def largest_of_the_batch(self, x):
    return self.o(self.d(torch.relu(self.a(x)))) * (1.0 if x.max() < 3 else 2.0)


def outliers_of_the_batch(self, x):
    if (x.abs() > 4).any():
        x = x.clamp(-1, 1)
    return torch.tanh(self.o(self.d(torch.relu(self.a(x)))))


def outliers_counted_by_a_length(self, x):
    y = torch.tanh(self.o(self.d(torch.relu(self.a(x)))))
    return y if len((x.abs() > 4).nonzero()) == 0 else 5 - y


DEPENDENT = [branch_on_the_mean, largest_of_the_batch, outliers_of_the_batch, outliers_counted_by_a_length]


def dependent(forward):
    children = layers(0.3, 2) | {"big": nn.Linear(6, 16)}
    x = torch.randn(6, 6).abs() * torch.tensor([1, -1, 1, 1, -1, 1.0])[:, None]
    x[2, 0] = 5.0
    return network(forward, **children), x


@pytest.mark.parametrize("forward", DEPENDENT)
def test_a_dependence_of_middle_rows_is_refused_or_each_row_is_as_alone(forward):
    net, x = made(lambda: dependent(forward))
    with may_be_refused():
        assert_same_alone(net, x, functions=False)


def test_rows_among_several_that_take_the_way_of_all_are_noticed():
    def agreed(self, x):
        h = torch.relu(self.a(x))
        return self.o(self.d(h if (x[:, 0] > 0).all() else 3 - h))

    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    x[:, 0] = -1.0
    x[[1, 6], 0] = 1.0
    net, _ = made(lambda: (network(agreed, **layers()), x))
    with pytest.raises(ValueError, match="its rows depend on each other"):
        db.draws(net, x, n_draws=5)


@pytest.mark.parametrize("forward", DEPENDENT)
def test_a_dependence_that_begins_in_a_later_batch_is_noticed(forward):
    net, x = made(lambda: dependent(forward))
    benign = torch.rand(6, 6, generator=torch.Generator().manual_seed(2))
    with may_be_refused():
        db.draws(net, benign, n_draws=5)
    with may_be_refused():
        assert_same_alone(net, x, functions=False)


def trimmed():
    """A text network that cuts its batch at the longest text."""

    def forward(self, tokens, lengths):
        tokens = tokens[:, : int(lengths.max())]
        real = torch.arange(tokens.shape[1]) < lengths[:, None]
        h = self.e(tokens)
        scores = (h @ h.transpose(1, 2)).masked_fill(~real[:, None], -1e9).softmax(-1)
        h = self.d(scores) @ h
        return self.o((h * real[..., None]).sum(1) / lengths[:, None])

    net = network(forward, e=nn.Embedding(9, 8), d=nn.Dropout(0.4), o=nn.Linear(8, 2))
    return net, (torch.randint(0, 9, (4, 6)), torch.tensor([3, 6, 2, 4]))


@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "after a call on full rows"])
def test_texts_cut_at_the_longest_one_are_the_same_alone(warm):
    net, (tokens, lengths) = made(trimmed)
    if warm:
        db.draws(net, (tokens, torch.full((4,), 6)), n_draws=5)
    assert_same_alone(net, (tokens, lengths))


def time_major(p):
    def forward(self, x):
        n, steps, width = x.shape
        h = self.d(torch.relu(self.a(x.transpose(0, 1).reshape(steps * n, width))))
        return torch.tanh(self.o(h)).view(steps, n, -1).cumsum(0).transpose(0, 1)

    return network(forward, **layers(p)), torch.randn(4, 5, 6)


def drop_blocks(p):
    """Blocks of three by three pixels, dropped together and scaled by the pixels that are left in the whole batch."""

    class DropBlock(nn.Module):
        def forward(self, x):
            if not self.training:
                return x
            seeds = (torch.rand(len(x), *x.shape[2:]) < p / 9).float()
            kept = 1 - F.max_pool2d(seeds[:, None], 3, 1, 1)
            return x * kept * kept.numel() / kept.sum()

    body = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), DropBlock(), nn.Conv2d(4, 2, 3), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(32, 2)), torch.randn(4, 2, 6, 6)


@pytest.mark.parametrize("p", [0.005, 0.02])
def test_rare_masks_are_keyed_to_the_rows_too(p):
    assert_same_alone(*made(lambda: time_major(p)), n_draws=60, rows=[0, 2])


@pytest.mark.parametrize("p", slow_except([0.2, 0.03], 0.2))
def test_blocks_scaled_by_what_the_batch_has_left_are_each_as_alone(p):
    net, x = made(lambda: drop_blocks(p))
    assert_law(net, cut(x, slice(0, 1)), n_draws=1000, predicted=False)
    assert_same_alone(net, x, n_draws=20)


# A random number that is compared more than once ----------------------------------------------------------------------


def one_of_three(draw):
    def forward(self, x):
        r = draw()
        if r < 0.3:
            return self.d(self.a(x))
        elif r < 0.7:
            return self.d(3 * self.b(x))
        elif r < 1.0:
            return self.d(9 * self.c(x))
        raise AssertionError(r)

    return forward


def second_rate_zero(self, x):
    r = torch.rand([])
    h = self.a(x) if r < 0.4 else 3 * self.b(x)
    return self.d(h + 5 * self.c(x) if r < self.rate else h)


def both_ends(self, x):
    r = torch.rand([])
    return self.d(self.a(x) if r < 0.3 or r > 0.8 else 3 * self.b(x))


def compared_and_used(self, x):
    r = torch.rand([])
    return self.d(self.a(x) * r if r < 0.5 else 3 * self.b(x))


def scaled_first(self, x):
    return self.d(self.a(x) if 2 * torch.rand([]) < 0.6 else 3 * self.b(x))


def by_an_index(self, x):
    return self.d([self.a, self.b, self.c][int(3 * torch.rand(1))](x))


def in_buckets(self, x):
    i = torch.bucketize(torch.rand(()), torch.tensor([0.3, 0.7]))
    return self.d((self.a, self.b, self.c)[i](x))


def compared_with_a_tensor(self, x):
    return self.d(torch.where(torch.rand([]) < torch.tensor([0.2, 0.9]), self.a(x), 3 * self.b(x)))


def compared_with_a_number_and_a_tensor(self, x):
    r = torch.rand([])
    h = self.a(x) if r < self.rate else 3 * self.b(x)
    return self.d(h + 5 * self.c(x) if r < torch.tensor(0.4) else h)


COMPARED = {
    "rand([])": one_of_three(lambda: torch.rand([])), "rand(1)": one_of_three(lambda: torch.rand(1)),
    "item": one_of_three(lambda: torch.rand(1).item()), "Python's": one_of_three(random.random),
    "NumPy's": one_of_three(lambda: np.random.rand()), "uniform_": one_of_three(lambda: torch.empty(1).uniform_()),
} | {f.__name__: f for f in (second_rate_zero, both_ends, compared_and_used, scaled_first, by_an_index, in_buckets,
                             compared_with_a_tensor, compared_with_a_number_and_a_tensor)}  # fmt: skip


@pytest.mark.parametrize(
    "name", slow_except(COMPARED, "rand([])", "both_ends", "in_buckets", "compared_with_a_number_and_a_tensor")
)
def test_a_random_number_that_is_compared_more_than_once_has_the_law_of_the_loop(name):
    children = {letter: nn.Linear(6, 2) for letter in "abc"}
    net, x = made(lambda: (network(COMPARED[name], d=nn.Dropout(0.1), rate=0.0, **children), rows(3)))
    assert_law(net, x[:1])
    assert_same_alone(net, x)


# A branch that all rows of a batch choose together --------------------------------------------------------------------


def early_exit(decides):
    def forward(self, x):
        y = self.o(h := self.d(torch.relu(self.a(x))))
        return y if decides(y) else self.o(self.d(torch.relu(self.b(h))))

    return network(forward, a=nn.Linear(4, 16), b=nn.Linear(16, 16), d=nn.Dropout(0.5), o=nn.Linear(16, 2))


@pytest.mark.parametrize("masks", ["shared", "row"])
@pytest.mark.parametrize(
    "decides, n_rows",
    [(lambda y: y.max() > 0.6, 4), (lambda y: y.max() > 0.6, 40), (lambda y: float(y.mean()) > 0.1, 4)],
)
def test_an_exit_that_a_batch_takes_as_a_whole_is_refused_and_that_of_a_row_is_not(decides, n_rows, masks):
    torch.manual_seed(0)
    net, x = early_exit(decides).eval(), torch.randn(n_rows, 4)
    with pytest.raises(ValueError, match="depend on each other"):
        db.predict(net, x, n_draws=20, masks=masks)
    if n_rows == 4:  # the law of one row does not depend on how many were refused
        assert_law(net, x[:1], masks=masks)


# Errors that a network catches ----------------------------------------------------------------------------------------


def scaled_by_a_gate(self, x):
    try:
        scale = 2.0 if self.d(torch.ones(1)) > 0 else 1.0
    except Exception:
        scale = 100.0
    return scale * self.o(torch.tanh(self.a(x)))


def scaled_by_large_values(self, x):
    h = self.d(torch.relu(self.a(x)))
    try:
        scale = torch.tensor([3.0 if max(row) > 3.0 else 1.0 for row in h.tolist()])
    except:  # noqa: E722
        scale = torch.ones(len(h))
    return scale[:, None] * self.o(h)


@pytest.mark.parametrize("forward", [scaled_by_a_gate, scaled_by_large_values])
def test_an_error_that_a_network_catches_does_not_choose_its_branch(forward):
    net, x = made(lambda: (network(forward, **layers(0.3)), 2 * rows(2)))
    assert_law(net, x, n_draws=100)


# Rows sent to different places ----------------------------------------------------------------------------------------


def sent(place, capacity=None, p=0.5):
    """Tokens are sent to experts by `place`; of each expert, no more than `capacity` at a time."""

    def forward(self, x):
        tokens = x.flatten(0, 1) if x.dim() == 3 else x
        out = tokens.new_zeros(len(tokens), 2)
        for i, expert in enumerate(self.experts):
            where = (place(tokens) == i).nonzero()[:capacity, 0]
            if where.numel():
                out = out.index_add(0, where, expert(tokens[where]))
        return out.view(*x.shape[:-1], 2)

    experts = (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(p), nn.Linear(8, 2)) for _ in range(4))
    return network(forward, experts=nn.ModuleList(experts))


def test_two_tokens_of_a_late_row_in_one_expert_have_masks_of_their_own():
    def make():
        x = torch.randn(20, 2, 4)
        x[:, 0, 0], x[:, 1, 0] = torch.arange(20) % 2, 2 + torch.arange(20) % 2
        x[18, :, 0] = 3
        net = sent(lambda tokens: tokens[:, 0])
        return network(lambda self, x: self.net(x).sum(1), net=net), x

    assert_law(*made(make), n_draws=170, predicted=False)


@pytest.mark.parametrize("places", [lambda mask: mask, lambda mask: mask.nonzero(as_tuple=True)])
def test_two_tokens_of_a_row_that_a_mask_of_rows_and_tokens_takes_have_masks_of_their_own(places):
    def unpadded(self, x):
        out, taken = torch.zeros_like(x), places(x[..., 0] > 0)
        out[taken] = self.drop(x[taken])
        order = out.sum((1, 2)).argsort()
        return self.drop(out[order])[order.argsort()]

    x = torch.randn(12, 3, 4, generator=torch.Generator().manual_seed(2))
    x[..., 0] = torch.tensor([1.0, -1.0, -1.0])
    x[3, 1, 0] = 1  # alone in having two
    net = network(unpadded, drop=nn.Dropout(0.5)).eval()
    for masks in ("shared", "row"):
        whole = db.draws(net, x, n_draws=20, masks=masks)
        alone = db.draws(net, x[3:4], n_draws=20, masks=masks, sampling=db.Sampling(row_offset=3))
        torch.testing.assert_close(whole[:, 3:4], alone)


def test_a_layer_is_skipped_beside_tokens_that_are_taken():
    def make():
        def forward(self, x):
            out, taken = torch.zeros_like(x), x[..., 0] > 0
            out[taken] = self.drop(x[taken])
            return out if self.training and torch.rand([]) < 0.4 else self.layer(out).tanh()

        return network(forward, drop=nn.Dropout(0.5), layer=nn.Linear(4, 4)), torch.randn(4, 3, 4)

    assert_law(*made(make))
    assert_same_alone(*made(make))


def test_rows_that_are_cut_into_twos_beside_tokens_that_are_taken_have_masks_of_their_own():
    def forward(self, x):
        out, taken = torch.zeros_like(x), x[..., 0] > 0
        out[taken] = self.drop(x[taken])
        return torch.cat([self.other(some) for some in out.split(2)])

    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(2))
    net = network(forward, drop=nn.Dropout(0.5), other=nn.Dropout(0.5)).eval()
    for masks in ("shared", "row"):
        whole = db.draws(net, x, n_draws=20, masks=masks)
        settings = [db.Sampling(row_offset=row) for row in range(4)]
        alone = [db.draws(net, x[i : i + 1], n_draws=20, masks=masks, sampling=one) for i, one in enumerate(settings)]
        torch.testing.assert_close(whole, torch.cat(alone, 1))


def test_a_row_has_the_masks_that_it_has_beside_rows_of_another_branch():
    def imputed(self, x):
        if (missing := x.isnan()).any():
            x = x.masked_scatter(missing, self.fill.expand_as(x)[missing])
        return self.o(self.d(torch.tanh(self.a(x))))

    def make():
        return network(imputed, fill=nn.Parameter(torch.randn(6)), **layers()), torch.randn(4, 6)

    (net, x), (again, _) = made(make), made(make)
    beside = x.clone()
    beside[2:, 1] = math.nan
    torch.testing.assert_close(db.draws(net, x, n_draws=20)[:, :2], db.draws(again, beside, n_draws=20)[:, :2])
    assert_same_alone(made(make)[0], beside, rows=(0, 3))


def test_a_row_for_which_its_expert_has_no_room_is_noticed():
    net, x = made(lambda: (sent(lambda tokens: (tokens[:, 0] > 0).long(), capacity=3), torch.randn(12, 4)))
    with pytest.raises(ValueError, match="its rows depend on each other"):
        db.predict(net, x, n_draws=10)


def test_a_row_for_which_there_is_no_room_is_noticed_after_batches_of_few():
    net, x = made(lambda: (sent(lambda tokens: (tokens[:, 0] > 0).long(), capacity=3), torch.randn(12, 4)))
    db.draws(net, x[:3], n_draws=6)  # in a block of more rows, which are copies of the last
    with pytest.raises(ValueError, match="its rows depend on each other"):
        db.draws(net, x.abs(), n_draws=6)


@pytest.mark.parametrize("capacity", [3, 40])
def test_a_row_that_finds_no_room_is_noticed_without_dropout_in_the_experts(capacity):
    def make():
        net = sent(lambda tokens: (tokens[:, 0] > 0).long(), capacity, p=0.0)
        return nn.Sequential(nn.Dropout(0.2), net), torch.randn(12, 4)

    net, x = made(make)
    if capacity < len(x):
        with pytest.raises(ValueError, match="its rows depend on each other"):
            db.predict(net, x, n_draws=10)
    else:  # room for the rows, not for those of all draws at once
        assert_same_alone(net, x, rows=(0, 11))


def counted(chosen, room):
    """The rank of a row in its expert, by a running count of one-hot choices; of an expert, `room` rows are taken."""
    counts = torch.nn.functional.one_hot(chosen, 2).cumsum(0)
    return counts.gather(1, chosen[:, None])[:, 0] <= room


def sorted_in(chosen, room):
    order = chosen.argsort(stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(chosen)))
    return rank - (chosen < chosen[:, None]).sum(1) < room


def best_of_all(chosen, room):
    best = chosen.float().topk(min(room, len(chosen))).indices
    return torch.zeros(len(chosen)).index_fill(0, best, 1.0) > 0


@pytest.mark.parametrize("taken", [counted, sorted_in, best_of_all])
@pytest.mark.parametrize("room", [4, 99])
def test_a_row_for_which_there_is_no_room_in_a_product_with_all_experts_is_noticed(taken, room):
    def forward(self, x):
        weight = taken((x[:, 0] > 0).long(), room)[:, None]
        return x[:, :2] + weight * self.o(torch.tanh(self.d(torch.relu(self.a(x)))))

    net, x = made(lambda: (network(forward, **layers(outputs=2)), torch.randn(16, 6)))
    if room < len(x):
        with pytest.raises(ValueError, match="its rows depend on each other"):
            db.predict(net, x, n_draws=10)
    else:  # room for the rows, not for those of all draws at once
        assert_same_alone(net, x, rows=(0, 15))


@pytest.mark.parametrize("near", ["distances", "products"])
def test_messages_that_only_rows_near_each_other_send_are_noticed(near):
    def forward(self, x):
        unit = x / x.norm(dim=1, keepdim=True)
        are_near = torch.cdist(x, x) < 0.2 if near == "distances" else unit @ unit.T > 0.999
        return self.o(self.d(torch.relu(are_near.float() @ self.a(x))))

    net, x = made(lambda: (network(forward, **layers()), torch.randn(20, 6)))
    assert_same_alone(net, x, rows=(0, 19))
    x[18:] = x[3] + 1e-3
    with pytest.raises(ValueError, match="its rows depend on each other"):
        db.predict(made(lambda: (network(forward, **layers()), x))[0], x, n_draws=10)


def test_rows_in_pairs_are_not_one_batch_where_they_cannot_be_mapped_over():
    def forward(self, x):  # an operation in place that torch.func.vmap cannot map
        are_near = (torch.cdist(x, x) < 0.2).float().fill_diagonal_(1.0)
        return self.o(self.d(torch.relu(are_near @ self.a(x))))

    net, x = made(lambda: (network(forward, **layers()), torch.randn(20, 6)))
    assert_same_alone(net, x, rows=(0, 19))  # the last is repeated where blocks are padded


def test_rows_that_depend_on_their_place_in_a_larger_batch_are_noticed():
    def forward(self, x):
        late = 1 + (torch.arange(len(x)) >= 16).float()
        return self.o(self.d(torch.relu(self.a(x)))) * late[:, None]

    net, x = made(lambda: (network(forward, **layers()), torch.randn(24, 6)))
    with pytest.raises(ValueError, match="its rows depend on each other"):
        db.predict(net, x, n_draws=7)


@pytest.mark.parametrize("n", [9, 30])
def test_a_branch_of_all_rows_beside_rows_that_are_sent_is_noticed_or_each_row_is_as_alone(n):
    def leaves_early(self, x):
        h = self.d(torch.relu(self.a(x)))
        big = h[:, 0] > 0.9
        y = h.clone()
        y[big] = self.g(h[big])
        return self.o(h) if (self.g(y).amax(1) > 1).any() else self.o(y) + 3

    torch.manual_seed(0)
    children = {"a": nn.Linear(4, 8), "d": nn.Dropout(0.4), "g": nn.Linear(8, 8), "o": nn.Linear(8, 2)}
    net, x = network(leaves_early, **children).eval(), torch.randn(n, 4)
    try:
        db.draws(net, x, n_draws=20)
    except ValueError as refusal:
        assert "its rows depend on each other" in str(refusal)
    else:
        assert_same_alone(net, x, n_draws=20, rows=range(n), functions=False)


def test_tokens_that_are_sent_to_experts_without_dropout_are_a_batch():
    def make():
        net = sent(lambda tokens: (tokens[:, 0] > 0).long(), p=0.0)
        return nn.Sequential(nn.Dropout(0.2), net), torch.randn(6, 3, 4)

    net, x = made(make)
    assert db.predict(net, x, n_draws=10).method == "folded"
    assert_law(net, x)
    assert_same_alone(net, x, rows=(0, 5))


def test_tokens_that_meet_dropout_in_their_expert_run_with_those_of_all_draws():
    net, x = made(lambda: (sent(lambda tokens: (tokens[:, 0] > 0).long()), torch.randn(6, 3, 4)))
    assert db.predict(net, x, n_draws=10).method == "folded"
    assert_law(net, x)
    assert_same_alone(net, x, rows=(0, 5))


def put_back_by_the_inverse(y, order):
    return y[order.argsort()]


def put_back_by_assignment(y, order):
    out = torch.zeros_like(y)
    out[order] = y
    return out


def put_back_by_adding(y, order):
    return torch.zeros_like(y).index_add(0, order, y)


def put_back_by_scatter(y, order):
    return torch.zeros_like(y).scatter(0, order[:, None].expand_as(y), y)


def sorted_by_expert(put_back, by_draw, n_tokens):
    """Entries are sorted by expert, meet dropout in that order, and are put back."""

    def forward(self, x):
        entries = x.reshape(-1, 6)
        chosen = self.gate(self.d(entries) if by_draw else entries).argmax(-1)
        order = chosen.argsort(stable=True)
        y = self.d(torch.einsum("nd,nde->ne", entries[order], self.weights[chosen[order]]).tanh())
        y = self.d(put_back(y, order).reshape(x.shape))
        return self.o(y.mean(1) if n_tokens else y)

    net = network(forward, gate=nn.Linear(6, 3), d=nn.Dropout(0.3), o=nn.Linear(6, 2))
    net.weights = nn.Parameter(torch.randn(3, 6, 6))
    return net, torch.randn(9, *([n_tokens] if n_tokens else []), 6)


@pytest.mark.parametrize("n_tokens", [0, 4])
@pytest.mark.parametrize("by_draw", [False, True])
@pytest.mark.parametrize(
    "put_back", [put_back_by_the_inverse, put_back_by_assignment, put_back_by_adding, put_back_by_scatter]
)
def test_entries_that_are_sorted_by_expert_keep_their_masks_among_those_of_all_draws(put_back, by_draw, n_tokens):
    for seed in (0, 1):  # of one, all rows of a trial have one expert, so that none is moved there
        torch.manual_seed(seed)
        net, x = sorted_by_expert(put_back, by_draw, n_tokens)
        net.eval()
        for masks in ("shared", "row"):
            whole = db.draws(net, x, n_draws=12, masks=masks)
            assert db.predict(net, x, n_draws=12, masks=masks).method.endswith("folded")
            for row in range(9):
                offset = db.Sampling(row_offset=row)
                alone = db.draws(net, x[row : row + 1], n_draws=12, masks=masks, sampling=offset)
                torch.testing.assert_close(alone[:, 0], whole[:, row])


def put_at_their_ranks(net, x, chosen):
    ranks = chosen.argsort(stable=True).argsort()
    y = torch.zeros_like(x)
    y[ranks] = x
    return net.d(torch.tanh(net.a(y)))[ranks]


def copied_into_a_buffer(net, x, chosen):
    order = chosen.argsort(stable=True)
    y = torch.zeros_like(x)
    y[:] = x[order]
    return net.d(torch.tanh(net.a(y)))[order.argsort()]


def groups_one_after_the_other(net, x, chosen):
    places = [(chosen == expert).nonzero()[:, 0] for expert in range(3)]
    y = net.d(torch.tanh(net.a(torch.cat([x[some] for some in places]))))
    return torch.zeros_like(x).index_copy(0, torch.cat(places), y)


def groups_by_masks(net, x, chosen):
    y, first, out = net.d(torch.tanh(net.a(torch.cat([x[chosen == i] for i in range(3)])))), 0, torch.zeros_like(x)
    for expert in range(3):
        count = int((chosen == expert).sum())
        out[chosen == expert] = y[first : first + count]
        first += count
    return out


def two_experts_each(net, x, chosen):
    flat = torch.stack([chosen, (chosen + 1) % 3], 1).flatten()
    order = flat.argsort(stable=True)
    y = net.d(torch.einsum("nd,nde->ne", x[order // 2], net.weights[flat[order]]).tanh())
    return torch.zeros_like(x).index_add(0, order // 2, y)


def split_by_counts(net, x, chosen):
    order, counts = chosen.argsort(stable=True), nn.functional.one_hot(chosen, 3).sum(0).tolist()
    parts = zip(x[order].split(counts), net.weights, strict=True)
    y = net.d(torch.cat([net.d(torch.tanh(part @ weight)) for part, weight in parts]))
    return torch.zeros_like(x).index_copy(0, order, y)


def turned(net, x, chosen):
    order = chosen.argsort(stable=True)
    return net.d(torch.tanh(net.a(x[order].flip(0)))).flip(0)[order.argsort()]


def own_noise(net, x, chosen):
    order = chosen.argsort(stable=True)
    y = net.a(x[order])
    return (y + 0.3 * torch.randn_like(y) if net.training else y)[order.argsort()]


MOVES = [put_at_their_ranks, copied_into_a_buffer, groups_one_after_the_other, groups_by_masks, two_experts_each,
         split_by_counts, turned, own_noise]  # fmt: skip


@pytest.mark.parametrize(("move", "masks"), crossed(MOVES, ["shared", "row"]))
def test_rows_that_come_to_stand_elsewhere_keep_their_masks(move, masks):
    def forward(self, x):
        return self.o(move(self, x, self.gate(x).argmax(-1)))

    for seed in (0, 1, 2):  # most rows have one expert: those of a trial may stay where they are
        torch.manual_seed(seed)
        net = network(forward, gate=nn.Linear(6, 3), a=nn.Linear(6, 6), d=nn.Dropout(0.3), o=nn.Linear(6, 2)).eval()
        net.weights = nn.Parameter(torch.randn(3, 6, 6))
        net.gate.bias.data = torch.tensor([0.6, 0.0, 0.0])
        x = torch.randn(11, 6)
        whole = db.draws(net, x, n_draws=8, masks=masks)
        for row in range(11):
            alone = db.draws(net, x[row : row + 1], n_draws=8, masks=masks, sampling=db.Sampling(row_offset=row))
            torch.testing.assert_close(alone[:, 0], whole[:, row])


def test_rows_that_only_their_values_can_move_past_the_eye_run_draw_by_draw():
    def forward(self, x):
        some = x[:, 0] > 0
        y = self.d(torch.masked_select(x, some[:, None]).view(-1, 4))  # whose rows are not followed
        return self.o(torch.zeros_like(x).masked_scatter(some[:, None], y))

    net, x = made(lambda: (network(forward, d=nn.Dropout(0.4), o=nn.Linear(4, 2)), torch.randn(12, 4)))
    assert not db.predict(net, x, n_draws=10).method.endswith("folded")
    assert_same_alone(net, x, rows=range(12), functions=False)


def by_masks(tokens, chosen, experts):
    out = torch.zeros_like(tokens)
    for i, expert in enumerate(experts):
        out[chosen == i] = expert(tokens[chosen == i])
    return out


def by_places(tokens, chosen, experts):
    flat, out = tokens.flatten(0, 1), torch.zeros_like(tokens).flatten(0, 1)
    for i, expert in enumerate(experts):
        if len(places := (chosen.flatten() == i).nonzero()[:, 0]):
            out = out.index_add(0, places, expert(flat[places]))
    return out.view_as(tokens)


def taken_first(tokens, chosen, experts):
    flat = tokens.flatten(0, 1)
    places = [(chosen.flatten() == i).nonzero()[:, 0] for i in range(len(experts))]
    taken = [flat.index_select(0, some) for some in places]  # several of them of one length
    outputs = [expert(some) for expert, some in zip(experts, taken, strict=True)]
    return torch.zeros_like(flat).index_copy(0, torch.cat(places), torch.cat(outputs)).view_as(tokens)


def tokens_routed_by_a_draw(send):
    """Tokens choose one of three experts after dropout, and meet dropout there."""

    def forward(self, x):
        h = self.drop(torch.tanh(self.first(x)))
        return self.last(send(h, self.gate(h).argmax(-1), self.experts)).mean(1)

    experts = (nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.4), nn.Linear(12, 8)) for _ in range(3))
    net = network(forward, first=nn.Linear(4, 8), drop=nn.Dropout(0.3), gate=nn.Linear(8, 3), last=nn.Linear(8, 2))
    net.experts = nn.ModuleList(experts)
    return net, torch.randn(40, 5, 4)


@pytest.mark.parametrize(("send", "masks"), crossed([by_masks, by_places, taken_first], ["shared", "row"]))
def test_tokens_that_draws_send_to_experts_run_with_those_of_other_rows(send, masks):
    net, x = made(lambda: tokens_routed_by_a_draw(send))
    assert db.predict(net, x, n_draws=10, masks=masks).method == "folded"
    assert_law(net, x[:6], masks=masks)
    if masks == "shared":
        assert_same_alone(net, x, rows=(0, 17, 39))


@pytest.mark.parametrize("n", [3, 8, 16])
def test_a_length_of_rows_that_draws_send_somewhere_may_decide_for_all_of_them(n):
    def forward(self, x):
        h = self.drop(torch.tanh(self.first(x)))
        places = (h[:, 0] > 0).nonzero()[:, 0]
        if len(places) == 0:
            return self.last(h)
        out = h.index_add(0, places, self.drop(self.expert(h[places])))
        return self.last(2 * out if len(places) > 12 else out)  # more than any row has alone

    children = {"first": nn.Linear(4, 8), "drop": nn.Dropout(0.3), "expert": nn.Linear(8, 8), "last": nn.Linear(8, 2)}
    net, x = made(lambda: (network(forward, **children), torch.randn(n, 4)))
    for masks in ("shared", "row"):
        whole = db.draws(net, x, n_draws=10, masks=masks)
        for row in range(0, n, 2):
            alone = db.draws(net, x[row : row + 1], n_draws=10, masks=masks, sampling=db.Sampling(row_offset=row))
            torch.testing.assert_close(alone[:, 0], whole[:, row])


def test_rows_with_other_numbers_of_tokens_have_masks_of_their_own():
    def unpadded(self, x):
        out, taken = torch.zeros_like(x), x[..., 0] > 0
        out[taken] = self.drop(x[taken])
        return out

    x = torch.ones(4, 6, 8)
    for row, n_tokens in enumerate((6, 4, 2, 1)):
        x[row, n_tokens:] = -1
    net = network(unpadded, drop=nn.Dropout(0.5)).eval()
    kept = db.draws(net, x, n_draws=300, masks="row", sampling=db.Sampling(sampler="independent"))[:, x > 0].double()
    correlation = torch.corrcoef(kept.T) - torch.eye(kept.shape[1])
    assert correlation.abs().max() < 5.5 / 300**0.5
