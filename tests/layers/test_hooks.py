"""Tests of dropout attached to layers: what one mask is shared by."""

import pytest
import torch
from torch import nn

from dropbayes.layers import add_dropout
from dropbayes.layers.hooks import drop_units


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_a_unit_is_dropped_at_all_positions_of_a_row():
    dropped = drop_units(torch.ones(4, 5, 6, 7), 0.5, True, 0, -1)
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(dropped))
    assert set(dropped.unique().tolist()) == {0.0, 2.0} and dropped[:, 0, 0].unique(dim=0).shape[0] == 4


def test_a_convolution_drops_channels_so_that_a_draw_is_one_kernel():
    conv = nn.Conv2d(2, 1, 3, bias=False)
    nn.init.ones_(conv.weight)
    output = add_dropout(conv, 0.5)(torch.ones(50, 2, 6, 6))
    assert (output == output[..., :1, :1]).all()  # an all-ones image stays flat, whatever is dropped
    assert set(output[:, 0, 0, 0].tolist()) == {0.0, 18.0, 36.0}
    elements = add_dropout(conv, 0.5, units="element")(torch.ones(50, 2, 6, 6))
    assert (elements != elements[..., :1, :1]).any()
    assert add_dropout(conv, 0.5)(torch.ones(2, 6, 6)).shape == (1, 4, 4)


@pytest.mark.parametrize("row_axis", [0, 1])
def test_the_tokens_of_a_row_share_a_mask(row_axis):
    net = nn.Linear(4, 3)
    x = torch.randn(4).expand(5, 6, 4)
    output = add_dropout(net, 0.5, row_axis=row_axis)(x).movedim(row_axis, 0)
    assert (output == output[:, :1]).all() and output[:, 0].unique(dim=0).shape[0] > 1
    tokens = nn.MultiheadAttention(4, 2, batch_first=row_axis == 0)
    attended = add_dropout(tokens, 0.5, row_axis=row_axis)(x, x, x)[0].movedim(row_axis, 0)
    torch.testing.assert_close(attended, attended[:, :1].expand_as(attended))


def test_an_embedding_drops_word_types_per_row():
    table = nn.Embedding(50, 4)
    bayesian = add_dropout(table, 0.5)
    words = torch.randint(50, (8, 200))
    kept = bayesian(words) / table(words)
    torch.testing.assert_close(kept.detach().round(), kept.detach())
    for row in range(8):
        for word in words[row].unique():
            assert kept[row][words[row] == word].unique().numel() == 1
    one = kept[:, :, 0]
    fraction = [(one[row] == 0).double().mean() for row in range(8)]
    assert torch.tensor(fraction).std() > 0  # rows have masks of their own
    assert set(one.round().unique().tolist()) == {0.0, 2.0}
    torch.testing.assert_close(bayesian.eval()(words), table(words))
    assert bayesian(words[:, 0]).shape == (8, 4)
