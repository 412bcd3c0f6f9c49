"""Tests of the process of a recurrent network, against depth and against wide networks drawn from their prior."""

import pytest
import torch
from torch import nn

from dropbayes.processes import Cosine, Deep, RecurrentCovariance, ReLU, TanH, exact_process

X = torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("layer", [ReLU(0.8, 0.5), TanH(1.3, 0.7)])
def test_a_sequence_of_one_step_is_its_layer_and_one_of_silence_a_deep_network(layer):
    torch.testing.assert_close(RecurrentCovariance(layer, 1)(X[:, :1]), layer(X[:, 0]))
    silent = X * torch.tensor([1.0, 0.0, 0.0], dtype=X.dtype)[:, None]
    later = layer.with_scales({"length_scale": 1.7})
    expected = Deep((layer, later, later))(X[:, 0])
    torch.testing.assert_close(RecurrentCovariance(layer, 3, state_length_scale=1.7)(silent), expected)


def test_wide_networks_drawn_from_their_prior_have_the_covariance():
    # One recurrent matrix for all steps: a network of width K differs from the limit by O(1/K).
    layer, width, n_networks = TanH(0.9, 0.4), 400, 60
    covariance = RecurrentCovariance(layer, 3, state_length_scale=0.8)
    torch.manual_seed(1)
    products = []
    for _ in range(n_networks):
        net = nn.RNN(2, width, batch_first=True).double()
        for name, parameter in net.named_parameters():
            std = {
                "weight_ih_l0": 1 / 0.9,
                "weight_hh_l0": 1 / (0.8 * width**0.5),
                "bias_ih_l0": 0.4,
                "bias_hh_l0": 0.0,
            }
            parameter.data.normal_(std=std[name])
        state = net(X)[1][0].detach()
        products.append(state @ state.T / width)
    sampled = torch.stack(products)
    error = sampled.std(0) / n_networks**0.5
    assert ((sampled.mean(0) - covariance(X)).abs() < 4.5 * error + 2 / width).all()


def test_it_is_a_covariance_of_flat_sequences_too_with_scales_to_tune():
    covariance = RecurrentCovariance(ReLU(0.8, 0.5), 3)
    matrix = covariance(X)
    torch.testing.assert_close(covariance(X.flatten(1)), matrix)
    torch.testing.assert_close(covariance(X[:2], X[1:]), matrix[:2, 1:])
    torch.testing.assert_close(covariance.diagonal(X), matrix.diagonal())
    assert torch.linalg.eigvalsh(matrix).min() > -1e-12
    changed = covariance.with_scales({"state_length_scale": 2.0, "bias_scale": 0.1})
    assert changed.scales == {"length_scale": 0.8, "bias_scale": 0.1, "state_length_scale": 2.0}
    process = exact_process(covariance, X.flatten(1), X[:, 0, 0], precision=1e6)
    torch.testing.assert_close(process.mean(X.flatten(1)), X[:, 0, 0], rtol=0, atol=1e-3)


def test_what_is_no_sequence_is_refused():
    with pytest.raises(ValueError, match=r"`x` must be \[row, 3 steps, input\]"):
        RecurrentCovariance(ReLU(), 3)(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="`n_steps` must be"):
        RecurrentCovariance(ReLU(), 0)
    with pytest.raises(ValueError, match=r"`layer.bias_scale` must be finite"):
        RecurrentCovariance(Cosine(), 2)
