"""Every mechanism of randomness, checked against what plain PyTorch does in training mode."""

import copy
import functools
import hashlib
import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import dropbayes as db
from dropbayes.sampling import Sampling
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.inspection import inspect
from dropbayes.sampling.plan import make_plan
from dropbayes.sampling.probes import Prober
from dropbayes.sampling.strategies import ONE_BY_ONE
from dropbayes.tracing.outputs import split
from dropbayes.tracing.views import checked_network
from tests.cases import slow_except
from tests.sampling.zoo import ZOO, build

NORMS = (nn.modules.batchnorm._NormBase,)
N_DRAWS = 160


@functools.cache
def shared(name):
    """A specimen for all tests that leave it as it is: its inspection is remembered with it."""
    return build(name)


def call(net, x):
    if isinstance(x, dict):
        return net(**x)
    return net(*x) if isinstance(x, tuple) else net(x)


def train_mode_draws(name, net, x):
    """The draws that plain PyTorch makes: training mode, normalisation frozen, one forward after another."""
    net = copy.deepcopy(net).train()
    for module in net.modules():
        if isinstance(module, NORMS):
            module.eval()
    if name == "auxiliary_output_in_training":  # only its dropout is wanted from training mode
        net.training = False
    torch.manual_seed(1)
    with torch.no_grad():
        drawn = [one_draw(net, x) for _ in range(N_DRAWS)]
    return [torch.stack(tensors).double() for tensors in zip(*drawn, strict=True)]


def one_draw(net, x):
    return split(call(net, pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, x)))[0]


def moments(draws):
    mean, variance = draws.mean(0), draws.var(0)
    fourth = (draws - mean).pow(4).mean(0)
    return mean, variance, (variance / len(draws)).sqrt(), ((fourth - variance**2).clamp(min=0) / len(draws)).sqrt()


@pytest.mark.parametrize("name", slow_except(ZOO, *(set(ZOO) - {"t5", "vit", "distilbert"})))  # kin of BERT and GPT-2
def test_moments_are_those_of_training_mode(name):
    net, x = shared(name)
    expected = train_mode_draws(name, net, x)
    ours = db.draws(
        net, x, n_draws=N_DRAWS, sampling=db.Sampling(sampler="independent", row_axis=ZOO[name].row_axis), masks="row"
    )
    ours = [tensor.double() for tensor in split(ours)[0]]
    assert len(ours) == len(expected)
    for own, reference in zip(ours, expected, strict=True):
        assert own.shape == reference.shape
        mean, variance, mean_error, variance_error = moments(own)
        their_mean, their_variance, their_mean_error, their_variance_error = moments(reference)
        tiny = 1e-5 * reference.abs().max()
        assert ((mean - their_mean).abs() <= 4.5 * (mean_error**2 + their_mean_error**2).sqrt() + tiny).all()
        spread = (variance_error**2 + their_variance_error**2).sqrt()
        assert ((variance - their_variance).abs() <= 5.4 * spread + tiny**2 + 0.02 * their_variance).all()


# Masks of a row's own are those of every network's moments above.
@pytest.mark.parametrize("masks", slow_except(["shared", "row"], "shared"))
@pytest.mark.parametrize("name", ZOO)
def test_the_strategy_chosen_gives_the_draws_of_one_by_one(name, masks):
    net, x = shared(name)
    inputs = as_inputs(x, row_axis=ZOO[name].row_axis)
    keys = Sampling().keys(8, 3)

    def gather(strategy):
        plan = make_plan(net, inputs, keys=keys, masks=masks)
        plan = (
            plan
            if strategy is None
            else replace(plan, strategy=strategy, direct=None, inspection=inspect(checked_network(net), inputs))
        )
        by_rows = itertools.groupby(plan.run(inputs), lambda block: block.rows)
        blocks = [[block.outputs for block in group] for _, group in by_rows]
        joined = [[torch.cat(tensors) for tensors in zip(*chunks, strict=True)] for chunks in blocks]
        return [torch.cat(tensors, dim=1) for tensors in zip(*joined, strict=True)]

    fast, oracle = gather(None), gather(ONE_BY_ONE)
    for one, other in zip(fast, oracle, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in ZOO if not ZOO[name].raw and not ZOO[name].always])
def test_network_without_its_masks_is_the_network_in_evaluation(name):
    net, x = shared(name)
    net = checked_network(net)
    inputs = as_inputs(x, row_axis=ZOO[name].row_axis)
    flags = inspect(net, inputs).flags
    row = inputs.rows([0])
    with torch.no_grad():
        seen = Prober(net, inputs, (), frozenset())(row, flags)
        expected = split(inputs.call(net, [r.clone() if isinstance(r, torch.Tensor) else r for r in row]))[0]
    for one, other in zip(seen.tensors, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def fingerprint(net):
    """Everything of a network and of the process that a prediction must leave as it was."""
    digest = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    modules = [(type(m), m.training, id(m), sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
               for m in net.modules()]  # fmt: skip
    switches = (torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled(), torch.get_default_dtype(),
                torch.are_deterministic_algorithms_enabled(), torch.get_num_threads())  # fmt: skip
    grads = [(p.requires_grad, p.grad) for p in net.parameters()]
    states = (hashlib.sha256(torch.get_rng_state().numpy().tobytes()).digest(), random.getstate(),
              np.random.get_state()[1].tobytes())  # fmt: skip
    return digest.digest(), modules, switches, grads, states


@pytest.mark.parametrize("training", slow_except([False, True], True))
@pytest.mark.parametrize("name", ZOO)
def test_draws_differ_and_nothing_is_changed(name, training):
    net, x = build(name)
    net.train(training)
    before, given = fingerprint(net), copy.deepcopy(x)
    prediction = db.predict(net, x, n_draws=20, sampling=db.Sampling(row_axis=ZOO[name].row_axis))
    assert max(float(v.max()) for v in split(prediction.std)[0]) > 0
    assert all(torch.isfinite(v).all() for v in split(prediction.mean)[0])
    assert fingerprint(net) == before
    leaves = zip(pytree.tree_leaves(given), pytree.tree_leaves(x), strict=True)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in leaves)


@pytest.mark.parametrize("name", ["dropout_mlp", "convnet_with_batch_norm", "functional_dropout", "lstm", "bert_sdpa"])
def test_training_flags_do_not_change_a_prediction(name):
    net, x = build(name)
    evaluated = db.draws(net.eval(), x, n_draws=5)
    trained = db.draws(net.train(), x, n_draws=5)
    for one, other in zip(split(evaluated)[0], split(trained)[0], strict=True):
        assert torch.equal(one, other)


def test_zoo_has_forty_networks():
    assert len(ZOO) >= 40
