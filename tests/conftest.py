"""What every test begins with."""

import random

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def seeded():
    """The generators at one state: weights and rows of a test do not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
