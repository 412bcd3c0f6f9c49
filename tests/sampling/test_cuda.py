"""On a GPU the draws are those of the CPU, up to rounding: the same masks, by other kernels."""

import concurrent.futures
import copy

import pytest
import torch
from torch.utils import _pytree as pytree

import dropbayes as db
from dropbayes.sampling import Keys, make_plan
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.masks import uniform
from dropbayes.tracing.outputs import split
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


class OtherOrders(torch.nn.Module):
    """Dropout of tensors whose memory has another order than their axes, which torch's own leaves as it is."""

    def __init__(self):
        super().__init__()
        self.drop, self.conv = torch.nn.Dropout(0.3), torch.nn.Conv2d(3, 4, 3)
        self.mix, self.last = torch.nn.Linear(9, 5), torch.nn.Linear(20, 2)

    def forward(self, x):
        images = self.conv(x.to(memory_format=torch.channels_last))
        dropped = self.drop(images)
        steps = self.mix(self.drop(dropped.flatten(2))).transpose(1, 2)
        mixed = self.drop(steps[:, None].expand(-1, 2, -1, -1))  # a memory that is not its own
        shuffled = self.drop(steps)
        if x.is_cuda and len(x) == 36:  # all draws of all rows
            assert (dropped.stride(), shuffled.stride()) == (images.stride(), steps.stride())
        return self.last(shuffled.flatten(1)) + mixed.sum((1, 2, 3))[:, None]


@pytest.mark.parametrize("masks", ["shared", "row"])
@pytest.mark.parametrize("sampler", ["stratified", "independent"])
def test_tensors_of_another_order_in_memory_keep_it_and_have_the_masks_of_the_cpu(sampler, masks):
    net, x = OtherOrders().eval(), torch.randn(3, 3, 5, 5)
    options = {"n_draws": 12, "masks": masks, "sampling": db.Sampling(sampler=sampler)}
    expected = db.draws(net, x, **options)
    torch.testing.assert_close(
        db.draws(copy.deepcopy(net).cuda(), x.cuda(), **options).cpu(), expected, rtol=2e-3, atol=2e-4
    )


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


class OfNothing(torch.nn.Module):
    """Dropout and noise of tensors without entries, as of a table in which no column is of some kind."""

    def __init__(self):
        super().__init__()
        self.drop, self.last = torch.nn.Dropout(0.3), torch.nn.Linear(4, 2)

    def forward(self, x):
        nothing = self.drop(x[:, :0]) * torch.rand(len(x), 0, device=x.device)
        return self.last(self.drop(x)) + nothing.sum(1, keepdim=True)


@pytest.mark.parametrize("masks", ["shared", "row"])
def test_tensors_without_entries_need_no_kernel(masks):
    net, x = OfNothing().eval(), torch.randn(3, 4)
    expected = db.draws(net, x, n_draws=5, masks=masks)
    torch.testing.assert_close(db.draws(net.cuda(), x.cuda(), n_draws=5, masks=masks).cpu(), expected)


def test_a_mask_that_is_kept_is_used_again_in_the_stream_that_made_it_alone():
    spec = {"draws": range(5), "rows": None, "shape": (3,), "device": torch.device("cuda")}
    first = uniform(Keys(0, 5), 0, **spec)
    with torch.cuda.stream(torch.cuda.Stream()):
        other = uniform(Keys(0, 5), 0, **spec)
        assert other is not first and other is uniform(Keys(0, 5), 0, **spec)
    torch.cuda.synchronize()
    assert uniform(Keys(0, 5), 0, **spec) is first and torch.equal(first, other)


class AtBoxes(torch.nn.Module):
    """Features at places that are given by the number of a row and a column, as of regions of interest."""

    def __init__(self):
        super().__init__()
        self.drop, self.last = torch.nn.Dropout(0.3), torch.nn.Linear(4, 2)

    def forward(self, x, boxes):
        return self.last(self.drop(x)[boxes[:, 0], :, boxes[:, 1]])


def test_an_index_that_a_row_alone_does_not_have_leaves_the_device_in_use():
    boxes = torch.tensor([[0, 1], [1, 2], [2, 3]], device="cuda")
    with pytest.raises(ValueError, match=r"fails on a single one .*IndexError"):
        db.draws(AtBoxes().cuda().eval(), (torch.randn(3, 4, 6, device="cuda"), boxes))
    assert float(torch.ones(3, device="cuda").sum()) == 3


