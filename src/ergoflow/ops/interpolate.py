"""Fields read between the points of a periodic plane, by cubic Lagrange polynomials.

    y[n] = Σ_ij a_i(t₀) a_j(t₁) f[⌊n + s(n)⌋ + (i, j)],   i, j = −1, 0, 1, 2,   t = s − ⌊s⌋,

    a = (−t(t − 1)(t − 2)/6, (t + 1)(t − 1)(t − 2)/2, −(t + 1)t(t − 2)/2, (t + 1)t(t − 1)/6),

s(n) being the shift of a point, in grid points. Exact for cubics, of fourth order for others, and continuous in s. The
gradient of f adds up what was read from each point, on a GPU in no fixed order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ergoflow.ops.choice import SINGLE, Impl, choose_impl
from ergoflow.ops.differentiable import Differentiable, Numbers, Tensors, has_tangent

TAPS = (-1, 0, 1, 2)


def interpolate(fields: Tensor, shift: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Return fields (B, C, X, Y) at n + shift(n), shift (B, 2, X, Y); float32 on a GPU takes Triton."""
    if fields.ndim != 4 or shift.shape != (fields.shape[0], 2, *fields.shape[2:]):
        raise ValueError(
            f"interpolate needs fields (B, C, X, Y) and a shift (B, 2, X, Y), got {tuple(fields.shape)} and "
            f"{tuple(shift.shape)}; give one shift per point"
        )
    chosen = choose_impl(fields, impl, dtypes=SINGLE)
    if chosen != "triton" or fields.dtype != torch.float32 or has_tangent(fields, shift):
        return reference_interpolate(fields, shift)
    with torch.autocast(fields.device.type, enabled=False):
        return _INTERPOLATE((fields, shift.float()), (int(fields.requires_grad),), "triton")[0]


def reference_interpolate(fields: Tensor, shift: Tensor) -> Tensor:
    """Return y as a sum over sixteen gathered fields."""
    size, length = fields.shape[2:]
    flat = fields.flatten(2)  # (B, C, X·Y)
    rows, row_weights = _stencil(shift[:, 0], torch.arange(size, device=shift.device)[:, None], size)
    columns, column_weights = _stencil(shift[:, 1], torch.arange(length, device=shift.device), length)
    total = torch.zeros_like(flat)
    for row, a in zip(rows, row_weights, strict=True):
        start, line = row * length, torch.zeros_like(flat)
        for column, b in zip(columns, column_weights, strict=True):
            line = torch.addcmul(line, b, flat.gather(2, (start + column).expand_as(flat)))
        total = torch.addcmul(total, a, line)
    return total.view_as(fields)


def _stencil(shift: Tensor, here: Tensor, size: int) -> tuple[list[Tensor], list[Tensor]]:
    """Return the four neighbours of here + shift (B, X, Y) along an axis, (B, 1, X·Y) each, and their weights."""
    floor = shift.detach().floor()
    t, first = (values.flatten(1)[:, None] for values in (shift - floor, here + floor.long()))
    weights = [
        -t * (t - 1) * (t - 2) / 6,
        (t + 1) * (t - 1) * (t - 2) / 2,
        -(t + 1) * t * (t - 2) / 2,
        (t + 1) * t * (t - 1) / 6,
    ]
    return [(first + tap) % size for tap in TAPS], weights


def _forward(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    from ergoflow.ops.interpolate_triton import launch

    fields, shift = tensors
    return [launch(fields.contiguous(), shift.contiguous())]


def _backward(gradients: Tensors, tensors: Tensors, kept: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    from ergoflow.ops.interpolate_triton import launch_gradient

    (d_result,), (fields, shift), (wanted,) = gradients, tensors, numbers
    return list(launch_gradient(d_result.contiguous(), fields.contiguous(), shift.contiguous(), bool(wanted)))


def _shapes(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    return [torch.empty_like(tensors[0], memory_format=torch.contiguous_format)]


_INTERPOLATE = Differentiable("interpolate", lambda inputs: 1, _forward, _backward, _shapes)
