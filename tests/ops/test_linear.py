"""The map with bias and its gradient against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ergoflow.ops.linear import THIN, biased_linear, by_products


@pytest.mark.parametrize("channels", [1, 3, THIN, THIN + 1, 12])
@pytest.mark.parametrize("moves", [True, False], ids=["x has a gradient", "x has none"])
def test_values_and_gradients_are_those_of_torch(channels, moves):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 4, channels, generator=generator, dtype=torch.float64, requires_grad=moves)
    weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((7, channels), (7,))
    )
    seed = torch.randn(2, 5, 4, 7, generator=generator, dtype=torch.float64)
    inputs = [tensor for tensor in (x, weight, bias) if tensor.requires_grad]
    found, wanted = by_products(x, weight, bias), F.linear(x, weight, bias)
    torch.testing.assert_close(found, wanted, rtol=1e-14, atol=1e-14)
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, seed), torch.autograd.grad(wanted, inputs, seed), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-13)


def test_away_from_a_gpu_it_is_torch_bit_by_bit():
    x, weight, bias = torch.randn(3, 2), torch.randn(5, 2), torch.randn(5)
    assert torch.equal(biased_linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 3, 128])
def test_on_a_gpu_it_agrees_under_autocast(channels):
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight, bias, seed = (
        torch.randn(*shape, generator=generator, device="cuda")
        for shape in ((2, 64, 64, channels), (128, channels), (128,), (2, 64, 64, 128))
    )
    for tensor in (weight, bias):
        tensor.requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        found = biased_linear(x, weight, bias)
    wanted = F.linear(x.double(), weight.double(), bias.double())
    assert found.dtype == torch.bfloat16
    mine = torch.autograd.grad(found, (weight, bias), seed.to(found.dtype))
    theirs = torch.autograd.grad(wanted, (weight, bias), seed.double())
    for a, b in zip((found.detach(), *mine), (wanted.detach(), *theirs), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 1e-2
