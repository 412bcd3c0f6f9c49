"""A small dropout network in double precision, its data and its prior."""

import torch
from torch import nn

from dropbayes.layers import Prior

DTYPE = torch.float64


def net_and_data(outputs, rows=12):
    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, outputs, bias=False))
    return net.to(DTYPE), torch.randn(rows, 3, dtype=DTYPE), torch.randn(rows, outputs, dtype=DTYPE)


PRIOR = Prior(length_scale=0.7, bias_length_scale=0.2, hidden_length_scale="fan_in")
