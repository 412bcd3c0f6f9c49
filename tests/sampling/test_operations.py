"""What stands in for a stochastic operation, against what torch computes with the same mask."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dropbayes.sampling.operations import Interception, RandomSource


class Fixed(RandomSource):
    """A noise that keeps a checkerboard, and gives fixed uniforms."""

    def __init__(self):
        self.kinds = []

    def keep(self, kind, drop_prob, shape, like):
        self.kinds.append((kind, drop_prob, shape))
        return (torch.arange(torch.Size(shape).numel()) % 2).reshape(shape).to(like.dtype)

    def uniform(self, kind, drop_prob, shape, device):
        self.kinds.append((kind, drop_prob, shape))
        return torch.linspace(0.05, 0.95, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


def intercepted(function, *args):
    noise = Fixed()
    with Interception(noise):
        return function(*args), noise


def test_dropout_scales_what_it_keeps():
    x = torch.arange(1.0, 5.0)
    out, noise = intercepted(lambda v: F.dropout(v, 0.2, training=False), x)
    assert out.tolist() == pytest.approx([0, 2 / 0.8, 0, 4 / 0.8])
    assert noise.kinds == [("dropout", 0.2, (4,))]


def test_dropout_in_place_writes_into_its_input():
    x = torch.arange(1.0, 5.0)
    out, _ = intercepted(lambda v: F.dropout(v, 0.2, True, True), x)
    assert out is x and x.tolist() == pytest.approx([0, 2.5, 0, 5])


@pytest.mark.parametrize(
    "function, shape, expected",
    [
        (F.dropout1d, (2, 3, 4), (2, 3, 1)),
        (F.dropout1d, (3, 4), (3, 1)),
        (F.dropout2d, (2, 3, 4, 4), (2, 3, 1, 1)),
        (F.dropout3d, (2, 3, 2, 2, 2), (2, 3, 1, 1, 1)),
        (F.dropout3d, (3, 2, 2, 2), (3, 1, 1, 1)),
        (F.feature_alpha_dropout, (2, 3, 4, 4), (2, 3, 1, 1)),
    ],
)
def test_feature_dropout_drops_whole_channels(function, shape, expected):
    _, noise = intercepted(lambda v: function(v, 0.3, False), torch.ones(shape))
    assert [s for _, _, s in noise.kinds] == [expected]


def test_alpha_dropout_keeps_mean_zero_and_variance_one():
    # Of a standard normal input: the affine map is derived to restore exactly these.
    torch.manual_seed(0)
    x = torch.randn(400_000, dtype=torch.float64)
    out, _ = intercepted(lambda v: F.alpha_dropout(v, 0.5, False), x)
    assert abs(float(out.mean())) < 5e-3 and abs(float(out.var()) - 1) < 5e-3


def test_attention_is_torchs_own_when_nothing_is_dropped():
    class Whole(Fixed):
        def keep(self, kind, drop_prob, shape, like):
            return torch.full(shape, 1 - drop_prob, dtype=like.dtype)  # undoes the scale

    q, k, v = torch.randn(3, 2, 4, 5, 8, dtype=torch.float64)
    mask = torch.rand(5, 5) > 0.3
    mask[:, 0] = True
    for kwargs in (
        {},
        {"attn_mask": mask},
        {"attn_mask": torch.randn(5, 5).double()},
        {"is_causal": True},
        {"scale": 0.3},
    ):
        with Interception(Whole()):
            ours = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **kwargs)
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, **kwargs))


def test_grouped_attention_repeats_its_keys():
    class Whole(Fixed):
        def keep(self, kind, drop_prob, shape, like):
            return torch.full(shape, 1 - drop_prob, dtype=like.dtype)

    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    with Interception(Whole()):
        ours = F.scaled_dot_product_attention(q, k, k, dropout_p=0.3, enable_gqa=True)
    torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, k, enable_gqa=True))


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5), (2, 3, 4, 4)])
def test_normalisation_in_evaluation_is_torchs_own(shape, affine):
    torch.manual_seed(0)
    norm = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)](3, affine=affine).double()
    norm.train()(torch.randn(shape, dtype=torch.float64) * 3 + 1)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    norm.eval()
    x = torch.randn(shape, dtype=torch.float64)
    out, _ = intercepted(norm, x)
    torch.testing.assert_close(out, norm(x))


def test_random_numbers_have_the_asked_distribution_and_dtype():
    out, noise = intercepted(
        lambda: (torch.rand(3, 2), torch.randn((4,), dtype=torch.float64), torch.rand_like(torch.ones(2)))
    )
    assert out[0].shape == (3, 2) and out[1].dtype == torch.float64
    assert out[1].tolist() == pytest.approx(torch.special.ndtri(torch.linspace(0.05, 0.95, 4).double()).tolist())
    assert [kind for kind, _, _ in noise.kinds] == ["rand", "randn", "rand"]


def test_in_place_random_numbers_are_written():
    def fill():
        a = torch.empty(4).bernoulli_(0.5)
        b = torch.empty(4).uniform_(-1, 1)
        c = torch.empty(4).normal_(2.0, 0.0)
        d = torch.empty(4).exponential_()
        return a, b, c, d

    (a, b, c, d), _ = intercepted(fill)
    assert a.tolist() == [1, 1, 0, 0]
    assert b.tolist() == pytest.approx([-0.9, -0.3, 0.3, 0.9])
    assert c.tolist() == [2.0] * 4
    assert d.tolist() == pytest.approx((-torch.log(torch.tensor([0.05, 0.35, 0.65, 0.95]))).tolist())


@pytest.mark.parametrize(
    "draw", [lambda: torch.randint(0, 5, (2,)), lambda: torch.multinomial(torch.ones(3), 1), lambda: torch.randperm(3)]
)
def test_randomness_that_cannot_be_keyed_is_refused(draw):
    with pytest.raises(NotImplementedError, match="cannot be keyed"):
        intercepted(draw)


def test_deterministic_operations_pass_through():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4))
    x = torch.randn(2, 3)
    out, noise = intercepted(net, x)
    assert torch.equal(out, net(x)) and noise.kinds == []
