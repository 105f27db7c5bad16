"""The first half of a ConvNeXt block: a depthwise convolution along the grid, and a layer norm over the channels.

    y[n, d] = bias_d + Σ_t w[d, t] x[n + t − c, d],     z = γ r(y − μ) + β,     c = (k − 1)/2 the centre tap,

with μ and r over the channels of one point, on features x (B, *grid, D). Beyond its ends an axis goes on: around on a
periodic one, at a wall with its last value ("replicate") or with zeros.

The residual stream x goes on too, past both: it is a result beside z, so that one kernel can add its gradient to the
one that comes back through the convolution. The fast twin reads 4 bytes of x and writes 2 of y and 2 of z per number
under autocast; it keeps y for the gradient, rounds neither x nor w, and pads nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ergoflow.ops.choice import HALF, SINGLE, Impl, choose_impl, in_product_dtype
from ergoflow.ops.differentiable import Differentiable, Numbers, Tensors, has_tangent
from ergoflow.ops.norm import EPS

# The kernels keep all taps of a channel in registers: no more than 9×9.
MOST_TAPS = 9


def depthwise_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    *,
    periodic: tuple[bool, ...],
    wall_padding: Literal["replicate", "zeros"] = "replicate",
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Return x, to be used in its place from here on, and z, both (B, *grid, D).

    weight (D, 1, k, ..) with odd sides k; bias, γ and β (D,). "reference" and "torch" are torch's own convolution of a
    padded copy and its layer norm, in float32 at least; "triton", on planes, returns z in half precision under
    autocast.
    """
    _check(x, weight, periodic)
    half = in_product_dtype(x.new_empty(0))[0].dtype
    chosen = choose_impl(x.new_empty(0, dtype=half), impl, dtypes=SINGLE)
    fast = chosen == "triton" and x.ndim == 4 and weight.shape[2] <= MOST_TAPS
    if not fast or has_tangent(x, weight, bias, gamma, beta):
        return x, reference_depthwise_norm(x, weight, bias, gamma, beta, periodic, wall_padding)
    # As in ergoflow.ops.depthwise_triton: 0 around, 1 replicate, 2 zeros.
    edges = [0 if wraps else 1 + (wall_padding == "zeros") for wraps in periodic]
    numbers = (*edges, int(half in HALF), int(torch.compiler.is_compiling()))
    with torch.autocast(x.device.type, enabled=False):
        stream, z = _DEPTHWISE_NORM((x, weight, bias, gamma, beta), numbers, "triton")
    return stream, z


def reference_depthwise_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gamma: Tensor,
    beta: Tensor,
    periodic: tuple[bool, ...],
    wall_padding: Literal["replicate", "zeros"],
) -> Tensor:
    """Return z from a padded copy of x, torch's convolution and torch's layer norm."""
    padded = pad_features(x, weight.shape[2] // 2, periodic, wall_padding=wall_padding)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
    # A view in channels-last memory, which the convolution keeps: the features are never transposed.
    y = convolve(padded.movedim(-1, 1), weight, bias, groups=len(weight)).movedim(1, -1)  # (B, *grid, D)
    return F.layer_norm(y.to(torch.promote_types(y.dtype, torch.float32)), gamma.shape, gamma, beta, EPS)


def pad_features(
    x: Tensor, width: int, periodic: tuple[bool, ...], *, wall_padding: Literal["replicate", "zeros"]
) -> Tensor:
    """Return features (B, *grid, C) with `width` more points on both ends of every grid axis.

    The same points as `ergoflow.models.layers.pad_axes` adds to (B, C, *grid); torch's circular padding returns
    channels-first memory, from which every block would have to be transposed back.
    """
    if width == 0:
        return x
    for axis, wraps in enumerate(periodic, start=1):
        size = x.shape[axis]
        if wraps:
            before, after = x.narrow(axis, size - width, width), x.narrow(axis, 0, width)
        else:
            shape = (*x.shape[:axis], width, *x.shape[axis + 1 :])
            before, after = x.narrow(axis, 0, 1).expand(shape), x.narrow(axis, size - 1, 1).expand(shape)
            if wall_padding == "zeros":
                before = after = x.new_zeros(()).expand(shape)
        x = torch.cat((before, x, after), dim=axis)
    return x


def _check(x: Tensor, weight: Tensor, periodic: tuple[bool, ...]) -> None:
    taps = weight.shape[2]
    if x.ndim != 2 + len(periodic) or weight.shape != (x.shape[-1], 1, *[taps] * len(periodic)) or taps % 2 == 0:
        raise ValueError(
            f"x must be (B, *grid, D) with {len(periodic)} grid axes and weight (D, 1, k, ..) with equal odd sides, "
            f"got {tuple(x.shape)} and {tuple(weight.shape)}; move the channels last or choose another kernel"
        )
    for axis, (size, wraps) in enumerate(zip(x.shape[1:-1], periodic, strict=True)):
        if wraps and size < taps // 2:
            raise ValueError(
                f"{taps} taps on a periodic axis need at least {taps // 2} points, got {size} on axis {axis}; "
                "use a finer grid or a smaller kernel"
            )


def _forward(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    """Return x, z, and y and the taps (k², D) for the gradient."""
    from ergoflow.ops.depthwise_triton import conv
    from ergoflow.ops.layer_norm_triton import layer_norm

    (x, weight, bias, gamma, beta), (edge_x, edge_y, _, compiled) = tensors, numbers
    taps = weight.flatten(1).mT.to(torch.float32, copy=True, memory_format=torch.contiguous_format)  # (k², D)
    y = conv(x.contiguous(), taps, bias, (edge_x, edge_y), _norm_dtype(x, numbers))
    # A compiler wants results of their own.
    return [x.clone() if compiled else x.view_as(x), layer_norm(y, gamma, beta, EPS), y, taps]


def _backward(gradients: Tensors, tensors: Tensors, kept: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    from ergoflow.ops.depthwise_triton import conv_gradient, taps_gradient
    from ergoflow.ops.layer_norm_triton import layer_norm_gradient

    (d_stream, d_z), (x, weight, bias, gamma, beta), (y, taps) = gradients, tensors, kept
    edges = (numbers[0], numbers[1])
    d_y, d_gamma, d_beta, d_bias = layer_norm_gradient(d_z.contiguous(), y, gamma, EPS)
    d_x = conv_gradient(d_y, d_stream.contiguous(), taps, edges)
    d_weight = taps_gradient(x.contiguous(), d_y, taps, edges).mT.reshape(weight.shape)
    d_vectors = (d_bias.to(bias.dtype), d_gamma.to(gamma.dtype), d_beta.to(beta.dtype))
    return [d_x, d_weight.to(weight.dtype), *d_vectors]


def _shapes(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    x, weight = tensors[:2]
    z = torch.empty_like(x, memory_format=torch.contiguous_format, dtype=_norm_dtype(x, numbers))
    taps = x.new_empty(weight.shape[2] * weight.shape[3], len(weight), dtype=torch.float32)
    return [torch.empty_like(x), z, torch.empty_like(z), taps]


_DEPTHWISE_NORM = Differentiable("depthwise_norm", lambda inputs: 2, _forward, _backward, _shapes)


def _norm_dtype(x: Tensor, numbers: Numbers) -> torch.dtype:
    return torch.get_autocast_dtype(x.device.type) if numbers[2] and x.dtype not in HALF else x.dtype
