"""The second half of a ConvNeXt block: an MLP over the channels, added to the residual stream.

    out = x + GELU(z W₁ᵀ + b₁) W₂ᵀ + b₂,     x and z (..., D), W₁ (E, D), W₂ (D, E), GELU(a) = a Φ(a).

The fast twin leaves the products to the library and does the rest in one pass each: bias and GELU, bias and residual.
It keeps z W₁ᵀ, once, in half precision; the gradient takes the GELU of it again in the pass that differentiates it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ergoflow.ops.choice import Impl, choose_impl, in_product_dtype
from ergoflow.ops.differentiable import Differentiable, Numbers, Tensors, has_tangent


def add_mlp(
    x: Tensor,
    z: Tensor,
    expand: Tensor,
    expand_bias: Tensor,
    contract: Tensor,
    contract_bias: Tensor,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Return x + GELU(z W₁ᵀ + b₁) W₂ᵀ + b₂, (..., D), in the dtype of x under autocast.

    "reference" and "torch" are torch's own; "triton" adds the biases in float32.
    """
    products = in_product_dtype(z, expand, contract)
    chosen = choose_impl(products[0], impl)
    if chosen != "triton" or has_tangent(x, z, expand, expand_bias, contract, contract_bias):
        return x + F.linear(F.gelu(F.linear(z, expand, expand_bias)), contract, contract_bias)
    with torch.autocast(x.device.type, enabled=False):
        return _ADD_MLP((x, *products, expand_bias, contract_bias), (), "triton")[0]


def _forward(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    """Return the result, and z W₁ᵀ (N, E) for the gradient."""
    from ergoflow.ops.mlp_triton import add, gelu

    x, z, expand, contract, expand_bias, contract_bias = tensors
    a = _rows(z) @ expand.mT
    y = gelu(a, expand_bias) @ contract.mT
    return [add(_rows(x), y, contract_bias).view(x.shape), a]


def _backward(gradients: Tensors, tensors: Tensors, kept: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    from ergoflow.ops.mlp_triton import gelu_gradient, rounded

    (_, z, expand, contract, expand_bias, contract_bias), (a,) = tensors, kept
    d_y, d_contract_bias = rounded(_rows(gradients[0]), a.dtype)
    d_a, hidden, d_expand_bias = gelu_gradient(d_y @ contract, a, expand_bias)
    d_contract = d_y.mT @ hidden
    d_z, d_expand = d_a @ expand, d_a.mT @ _rows(z)
    d_biases = (d_expand_bias.to(expand_bias.dtype), d_contract_bias.to(contract_bias.dtype))
    return [gradients[0], d_z.view(z.shape), d_expand, d_contract, *d_biases]


def _shapes(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    x, z, expand = tensors[:3]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [out, z.new_empty(z.shape[:-1].numel(), len(expand))]


_ADD_MLP = Differentiable("add_mlp", lambda inputs: 1, _forward, _backward, _shapes)


def _rows(x: Tensor) -> Tensor:
    """Return x (..., C) as (N, C), contiguous."""
    return x.contiguous().view(-1, x.shape[-1])
