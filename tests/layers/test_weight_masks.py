"""Tests of dropout by the columns of matrices: the same as dropout of the inputs, with one mask for all positions."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.layers.hooks import WeightDropout, stacked_matrices


class Experts(nn.Module):
    """Two experts, each a linear layer, kept in one tensor; every row is sent to one by its first number's sign."""

    def __init__(self, is_transposed=False):
        super().__init__()
        self.is_transposed = is_transposed
        shape = (2, 3, 4) if is_transposed else (2, 4, 3)
        self.weight_of_all = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        matrices = self.weight_of_all if self.is_transposed else self.weight_of_all.transpose(1, 2)
        outputs = torch.einsum("bsi,eio->ebso", x, matrices)
        return torch.where((x[..., :1] > 0), outputs[0], outputs[1])


def masked_by_hand(experts, x, mask):
    matrices = experts.weight_of_all if experts.is_transposed else experts.weight_of_all.transpose(1, 2)
    outputs = [(x * mask[e]) @ matrices[e] for e in range(2)]
    return torch.where((x[..., :1] > 0), *outputs)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_mask_of_columns_is_a_mask_of_the_inputs_of_each_expert(is_transposed):
    experts, x = Experts(is_transposed), torch.randn(5, 6, 3)
    dropped = db.add_dropout(experts, 0.4).train()
    torch.manual_seed(3)
    output = dropped(x)
    torch.manual_seed(3)
    mask = F.dropout(torch.ones(2, 3, 1) if is_transposed else torch.ones(2, 1, 3), 0.4).reshape(2, 3)
    torch.testing.assert_close(output, masked_by_hand(experts, x, mask))


def test_the_parameters_are_back_after_the_pass_and_after_an_error():
    dropped = db.add_dropout(Experts(), 0.4).train()
    before = list(dropped.state_dict().items())
    dropped(torch.randn(2, 3, 3))
    with pytest.raises(RuntimeError):
        dropped(torch.randn(2, 3, 5))
    assert isinstance(dropped.weight_of_all, nn.Parameter)
    assert [name for name, _ in before] == list(dropped.state_dict())
    assert vars(dropped).keys() == vars(Experts()).keys()


def test_gradients_reach_the_matrices_through_their_masks():
    dropped = db.add_dropout(Experts(), 0.4).train()
    torch.manual_seed(0)
    dropped(torch.randn(4, 5, 3)).sum().backward()
    unseen = dropped.weight_of_all.grad.abs().sum(1) == 0
    assert 0 < unseen.sum() < 6  # whole columns, some of them


def test_draws_of_experts_are_functions_and_average_to_the_network():
    experts, x = Experts().eval(), torch.randn(3, 4, 3)
    dropped = db.add_dropout(experts, 0.3)
    drawn = db.draws(dropped, x, n_draws=400)
    torch.testing.assert_close(drawn.mean(0), experts(x), rtol=0, atol=0.05)
    torch.testing.assert_close(drawn[7, 1:2], db.draws(dropped, x[1:2], n_draws=400)[7])


def test_hooks_can_be_copied_and_pickled():
    dropped, x = db.add_dropout(Experts().eval(), 0.4), torch.randn(2, 3, 3)
    for twin in (copy.deepcopy(dropped), pickle.loads(pickle.dumps(dropped))):
        torch.testing.assert_close(db.draws(twin, x, n_draws=3), db.draws(dropped, x, n_draws=3))


def test_only_modules_that_say_their_layout_are_stacks():
    positions = nn.Module()
    positions.table = nn.Parameter(torch.ones(4, 5, 6))
    assert not list(stacked_matrices(positions))
    assert [shape for _, _, shape in stacked_matrices(Experts())] == [(2, 1, 3)]
    assert WeightDropout(0.2, stacked_matrices).keep_prob == pytest.approx(0.8)
