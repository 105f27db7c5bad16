"""Norms whose fast twins read and write every field once: the group norm, and sums followed by a layer norm.

Group norm, with μ_g and σ_g² over the channels of group g and the whole grid of one sample:

    y[c, n] = γ_c r_g (x[c, n] − μ_g) + β_c,     r_g = (σ_g² + ε)^(−1/2).

Both y and the gradient of x are linear in fields with one coefficient per sample and channel, d_x = a·d_y + b·x + c,
and all coefficients follow from two sums per channel. A field whose channels lie together in memory stays so.

Layer norm of a sum, p = x + code, z = γ r(p − μ) + β with μ and r over the channels of one point: p is the residual
stream, in float32, and z what the block works on, in the precision of its products. Statistics are never taken
below float32. The end of the block before, its last linear map W of an activation, is part of the sum,

    p = x + GELU(a) Wᵀ + code:

one pass instead of four. The gradient takes p from the results; a second pass makes d_a and d_W of d_p.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ergoflow.ops.choice import HALF, Impl, choose_impl, in_product_dtype
from ergoflow.ops.differentiable import Differentiable, Numbers, Tensors, has_tangent

# torch's own value (nn.GroupNorm).
EPS = 1e-5


def group_norm(x: Tensor, groups: int, weight: Tensor, bias: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Return y of x (B, C, *grid) with weight γ and bias β (C,).

    "reference" and "torch" are torch's own, in float32 at least; "triton" takes and returns half precision.
    """
    field = in_product_dtype(x)[0]
    if choose_impl(field, impl) != "triton" or has_tangent(x, weight, bias):
        # Contiguous, as the norm makes it anyway: its forward-mode derivative cannot do so itself.
        x = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
        return F.group_norm(x, groups, weight, bias, EPS)
    with torch.autocast(x.device.type, enabled=False):
        return _NORM((field, weight, bias), (groups,), "triton")[0]


