"""How outputs are compared: each element with values of its own size, and rounding is no difference."""

import pytest
import torch
from torch import nn

import dropbayes as db
from tests.cases import crossed
from tests.sampling.loop import assert_law, assert_same_alone, cut, made, may_be_refused, network
from tests.sampling.training_loop import rows


def hidden(p=0.3):
    return {"a": nn.Linear(6, 16), "d": nn.Dropout(p), "big": nn.Linear(16, 1), "small": nn.Linear(16, 1)}


# A small column beside a large one ------------------------------------------------------------------------------------

JOINED = {
    "one tensor": lambda large, small: torch.cat([large, small], 1),
    "small first": lambda large, small: torch.cat([small, large], 1),
    "two tensors": lambda large, small: (large, small),
    "a sequence": lambda large, small: torch.stack([large, small], 1),
}


def price_and_probability(join, factor):
    def forward(self, x):
        h = self.d(torch.relu(self.a(x)))
        c = self.small(h)
        return join(factor * (self.big(h) + 1), c if self.training else c.sigmoid())

    return network(forward, **hidden()), rows(3)


@pytest.mark.parametrize(("name", "factor"), crossed(JOINED, [3e5, 1e8, 1.0]))
def test_a_sigmoid_of_evaluation_is_kept_in_a_column_beside_a_large_one(name, factor):
    net, x = made(lambda: price_and_probability(JOINED[name], factor))
    with may_be_refused():
        assert_law(net, x, evaluation=("",), n_draws=400)


def with_offset(forward, offset):
    return made(lambda: (network(lambda self, x: forward(self, x) + offset, **hidden()), rows(4)))


@pytest.mark.parametrize("offset", [2e3, 1e4])
def test_an_output_with_an_offset_is_compared_without_it(offset):
    head = lambda self, x: self.small(self.d(torch.relu(self.a(x))))  # noqa: E731
    net, x = with_offset(lambda self, x: head(self, x) - head(self, x).mean(0), offset)
    with pytest.raises(ValueError, match="rows depend on each other"):
        db.predict(net, x)
    net, x = with_offset(lambda self, x: head(self, x) if self.training else head(self, x).sigmoid(), offset)
    assert (db.predict(net, x, n_draws=200).mean - net(x)).abs().max() < 0.1

    def heads_outermost(self, x):
        copies = self.d(torch.relu(self.a(x)).repeat(4, 1))
        return (self.small(copies) * 3).view(4, len(x), 1).tanh().sum(0)

    net, x = with_offset(heads_outermost, offset)
    assert_same_alone(net, x, functions=False)


def test_a_tiny_column_is_compared_too():
    def forward(self, x):
        h = self.d(torch.relu(self.a(x)))
        c = 1e-6 * self.small(h)
        return torch.cat([self.big(h), c if self.training else c.abs()], 1)

    net, x = made(lambda: (network(forward, **hidden()), rows(3)))
    with may_be_refused():
        assert_law(net, x, evaluation=("",), n_draws=400)


def over_the_batch(join, factor):
    def forward(self, x):
        h = self.d(torch.relu(self.a(x)))
        return join(factor * self.big(h), self.small(h).softmax(0))

    return network(forward, **hidden()), rows(3)


def centred_by_the_batch(join, factor):
    def forward(self, x):
        h = self.d(torch.relu(self.a(x)))
        return join(factor * self.big(h), self.small(h) - self.small(h).mean(0))

    return network(forward, **hidden()), rows(3)


def ranked_in_the_batch(join, factor):
    def forward(self, x):
        h = self.d(torch.relu(self.a(x)))
        return join(factor * self.big(h), self.small(h).argsort(0).float())

    return network(forward, **hidden()), rows(3)


