"""Which axis holds the rows."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.layouts import output_layouts, row_of, site_layouts, site_names, whole_arguments
from dropbayes.sampling.probes import Prober, training_flags
from dropbayes.tracing import RowLayout
from tests.sampling.zoo import Module, build


def probes(net, x):
    """The probes of the first row and of the batch, with the flags of a draw."""
    inputs = as_inputs(x)
    prober, flags = Prober(net, inputs, (), frozenset()), training_flags(())
    with torch.no_grad():
        return prober(inputs.rows([0]), flags), prober(inputs.leaves, flags), inputs.n_rows


def test_sites_know_where_a_batch_has_its_rows():
    net = Module(lambda m, x: m.d(m.d(m.d(x).transpose(0, 1)).reshape(4, -1)).sum(0).reshape(-1, 2), d=nn.Dropout(0.5))
    sites, together = site_layouts(*probes(net, torch.randn(5, 4, 2)))
    assert together and [site.layout for site in sites] == [RowLayout(0, 1), RowLayout(1, 1), RowLayout(1, 2)]
    assert [site.shape for site in sites] == [(1, 4, 2), (4, 1, 2), (4, 2)]


def test_heads_folded_into_the_batch_are_counted():
    net, x = build("transformer_encoder")
    layouts = {site.layout for site in db.sites(net, x)}
    assert all(layout is not None and layout.axis == 0 for layout in layouts)


def test_weights_that_are_dropped_have_no_rows():
    net, x = build("drop_connect")
    assert [site.layout for site in db.sites(net, x) if site.shape and site.shape[0] != 1][:1] == [None]


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: x + m.d(x @ x.t()).sum(),  # rows along two axes
        lambda m, x: x + m.d(torch.ones(x.numel() + 1)).mean(),  # not in proportion
        lambda m, x: x + m.d(x.reshape((1,) * len(x) + (-1,))).mean(),  # another number of axes
    ],
)
def test_rows_that_a_sites_tensor_does_not_show_are_not_run_together(forward):
    (site,), together = site_layouts(*probes(Module(forward, d=nn.Dropout(0.5)), torch.randn(3, 2)))
    assert not together and site.layout is None


def test_a_site_that_some_rows_do_not_meet_has_their_entries():
    def forward(m, x):  # positive rows go to the expert
        chosen = x[:, 0] > 0
        out = x.clone()
        out[chosen] = m.d(x[chosen])
        return out

    x = torch.tensor([[-1.0, 1], [1, 2], [2, 3]])
    (site,), together = site_layouts(*probes(Module(forward, d=nn.Dropout(0.5)), x))
    assert together and site.layout == RowLayout(0, 0)


def test_steps_of_packed_sequences_come_before_their_rows():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(2, 3, 2, dropout=0.5, batch_first=True)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.rnn(packed)[1][0][-1]

    x, lengths = torch.randn(3, 5, 2), torch.tensor([2, 5, 3])
    (site,), together = site_layouts(*probes(Packed(), (x, lengths)))
    assert together and site.layout == RowLayout(1, 1)


def test_sites_of_a_probe_are_named_in_order():
    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 3), nn.Dropout(0.1))
    assert site_names(probes(net, torch.randn(2, 3))[1]) == ["0 dropout 0", "2 dropout 0"]


# Outputs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda m, x: x, (RowLayout(0, 1),)),
        (lambda m, x: x.t(), (RowLayout(1, 1),)),
        (lambda m, x: x.reshape(-1), (RowLayout(0, 2),)),
        (lambda m, x: (x, torch.ones(3)), (RowLayout(0, 1), None)),
    ],
)
def test_outputs_are_laid_out_as_they_grow(forward, expected):
    assert output_layouts(*probes(Module(forward), torch.randn(4, 2))) == expected


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: torch.cat([x, x[:1]]),
        lambda m, x: x @ x.t(),
        lambda m, x: list(x),
        lambda m, x: x.reshape((1,) * len(x) + (-1,)),
    ],
)
def test_an_output_that_grows_otherwise_is_refused(forward):
    with pytest.raises(ValueError, match="rows depend on each other"):
        output_layouts(*probes(Module(forward), torch.randn(4, 3)))


def test_a_prediction_refuses_it_too():
    net = Module(lambda m, x: torch.cat([m.d(x), x[:1]]), d=nn.Dropout(0.5))
    with pytest.raises(ValueError, match="rows depend on each other"):
        db.predict(net, torch.randn(4, 3))


def test_a_row_is_cut_from_its_batch():
    whole = torch.arange(24).reshape(6, 4)
    assert torch.equal(row_of(whole, RowLayout(0, 2), 1, 3), whole[2:4])
    assert torch.equal(row_of(whole, RowLayout(1, 1), 3, 4), whole[:, 3:])
    assert row_of(whole, None, 1, 3) is whole
    assert row_of(whole, RowLayout(0, 1), 1, 4) is row_of(whole, RowLayout(2, 1), 0, 4) is None


def test_arguments_that_may_have_been_cut_by_mistake_are_named_if_there_are_several():
    one, two = as_inputs(torch.zeros(3, 2)), as_inputs({"x": torch.zeros(3, 2), "positions": torch.arange(3)})
    assert whole_arguments(one) == "" and "row_axis=" in whole_arguments(two)


def test_outputs_that_have_no_rows_to_draw_are_refused_with_what_to_return():
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    with pytest.raises(ValueError, match=r"`net` .* squeezes the row axis .* squeeze\(-1\)"):
        db.draws(Module(lambda m, x: m.n(x).squeeze(), n=net), torch.randn(4, 3))
    with pytest.raises(TypeError, match=r"`net` must return dense tensors.* got Normal\. Return"):
        db.draws(Module(lambda m, x: torch.distributions.Normal(m.n(x), 1.0), n=net), torch.randn(4, 3))


@pytest.mark.parametrize(
    ("convert", "got"),
    [
        (lambda y: y.to_sparse(), "torch.sparse_coo torch.float32"),
        (lambda y: torch.nested.as_nested_tensor(list(y), layout=torch.jagged), "torch.jagged torch.float32 nested"),
        (lambda y: torch.quantize_per_tensor(y, 0.1, 0, torch.qint8), "torch.strided torch.qint8"),
        (lambda y: y.to(torch.float8_e4m3fn), "torch.strided torch.float8_e4m3fn"),
    ],
)
def test_outputs_that_torch_cannot_average_are_refused_with_what_to_return(convert, got):
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    with pytest.raises(
        TypeError, match=rf"`net` must return dense tensors.* got {got}\. .* dequantize\(\) or float\(\)"
    ):
        db.predict(Module(lambda m, x: convert(m.n(x)), n=net), torch.randn(4, 3))
