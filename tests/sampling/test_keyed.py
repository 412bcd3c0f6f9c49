"""The keyed source gives a network the same masks by torch operations and by kernels, and notices other sites."""

import pytest
import torch
from torch import nn

from dropbayes.sampling import keyed
from dropbayes.sampling.fusion import fused_kernels
from dropbayes.sampling.inspection import inspect_cached
from dropbayes.sampling.keyed import KeyedSource, Masks, NetworkChanged
from dropbayes.sampling.operations import Interception
from dropbayes.sampling.plan import checked_keys
from dropbayes.sampling.strategies import FOLDED, MAPPED
from dropbayes.sampling.trees import as_inputs
from tests.sampling.test_strategies import run
from tests.sampling.zoo import build


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("strategy", [FOLDED, MAPPED], ids=str)
@pytest.mark.parametrize("name", ["dropout2d", "transformer_encoder", "lstm", "drop_path_rand"])
def test_kernels_give_every_strategy_the_same_masks(name, strategy, per_row, monkeypatch):
    kernels = fused_kernels()
    if kernels is None or torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter, which runs where Triton is installed and no GPU is")
    net, x = build(name)
    expected = run(strategy, net, x, per_row=per_row)
    monkeypatch.setattr(keyed, "kernels_on", lambda device: kernels)
    for ours, other in zip(run(strategy, net, x, per_row=per_row), expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-4, atol=1e-5)


def test_other_sites_than_were_inspected_are_noticed():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.LayerNorm(4)), torch.randn(2, 3)
    masks = Masks(inspect_cached(net, as_inputs(x)).anatomy, checked_keys(4, 0, "stratified"), False, False)
    others = {
        "another": nn.Dropout(0.4),
        "one more": nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.3)),
        "none": nn.Identity(),
    }
    for other in others.values():
        source = KeyedSource(masks, range(4), range(2), folded=True)
        with pytest.raises(NetworkChanged):
            with Interception(source):
                outputs = other.train()(torch.ones(8, 4))
            source.finish([outputs])
