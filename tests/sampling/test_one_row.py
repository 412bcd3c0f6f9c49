"""One row: its law is that of a batch of one, and it is the same alone as in any batch.

With one row, every layout that puts rows inside another axis looks like the plain one, and every operation over the
whole tensor like one over a row.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dropbayes as db
from tests.cases import slow_except
from tests.sampling.loop import assert_functions, assert_law, assert_same_alone, cut, made, may_be_refused, network
from tests.sampling.training_loop import rows


def layers(p=0.3, inputs=6, width=16, outputs=2):
    return {"a": nn.Linear(inputs, width), "d": nn.Dropout(p), "o": nn.Linear(width, outputs)}


# Rows inside another axis ---------------------------------------------------------------------------------------------


def siamese():
    def forward(self, a, b):
        one, two = self.o(self.d(torch.relu(self.a(torch.cat([a, b]))))).chunk(2)
        return (one - two).square().sum(-1)

    return network(forward, **layers(outputs=4)), (torch.randn(3, 6), torch.randn(3, 6))


def packed_lstm():
    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.o(self.l(packed)[1][0][-1])

    net = network(forward, l=nn.LSTM(5, 8, 2, dropout=0.5, batch_first=True), o=nn.Linear(8, 1))
    return net, (torch.randn(3, 4, 5), torch.tensor([4, 2, 3]))


def packed_gru_sorted_by_the_network():
    def forward(self, x, lengths):
        order = lengths.argsort(descending=True)
        packed = pack_padded_sequence(x[order], lengths[order], batch_first=True)
        h = pad_packed_sequence(self.l(packed)[0], batch_first=True, total_length=x.shape[1])[0]
        return self.o(self.d(h.sum(1)))[order.argsort()]

    gru = nn.GRU(5, 8, 2, dropout=0.4, batch_first=True, bidirectional=True)
    return network(forward, l=gru, d=nn.Dropout(0.2), o=nn.Linear(16, 2)), (
        torch.randn(3, 4, 5),
        torch.tensor([2, 4, 3]),
    )


def flipped_copies():
    def forward(self, x):
        return torch.tanh(self.o(self.d(torch.relu(self.a(torch.cat([x, x.flip(-1)])))))).view(2, len(x), 2).mean(0)

    return network(forward, **layers()), rows(3)


def guidance_by_two_conditions():
    def forward(self, x):
        condition = torch.cat([torch.zeros_like(x), torch.ones_like(x)])
        without, with_it = self.o(self.d(torch.tanh(self.a(torch.cat([x, x]) + condition)))).chunk(2)
        return without + 3 * (with_it - without)

    return network(forward, **layers()), rows(3)


def time_major_inside():
    def forward(self, x):
        n, steps, width = x.shape
        h = self.d(torch.relu(self.a(x.transpose(0, 1).reshape(steps * n, width))))
        return torch.tanh(self.o(h)).view(steps, n, 2).cumsum(0).transpose(0, 1)

    return network(forward, **layers()), torch.randn(3, 4, 6)


def embedded_time_first():
    def forward(self, tokens):
        h = self.d(self.e(tokens).transpose(0, 1).flatten(0, 1))
        h = h.view(tokens.shape[1], tokens.shape[0], -1)
        return self.o(torch.tanh((h * self.w[:, None, None]).sum(0)))

    net = network(forward, e=nn.Embedding(9, 8), d=nn.Dropout(0.4), o=nn.Linear(8, 2))
    net.register_buffer("w", torch.tensor([1.0, 3.0, -2.0, 0.5]))
    return net, torch.randint(0, 9, (3, 4))


def batch_ensemble():
    def forward(self, x):
        k, n = len(self.r), len(x)
        h = torch.relu(self.a(x.repeat(k, 1) * self.r.repeat_interleave(n, 0)))
        return torch.tanh(self.o(self.d(h))).view(k, n, 2).mean(0)

    return network(forward, r=nn.Parameter(torch.randn(4, 6)), **layers()), rows(3)


def four_crops():
    def forward(self, x):
        crops = torch.cat([x[..., i : i + 4, j : j + 4] for i in (0, 2) for j in (0, 2)])
        return torch.tanh(self.o(self.d(torch.relu(self.c(crops)).mean((2, 3))))).view(4, len(x), 2).mean(0)

    return network(forward, c=nn.Conv2d(2, 8, 3), d=nn.Dropout(0.4), o=nn.Linear(8, 2)), torch.randn(3, 2, 6, 6)


def heads_outermost():
    def forward(self, x):
        n, steps, width = x.shape
        q, k, v = (
            f(x).view(n, steps, 2, 3).permute(2, 0, 1, 3).reshape(2 * n, steps, 3) for f in (self.q, self.k, self.v)
        )
        h = self.d((q @ k.transpose(1, 2)).softmax(-1)) @ v
        return self.o(h.view(2, n, steps, 3).permute(1, 2, 0, 3).reshape(n, steps, width))

    net = network(forward, q=nn.Linear(6, 6), k=nn.Linear(6, 6), v=nn.Linear(6, 6), o=nn.Linear(6, 2))
    net.d = nn.Dropout(0.4)
    return net, torch.randn(3, 4, 6)


def two_views():
    def forward(self, x):
        return self.o(self.d(torch.relu(self.a(torch.cat([x, x]))))).view(2, len(x), 2).mean(0)

    return network(forward, **layers(0.5)), rows(3)


def both_passes_and_their_difference():
    def forward(self, x):
        one, two = self.o(self.d(torch.relu(self.a(x.repeat(2, 1))))).chunk(2)
        return one, two, (one - two).abs()

    return network(forward, **layers()), rows(3)


def views_on_a_new_first_axis():
    def forward(self, x):
        h = self.d(torch.relu(self.a(torch.stack([x, -x, 2 * x]))))
        return torch.tanh(self.o(h)).prod(0)

    return network(forward, **layers()), rows(3)


def features_first():
    def forward(self, x):
        h = self.d(torch.relu(self.a(x)).T)
        return torch.tanh(self.o(h.T))

    return network(forward, **layers()), rows(3)


def windows_one_after_the_other():
    def forward(self, x):
        windows = torch.cat([x[:, i : i + 3] for i in range(4)])
        h = self.d(torch.tanh(self.a(windows)))
        return self.o(h).view(4, len(x), 2).amax(0)

    return network(forward, **layers(inputs=3)), rows(3)


def space_and_time():
    def forward(self, x):
        n, steps, places, _ = x.shape
        h = self.d(torch.tanh(self.a(x.flatten(0, 1))))
        h = h.view(n, steps, places, -1).transpose(1, 2).flatten(0, 1)
        return self.o(self.d(h.cumsum(1))).view(n, places, steps, 2).mean((1, 2))

    return network(forward, **layers()), torch.randn(3, 2, 3, 6)


LAYOUTS = [
    siamese, packed_lstm, packed_gru_sorted_by_the_network, flipped_copies, guidance_by_two_conditions,
    time_major_inside, embedded_time_first, batch_ensemble, four_crops, heads_outermost, two_views,
    both_passes_and_their_difference, views_on_a_new_first_axis, features_first, windows_one_after_the_other,
    space_and_time,
]  # fmt: skip


@pytest.mark.parametrize("make", slow_except(LAYOUTS, *set(LAYOUTS) - {packed_lstm, packed_gru_sorted_by_the_network}))
def test_a_lone_row_inside_another_axis_has_the_law_of_the_loop(make):
    net, x = made(make)
    assert_law(net, cut(x, slice(1, 2)))


@pytest.mark.parametrize("make", LAYOUTS)
def test_a_row_inside_another_axis_is_the_same_alone_and_in_its_batch(make):
    assert_same_alone(*made(make))


@pytest.mark.parametrize(
    "make", slow_except([siamese, time_major_inside, two_views, packed_lstm], siamese, time_major_inside, two_views)
)
def test_a_batch_whose_rows_lie_inside_another_axis_has_the_law_of_the_loop(make):
    assert_law(*made(make), n_draws=270)


@pytest.mark.parametrize("make", [siamese, batch_ensemble])
def test_the_first_call_on_one_row_does_not_decide_for_later_batches(make):
    net, x = made(make)
    db.draws(net, cut(x, slice(0, 1)), n_draws=5)
    fresh, _ = made(make)
    torch.testing.assert_close(db.draws(net, x, n_draws=5), db.draws(fresh, x, n_draws=5))


# Operations over the whole tensor -------------------------------------------------------------------------------------

WHOLE = {
    "x / x.norm()": lambda m, x: torch.tanh(m.o(m.d(m.a(x / x.norm())))),
    "x - x.mean()": lambda m, x: torch.tanh(m.o(m.d(m.a((x - x.mean()) / x.std())))),
    "divided by its own sum": lambda m, x: torch.tanh(m.o((lambda h: h / h.sum())(m.d(m.a(x).exp())))),
    "softmax over everything": lambda m, x: m.o(16 * m.d(m.a(x)).flatten().softmax(0).view(len(x), -1)),
    "softmax over the rows": lambda m, x: (lambda h: m.o(h.softmax(0) * h))(m.d(m.a(x))),
    "normalised with the rows": lambda m, x: m.o(F.layer_norm(m.d(m.a(x)), (len(x), 16))),
    "divided by the number of rows": lambda m, x: torch.tanh(m.o(m.d(m.a(x)))) / len(x),
    "summed over the rows": lambda m, x: torch.tanh(m.o(m.d(m.a(x)))).sum(0, keepdim=True),
    "its largest value": lambda m, x: m.o((lambda h: h / h.max())(m.d(m.a(x).exp()))),
    "written for one row": lambda m, x: torch.tanh(m.o(m.d(m.a(x.squeeze(0)))))[None],
    "flattened": lambda m, x: torch.tanh(m.o(m.d(m.a(x.reshape(-1))))).view(1, -1),
    "similarities": lambda m, x: torch.tanh(m.o(m.d(m.a(x)))).square() @ torch.ones(2, len(x)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_one_row_is_never_copied_where_an_operation_reads_the_whole_tensor(name):
    net, x = made(lambda: (network(WHOLE[name], **layers()), torch.randn(1, 6)))
    assert_law(net, x)
    assert_functions(net, x)


@pytest.mark.parametrize("name", ["x / x.norm()", "softmax over the rows", "its largest value"])
def test_three_such_rows_are_refused_or_each_as_alone(name):
    net, x = made(lambda: (network(WHOLE[name], **layers()), torch.randn(3, 6)))
    with may_be_refused():
        assert_same_alone(net, x)


class RowsAsSteps(nn.Module):
    """A sequence without a batch axis: its steps are the rows."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.o = layer, nn.Linear(6, 2)

    def forward(self, x):
        h = self.layer(x)
        return self.o(h[0] if isinstance(h, tuple) else h)


