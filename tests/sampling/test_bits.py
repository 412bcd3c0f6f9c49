"""On a CPU, a row has the same bits alone and in any batch, whatever the number of threads."""

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db
from tests.cases import slow_except
from tests.sampling.loop import made, network


@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow), 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def recurrent(kind, *, before_last=False, **options):
    def forward(self, x):
        h = self.l(x)[0][:, -1]
        return self.o(self.d(h))

    layer = kind(5, 12, 2, dropout=0.0 if before_last else 0.3, batch_first=True, **options)
    width = 24 if options.get("bidirectional") else 12
    last = nn.Dropout(0.3) if before_last else nn.Identity()
    return network(forward, l=layer, d=last, o=nn.Linear(width, 1)), torch.randn(40, 6, 5)


def small_convolutions():
    body = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Dropout2d(0.2), nn.Conv2d(8, 16, 3, stride=2), nn.ReLU()
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 1)), torch.randn(40, 3, 12, 12)


def grouped_and_dilated():
    body = nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 12, 1), nn.GELU(), nn.Dropout(0.2)
    return nn.Sequential(*body, nn.Conv2d(12, 4, 3, dilation=2), nn.Flatten(), nn.Linear(64, 3)), torch.randn(
        40, 4, 10, 10
    )


def one_dimensional():
    body = nn.Conv1d(3, 7, 5, padding=2), nn.GELU(), nn.Dropout(0.2), nn.Conv1d(7, 5, 3, stride=2), nn.ReLU()
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(35, 1)), torch.randn(40, 3, 16)


def transposed():
    body = nn.ConvTranspose2d(2, 5, 3), nn.ReLU(), nn.Dropout2d(0.3), nn.Conv2d(5, 1, 3), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(36, 1)), torch.randn(40, 2, 6, 6)


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(40, 1)), torch.randn(40, 5, 8)


def residual_perceptron():
    def forward(self, x):
        h = self.n(torch.relu(self.a(x)))
        return self.o(self.d(h + torch.relu(self.b(h))))

    children = {"a": nn.Linear(13, 32), "b": nn.Linear(32, 32), "n": nn.BatchNorm1d(32), "d": nn.Dropout(0.2)}
    return network(forward, o=nn.Linear(32, 1), **children), torch.randn(40, 13)


def bilinear_and_einsum():
    def forward(self, x):
        h = self.d(torch.tanh(self.b(x, x)))
        return torch.einsum("rf,fgh,rh->rg", h, self.w, h)

    net = network(forward, b=nn.Bilinear(6, 6, 9), d=nn.Dropout(0.3), w=nn.Parameter(torch.randn(9, 2, 9)))
    return net, torch.randn(40, 6)


def random_first_state():
    def forward(self, x):
        state = torch.randn(2, len(x), 12), torch.randn(2, len(x), 12)
        return self.o(self.l(x, state)[0][:, -1])

    lstm = nn.LSTM(5, 12, 2, dropout=0.3, batch_first=True)
    return network(forward, l=lstm, o=nn.Linear(12, 1)), torch.randn(40, 6, 5)


def dropped_embeddings():
    def forward(self, x):
        weight = self.e.weight
        kept = weight.new_empty(len(weight), 1).bernoulli_(0.8) / 0.8 if self.training else 1.0
        return self.o(nn.functional.embedding(x, weight * kept).mean(1))

    return network(forward, e=nn.Embedding(20, 8), o=nn.Linear(8, 2)), torch.randint(20, (40, 6))


def random_member():
    def forward(self, x):
        return self.members[torch.randint(3, ()).item() if self.training else 0](x)

    member = lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))  # noqa: E731
    return network(forward, members=nn.ModuleList(member() for _ in range(3))), torch.randn(40, 5)


NETWORKS = {
    "LSTM": lambda: recurrent(nn.LSTM),
    "LSTM before the last layer": lambda: recurrent(nn.LSTM, before_last=True),
    "LSTM both ways": lambda: recurrent(nn.LSTM, bidirectional=True),
    "GRU": lambda: recurrent(nn.GRU),
    "GRU before the last layer": lambda: recurrent(nn.GRU, before_last=True),
    "RNN": lambda: recurrent(nn.RNN),
    "small convolutions": small_convolutions,
    "grouped and dilated": grouped_and_dilated,
    "one dimension": one_dimensional,
    "transposed": transposed,
    "transformer": transformer,
    "residual": residual_perceptron,
    "bilinear": bilinear_and_einsum,
    "random first state": random_first_state,
    "dropped embeddings, draw by draw": dropped_embeddings,
    "a random member, draw by draw": random_member,
}
KIN = {"LSTM before the last layer", "LSTM both ways", "GRU before the last layer", "RNN"}


