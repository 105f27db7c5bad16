"""A linear map with bias at many points, y = x Wᵀ + b, for a GPU: two things that torch does slowly are products.

The gradient of the bias is a sum over all points, d_b = gᵀ 1: a reduction of columns reaches a seventh of the speed of
memory on an H200, a product with ones all of it. And few channels are no work for a matrix product: with up to THIN of
them y is added up channel by channel, and the ones join x, so that one product makes d_W and d_b.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ergoflow.ops.choice import choose_impl, in_product_dtype
from ergoflow.ops.differentiable import has_tangent

THIN = 4


def biased_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x Wᵀ + b (..., D) for x (..., C), weight (D, C), bias (D,): torch's own but for half precision on CUDA."""
    tensors = in_product_dtype(x, weight, bias)
    if choose_impl(tensors[0], "auto") != "triton" or has_tangent(*tensors):
        return F.linear(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        return by_products(*tensors)


def by_products(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return x Wᵀ + b, all of one dtype."""
    out: Tensor = _BiasedLinear.apply(x, weight, bias)
    return out


class _BiasedLinear(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        if x.shape[-1] > THIN:
            return F.linear(x, weight, bias)
        out = bias
        for channel, column in zip(x.split(1, dim=-1), weight.unbind(1), strict=True):
            out = torch.addcmul(out, channel, column)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        d_x = gradient @ weight if ctx.needs_input_grad[0] else None
        g, rows = gradient.flatten(0, -2), x.flatten(0, -2)
        ones = rows.new_ones(len(rows), 1)
        if x.shape[-1] > THIN:
            return d_x, g.mT @ rows, (g.mT @ ones)[:, 0]
        *d_weight, d_bias = (g.mT @ torch.cat((rows, ones), dim=1)).unbind(1)
        return d_x, torch.stack(d_weight, dim=1), d_bias