STEPS = {
    "lstm": lambda: nn.LSTM(6, 6, 2, dropout=0.4),
    "transformer": lambda: nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3),
}


@pytest.mark.parametrize("name", STEPS)
def test_one_row_that_is_read_as_a_sequence_of_one_step_has_the_law_of_the_loop(name):
    net, x = made(lambda: (RowsAsSteps(STEPS[name]()), torch.randn(1, 6)))
    assert_law(net, x)


@pytest.mark.parametrize("masks", ["shared", "row"])
def test_one_image_normalised_by_its_own_statistics_has_the_law_of_the_loop(masks):
    def make():
        body = nn.Sequential(nn.Conv2d(2, 6, 3), nn.Dropout2d(0.4), nn.BatchNorm2d(6, track_running_stats=False))
        return nn.Sequential(body, nn.Flatten(), nn.Linear(6 * 16, 2)), torch.randn(1, 2, 6, 6)

    assert_law(*made(make), masks=masks)


# One row of networks that take rows apart -----------------------------------------------------------------------------


def experts_by_index():
    def forward(self, x):
        chosen, out = self.gate(x).argmax(-1), x.new_zeros(len(x), 2)
        for i, expert in enumerate(self.experts):
            where = (chosen == i).nonzero()[:, 0]
            out = out.index_add(0, where, expert(x[where]))
        return out

    experts = nn.ModuleList(nn.Sequential(*layers(outputs=2).values()) for _ in range(3))
    return network(forward, gate=nn.Linear(6, 3), experts=experts), rows(5)


