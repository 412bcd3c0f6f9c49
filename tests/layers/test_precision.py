"""Tests of the identity between precision, weight decay and length-scale."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dropbayes.layers import Prior, model_precision, optimizer_weight_decay, weight_decay


def test_precision_and_weight_decay_are_inverse_to_each_other():
    for tau in (1e-12, 0.3, 1e12):
        lam = weight_decay(precision=tau, keep_prob=0.8, length_scale=3.0, n_data=50)
        assert model_precision(weight_decay=lam, keep_prob=0.8, length_scale=3.0, n_data=50) == pytest.approx(tau)


@given(
    precision=st.floats(1e-6, 1e6),
    keep_prob=st.floats(1e-3, 1.0),
    length_scale=st.floats(1e-3, 1e3),
    n=st.integers(1, 10**7),
)
def test_precision_and_weight_decay_are_inverse_for_all_settings(precision, keep_prob, length_scale, n):
    setting = {"keep_prob": keep_prob, "length_scale": length_scale, "n_data": n}
    decay = weight_decay(precision=precision, **setting)
    assert model_precision(weight_decay=decay, **setting) == pytest.approx(precision, rel=1e-12)


@pytest.mark.parametrize("name", ["keep_prob", "n_data"])
def test_what_is_no_number_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"`{name}` must"):
        model_precision(**{"weight_decay": 1.0, "keep_prob": 0.5, "length_scale": 1.0, "n_data": 10, name: None})


def test_the_identities_are_differentiated_where_they_are_given_tensors():
    def both(first, length_scale):
        setting = {"keep_prob": 0.8, "length_scale": length_scale, "n_data": 50}
        return weight_decay(precision=first, **setting), model_precision(weight_decay=first, **setting)

    values = [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.3, 1.7)]
    assert torch.autograd.gradcheck(both, values)
    with pytest.raises(TypeError, match="`precision` must be a number"):
        optimizer_weight_decay(precision=values[0], keep_prob=0.8, length_scale=1.0, n_data=50)


def test_weight_decay_has_every_factor_of_the_paper():
    # l = 2, p = 0.9, N = 10, τ = 4: 4·0.9/(2·10·4). A lost ½, a keep/drop swap or l for l² each give another number.
    assert weight_decay(precision=4.0, keep_prob=0.9, length_scale=2.0, n_data=10) == pytest.approx(0.045)


def test_boston_weight_decay_is_the_authors_own():
    # drop .05, τ .159707652696, l 1e-2, N = 455 = round(0.9·506): the authors' code gives reg = 6.5e-7.
    lam = weight_decay(precision=0.159707652696, keep_prob=0.95, length_scale=1e-2, n_data=455)
    assert lam == pytest.approx(6.5e-7, rel=0.01)


def test_regression_demo_precision_is_the_authors_own():
    # reg_demo: τ⁻¹ = 2·N·1e-5/(.95·l²) with l² = .005 and N = 20.
    tau = model_precision(weight_decay=1e-5, keep_prob=0.95, length_scale=0.005**0.5, n_data=20)
    assert 1 / tau == pytest.approx(2 * 20 * 1e-5 / (0.95 * 0.005))


@pytest.mark.parametrize(("lam", "squared_length_scale"), [(1e-6, 60.0), (5e-7, 30.0)])
def test_co2_precision_needs_the_length_scale_the_paper_leaves_out(lam, squared_length_scale):
    # The appendix: weight decay 1e-6 "corresponding to" τ = 1e5, with N = 272 and p = .9.
    tau = model_precision(weight_decay=lam, keep_prob=0.9, length_scale=squared_length_scale**0.5, n_data=272)
    assert tau == pytest.approx(1e5, rel=0.01)


def test_optimizer_step_descends_the_papers_penalty():
    setting = {"precision": 2.0, "keep_prob": 0.7, "length_scale": 1.5, "n_data": 30}
    theta = nn.Parameter(torch.tensor([3.0, -1.0], dtype=torch.float64))
    (weight_decay(**setting) * theta.square().sum()).backward()
    explicit = theta.detach() - 0.1 * theta.grad
    theta.grad = torch.zeros_like(theta)
    torch.optim.SGD([theta], lr=0.1, weight_decay=optimizer_weight_decay(**setting)).step()
    torch.testing.assert_close(theta.detach(), explicit)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"precision": -1.0}, "`precision` must be a positive"),
        ({"precision": 0.0}, "`precision` must be a positive"),
        ({"length_scale": -0.1}, "`length_scale` must be a positive"),
        ({"keep_prob": 0.0}, r"`keep_prob` must lie in \(0, 1\]"),
        ({"keep_prob": 1.1}, r"`keep_prob` must lie in \(0, 1\]"),
        ({"keep_prob": float("nan")}, r"`keep_prob` must lie in \(0, 1\]"),
        ({"n_data": 0}, "`n_data` must be at least 1"),
    ],
)
def test_invalid_settings_are_refused_with_the_rule(change, rule):
    setting = {"precision": 1.0, "keep_prob": 0.9, "length_scale": 1.0, "n_data": 10} | change
    with pytest.raises(ValueError, match=rule):
        weight_decay(**setting)


def test_prior_refuses_negative_length_scales_and_is_frozen():
    with pytest.raises(ValueError, match="`length_scale`"):
        Prior(length_scale=-1.0)
    with pytest.raises(ValueError, match="`bias_length_scale`"):
        Prior(bias_length_scale=-1.0)
    with pytest.raises(AttributeError):
        Prior().length_scale = 2.0


def test_length_scales_of_layers_without_names_are_refused():
    with pytest.raises(TypeError, match=r"`per_layer` must map names to length-scales, .*; got \[1.0\]"):
        Prior(per_layer=[1.0])
