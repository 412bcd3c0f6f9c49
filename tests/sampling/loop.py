"""The plain loop in training mode, and what a prediction has to share with it: its law, its rows, its network."""

import contextlib
import copy
import pickle
import random
import re
import weakref

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import dropbayes as db

STANDARD_ERRORS = 4.1  # by which moments may be apart
REFUSALS = (TypeError, ValueError, NotImplementedError, RuntimeError)


def network(forward, **children):
    """A module of a class of its own, with `forward` as its method."""
    net = type("Network", (nn.Module,), {"forward": forward})()
    for name, child in children.items():
        setattr(net, name, child)
    return net


def made(make):
    """The network of `make`, in evaluation, and its input, from fixed seeds."""
    with kept_generators():
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        net, x = make()
    return net.eval(), x


@contextlib.contextmanager
def kept_generators():
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0]), random.setstate(states[1]), np.random.set_state(states[2])


def call(net, x):
    x = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x)
    return net(*x) if isinstance(x, tuple) else net(**x) if isinstance(x, dict) else net(x)


def values(output):
    """The numbers of an output, as a list of real tensors."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors if t.is_floating_point() or t.is_complex()]


def loop(net, x, n_passes, *, evaluation=(), copied=True):
    """The outputs of `n_passes` passes in training, normalisation and the modules of `evaluation` aside."""
    trained = (copy.deepcopy(net) if copied else net).train()
    for name, module in trained.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) or name in evaluation:
            module.training = False
    with kept_generators(), torch.no_grad():
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        runs = [values(call(trained, x)) for _ in range(n_passes)]
    return [torch.stack([run[i] for run in runs]).double() for i in range(len(runs[0]))]


def assert_law(net, x, *, n_draws=200, reference=None, evaluation=(), predicted=True, **options):
    """Mean and variance of `draws` and `predict` are the loop's, within 4.1 standard errors, element by element.

    With 200 draws a mean off by 0.37 standard deviations is seen, and a Gaussian's variance off by a half.

    Args:
        net: The network, in evaluation.
        x: Its input.
        n_draws: The number of draws; the loop has half as many passes more.
        reference: The network of the loop, which it may change; a copy of `net` by default.
        evaluation: The modules of the loop, by name, whose own flag is down.
        predicted: Whether `predict` is compared too.
        options: Of `draws` and `predict`.
    """
    expected = loop(net if reference is None else reference, x, n_draws * 3 // 2, evaluation=evaluation,
                    copied=reference is None)  # fmt: skip
    drawn = [d.double() for d in values(db.draws(net, x, n_draws=n_draws, **options))]
    assert_moments("draws", expected, [(d.mean(0), d.var(0)) for d in drawn], n_draws)
    if predicted and not any(leaf.is_complex() for leaf in tree_leaves(x) if isinstance(leaf, Tensor)):
        ours = db.predict(net, x, n_draws=n_draws, **options)
        pairs = zip(values(ours.mean), values(ours.epistemic), strict=True)
        assert_moments("predict", expected, [(m.double(), v.double()) for m, v in pairs], n_draws)


def assert_moments(name, expected, moments, n_draws):
    assert len(expected) == len(moments), name
    for sample, (mean, variance) in zip(expected, moments, strict=True):
        assert sample.shape[1:] == mean.shape, (name, sample.shape, mean.shape)
        centred = sample - sample.mean(0)
        second, fourth = centred.square().mean(0), centred.pow(4).mean(0)
        share = 1 / n_draws + 1 / len(sample)
        scale = sample.abs().amax(0)
        within(f"mean of {name}", mean, sample.mean(0), STANDARD_ERRORS * (second * share).sqrt() + 1e-5 * scale + 1e-7)
        error = STANDARD_ERRORS * ((fourth - second.square()).clamp(min=0) * share).sqrt()
        within(f"variance of {name}", variance, second, error + 1e-5 * scale.square() + 1e-9)


def within(name, ours, theirs, error):
    bad = ~((ours - theirs).abs() <= error)
    assert not bad.any(), f"{name} {ours[bad][:4].tolist()}, of the loop {theirs[bad][:4].tolist()}"


def assert_close(ours, theirs, *, bits=False, name=""):
    """Equal bits, or equal up to 1e-5 of the largest value that an element takes in any row and draw."""
    for one, two in zip(values(ours), values(theirs), strict=True):
        assert one.shape == two.shape, (name, one.shape, two.shape)
        if bits:
            assert torch.equal(one, two), f"{name}: other bits, by up to {(one - two).abs().max()}"
        else:
            scale = two.abs().flatten(0, 1).amax(0) if two.dim() > 2 else two.abs().max()
            within(name, one, two, 1e-5 * scale + 1e-7)


def cut(x, rows):
    """Some rows of an input."""
    return tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, x)


def n_rows(x):
    return len(tree_leaves(x)[0])


def assert_same_alone(net, x, *, n_draws=5, bits=False, functions=True, rows=None):
    """A row has the same draws alone, in its batch, among permuted rows and in a shard; a draw is their function."""
    n, whole = n_rows(x), db.draws(net, x, n_draws=n_draws)
    for i in range(n) if rows is None else rows:
        alone = db.draws(net, cut(x, slice(i, i + 1)), n_draws=n_draws)
        assert_close(alone, [w[:, i : i + 1] for w in tree_leaves(whole)], bits=bits, name=f"row {i} alone")
    order = torch.randperm(n, generator=torch.Generator().manual_seed(3))
    permuted = db.draws(net, cut(x, order), n_draws=n_draws)
    assert_close(permuted, [w[:, order] for w in tree_leaves(whole)], bits=bits, name="rows permuted")
    assert_shards(net, x, n_draws=n_draws, bits=bits)
    if functions:
        assert_functions(net, x, n_draws=n_draws, whole=whole)


def assert_shards(net, x, *, n_draws=5, bits=False):
    """With a mask per row, shards have the masks of the whole."""
    whole = db.draws(net, x, n_draws=n_draws, masks="row")
    for start, stop in ((0, 1), (1, n_rows(x))):
        shard = db.draws(
            net, cut(x, slice(start, stop)), n_draws=n_draws, masks="row", sampling=db.Sampling(row_offset=start)
        )
        assert_close(shard, [w[:, start:stop] for w in tree_leaves(whole)], bits=bits, name=f"shard from {start}")


def assert_functions(net, x, *, n_draws=5, whole=None, **options):
    """A draw as a function gives what `draws` gives."""
    whole = db.draws(net, x, n_draws=n_draws, **options) if whole is None else whole
    for i in range(n_draws):
        ours = db.function_draw(net, i, n_draws=n_draws, **options)(*x if isinstance(x, tuple) else (x,))
        assert_close([o[None] for o in values(ours)], [w[i : i + 1] for w in values(whole)], name=f"function {i}")


@contextlib.contextmanager
def may_be_refused():
    """Lets errors pass that are plain and begin with the name of an argument; yields a list that is not empty then."""
    refused = []
    try:
        yield refused
    except REFUSALS as error:
        assert type(error) in REFUSALS, f"{type(error).__name__}: {error}"
        assert re.match(r"`\w+`", str(error)), f"{type(error).__name__}: {error}"
        refused.append(error)


# The network is left as it was ----------------------------------------------------------------------------------------


def picture(value, seen=None):
    """What a value holds, in a form that can be compared; modules in it by identity."""
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        return ("tensor", tuple(value.shape), str(value.dtype), value.detach().double().numpy().tobytes()
                if not value.is_complex() else torch.view_as_real(value.detach()).numpy().tobytes())  # fmt: skip
    if isinstance(value, np.ndarray):
        return ("array", value.shape, str(value.dtype), value.tobytes())
    if isinstance(value, nn.Module) or callable(value) or id(value) in seen:
        return ("same", id(value))
    if isinstance(value, (int, float, str, bytes, bytearray, type(None))):
        return ("value", repr(value))
    seen[id(value)] = value
    if isinstance(value, dict):
        return ("dict", [(repr(key), picture(entry, seen)) for key, entry in value.items()])
    if isinstance(value, (list, tuple, set)) or type(value).__name__ == "deque":
        return ("list", [picture(entry, seen) for entry in value])
    if hasattr(value, "__dict__") and not isinstance(value, (torch.dtype, torch.device, weakref.ref)):
        return ("object", picture(vars(value), seen))
    return ("value", repr(value))


def pictures(net):
    """Everything that a network holds, by module and name."""
    seen = {}
    for path, module in net.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers"):
                for key, tensor in value.items():
                    needs = tensor is not None and tensor.requires_grad
                    seen[f"{path}.{name}.{key}"] = (id(tensor) if name == "_parameters" else 0, needs, picture(tensor))
            elif name != "_modules":
                seen[f"{path}.{name}"] = picture(value)
        seen[f"{path} modules"] = [(key, id(child)) for key, child in module._modules.items()]
    return seen


def generators():
    return {
        "torch's generator": torch.get_rng_state().numpy().tobytes(),
        "Python's generator": random.getstate(),
        "NumPy's generator": pickle.dumps(np.random.get_state(legacy=False)),
    }


@contextlib.contextmanager
def unchanged(net, x=None, *, once=False):
    """The network, its input and the generators are after the block as before it.

    With `once`, what is no parameter may also be as after one call in evaluation: a network that keeps a state does so.
    """
    state = lambda: {**pictures(net), **generators(), "x": picture(x)}  # noqa: E731
    before = state()
    allowed = [before]
    if once:
        called = copy.deepcopy(net)
        with torch.no_grad(), kept_generators():
            call(called, x)
        allowed.append({key: value for key, value in pictures(called).items() if "._parameters." not in key})
    yield
    after = state()
    gone = [key for key in after.keys() | before.keys() if all(after.get(key) != one.get(key, 0) for one in allowed)]
    assert not gone, f"changed: {sorted(gone)}"
