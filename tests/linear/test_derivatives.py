"""Derivatives by the masks, against finite differences, closed forms and draws."""

import concurrent.futures
import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint

import dropbayes as db
from dropbayes.linear import covariance, derivatives, variables
from dropbayes.sampling.inspection import Inspection
from dropbayes.tracing import Given, Interception
from dropbayes.tracing.outputs import split
from tests.sampling.zoo import ZOO, build
from tests.sampling.zoo.specimens import Module


def perceptron():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3),
                         nn.Linear(4, 2)), [(1, 4), (1, 4)], torch.randn(1, 3)  # fmt: skip


def images():
    return (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Dropout2d(0.3), nn.Conv2d(2, 2, 2), nn.Flatten()),
        [(1, 2, 1, 1)],
        torch.randn(1, 1, 4, 4),
    )


def attention():
    def forward(m, x):
        q, k, v = m.qkv(x).unsqueeze(1).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if m.training else 0.0).sum((1, 2)).sin()

    return Module(forward, qkv=nn.Linear(4, 12)), [(1, 1, 3, 3)], torch.randn(1, 3, 4)


def recurrent():
    return (
        Module(lambda m, x: m.rnn(x)[0][:, -1], rnn=nn.LSTM(2, 3, 2, dropout=0.4, batch_first=True)),
        [(1, 4, 3)],
        torch.randn(1, 4, 2),
    )


@pytest.mark.parametrize("make", [perceptron, images, attention, recurrent])
def test_the_covariance_is_that_of_finite_differences(make):
    torch.manual_seed(0)
    net, shapes, x = make()
    net, x, step = net.double().train(), x.double(), 1e-5
    rates = [site.drop_prob for site in db.sites(net, x)]

    def at(site, unit, size):
        factors = [torch.ones(shape, dtype=torch.float64) for shape in shapes]
        factors[site].view(-1)[unit] += size
        with torch.no_grad(), Interception(Given(factors)):
            return net(x)[0]

    expected = 0
    for site, (shape, rate) in enumerate(zip(shapes, rates, strict=True)):
        for unit in range(torch.Size(shape).numel()):
            slope = (at(site, unit, step) - at(site, unit, -step)) / (2 * step)
            expected = expected + rate / (1 - rate) * slope[:, None] * slope
    torch.testing.assert_close(covariance(net, x)[0], expected, rtol=1e-6, atol=1e-10)


def test_one_hidden_layer_is_exact():
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Dropout(0.4), nn.Linear(20, 2))
    x = torch.randn(5, 3)
    linear, exact = db.predict(net, x, method="linear"), db.predict(net, x)
    assert exact.method == "exact" and linear.method == "linear"
    torch.testing.assert_close(linear.mean, exact.mean)
    torch.testing.assert_close(linear.epistemic, exact.epistemic)


def test_the_error_of_a_quadratic_is_the_known_one():
    net = Module(lambda m, x: F.dropout(x, 0.5, m.training).square()).double()
    x = torch.tensor([[3.0]], dtype=torch.float64)
    linear = db.predict(net, x, method="linear")
    # z is 0 or 2 with equal chances: (z x)² has mean 2 x² and variance 4 x⁴; in the linear z, mean x² and the same
    assert float(linear.mean) == 9 and float(linear.epistemic) == 4 * 81
    drawn = db.predict(net, x, n_draws=1000)
    assert float(drawn.mean) == pytest.approx(18) and float(drawn.epistemic) == pytest.approx(4 * 81)


# The least and largest ratio of standard deviations, linear to 10,000 draws, in the median over outputs.
KINDS = {
    "dropout_mlp": (0.9, 1.02), "dropout1d": (0.97, 1.03), "dropout2d": (0.97, 1.03), "drop_connect": (0.97, 1.03),
    "alpha_dropout": (0.97, 1.03), "drop_path_rand": (0.97, 1.03), "bert_sdpa": (0.95, 1.03),
    "multi_head_attention_sequence_first": (0.97, 1.03), "causal_attention": (0.97, 1.03), "lstm": (0.95, 1.03),
    "gru_bidirectional": (0.97, 1.05), "residual_with_norms": (0.97, 1.03), "dict_in_dict_out": (0.97, 1.03),
    "data_parallel": (0.97, 1.03), "writes_into_a_buffer": (0.97, 1.03),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_deviations_are_those_of_3000_draws(name):
    net, x = build(name)
    linear = db.predict(net, x, method="linear", sampling=db.Sampling(row_axis=ZOO[name].row_axis))
    drawn = db.predict(net, x, n_draws=3000, sampling=db.Sampling(row_axis=ZOO[name].row_axis))
    one, other = (
        torch.cat([tensor.flatten() for tensor in split(prediction.std)[0]]) for prediction in (linear, drawn)
    )
    low, high = KINDS[name]
    assert low <= float((one / other).median()) <= high
    spread = ((one / other).quantile(0.1), (one / other).quantile(0.9))
    assert spread[0] >= 0.75 and spread[1] <= 1.2


@pytest.mark.parametrize("name", ["dropout_mlp", "dropout2d", "drop_connect", "bert_eager", "lstm_sequence_first"])
def test_a_row_has_among_others_what_it_has_alone(name):
    net, x = build(name)
    axis = ZOO[name].row_axis
    whole = db.predict(net, x, method="linear", sampling=db.Sampling(row_axis=axis))

    def row(tensor):
        return tensor.narrow(axis, 1, 1)

    single = {key: row(value) for key, value in x.items()} if isinstance(x, dict) else row(x)
    alone = db.predict(net, single, method="linear", sampling=db.Sampling(row_axis=axis))
    for one, other in zip(split(whole.epistemic)[0], split(alone.epistemic)[0], strict=True):
        torch.testing.assert_close(row(one), other, rtol=1e-4, atol=1e-9)


def test_an_operation_that_cannot_be_mapped_is_differentiated_one_by_one(monkeypatch):
    net, x = build("dropout_mlp")
    expected = covariance(net, x)

    def unmapped(function, **options):
        raise RuntimeError("no batching rule")

    monkeypatch.setattr(derivatives.torch, "vmap", unmapped)
    torch.testing.assert_close(covariance(net, x), expected)


@pytest.mark.parametrize(
    "name", ["dropout_mlp", "convnet_with_batch_norm", "bert_eager", "in_place_dropout_of_the_input"]
)
def test_the_network_its_input_and_the_generator_are_unchanged(name):
    net, x = build(name)
    net.train()
    before = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()], copy.deepcopy(x)
    generator = torch.get_rng_state()
    db.predict(net, x, method="linear")
    after = net.state_dict(), [module.training for module in net.modules()], x
    assert all(torch.equal(before[0][key], after[0][key]) for key in after[0])
    assert before[1] == after[1] and torch.equal(torch.get_rng_state(), generator)
    inputs = (before[2], after[2]) if isinstance(x, torch.Tensor) else (before[2]["input_ids"], x["input_ids"])
    assert torch.equal(*inputs)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in net.parameters())


