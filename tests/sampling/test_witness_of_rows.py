"""The network as its own witness, of its rows: what breaks an assumption is right or refused.

Each group is a cause; its members differ in clothes only.
"""

import copy
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropbayes as db
from tests.cases import crossed
from tests.sampling.training_loop import Net, assert_right, rows
from tests.sampling.zoo import Module

# Rows -----------------------------------------------------------------------------------------------------------------

DEPENDENT = {
    "attention": lambda m, x: m.o(m.d((lambda h: (h @ h.T).softmax(-1) @ h)(m.a(x)))),
    "batch statistics": lambda m, x: m.o(m.d(m.a(x) - m.a(x).mean(0))),
    "position in the batch": lambda m, x: m.o(m.d(m.a(x))) + torch.arange(5.0)[: len(x), None],
    "branch": lambda m, x: m.o(m.d(m.a(x))) * (1 if float(x.sum()) > 0 else -1),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_rows_that_depend_on_each_other_are_refused_with_the_remedy(name):
    net = Module(DEPENDENT[name], a=nn.Linear(6, 16), d=nn.Dropout(0.1), o=nn.Linear(16, 3)).eval()
    with pytest.raises(ValueError, match="row_axis=None"):
        db.predict(net, rows() + torch.tensor([[1.0], [1], [1], [1], [-9]]))
    assert db.predict(net, rows(), sampling=db.Sampling(row_axis=None)).mean.shape == (5, 3)


def test_a_small_difference_of_large_numbers_is_no_dependence():
    net = Module(lambda m, x: m.d(m.o(1e6 * m.a(x)) - m.o(1e6 * m.a(x) + 1.0)), a=nn.Linear(6, 64), d=nn.Dropout(0.2),
                 o=nn.Linear(64, 1)).eval()  # fmt: skip
    assert db.predict(net, rows(50)).mean.shape == (50, 1)


def test_pairwise_outputs_are_refused_and_right_as_one_row():
    net = Module(lambda m, x: (lambda h: h @ h.T)(m.d(m.a(x))), a=nn.Linear(6, 16), d=nn.Dropout(0.2)).eval()
    with pytest.raises(ValueError, match="row_axis=None"):
        db.predict(net, rows())
    assert_right(net, rows(), sampling=db.Sampling(row_axis=None))


def test_a_loss_beside_the_output_is_refused_with_the_remedy():
    net = Net(lambda m, h: h).eval()
    both = Module(lambda m, x, labels: (F.mse_loss(m.net(x), labels), m.net(x)), net=net)
    with pytest.raises(ValueError, match="If the scalar is a loss, leave the labels out of `x`"):
        db.predict(both, (rows(), torch.zeros(5, 3)))


class Message(nn.Module):
    """A graph convolution: every node adds what its neighbours send."""

    def __init__(self, n_inputs, n_outputs):
        super().__init__()
        self.linear = nn.Linear(n_inputs, n_outputs)

    def forward(self, x, edge_index):
        sent = self.linear(x)
        return sent.index_add(0, edge_index[1], sent[edge_index[0]])


class Graphs(nn.Module):
    """Two convolutions with dropout; one output per node, or per graph if `batch` says whose the nodes are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.d = Message(6, 8), Message(8, 2), nn.Dropout(0.3)

    def forward(self, x, edge_index, batch=None):
        h = self.second(self.d(torch.relu(self.first(x, edge_index))), edge_index)
        return h if batch is None else h.new_zeros(int(batch.max()) + 1, 2).index_add(0, batch, h)


class EdgesDropped(Graphs):
    def forward(self, x, edge_index):
        kept = torch.rand(edge_index.shape[1]) < 0.7 if self.training else torch.ones(edge_index.shape[1]).bool()
        return self.first(x, edge_index[:, kept])


class Gathered(Graphs):
    def forward(self, x, edge_index):
        sent = self.d(self.first.linear(x))
        return torch.zeros(len(x), 8).index_add_(0, edge_index[1], sent[edge_index[0]])


class SparseGraph(Graphs):
    def forward(self, x, adjacency):
        return torch.sparse.mm(adjacency, self.second.linear(self.d(torch.relu(self.first.linear(x)))))


EDGES = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 2, 4]])
GRAPHS = {
    "nodes": (Graphs(), (rows(), EDGES)),
    "graphs": (Graphs(), (rows(), EDGES, torch.tensor([0, 0, 0, 1, 1]))),
    "as many edges as nodes": (Graphs(), (rows(), EDGES[:, :5])),
    "sparse": (SparseGraph(), (rows(), torch.eye(5).roll(1, 0).to_sparse())),
    "dropped edges": (EdgesDropped(), (rows(), EDGES)),
    "gathered in place": (Gathered(), (rows(), EDGES)),
}


@pytest.mark.parametrize(("name", "masks"), crossed(GRAPHS, ["shared", "row"]))
def test_a_graph_is_one_row_and_refused_otherwise_with_that_remedy(name, masks):
    net, x = GRAPHS[name]
    with pytest.raises(ValueError, match="row_axis=None"):
        db.predict(net.eval(), x, masks=masks)
    one_row, each = db.Sampling(row_axis=None), db.Sampling(row_axis=(None,) * len(x))
    assert_right(Arguments(net), x, sampling=one_row, masks=masks, n_draws=600)
    ours, other = (db.predict(net, x, sampling=sampling, masks=masks, n_draws=20) for sampling in (one_row, each))
    assert torch.equal(ours.mean, other.mean)


def test_messages_that_a_graph_gathers_in_place_are_mapped_over():
    net, x = GRAPHS["gathered in place"]
    assert db.predict(net.eval(), x, sampling=db.Sampling(row_axis=None)).method == "mapped"


class Arguments(nn.Module):
    """A network that takes its arguments as one tuple, as `assert_right` calls it."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *x):
        return self.net(*(x[0] if isinstance(x[0], tuple) else x))


class Contrast(nn.Module):
    """The similarities of images and texts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text, self.d = nn.Linear(6, 4), nn.Linear(6, 4), nn.Dropout(0.3)

    def forward(self, image, text):
        return F.normalize(self.image(self.d(image)), dim=1) @ F.normalize(self.text(self.d(text)), dim=1).T


class InContext(nn.Module):
    """Answers for queries that attend to a context."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.d = nn.MultiheadAttention(6, 2, dropout=0.2, batch_first=True), nn.Dropout(0.2)
        self.o = nn.Linear(6, 2)

    def forward(self, query, context):
        context = self.d(context)[None]
        return self.o(self.attention(query[None], context, context)[0][0])


@pytest.mark.parametrize(("make", "masks"), crossed([Contrast, InContext], ["shared", "row"]))
def test_an_argument_that_all_rows_read_is_passed_whole(make, masks):
    net, x = Arguments(make().eval()), (rows(4), rows(4))
    with pytest.raises(ValueError, match="row_axis"):
        db.predict(net, x, masks=masks)
    assert_right(net, x, sampling=db.Sampling(row_axis=(0, None)), masks=masks, n_draws=600)
    assert_right(net, x, sampling=db.Sampling(row_axis=None), masks=masks, n_draws=600)


ONE_ROW_FAILS = {
    "statistics of the batch": nn.BatchNorm1d(16, track_running_stats=False),
    "rows in pairs": Module(lambda m, h: (h.view(-1, 2, 16) - h.view(-1, 2, 16).mean(1, keepdim=True)).view(-1, 16)),
    "a batch of one size": Module(lambda m, h: h.view(6, 16)),
}


@pytest.mark.parametrize("name", ONE_ROW_FAILS)
def test_a_network_that_fails_on_a_single_row_is_refused_with_the_remedy(name):
    net = nn.Sequential(nn.Linear(6, 16), ONE_ROW_FAILS[name], nn.Dropout(0.1), nn.Linear(16, 3)).eval()
    with pytest.raises(ValueError, match="row_axis=None"):
        db.predict(net, rows(6))
    assert_right(net, rows(6), sampling=db.Sampling(row_axis=None))


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.p, self.d, self.o = nn.Embedding(20, 8), nn.Embedding(20, 8), nn.Dropout(0.3), nn.Linear(8, 2)

    def forward(self, tokens, positions):
        return self.o(self.d(self.e(tokens) + self.p(positions)))


def test_an_argument_as_long_as_the_batch_is_not_cut_in_silence():
    net, tokens, positions = Positions().eval(), torch.randint(0, 20, (6, 6)), torch.arange(6)
    with pytest.raises(ValueError, match="row_axis="):
        db.predict(net, (tokens, positions))
    for x, axes in (
        ((tokens, positions), (0, None)),
        ({"tokens": tokens, "positions": positions}, {"tokens": 0, "positions": None}),
    ):
        torch.testing.assert_close(db.predict(net, x, sampling=db.Sampling(row_axis=axes)).mean, net(tokens, positions))


@pytest.mark.parametrize("length", [4, 5])
def test_the_last_layer_is_integrated_with_rows_along_the_second_axis(length):
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2)).eval()
    x = torch.randn(length, 5, 6)
    ours = db.predict(net, x, sampling=db.Sampling(row_axis=1))
    torch.testing.assert_close(ours.mean, net(x))
    torch.testing.assert_close(ours.std, db.predict(net, x.transpose(0, 1)).std.transpose(0, 1))