def test_bags_that_are_cut_as_rows_leave_the_device_in_use():
    class Texts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.drop, self.last = torch.nn.EmbeddingBag(30, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)

        def forward(self, words, offsets):
            return self.last(self.drop(self.bag(words, offsets)))

    words, offsets = torch.randint(30, (12,), device="cuda"), torch.tensor([0, 4, 9], device="cuda")
    with pytest.raises(ValueError, match=r"fails on"):
        db.predict(Texts().cuda().eval(), (words, offsets), sampling=db.Sampling(row_axis=[None, 0]))
    assert float(torch.ones(3, device="cuda").sum()) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_under_autocast_is_not_taken_for_a_branch_on_the_batch(dtype):
    class Checked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 256), torch.nn.Tanh(), torch.nn.Dropout(0.2))
            self.mean, self.scale = torch.nn.Linear(256, 3), torch.nn.Linear(256, 3)

        def forward(self, x):
            h = self.net(x)
            return torch.distributions.Normal(self.mean(h), self.scale(h).exp()).variance  # whose values are checked

    with torch.autocast("cuda", dtype=dtype):
        found = db.predict(Checked().cuda().eval(), torch.randn(3, 4, device="cuda"), n_draws=16)
    assert bool((found.epistemic > 0).all())


def test_rows_that_are_mixed_in_large_batches_leave_the_device_in_use():
    net, _ = build("dropout_mlp")

    class Centred(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            y = self.net(x)
            return y - y.mean(0) if len(y) > 5 else y

    with pytest.raises(ValueError, match="rows depend on each other"):
        db.draws(Centred().cuda().eval(), torch.randn(9, 6, device="cuda"))
    assert float(torch.ones(3, device="cuda").sum()) == 3


def test_outputs_may_be_on_several_devices():
    class Tagged(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.last = torch.nn.Dropout(0.3), torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.last(self.drop(x)), torch.ones(len(x))

    found = db.predict(Tagged().cuda().eval(), torch.randn(3, 4, device="cuda"))
    assert [mean.device.type for mean in found.mean] == ["cuda", "cpu"]


@pytest.mark.parametrize("masks", ["shared", "row"])
def test_a_network_may_map_over_its_rows_itself(masks):
    class Mapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.last = torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2)

        def forward(self, x):
            return self.last(torch.vmap(lambda row: self.drop(self.first(row)), randomness="same")(x))

    net, x = Mapped().eval(), torch.randn(3, 4)
    expected = db.draws(net, x, n_draws=12, masks=masks)
    ours = db.draws(copy.deepcopy(net).cuda(), x.cuda(), n_draws=12, masks=masks)
    torch.testing.assert_close(ours.cpu(), expected, rtol=2e-3, atol=2e-4)


def test_random_numbers_that_a_layer_draws_on_the_device_are_refused_by_name():
    net = torch.nn.Sequential(torch.nn.FractionalMaxPool2d(2, output_size=3), torch.nn.Dropout(0.3))
    with pytest.raises(NotImplementedError, match="cannot be keyed to a seed: rand"):
        db.draws(net.cuda().eval(), torch.randn(3, 2, 8, 8, device="cuda"))


@pytest.mark.filterwarnings("ignore")
def test_a_draw_on_the_device_may_be_mapped_over():
    net, _ = build("dropout_mlp")
    x = torch.randn(3, 6)
    on_cpu, on_gpu = (db.function_draw(one, 2) for one in (net, copy.deepcopy(net).cuda()))
    expected = torch.func.vmap(lambda row: on_cpu(row[None])[0])(x)
    ours = torch.func.vmap(lambda row: on_gpu(row[None])[0])(x.cuda())
    torch.testing.assert_close(ours.cpu(), expected, rtol=2e-3, atol=2e-4)


def test_random_numbers_of_another_thread_are_refused_and_the_devices_generator_put_back():
    class Threaded(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.last = torch.nn.Dropout(0.001), torch.nn.Linear(4, 2)

        def forward(self, x):
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                return self.last(pool.submit(self.drop, x).result())

    x, before = torch.randn(3, 4, device="cuda"), torch.cuda.get_rng_state()
    with pytest.raises(NotImplementedError, match="torch's generator, outside of what can be watched"):
        db.draws(Threaded().cuda().eval(), x)
    assert torch.equal(torch.cuda.get_rng_state(), before)
