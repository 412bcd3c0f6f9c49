"""What works around a prediction: derivatives, profilers, tracers, threads, modes and unusual weights."""

import cProfile
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from tests.sampling.loop import assert_functions, assert_law, made, network, unchanged
from tests.sampling.training_loop import rows


def perceptron():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 2))


def general():
    return network(lambda self, x: torch.tanh(self.n(x)), n=perceptron())


# Derivatives of a draw ------------------------------------------------------------------------------------------------


def lstm(kind=nn.LSTM, skip=True):
    def forward(self, x):
        y = self.o(self.l(x)[0][:, -1])
        return (y + x[:, -1, :1]).square() if skip else y

    net = network(forward, l=kind(3, 4, 2, dropout=0.4, batch_first=True), o=nn.Linear(4, 1))
    for p in net.parameters():
        p.data.mul_(3)
    return net.double(), torch.randn(1, 3, 3, dtype=torch.float64)


def attention():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, batch_first=True, activation="gelu")
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 1)).double(), torch.randn(1, 3, 4, dtype=torch.float64)


def convolutions():
    body = nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Dropout1d(0.4), nn.Flatten(), nn.Linear(8, 1)
    return nn.Sequential(*body).double(), torch.randn(1, 2, 4, dtype=torch.float64)


def scaled_attention():
    def forward(self, x):
        return self.o(F.scaled_dot_product_attention(x, x, x, dropout_p=0.4 if self.training else 0.0).tanh()).sum(1)

    return network(forward, o=nn.Linear(4, 1)).double(), torch.randn(1, 3, 4, dtype=torch.float64)


DIFFERENTIABLE = {
    "LSTM with a skip": lstm,
    "LSTM": lambda: lstm(skip=False),
    "GRU": lambda: lstm(nn.GRU),
    "RNN": lambda: lstm(nn.RNN, False),
    "attention": attention,
    "scaled attention": scaled_attention,
    "convolutions": convolutions,
    "perceptron": lambda: (perceptron().double(), torch.randn(1, 6, dtype=torch.float64)),
}


def gradient(f, x, create_graph=False):
    x = x.detach().requires_grad_() if not create_graph else x
    return torch.autograd.grad(f(x).sum(), x, create_graph=create_graph)[0]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_first_and_second_derivatives_of_a_draw_are_difference_quotients(name):
    net, x = made(DIFFERENTIABLE[name])
    f = db.function_draw(net, 2, n_draws=5)
    direction = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    step = 1e-5 * direction
    with torch.no_grad():
        quotient = (f(x + step) - f(x - step)).sum() / 2e-5
    torch.testing.assert_close((gradient(f, x) * direction).sum(), quotient, rtol=1e-5, atol=1e-7)
    x = x.requires_grad_()
    second = torch.autograd.grad(gradient(f, x, True).square().sum(), x)[0]
    norm = lambda z: gradient(f, z).square().sum()  # noqa: E731
    quotient = (norm(x + step) - norm(x - step)) / 2e-5
    torch.testing.assert_close((second * direction).sum(), quotient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["LSTM", "attention", "convolutions", "perceptron", "scaled attention"])
def test_gradients_reach_the_parameters(name):
    net, x = made(DIFFERENTIABLE[name])
    f = db.function_draw(net, 2, n_draws=5)
    parameter = next(p for p in net.parameters() if p.dim() > 1)
    (slope,) = torch.autograd.grad(f(x).sum(), parameter)
    direction = torch.randn(parameter.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    values = []
    for sign in (1, -1, 0):
        parameter.data.add_(1e-5 * (sign if sign else 1) * direction)
        values.append(f(x).sum().item())
        parameter.data.sub_(1e-5 * (sign if sign else 1) * direction)
    assert (slope * direction).sum().item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4, abs=1e-7)