# Attention and padding ------------------------------------------------------------------------------------------------


def test_a_query_that_sees_no_key_keeps_its_dropout_elsewhere():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(6, 6)

        def forward(self, x, mask):
            p = 0.5 if self.training else 0.0
            return F.scaled_dot_product_attention(self.q(x), x, x, attn_mask=mask[:, None, :], dropout_p=p)

    net, x = Attention().eval(), torch.randn(3, 4, 6)
    mask = torch.ones(3, 4, dtype=torch.bool)
    whole = db.draws(copy.deepcopy(net), (x, mask), n_draws=50)
    padded = mask.clone()
    padded[0] = False
    drawn = db.draws(net, (x, padded), n_draws=50)
    assert torch.isfinite(drawn).all() and (drawn[:, 0] == 0).all()
    torch.testing.assert_close(drawn[:, 1:], whole[:, 1:])
    torch.testing.assert_close(db.draws(net, (x, mask), n_draws=50), whole)


# Transforms inside the forward pass -----------------------------------------------------------------------------------


def test_dropout_under_a_vmap_of_the_networks_own_is_refused():
    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(1, 6, 3).repeat(8, 1, 1))

        def forward(self, x):
            member = lambda w: F.dropout(x, 0.5, self.training) @ w  # noqa: E731
            return torch.func.vmap(member, randomness="different")(self.w).mean(0)

    with pytest.raises((NotImplementedError, RuntimeError), match=r"transform|vmap"):
        db.predict(Ensemble(), rows())