def add_layer_norm(
    x: Tensor, code: Tensor, weight: Tensor, bias: Tensor, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Return p = x + code and its layer norm z, (B, *grid, D), for x (B, *grid, D), code (*grid, D), γ and β (D,).

    p is in float32 at least. "reference" returns z as torch does, the others in half precision under autocast.
    """
    half = _product_dtype(x)
    chosen = choose_impl(x.new_empty(0, dtype=half), impl)
    if chosen != "triton" or has_tangent(x, code, weight, bias):
        total = x.to(_stream_dtype(x)) + code.to(_stream_dtype(x))
        normed = F.layer_norm(total, weight.shape, weight, bias, EPS)
        return total, normed if chosen == "reference" else in_product_dtype(normed)[0]
    with torch.autocast(x.device.type, enabled=False):
        total, normed = _ADD_NORM((x, code, weight, bias), (int(half in HALF),), "triton")
    return total, normed


def mix_add(x: Tensor, activation: Tensor, mix: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Return x + GELU(a) Wᵀ, (B, *grid, D), for x (B, *grid, D), a (B, *grid, E) and W (D, E).

    "triton" returns it in half precision under autocast, the others in float32 at least.
    """
    half = _product_dtype(x)
    if choose_impl(x.new_empty(0, dtype=half), impl) != "triton" or has_tangent(x, activation, mix):
        # A sum of two precisions takes longer on a CPU than a cast and a sum.
        return x.to(_stream_dtype(x)) + F.linear(F.gelu(activation), mix).to(_stream_dtype(x))
    tensors = (x, *in_product_dtype(activation, mix))
    with torch.autocast(x.device.type, enabled=False):
        return _MIX_ADD(tensors, (int(half in HALF),), "triton")[0]


def mix_add_layer_norm(
    x: Tensor, activation: Tensor, mix: Tensor, code: Tensor, weight: Tensor, bias: Tensor, *, impl: Impl = "auto"
) -> tuple[Tensor, Tensor]:
    """Return p = x + GELU(a) Wᵀ + code and its layer norm z, as `mix_add` and `add_layer_norm` do one after the other.

    "triton" does so in one pass, and rounds nothing on the way from a to p but GELU(a).
    """
    half = _product_dtype(x)
    if choose_impl(x.new_empty(0, dtype=half), impl) != "triton" or has_tangent(x, activation, mix, code, weight, bias):
        return add_layer_norm(mix_add(x, activation, mix, impl=impl), code, weight, bias, impl=impl)
    tensors = (x, *in_product_dtype(activation, mix), code, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        total, normed = _MIX_ADD_NORM(tensors, (int(half in HALF),), "triton")
    return total, normed


def _forward(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    """Return y, and μ and r (B, G) in float32."""
    from ergoflow.ops.norm_triton import group_norm as launch

    (x, weight, bias), (groups,) = tensors, numbers
    last = x.movedim(1, -1).contiguous().flatten(1, -2)  # (B, N, C)
    y, mean, rate = launch(last, groups, weight.contiguous(), bias.contiguous(), EPS)
    return [y.unflatten(1, x.shape[2:]).movedim(-1, 1), mean, rate]


def _backward(gradients: Tensors, tensors: Tensors, kept: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    from ergoflow.ops.norm_triton import group_norm_gradient

    x, weight, bias = tensors
    last = x.movedim(1, -1).contiguous().flatten(1, -2)  # (B, N, C)
    g = gradients[0].movedim(1, -1).contiguous().flatten(1, -2)
    d_x, d_scale = group_norm_gradient(g, last, kept[0], kept[1], weight.contiguous())
    d_x = d_x.unflatten(1, x.shape[2:]).movedim(-1, 1)
    return [d_x, d_scale[0].to(weight.dtype), d_scale[1].to(bias.dtype)]


def _shapes(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    x = tensors[0]
    y = x.new_empty(len(x), *x.shape[2:], x.shape[1]).movedim(-1, 1)
    mean = x.new_empty(len(x), numbers[0], dtype=torch.float32)
    return [y, mean, torch.empty_like(mean)]


_NORM = Differentiable("group_norm", lambda inputs: 1, _forward, _backward, _shapes)


def _add_norm_forward(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    """Return p and z."""
    from ergoflow.ops.residual_triton import add_norm

    x, code, weight, bias = tensors
    return list(add_norm(x.contiguous(), code.contiguous(), weight, bias, EPS, _norm_dtype(x, numbers)))


def _add_norm_backward(
    gradients: Tensors, tensors: Tensors, kept: Tensors, numbers: Numbers, impl: str
) -> list[Tensor]:
    from ergoflow.ops.residual_triton import norm_gradient

    (d_total, d_normed), (x, code, weight, bias) = (gradient.contiguous() for gradient in gradients), tensors
    dtypes = (x.dtype, x.dtype, code.dtype)
    d_x, _, d_code, d_scale = norm_gradient(d_total, d_normed, kept[0], weight.contiguous(), EPS, dtypes)
    return [d_x, d_code, d_scale[0].to(weight.dtype), d_scale[1].to(bias.dtype)]


def _add_norm_shapes(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    x = tensors[0]
    total = torch.empty_like(x, memory_format=torch.contiguous_format, dtype=_stream_dtype(x))
    return [total, torch.empty_like(total, dtype=_norm_dtype(x, numbers))]


_ADD_NORM = Differentiable(
    "add_layer_norm", lambda inputs: 2, _add_norm_forward, _add_norm_backward, _add_norm_shapes, reused=1
)


def _mix_add_forward(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    """Return x + GELU(a) Wᵀ."""
    from ergoflow.ops.residual_triton import mix_add as launch

    x, activation, mix = (tensor.contiguous() for tensor in tensors)
    return [launch(x, activation, mix, _norm_dtype(x, numbers))]


def _mix_add_backward(gradients: Tensors, tensors: Tensors, kept: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    from ergoflow.ops.residual_triton import mix_add_gradient

    x, activation, mix = tensors
    gradient = gradients[0].contiguous()
    return list(mix_add_gradient(gradient, activation.contiguous(), mix.contiguous(), x.dtype))


def _mix_add_shapes(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    x = tensors[0]
    return [torch.empty_like(x, memory_format=torch.contiguous_format, dtype=_norm_dtype(x, numbers))]


_MIX_ADD = Differentiable("mix_add", lambda inputs: 1, _mix_add_forward, _mix_add_backward, _mix_add_shapes)


def _mix_add_norm_forward(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    """Return p and z."""
    from ergoflow.ops.residual_triton import mix_add_norm

    x, activation, mix, code, weight, bias = (tensor.contiguous() for tensor in tensors)
    return list(mix_add_norm(x, activation, mix, code, weight, bias, EPS, _norm_dtype(x, numbers)))


def _mix_add_norm_backward(
    gradients: Tensors, tensors: Tensors, kept: Tensors, numbers: Numbers, impl: str
) -> list[Tensor]:
    from ergoflow.ops.residual_triton import mix_add_gradient, norm_gradient

    x, activation, mix, code, weight, bias = tensors
    d_total, d_normed = (gradient.contiguous() for gradient in gradients)
    dtypes = (x.dtype, mix.dtype, code.dtype)
    d_x, rounded, d_code, d_scale = norm_gradient(d_total, d_normed, kept[0], weight.contiguous(), EPS, dtypes)
    _, d_activation, d_mix = mix_add_gradient(rounded, activation.contiguous(), mix.contiguous(), rounded.dtype)
    return [d_x, d_activation, d_mix, d_code, d_scale[0].to(weight.dtype), d_scale[1].to(bias.dtype)]


_MIX_ADD_NORM = Differentiable(
    "mix_add_layer_norm", lambda inputs: 2, _mix_add_norm_forward, _mix_add_norm_backward, _add_norm_shapes, reused=1
)


def _norm_dtype(x: Tensor, numbers: Numbers) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if numbers[0] and x.dtype not in HALF else x.dtype


def _stream_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the residual stream: float32, or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _product_dtype(x: Tensor) -> torch.dtype:
    return in_product_dtype(x.new_empty(0))[0].dtype
