"""Dropout under interception, against what torch computes with the same mask."""

import pytest
import torch
import torch.nn.functional as F

from tests.tracing.fixed_source import run_with_fixed_source


def test_dropout_scales_what_it_keeps():
    x = torch.arange(1.0, 5.0)
    out, source = run_with_fixed_source(lambda v: F.dropout(v, 0.2), x)
    assert out.tolist() == pytest.approx([0, 2 / 0.8, 0, 4 / 0.8])
    assert source.kinds == [("dropout", 0.2, (4,))]


@pytest.mark.parametrize("function", [torch.dropout, torch.ops.aten.dropout, torch.ops.aten.dropout.default])
def test_dropout_by_the_name_of_its_operator_is_dropout(function):
    x = torch.arange(1.0, 5.0)
    out, source = run_with_fixed_source(lambda v: function(v, p=0.2, train=True), x)
    assert out.tolist() == pytest.approx([0, 2 / 0.8, 0, 4 / 0.8])
    assert source.kinds == [("dropout", 0.2, (4,))]


@pytest.mark.parametrize("name", ["native_dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"])
def test_the_operators_of_dropout_are_those_of_torch(name):
    x = torch.arange(1.0, 9.0).view(2, 2, 2)
    outs = [run_with_fixed_source(f, x, 0.2, True)[0] for f in (getattr(torch, name), getattr(torch.ops.aten, name))]
    torch.testing.assert_close(outs[0], outs[1])


def test_dropout_in_place_writes_into_its_input():
    x = torch.arange(1.0, 5.0)
    out, _ = run_with_fixed_source(lambda v: F.dropout(v, 0.2, True, True), x)
    assert out is x and x.tolist() == pytest.approx([0, 2.5, 0, 5])


@pytest.mark.parametrize("function", [F.dropout, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout])
def test_dropout_that_is_switched_off_asks_for_no_mask(function):
    x = torch.arange(1.0, 5.0)[:, None, None, None]
    out, source = run_with_fixed_source(lambda v: function(v, 0.2, False), x)
    assert torch.equal(out, x) and source.kinds == []


@pytest.mark.parametrize(
    "function, shape, expected",
    [
        (F.dropout1d, (2, 3, 4), (2, 3, 1)),
        (F.dropout1d, (3, 4), (3, 1)),
        (F.dropout2d, (2, 3, 4, 4), (2, 3, 1, 1)),
        (F.dropout3d, (2, 3, 2, 2, 2), (2, 3, 1, 1, 1)),
        (F.dropout3d, (3, 2, 2, 2), (3, 1, 1, 1)),
        (F.feature_alpha_dropout, (2, 3, 4, 4), (2, 3, 1, 1)),
    ],
)
def test_feature_dropout_drops_whole_channels(function, shape, expected):
    _, source = run_with_fixed_source(lambda v: function(v, 0.3, True), torch.ones(shape))
    assert [s for _, _, s in source.kinds] == [expected]


def test_alpha_dropout_keeps_mean_zero_and_variance_one():
    # Of a standard normal input: the affine map is derived to restore exactly these.
    torch.manual_seed(0)
    x = torch.randn(400_000, dtype=torch.float64)
    out, _ = run_with_fixed_source(lambda v: F.alpha_dropout(v, 0.5, True), x)
    assert abs(float(out.mean())) < 5e-3 and abs(float(out.var()) - 1) < 5e-3


def test_dropout_of_a_nested_tensor_is_refused_with_the_remedy():
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="Pad it before the dropout"):
        run_with_fixed_source(lambda v: F.dropout(v, 0.2), nested)
