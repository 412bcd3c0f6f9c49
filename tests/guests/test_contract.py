"""One contract for every framework: the draws of the bare network, bit for bit, and everything else as before."""

import random

import numpy as np
import pytest
import torch

from tests.guests.tutorials import TUTORIALS

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks, about themselves


@pytest.fixture(params=TUTORIALS, scope="module")
def tutorial(request):
    package, made = TUTORIALS[request.param]
    pytest.importorskip(package, reason=f"{package} is not installed: `make test-guests` installs it")
    return made


@pytest.fixture(scope="module")
def visit(tutorial):
    return tutorial(0.3)


def test_the_result_is_that_of_the_bare_network_bit_for_bit(visit):
    for ours, bare in zip(visit.ours(), visit.bare(), strict=True):
        assert torch.equal(ours, bare), (ours - bare).abs().max()


def test_the_model_its_modes_the_generators_and_the_trainer_are_as_the_framework_leaves_them(visit):
    def left_by(run, training):
        visit.model.train(training)
        torch.manual_seed(5), np.random.seed(5), random.seed(5)
        run()
        flags = [(name, module.training) for name, module in visit.model.named_modules()]
        attributes = [sorted(vars(module)) for module in visit.model.modules()]
        generators = (torch.get_rng_state(), np.random.get_state()[1], random.getstate())
        return _plain([list(visit.model.state_dict().values()), flags, attributes, generators, visit.state()])

    visit.ours(), visit.own()  # a framework may prepare itself once
    for training in (True, False):
        np.testing.assert_equal(left_by(visit.ours, training), left_by(visit.own, training))


def _plain(tree):
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.numpy().copy() if isinstance(leaf, torch.Tensor) else leaf, tree
    )


def test_the_frameworks_own_batches_give_the_same(visit):
    if visit.other_batches is None:
        pytest.skip("the tutorial has one batch")
    for one, other in zip(visit.ours(), visit.other_batches(), strict=True):
        torch.testing.assert_close(one, other, atol=visit.atol, rtol=0)


def test_a_model_in_which_nothing_is_random_is_refused_with_the_remedy(tutorial):
    with pytest.raises(ValueError, match=r"must have dropout .* dropbayes\.add_dropout"):
        tutorial(0.0).ours()