TRANSFORMS = {
    "grad": lambda f, x: torch.func.grad(lambda v: f(v).sum())(x),
    "jacrev": lambda f, x: torch.func.jacrev(lambda v: f(v).sum(0))(x).sum(0),
    "jacfwd": lambda f, x: torch.func.jacfwd(lambda v: f(v).sum(0))(x).sum(0),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1].sum(1),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(len(x), 2))[0],
}


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("make", [perceptron, general], ids=["perceptron", "general"])
def test_torch_func_transforms_a_draw(name, make):
    net, x = made(lambda: (make(), rows(3)))
    f = db.function_draw(net, 1, n_draws=5)
    slope = gradient(f, x)
    expected = slope.sum(1) if name == "jvp" else slope
    torch.testing.assert_close(TRANSFORMS[name](f, x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [perceptron, general], ids=["perceptron", "general"])
def test_torch_func_maps_a_draw_over_rows(make):
    net, x = made(lambda: (make(), rows(3)))
    f = db.function_draw(net, 1, n_draws=5)
    mapped = torch.func.vmap(lambda row: f(row[None])[0])(x)
    torch.testing.assert_close(mapped, f(x), rtol=1e-4, atol=1e-5)


class Halting(nn.Module):
    """Steps until every row has halted: how many depends on the rows and on the draw."""

    def __init__(self):
        super().__init__()
        self.cell, self.halt, self.out = nn.GRUCell(6, 8), nn.Linear(8, 1), nn.Linear(8, 2)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        state, total = x.new_zeros(len(x), 8), x.new_zeros(len(x), 1)
        while bool((total < 0.9).any()):
            going = (total < 0.9).float()
            state = state + going * (self.cell(self.dropout(x), state) - state)
            total = total + going * self.halt(state).sigmoid()
        return self.out(state)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_first_call_inside_a_transform_leaves_the_draws_as_they_are(name):
    net, x = made(lambda: (Halting(), rows(3)))
    expected = db.draws(made(lambda: (Halting(), rows(3)))[0], x, n_draws=5)
    f = db.function_draw(net, 1, n_draws=5)
    slope = TRANSFORMS[name](f, x)
    torch.testing.assert_close(db.draws(net, x, n_draws=5), expected)
    expected_slope = gradient(f, x)
    torch.testing.assert_close(slope, expected_slope.sum(1) if name == "jvp" else expected_slope)


class MergedInEvaluation(nn.Module):
    """A low-rank adapter whose `train` and `eval` write into the layer that it adapts."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout, self.merged = nn.Linear(6, 2), nn.Dropout(0.2), False
        self.down, self.up = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.randn(2, 1))

    def train(self, mode=True):
        super().train(mode)
        if self.merged == mode:
            self.layer.weight.data += (-1 if mode else 1) * self.up @ self.down
            self.merged = not mode
        return self

    def forward(self, x):
        return self.layer(x) if self.merged else self.layer(x) + self.dropout(x) @ self.down.T @ self.up.T


def test_weights_that_a_mode_moves_stay_when_a_draw_is_transformed():
    net, x = made(lambda: (MergedInEvaluation(), rows(3)))
    f = db.function_draw(net, 1, n_draws=5)
    with unchanged(net):
        slope = torch.func.grad(lambda v: f(v).sum())(x)
    torch.testing.assert_close(slope, gradient(f, x))


class DropsInside(torch.autograd.Function):
    """Dropout in the forward of an autograd.Function, whose operations a transform of torch.func hides."""

    @staticmethod
    def forward(x):
        mask = (torch.rand_like(x) >= 0.3).to(x) / 0.7
        return x * mask, mask

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, slope, _):
        return slope * ctx.saved_tensors[0]


def test_sites_that_a_transform_hides_are_refused():
    drop = network(lambda self, x: DropsInside.apply(x)[0] if self.training else x)
    net, x = made(lambda: (nn.Sequential(nn.Linear(6, 8), drop, nn.Tanh(), nn.Linear(8, 2)), rows(3)))
    f = db.function_draw(net, 1, n_draws=5)
    torch.testing.assert_close(f(x), db.draws(net, x, n_draws=5)[1])
    with (
        torch.random.fork_rng(),
        pytest.raises(ValueError, match="Differentiate a draw by torch"),
    ):
        torch.func.grad(lambda v: f(v).sum())(x)
    assert gradient(f, x).any()


# Profilers, tracers, threads, modes -----------------------------------------------------------------------------------


def under_cprofile(act):
    profile = cProfile.Profile()
    profile.enable()
    try:
        result = act()
        assert sys.getprofile() is not None or sys.version_info >= (3, 12)  # which has sys.monitoring
    finally:
        profile.disable()
    return result


def under(get, switch):
    def run(act):
        events, before = [], get()
        mine = lambda frame, event, argument: events.append(event)  # noqa: E731
        switch(mine)
        try:
            result = act()
            assert get() is mine
        finally:
            switch(before)
        assert events
        return result

    return run


def under_torch_profiler(act):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return act()


def in_a_thread(act):
    box = []
    thread = threading.Thread(target=lambda: box.append(act()))
    thread.start()
    thread.join()
    return box[0]


def in_mode(mode):
    def run(act):
        with mode():
            return act()

    return run


def with_another_bit_generator(act):
    old = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(np.random.PCG64(1))  # type: ignore[attr-defined]
    try:
        return act()
    finally:
        np.random.set_bit_generator(old)  # type: ignore[attr-defined]


AROUND = {
    "cProfile": under_cprofile,
    "sys.setprofile": under(sys.getprofile, sys.setprofile),
    "sys.settrace": under(sys.gettrace, sys.settrace),
    "torch.profiler": under_torch_profiler,
    "a thread": in_a_thread,
    "inference_mode": in_mode(torch.inference_mode),
    "no_grad": in_mode(torch.no_grad),
    "enable_grad": in_mode(torch.enable_grad),
    "anomaly mode": in_mode(torch.autograd.detect_anomaly),
    "another bit generator": with_another_bit_generator,
    "another default device": in_mode(lambda: torch.device("meta")),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning", "ignore:.*Profiler clears events:UserWarning")
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("make", [perceptron, general], ids=["perceptron", "general"])
def test_a_prediction_is_the_same_in_any_surroundings(name, make):
    (net, x), (fresh, _) = made(lambda: (make(), rows(3))), made(lambda: (make(), None))
    expected = db.draws(fresh, x, n_draws=8)
    ours = AROUND[name](lambda: (db.draws(net, x, n_draws=8), len(db.sites(net, x)), db.predict(net, x)))
    assert torch.equal(ours[0], expected) and ours[1] == 1
    torch.testing.assert_close(AROUND[name](lambda: db.function_draw(net, 3, n_draws=8)(x)), expected[3])


class Inference(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = perceptron()

    @torch.inference_mode()
    def forward(self, x):
        return self.n(x)


class InsideInference(Inference):
    def forward(self, x):
        with torch.inference_mode():
            h = self.n[:2](x)
        return self.n[2:](h.clone())


@pytest.mark.parametrize("kind", [Inference, InsideInference])
def test_a_forward_pass_in_inference_mode_is_drawn(kind):
    net, x = made(lambda: (kind(), rows(3)))
    with unchanged(net, x):
        assert_law(net, x, n_draws=400)


class OwnTrain(nn.Sequential):
    def train(self, mode=True):
        return super().train(mode)


@pytest.mark.parametrize("kind", [nn.Sequential, OwnTrain])
def test_weights_made_in_inference_mode_are_read(kind):
    with torch.inference_mode():
        net = kind(*perceptron()).eval()
    assert db.predict(net, rows(3)).mean.shape == (3, 2)


def as_buffer(net):
    weight = net[0].weight.data
    del net[0].weight
    net[0].register_buffer("weight", weight)


def as_plain_tensor(net):
    weight = net[0].weight.data
    del net[0].weight
    net[0].weight = weight


def as_property(net):
    halves = nn.ParameterList([net[0].weight.data[:8].clone(), net[0].weight.data[8:].clone()])
    kind = type("Halved", (nn.Linear,), {"weight": property(lambda self: torch.cat(list(self.halves)))})
    del net[0].weight
    net[0].__class__, net[0].halves = kind, halves


@pytest.mark.parametrize("change", [as_buffer, as_plain_tensor, as_property])
def test_weights_that_are_no_parameters_are_used(change):
    (net, x), (plain, _) = made(lambda: (perceptron(), rows(3))), made(lambda: (perceptron(), None))
    change(net)
    assert_functions(net, x)
    torch.testing.assert_close(db.draws(net, x, n_draws=6), db.draws(plain, x, n_draws=6))


def test_data_parallel_of_one_process_is_predicted(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net, x = made(lambda: (general(), rows(3)))
        expected = db.predict(net, x)
        wrapped = nn.parallel.DistributedDataParallel(net)
        torch.testing.assert_close(db.predict(wrapped, x).mean, expected.mean)
        torch.testing.assert_close(db.predict(wrapped, x).std, expected.std)
    finally:
        torch.distributed.destroy_process_group()


class OneHot(nn.Module):
    def __init__(self, n_classes):
        super().__init__()
        self.n_classes, self.n, self.o = n_classes, perceptron(), nn.Linear(n_classes, 1)

    def forward(self, x):
        return self.o(nn.functional.one_hot(self.n(x).argmax(-1), self.n_classes).float())


def test_a_class_that_is_not_there_is_refused_as_torch_refuses_it():
    net, x = made(lambda: (OneHot(2), rows(6)))
    assert db.predict(net, x).method == "mapped"
    few, _ = made(lambda: (OneHot(1), None))
    with pytest.raises(RuntimeError, match=r"out of bounds|smaller than num_classes"):
        db.predict(few, x)


class NoRegisters(nn.Module):
    """An encoder whose number of register tokens is zero."""

    def __init__(self):
        super().__init__()
        self.registers, self.a, self.d, self.o = nn.Parameter(torch.zeros(1, 0, 4)), nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2)  # fmt: skip

    def forward(self, x):
        tokens = torch.cat([self.registers.expand(len(x), -1, -1), x], 1)
        return self.o(self.d(torch.relu(self.a(tokens))).mean(1))


def test_a_parameter_without_elements_is_no_layer_of_width_0():
    net, x = made(lambda: (NoRegisters(), torch.randn(3, 5, 4)))
    torch.testing.assert_close(db.draws(net, x, n_draws=5)[:, 1:2], db.draws(net, x[1:2], n_draws=5))
    assert (db.predict(net, x).std > 0).all()