@pytest.mark.parametrize(("name", "make"), crossed(JOINED, [over_the_batch, centred_by_the_batch, ranked_in_the_batch]))
def test_rows_that_depend_on_each_other_in_a_small_column_are_refused(name, make):
    net, x = made(lambda: make(JOINED[name], 1e5))
    with may_be_refused() as refused:
        db.predict(net, x)
    assert refused and "row_axis" in str(refused[0])
    assert_law(net, x, sampling=db.Sampling(row_axis=None), n_draws=400)


def time_major_beside_a_large_column():
    def forward(self, x):
        n, steps, _ = x.shape
        h = self.d(torch.relu(self.a(x.transpose(0, 1).flatten(0, 1)))).view(steps, n, 16).transpose(0, 1)
        return torch.cat([1e6 + 1e6 * x[:, :, :1].sum(1), torch.tanh(self.small(h)).cumsum(1)[:, :, 0]], 1)

    return network(forward, **hidden()), torch.randn(3, 4, 6)


def test_rows_inside_another_axis_are_found_in_small_columns():
    net, x = made(time_major_beside_a_large_column)
    assert_same_alone(net, x)
    assert_law(net, cut(x, slice(0, 1)), n_draws=400)


# A row that is large beside the others --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [0, 2, 4])
def test_a_row_of_large_numbers_does_not_hide_what_the_others_do(where):
    def forward(self, x):
        h = self.d(torch.tanh(self.a(x)))
        return self.small(h) * x.abs().amax(1, keepdim=True) + 0.1 * torch.tanh(x.sum(0))[:1]

    x = rows(5)
    x[where] *= 1e7
    net, _ = made(lambda: (network(forward, **hidden()), None))
    with may_be_refused():
        assert_same_alone(net, x)


def test_a_row_of_large_numbers_is_no_reason_to_refuse():
    net, x = made(lambda: (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)), rows(5)))
    x[3] *= 1e7
    assert_same_alone(net, x)


# Rounding is no difference --------------------------------------------------------------------------------------------


@pytest.fixture
def without_onednn():
    """On a CPU without bfloat16, oneDNN's first failure switches it off for the process: later tests would change."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    yield
    torch.backends.mkldnn.enabled = before


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_network_of_any_precision_is_accepted(dtype):
    layers = nn.Linear(6, 32), nn.ReLU(), nn.LayerNorm(32), nn.Dropout(0.3), nn.Linear(32, 32), nn.Tanh()
    net, x = made(lambda: (nn.Sequential(*layers, nn.Linear(32, 2)).to(dtype), rows(5).to(dtype)))
    ours = db.predict(net, x, n_draws=200)
    assert torch.isfinite(ours.std).all() and (ours.std > 0).all()


def test_a_difference_of_large_numbers_is_accepted_beside_a_small_column():
    def forward(self, x):
        h = self.d(self.a(x))
        return torch.cat([self.small(1e6 * h) - self.small(1e6 * h + 1), h[:, :1]], 1)

    net, x = made(lambda: (network(forward, **hidden()), rows(40)))
    assert db.predict(net, x, n_draws=10).mean.shape == (40, 2)


def test_a_column_that_is_zero_but_for_rounding_is_accepted():
    def forward(self, x):
        h = self.d(torch.tanh(self.a(x)))
        return torch.cat([self.small(h), (h - h.mean(1, keepdim=True)).mean(1, keepdim=True)], 1)

    net, x = made(lambda: (network(forward, **hidden()), rows(20)))
    assert db.predict(net, x).mean.shape == (20, 2)


def test_missing_values_are_equal_to_themselves():
    net, x = made(lambda: (nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2)), rows(4)))
    wrapped = network(lambda self, x: torch.tanh(self.n(x)), n=net).eval()
    x[1, 2] = torch.nan
    drawn, without = db.draws(wrapped, x, n_draws=5), db.draws(wrapped, x[[0, 2, 3]], n_draws=5)
    assert drawn[:, 1].isnan().all()
    torch.testing.assert_close(drawn[:, [0, 2, 3]], without)