def experts_by_masked_assignment():
    def forward(self, x):
        out, left = torch.zeros(len(x), 2), x[:, 0] < 0
        for where, expert in ((left, self.one), (~left, self.two)):
            if where.any():
                out[where] = torch.tanh(expert(x[where]))
        return out

    return network(forward, one=nn.Sequential(*layers().values()), two=nn.Sequential(*layers(0.5).values())), rows(5)


@pytest.mark.parametrize(
    "make", slow_except([experts_by_index, experts_by_masked_assignment], experts_by_masked_assignment)
)
def test_rows_sent_to_experts_are_right_alone_and_together(make):
    net, x = made(make)
    assert_law(net, x[2:3], n_draws=270)
    assert_same_alone(net, x)


def test_one_row_with_weights_dropped_has_a_mask_of_its_own():
    def forward(self, x):
        return self.o(torch.relu(F.linear(x, F.dropout(self.a.weight, 0.3, self.training))))

    net, x = made(lambda: (network(forward, a=nn.Linear(6, 16), o=nn.Linear(16, 1)), rows(1)))
    assert_law(net, x, masks="row")
    judged = db.evaluate(net, x, torch.zeros(1, 1), likelihood=db.Gaussian(1.0))
    assert judged.n_rows == 1


@pytest.mark.parametrize("batches", [True, False], ids=["in batches", "one row at a time"])
def test_a_lone_row_of_categories_that_no_other_column_has_is_as_in_its_batch(batches):
    def forward(self, x):
        assert batches or len(x) == 1
        columns = [self.get_submodule(f"e{column}")(x[:, column]) for column in range(3)]
        return self.o(self.d(torch.relu(self.a(torch.cat(columns, 1)))))

    tables = {f"e{column}": nn.Embedding(n_values, 2) for column, n_values in enumerate((2, 5, 9))}
    x = torch.tensor([[1, 3, 8], [0, 4, 7], [1, 2, 5]])
    net, x = made(lambda: (network(forward, **tables, **layers()), x))
    assert_law(net, x[:1], n_draws=270)
    if batches:
        assert_same_alone(net, x)