def test_inference_mode_around_the_call_does_not_matter():
    net, x = build("dropout_mlp")
    expected = db.predict(net, x, method="linear")
    with torch.inference_mode():
        found = db.predict(net, x.clone(), method="linear")
    assert torch.equal(found.epistemic, expected.epistemic)


class Force(nn.Module):
    """The slope of an energy by the input: masks are in its backward pass as well."""

    def __init__(self):
        super().__init__()
        self.a, self.d, self.o = nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.o(self.d(self.a(x).tanh())).sum(), x, create_graph=True)[0]


def test_a_network_that_differentiates_itself_has_its_masks_in_both_passes():
    torch.manual_seed(0)
    net, x = Force(), torch.randn(3, 4)
    bent = 1 - net.a(x).tanh().square()  # the force is a sum over units: linear in the masks, so that this is exact
    terms = net.o.weight[0] * bent * net.a.weight.T.unsqueeze(1)  # [input, row, unit]
    expected = (0.3 / 0.7 * terms.square().sum(2)).T.detach()
    found = db.predict(net, x, method="linear")
    torch.testing.assert_close(found.epistemic, expected, rtol=1e-4, atol=1e-6)
    drawn = db.predict(net, x, n_draws=20)
    assert not (drawn.mean.requires_grad or drawn.epistemic.requires_grad or db.draws(net, x, n_draws=2).requires_grad)


@pytest.mark.parametrize("name", ["dropout_mlp", "convnet_with_batch_norm", "bert_sdpa", "lstm"])
def test_a_mode_in_the_modules_that_drop_alone_gives_the_bits_of_one_throughout(monkeypatch, name):
    net, x = build(name)
    found = [db.predict(net, x, method="linear") for _ in range(2)][-1]
    monkeypatch.setattr(Inspection, "view_at_sites", lambda *_: None)
    expected = db.predict(build(name)[0], x, method="linear")
    assert all(map(torch.equal, *(split((one.mean, one.epistemic))[0] for one in (found, expected))))


def test_a_mode_in_the_modules_that_drop_sees_nothing_else(monkeypatch):
    (net, x), seen = build("convnet_with_batch_norm"), []
    expected = db.predict(net, x, method="linear")
    monkeypatch.setattr(variables.SiteVariables, "after", lambda self, func, *rest: seen.append(func))
    assert torch.equal(db.predict(net, x, method="linear").epistemic, expected.epistemic)
    assert set(seen) == {F.dropout, F.dropout2d}


@pytest.mark.parametrize("hooked", [False, True])
def test_dropout_past_the_forward_of_its_module_is_a_variable_in_every_pass(hooked):
    """By the function of its class, and by a hook."""
    torch.manual_seed(0)
    call = (lambda m, x: m.head(m.drop(x))) if hooked else (lambda m, x: m.head(nn.Dropout.forward(m.drop, x)))
    net, x = Module(call, drop=nn.Identity() if hooked else nn.Dropout(0.5), head=nn.Linear(3, 2)), torch.randn(4, 3)
    if hooked:
        net.head.register_forward_pre_hook(lambda m, args: F.dropout(args[0], 0.5, m.training))
    expected = (x[:, None] * net.head.weight).square().sum(2).detach()
    for _ in range(3):
        torch.testing.assert_close(db.predict(net, x, method="linear").epistemic, expected)


def test_threads_differentiate_the_same_network_at_a_time():
    net, x = build("dropout_mlp")
    rows = [x * scale for scale in range(1, 9)]
    expected = [db.predict(net, one, method="linear").epistemic for one in rows]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = pool.map(lambda one: db.predict(net, one, method="linear").epistemic, rows)
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("n_outputs", [1, 3])
def test_modules_that_run_again_in_the_backward_pass_have_the_same_derivatives(n_outputs):
    """Of all sites: before them, among them and after them."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.3))
    layers = {"first": nn.Dropout(0.2), "inner": inner, "last": nn.Dropout(0.4), "head": nn.Linear(3, n_outputs)}

    def again(m, x):
        return m.head(m.last(checkpoint.checkpoint(m.inner, m.first(x), use_reentrant=False).tanh()))

    once, x = Module(lambda m, x: m.head(m.last(m.inner(m.first(x)).tanh())), **layers), torch.randn(4, 3)
    found, expected = (db.predict(net, x, method="linear").epistemic for net in (Module(again, **layers), once))
    torch.testing.assert_close(found, expected)
