"""Dropout as modules and as functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.sampling.zoo.specimens import Module, flat, specimen

# Dropout modules ----------------------------------------------------------------------------------------------------


@specimen()
def dropout_mlp():
    return nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)), flat()


@specimen()
def dropout_only_before_last_layer():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)), flat()


@specimen()
def nested_sequential():
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.GELU()), nn.Sequential(nn.Dropout(0.4), nn.Linear(8, 2))
    ), flat()


@specimen()
def dropout1d():
    return nn.Sequential(nn.Conv1d(2, 5, 3), nn.Dropout1d(0.4), nn.Flatten(), nn.Linear(20, 2)), torch.randn(4, 2, 6)


@specimen()
def dropout2d():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Dropout2d(0.4), nn.Flatten(), nn.Linear(16, 2)), torch.randn(
        3, 1, 4, 4
    )


@specimen()
def dropout3d():
    net = nn.Sequential(nn.Conv3d(1, 4, 2), nn.Dropout3d(0.4), nn.Flatten(), nn.Linear(32, 2))
    return net, torch.randn(3, 1, 3, 3, 3)


@specimen()
def alpha_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.SELU(), nn.AlphaDropout(0.3), nn.Linear(8, 2)), flat()


@specimen()
def feature_alpha_dropout():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.SELU(), nn.FeatureAlphaDropout(0.3), nn.Flatten(), nn.Linear(16, 2))
    return net, torch.randn(3, 1, 4, 4)


@specimen()
def in_place_dropout():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3, inplace=True), nn.Linear(8, 2)), flat()


@specimen()
def in_place_dropout_of_the_input():
    return Module(lambda m, x: m.b(F.dropout(x, 0.4, m.training, inplace=True)), b=nn.Linear(6, 2)), flat()


@specimen()
def in_place_result_ignored():
    def forward(m, x):
        h = m.a(x)
        m.drop(h)
        return m.b(h)

    return Module(forward, a=nn.Linear(6, 8), drop=nn.Dropout(0.5, inplace=True), b=nn.Linear(8, 2)), flat()


@specimen()
def module_used_twice():
    drop = nn.Dropout(0.3)
    return Module(
        lambda m, x: m.b(m.drop(F.relu(m.a(m.drop(x))))), a=nn.Linear(6, 8), b=nn.Linear(8, 2), drop=drop
    ), flat()


@specimen(always=True)
def dropout_made_in_forward():
    return Module(lambda m, x: m.b(nn.Dropout(0.4)(torch.relu(m.a(x)))), a=nn.Linear(6, 8), b=nn.Linear(8, 2)), flat()


# Functional dropout ---------------------------------------------------------------------------------------------------


@specimen()
def functional_dropout():
    return Module(
        lambda m, x: m.b(F.dropout(F.relu(m.a(x)), 0.3, m.training)), a=nn.Linear(6, 8), b=nn.Linear(8, 2)
    ), flat()


@specimen(always=True)
def functional_dropout_hard_coded():
    return Module(
        lambda m, x: m.b(F.dropout(F.relu(m.a(x)), 0.3, training=True)), a=nn.Linear(6, 8), b=nn.Linear(8, 2)
    ), flat()


@specimen()
def torch_dropout():
    return Module(
        lambda m, x: m.b(torch.dropout(m.a(x), 0.3, m.training)), a=nn.Linear(6, 8), b=nn.Linear(8, 2)
    ), flat()


@specimen()
def functional_feature_dropouts():
    def forward(m, x):
        h = F.dropout2d(m.a(x), 0.3, m.training)
        h = F.feature_alpha_dropout(h, 0.2, m.training)
        return m.b(F.alpha_dropout(h.flatten(1), 0.2, m.training))

    return Module(forward, a=nn.Conv2d(1, 4, 3), b=nn.Linear(16, 2)), torch.randn(3, 1, 4, 4)


@specimen()
def drop_connect():
    return Module(lambda m, x: F.linear(x, F.dropout(m.a.weight, 0.3, m.training), m.a.bias), a=nn.Linear(6, 3)), flat()