# Outputs and inputs of every kind -------------------------------------------------------------------------------------


def test_complex_outputs_have_the_variance_of_both_parts():
    net = Module(lambda m, x: m.o(m.d(x) + 0j), d=nn.Dropout(0.3), o=nn.Linear(6, 2, dtype=torch.complex64)).eval()
    ours, drawn = db.predict(net, rows(), n_draws=400), db.draws(net, rows(), n_draws=400)
    assert ours.mean.dtype == torch.complex64
    torch.testing.assert_close(ours.mean, drawn.mean(0), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.epistemic, drawn.var(0, correction=0), rtol=1e-4, atol=1e-5)


def test_numbers_in_an_output_have_no_statistics():
    net = Module(lambda m, x: {"y": m.d(m.a(x)), "scale": 2.5}, a=nn.Linear(6, 2), d=nn.Dropout(0.3)).eval()
    ours = db.predict(net, rows())
    assert ours.mean["scale"] == 2.5 and ours.epistemic["scale"] is None


@pytest.mark.parametrize(
    "make", [lambda x, y: TensorDataset(x, y), lambda x, y: [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]]
)
def test_loaders_with_targets_are_taken_for_their_inputs(make):
    net = Module(lambda m, x: m.d(m.a(x)), a=nn.Linear(6, 2), d=nn.Dropout(0.3)).eval()
    net.forward = None
    del net.forward

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return self.net(x)

    y = torch.zeros(5, 2)
    loader = DataLoader(make(rows(), y), batch_size=2)
    wrapped = Wrapped().eval()
    torch.testing.assert_close(db.predict(wrapped, loader, progress=False).std, db.predict(wrapped, rows()).std)
    judged = db.evaluate(wrapped, loader, likelihood=db.Gaussian(1.0), progress=False)
    assert judged.n_rows == 5


def numpy_noise(shape):
    return torch.from_numpy(np.random.binomial(1, 0.7, shape).astype(np.float32)) / 0.7


def numbers_of_a_list(shape):
    return torch.tensor([[random.random() < 0.7 for _ in range(shape[1])] for _ in range(shape[0])]) / 0.7


def bits_of_torch(shape):
    return 2.0 * torch.empty(shape).random_(0, 2)  # has no handler


@pytest.mark.parametrize(("noise", "seed"), crossed([numpy_noise, numbers_of_a_list, bits_of_torch], range(3)))
def test_noise_of_the_host_for_each_row_is_what_the_row_has_alone(noise, seed):
    def forward(m, x):
        h = torch.relu(m.a(x))  # of which few units may be more than zero, so that noises agree by chance
        return m.o(h * noise(h.shape) if m.training else h)

    torch.manual_seed(seed)
    net, x = Module(forward, a=nn.Linear(5, 8), o=nn.Linear(8, 2)).eval(), torch.randn(4, 5)
    whole = db.draws(net, x, n_draws=5)
    for row in range(4):
        torch.testing.assert_close(db.draws(net, x[row : row + 1], n_draws=5), whole[:, row : row + 1])