def other_rows(net, x, n_draws, threads=2, **options):
    """The rows that have other bits alone than in their batch: of every sixth one, of all with one thread (slow)."""
    whole = db.predict(net, x, n_draws=n_draws, **options)
    bad = []
    for i in range(0, len(x), 6 if threads > 1 else 1):
        alone = db.predict(net, x[i : i + 1], n_draws=n_draws, **options)
        if not (torch.equal(alone.mean, whole.mean[i : i + 1]) and torch.equal(alone.std, whole.std[i : i + 1])):
            bad.append(i)
    return bad


@pytest.mark.parametrize("name", slow_except(NETWORKS, *(set(NETWORKS) - KIN)))
def test_a_row_has_the_same_bits_alone(name, threads):
    net, x = made(NETWORKS[name])
    assert not other_rows(net, x, 10, threads)
    assert torch.equal(db.draws(net, x[7:8], n_draws=10), db.draws(net, x, n_draws=10)[:, 7:8])


@pytest.mark.parametrize("seed", range(3))
def test_small_convolutions_have_the_same_bits_for_any_weights(seed, threads):
    torch.manual_seed(seed)
    net, x = small_convolutions()
    assert not other_rows(net.eval(), x, 10, threads)


ACTIVATIONS = {
    "Mish": nn.Mish,
    "SiLU in place": lambda: nn.SiLU(inplace=True),
    "Softplus": nn.Softplus,
    "GELU by tanh": lambda: nn.GELU("tanh"),
    "ELU in place": lambda: nn.ELU(inplace=True),
}


@pytest.mark.parametrize("name", slow_except(ACTIVATIONS, "Mish", "SiLU in place"))
def test_units_that_fill_no_vector_have_the_same_bits(name, threads):
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 7, 3),
        ACTIVATIONS[name](),
        nn.Dropout(0.2),
        nn.Conv2d(7, 7, 3, padding=1),
        ACTIVATIONS[name](),
    )
    net = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(7 * 13 * 13, 30)).eval()
    for n_draws in (3, 5, 10):
        assert not other_rows(net, torch.randn(8, 3, 15, 15), n_draws, threads)


@pytest.mark.parametrize("seed", [1, 2, 4])
def test_draws_that_run_one_at_a_time_have_the_same_bits_for_any_weights(seed, threads):
    torch.manual_seed(seed)
    net, x = dropped_embeddings()
    assert not other_rows(net.eval(), x[:8], 10, threads)


@pytest.mark.parametrize("name", ["LSTM", "small convolutions", "transformer", "residual"])
def test_permuted_rows_and_shards_have_the_same_bits(name, threads):
    net, x = made(NETWORKS[name])
    whole, order = db.draws(net, x, n_draws=6), torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert torch.equal(db.draws(net, x[order], n_draws=6), whole[:, order])
    by_row = db.draws(net, x, n_draws=6, masks="row")
    for start, stop in ((0, 17), (17, 18), (18, 40)):
        shard = db.draws(net, x[start:stop], n_draws=6, masks="row", sampling=db.Sampling(row_offset=start))
        assert torch.equal(shard, by_row[:, start:stop])


@pytest.mark.parametrize("name", ["LSTM", "grouped and dilated"])
def test_the_number_of_threads_does_not_change_the_bits(name):
    before, results = torch.get_num_threads(), []
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            net, x = made(NETWORKS[name])
            results.append(db.draws(net, x, n_draws=6))
            assert torch.get_num_threads() == n
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*results)


@pytest.mark.parametrize("n_draws", [1, 3, 50])
def test_few_and_many_draws_have_the_same_bits_alone(n_draws):
    net, x = made(small_convolutions)
    assert not other_rows(net, x[:20], n_draws)


def test_a_regressor_has_the_same_bits_for_a_row_alone():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(100, 5))
    y = x @ generator.normal(size=5) + 0.1 * generator.normal(size=100)
    settings = {"n_steps": 50, "n_folds": 2, "drop_prob": 0.05, "weight_decay": 1e-4}
    model = db.DropoutRegressor(**settings, random_state=0).fit(x, y)
    mean, std = model.predict(x[:10], return_std=True)
    alone = [model.predict(x[i : i + 1], return_std=True) for i in range(10)]
    np.testing.assert_array_equal(np.concatenate([m for m, _ in alone]), mean)
    np.testing.assert_array_equal(np.concatenate([s for _, s in alone]), std)
