"""Which axis holds the rows."""

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.sampling.anatomy import RowLayout
from tests.sampling.zoo import Module, build


def test_sites_know_where_a_batch_has_its_rows():
    net = Module(lambda m, x: m.d(m.d(m.d(x).transpose(0, 1)).reshape(4, -1)).sum(0).reshape(-1, 2), d=nn.Dropout(0.5))
    layouts = [site.layout for site in db.sites(net, torch.randn(5, 4, 2))]
    assert layouts[:2] == [RowLayout(0, 1), RowLayout(1, 1)] and layouts[2] == RowLayout(1, 2)


def test_heads_folded_into_the_batch_are_counted():
    net, x = build("transformer_encoder")
    layouts = {site.layout for site in db.sites(net, x)}
    assert all(layout is not None and layout.axis == 0 for layout in layouts)


def test_weights_that_are_dropped_have_no_rows():
    net, x = build("drop_connect")
    assert [site.layout for site in db.sites(net, x) if site.shape and site.shape[0] != 1][:1] == [None]


def test_an_output_that_grows_otherwise_is_refused():
    net = Module(lambda m, x: torch.cat([m.d(x), x[:1]]), d=nn.Dropout(0.5))
    with pytest.raises(ValueError, match="rows depend on each other"):
        db.predict(net, torch.randn(4, 3))
