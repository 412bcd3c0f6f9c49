"""On a GPU the draws are those of the CPU, up to rounding: the same masks, by other kernels."""

import copy

import pytest
import torch
from torch.utils import _pytree as pytree

import dropbayes as db
from dropbayes.sampling import Keys, make_plan
from dropbayes.sampling.inputs import as_inputs, split
from tests.sampling.zoo import ZOO, build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def without_tf32(monkeypatch):
    """cuDNN's recurrent layers round products to TF32 unless told otherwise."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def on_device(tree):
    return pytree.tree_map(lambda v: v.cuda() if isinstance(v, torch.Tensor) else v, tree)


@pytest.mark.parametrize("masks", ["shared", "row"])
@pytest.mark.parametrize("name", ZOO)
def test_draws_are_those_of_the_cpu(name, masks):
    net, x = build(name)
    options = {"n_draws": 12, "masks": masks, "sampling": db.Sampling(row_axis=ZOO[name].row_axis)}
    ours = split(db.draws(copy.deepcopy(net).cuda(), on_device(x), **options))[0]
    # where there are GPUs, DataParallel moves its module to one of them when it is made
    expected = split(db.draws(net.cpu(), x, **options))[0]
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-3, atol=2e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ZOO)
def test_the_linear_method_is_that_of_the_cpu(name):
    net, x = build(name)
    options = {"method": "linear", "sampling": db.Sampling(row_axis=ZOO[name].row_axis)}
    try:
        expected = db.predict(copy.deepcopy(net).cpu(), x, **options)
    except (NotImplementedError, ValueError) as refusal:
        with pytest.raises(type(refusal)):
            db.predict(net.cuda(), on_device(x), **options)
        return
    ours = db.predict(net.cuda(), on_device(x), **options)
    for one, other in ((ours.mean, expected.mean), (ours.std, expected.std)):
        for on_gpu, on_cpu in zip(split(one)[0], split(other)[0], strict=True):
            torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=5e-3, atol=5e-4)


@pytest.mark.parametrize("masks", ["shared", "row"])
@pytest.mark.parametrize("analytic", [True, False])
@pytest.mark.parametrize("n_rows", [1, 7, 1000])
def test_the_moments_of_a_perceptron_are_those_of_the_cpu(n_rows, analytic, masks):
    net, _ = build("dropout_mlp")
    x = torch.randn(n_rows, 6)
    expected = db.predict(net, x, n_draws=50, masks=masks, sampling=db.Sampling(integrate_last_layer=analytic))
    ours = db.predict(
        copy.deepcopy(net).cuda(),
        x.cuda(),
        n_draws=50,
        masks=masks,
        sampling=db.Sampling(integrate_last_layer=analytic),
    )
    torch.testing.assert_close(ours.mean.cpu(), expected.mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.epistemic.cpu(), expected.epistemic, rtol=1e-3, atol=1e-6)


def test_exact_rows_keep_their_bits_in_any_batch():
    net, x = build("transformer_encoder")
    net, x = copy.deepcopy(net).cuda(), on_device(x)
    whole = db.predict(net, x, n_draws=20, sampling=db.Sampling(batch_invariant=True))
    alone = db.predict(net, x[1:2], n_draws=20, sampling=db.Sampling(batch_invariant=True))
    assert torch.equal(alone.std[0], whole.std[1])


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["transformer_encoder", "convnet_with_batch_norm", "vit"])
def test_a_run_does_not_wait_for_the_device(name):
    net, x = build(name)
    net, inputs = net.cuda(), as_inputs(on_device(x), net)
    for _ in range(2):  # the first compares rows alone and in their batch
        for _ in (plan := make_plan(net, inputs, keys=Keys(seed=0, n_draws=20))).run(inputs):
            pass
    torch.cuda.set_sync_debug_mode(2)
    try:
        for _ in plan.run(inputs):
            pass
    finally:
        torch.cuda.set_sync_debug_mode(0)
