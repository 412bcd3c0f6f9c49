"""Attention and normalisation under interception, against torch's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dropbayes.tracing import Interception, Ones
from tests.tracing.fixed_source import WholeSource, run_with_fixed_source


def test_attention_is_torchs_own_when_nothing_is_dropped():
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
        with Interception(WholeSource()):
            ours = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **kwargs)
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, **kwargs))


def test_grouped_attention_repeats_its_keys():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    with Interception(WholeSource()):
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
    out, _ = run_with_fixed_source(norm, x)
    torch.testing.assert_close(out, norm(x))


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="PyTorch 2.8 groups the rows of experts")
def test_experts_run_in_double_precision_where_torch_has_no_kernel():
    torch.manual_seed(0)
    rows, matrices, offs = torch.randn(8, 16), torch.randn(3, 16, 16), torch.tensor([3, 3, 8], dtype=torch.int32)
    with Interception(WholeSource()):
        single = torch._grouped_mm(rows, matrices, offs=offs)
        double = torch._grouped_mm(rows.double(), matrices.double(), offs=offs)
    expected = torch.cat([rows[:3].double() @ matrices[0].double(), rows[3:].double() @ matrices[2].double()])
    torch.testing.assert_close(double, expected)
    torch.testing.assert_close(single, expected.float(), atol=1e-5, rtol=1e-5)


FUNCTIONS = {
    "mish": F.mish,
    "softplus": lambda x: F.softplus(x, beta=2.0),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "elu in place": lambda x: F.elu(x.clone(), 0.5, True),
    "sigmoid in place": lambda x: x.clone().sigmoid_(),
    "power": lambda x: x.abs() ** 1.5,
    "power of a number": lambda x: 1.5 ** x.contiguous(),  # of another order in memory, it is never in vectors
    "power of two tensors": lambda x: torch.pow(x.abs(), exponent=x) * torch.pow(2.0, x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(3, 5, 47), (47,), (2, 64), (1, 1)])
def test_a_number_that_fills_no_vector_is_computed_as_part_of_one(name, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for given in (x, x.t() if x.dim() == 2 else x.movedim(0, -1)):
        padded = torch.cat([given.reshape(-1), torch.zeros(64)])[: -(-x.numel() // 64) * 64]
        with Interception(Ones()):
            result = FUNCTIONS[name](given)
        expected = FUNCTIONS[name](padded)[: x.numel()].view(given.shape)
        torch.testing.assert_close(result, expected, rtol=0 if "two" not in name else 1e-6, atol=0)


def test_a_function_in_place_leaves_its_result_in_its_input():
    x = torch.randn(3, 5, 7)
    for layout in (x.clone(), x.clone().movedim(0, -1)):
        expected = F.silu(layout)
        with Interception(Ones()):
            result = F.silu(layout, inplace=True)
        assert result is layout
        torch.testing.assert_close(layout, expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors_keep_their_layout(layout):
    x = getattr(torch.eye(5), layout)()
    with Interception(Ones()):
        result = torch.tanh(x)
    assert result.layout == x.layout
    torch.testing.assert_close(result.to_dense(), torch.eye(5).tanh())


def test_functions_of_odd_lengths_have_their_derivatives():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def forward(x):
        with Interception(Ones()):
            return torch.sigmoid(F.mish(x)) + x.sin().tanh_()

    assert torch.autograd.gradcheck(forward, x) and torch.autograd.gradgradcheck(forward, x)
    mapped = torch.func.vmap(torch.func.grad(lambda row: forward(row).sum()))(x)
    torch.testing.assert_close(mapped, torch.autograd.grad(forward(x).sum(), x)[0])
