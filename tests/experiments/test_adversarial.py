"""Attacks on images."""

import pytest
import torch

from experiments import adversarial, lenet
from tests.experiments.smallest import tiny


@pytest.mark.slow
def test_attacks_lower_accuracy_and_are_answered_by_uncertainty(tmp_path):
    metrics = tiny("adversarial", adversarial, tmp_path)["all"]
    for attack in ("FGSM", "PGD"):
        accuracy = metrics[attack]["accuracy_averaged"]
        assert accuracy[-1] < accuracy[0] - 0.2
        assert metrics[attack]["auroc_entropy"][1] > 0.5
    assert metrics["PGD"]["accuracy_averaged"][-1] <= metrics["FGSM"]["accuracy_averaged"][-1]
    assert metrics["random signs"]["accuracy_averaged"][-1] > metrics["FGSM"]["accuracy_averaged"][-1]


def test_attacks_stay_within_their_strength_and_raise_the_loss():
    net = lenet.lenet("all", channels=(2, 3), hidden=8).eval()
    x, y = torch.rand(4, 1, 28, 28), torch.tensor([0, 1, 2, 3])
    before = torch.nn.functional.cross_entropy(net(x), y)
    for attack in (adversarial.fgsm, adversarial.pgd):
        moved = attack(net, x, y, strength=0.05)
        assert (moved - x).abs().max() <= 0.05 + 1e-6
        assert moved.min() >= 0 and moved.max() <= 1
        assert torch.nn.functional.cross_entropy(net(moved), y) > before
