"""The value path of axial attention: project, integrate along every axis, normalise each head, merge the heads.

    v = x Wvᵀ,     u[i] = Π_a (1/S_a) Σ_j K_a[i_a, j_a] v[j],     y = Σ_h r_h (u_h − μ_h) Wm_hᵀ,

with μ_h and r_h = (σ_h² + ε)^(−1/2) of head h over its d channels and the whole grid of one sample. The normalised
values are never written: the norm is a change of the merging weights and one constant vector per sample,

    y = Σ_h u_h (r_h Wm_h)ᵀ − Σ_h μ_h r_h Σ_d Wm_hd.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ergoflow.ops.choice import Impl, choose_impl, in_product_dtype
from ergoflow.ops.differentiable import Differentiable, Numbers, Tensors, has_tangent
from ergoflow.ops.pool import sides

# The head norm removes the scale of the kernels, which is about 1e-3 per axis in a freshly drawn model: the
# values leave two axes with a variance near 1e-13, three with 1e-18, which the usual 1e-5 would swallow.
HEAD_NORM_EPS = 1e-24


def axial_mix(x: Tensor, value: Tensor, kernels: Sequence[Tensor], merge: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Return y (B, *grid, E) of x (B, *grid, D), value (H·d, D), one kernel (B, H, S, S) per axis, merge (E, H·d).

    "reference" writes every step out; "torch" keeps v, the partly integrated values and u for the gradient;
    "triton" keeps none of them and computes them again, one sample after the other.
    """
    if len(kernels) != x.ndim - 2:
        raise ValueError(f"axial_mix needs one kernel per grid axis of {tuple(x.shape)}, got {len(kernels)}; give all")
    tensors = in_product_dtype(x, value, merge, *kernels)
    chosen = choose_impl(tensors[0], impl)
    if chosen == "reference" or has_tangent(*tensors):
        return _reference_mix(x, value, kernels, merge)
    with torch.autocast(x.device.type, enabled=False):
        return _MIX(tensors, (len(kernels),), chosen)[0]


def apply_kernels(kernels: Sequence[Tensor], values: Tensor) -> Tensor:
    """Integrate values (B, H, *grid, d) against one kernel (B, H, S, S) per axis; returns (B, H, d, *grid).

    Each product takes the leading grid axis and leaves it last, (S, R) → (R, S): after the last axis the
    channels lead, and no transposed copy was ever made.
    """
    grid = values.shape[2:-1]
    out = values
    for kernel, size in zip(kernels, grid, strict=True):
        rest = out.shape[3:]
        out = out.flatten(3).mT @ (kernel / size).mT  # (B, H, R, S)
        out = out.unflatten(2, rest)  # (B, H, *rest, S)
    return out


def head_norm(x: Tensor) -> Tensor:
    """Return x (B, H, d, *grid) with mean 0 and variance 1 over each head's channels and whole domain."""
    flat = x.to(torch.promote_types(x.dtype, torch.float32)).flatten(2)  # (B, H, d·N)
    return F.layer_norm(flat, flat.shape[2:], eps=HEAD_NORM_EPS).view(x.shape)


def _reference_mix(x: Tensor, value: Tensor, kernels: Sequence[Tensor], merge: Tensor) -> Tensor:
    values = F.linear(x, value).unflatten(-1, (kernels[0].shape[1], -1)).movedim(-2, 1)  # (B, H, *grid, d)
    mixed = head_norm(apply_kernels(kernels, values)).flatten(1, 2)  # (B, H·d, *grid)
    return F.linear(mixed.movedim(1, -1).to(merge.dtype), merge)


def _forward(tensors: Tensors, _: Numbers, impl: str) -> list[Tensor]:
    """Return y, then μ and r (B, H, 1), and v and the values after each axis, (B, H·d, *grid); Triton: u alone."""
    x, value, merge, *kernels = tensors
    if impl == "triton":
        from ergoflow.ops.axial_triton import mix

        return mix(x, value, merge, kernels)
    batch, heads, points = x.shape[0], kernels[0].shape[1], x.shape[1:-1].numel()
    # Channels first: every later product then finds its matrices in place.
    v = torch.bmm(value.expand(batch, -1, -1), x.reshape(batch, points, -1).mT)  # (B, H·d, N)
    stages = [v.view(batch, -1, *x.shape[1:-1])]
    for axis, kernel in enumerate(kernels):
        stages.append(_integrate(kernel, stages[-1], axis))
    u = stages[-1].view(batch, heads, -1)  # (B, H, d·N)
    wide = u.to(torch.promote_types(u.dtype, torch.float32))
    mean = wide.mean(2, keepdim=True)  # (B, H, 1)
    variance = torch.linalg.vector_norm(wide - mean, dim=2, keepdim=True).square() / u.shape[2]
    rate = (variance + HEAD_NORM_EPS).rsqrt()
    scaled, shift = fold_norm(merge, mean, rate)
    y = torch.baddbmm(shift.to(u.dtype), u.view(batch, -1, points).mT, scaled.to(u.dtype))  # (B, N, E)
    return [y.view(*x.shape[:-1], -1), mean, rate, *stages]


def _backward(gradients: Tensors, tensors: Tensors, kept: Tensors, _: Numbers, impl: str) -> list[Tensor]:
    (gradient,), (x, value, merge, *kernels) = gradients, tensors
    if impl == "triton":
        from ergoflow.ops.axial_triton import mix_gradient

        return mix_gradient(gradient, x, value, merge, kernels, kept)
    mean, rate, *stages = kept
    batch, points = x.shape[0], x.shape[1:-1].numel()
    g = gradient.reshape(batch, points, -1)  # (B, N, E)
    u = stages[-1].view(batch, -1, points)  # (B, H·d, N)
    d_merge, scaled, slope, offset = norm_gradient(torch.bmm(u, g), g, merge, mean, rate)
    # Two passes: one of three operands takes thrice as long in bfloat16.
    d_u = (u.view(*mean.shape[:2], -1) * slope.to(u.dtype)).add_(offset.to(u.dtype)).view(u.shape)
    d_stage = d_u.baddbmm_(scaled, g.mT).view(stages[-1].shape)
    d_kernels: list[Tensor] = []
    for axis in reversed(range(len(kernels))):
        d_kernels.insert(0, _kernel_gradient(d_stage, stages[axis], axis, kernels[axis]))
        d_stage = _integrate(kernels[axis].mT, d_stage, axis)
    d_v = d_stage.view(batch, -1, points)
    d_x = torch.bmm(d_v.mT, value.expand(batch, -1, -1)).view(x.shape)
    d_value = torch.bmm(d_v, x.reshape(batch, points, -1)).sum(0)
    return [d_x, d_value, d_merge, *d_kernels]


def _shapes(tensors: Tensors, _: Numbers, impl: str) -> list[Tensor]:
    x, value, merge, *kernels = tensors
    norm = torch.empty_like(kernels[0][:, :, :1, 0], dtype=torch.promote_types(x.dtype, torch.float32))
    if impl == "triton":
        stages = [x.new_empty(x.shape[0], x.shape[1:-1].numel(), len(value))]
    else:
        stages = [x.new_empty(x.shape[0], len(value), *x.shape[1:-1]) for _ in range(len(kernels) + 1)]
    return [x.new_empty(*x.shape[:-1], len(merge)), norm, torch.empty_like(norm), *stages]


_MIX = Differentiable("axial_mix", lambda inputs: 1, _forward, _backward, _shapes)


def fold_norm(merge: Tensor, mean: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Return r_h Wm_hᵀ (B, H·d, E) and −Σ_h μ_h r_h Σ_d Wm_hd (B, 1, E), for mean and rate (B, H, 1)."""
    weight = _by_head(merge, mean)
    return (rate[..., None] * weight).flatten(1, 2), -(mean * rate).mT @ weight.sum(1)


def norm_gradient(
    moments: Tensor, g: Tensor, merge: Tensor, mean: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return d_merge (E, H·d), the scaled weights (B, H·d, E), and slope and offset (B, H, 1) of the head norm.

    With moments = uᵀg (B, H·d, E), g (B, N, E) the gradient of y, and z = r(u − μ) the normalised values,
    d_z = g Wm, n = d·N points per head,

        d_u = r (d_z − ⟨d_z⟩ − z⟨d_z z⟩) = g (r Wm) + slope·u + offset;

    both means follow from sums over points that are at hand: n⟨d_z⟩ = Σ_d Wm·Σ_N g and n⟨d_z z⟩ = Wm·(zᵀg).
    """
    batch, heads = mean.shape[:2]
    count = moments.shape[1] // heads * g.shape[1]
    weight = _by_head(merge, mean)
    # In two steps: a sum over all points at once would leave most of a GPU idle.
    total = g.unflatten(1, (math.gcd(g.shape[1], 256), -1)).sum(2, dtype=mean.dtype).sum(1, keepdim=True)  # (B, 1, E)
    products = moments.view(batch, heads, -1, g.shape[2]) - mean[..., None] * total[:, None]
    products = rate[..., None] * products  # zᵀg, (B, H, d, E)
    slope = -rate.square() * (products * weight).sum((2, 3))[..., None] / count
    offset = -rate * (weight.sum(1) @ total.mT) / count - slope * mean
    scaled = (rate[..., None] * weight).flatten(1, 2)
    return products.sum(0).flatten(0, 1).mT.to(merge.dtype), scaled.to(g.dtype), slope, offset


def _by_head(merge: Tensor, mean: Tensor) -> Tensor:
    """Return Wmᵀ as (H, d, E) in the dtype of the mean, contiguous: what is made of it per sample is then, too."""
    return merge.to(mean.dtype).mT.contiguous().view(mean.shape[1], -1, merge.shape[0])


def _integrate(kernel: Tensor, values: Tensor, axis: int) -> Tensor:
    """Return (1/S) Σ_j K_ij v_j along one grid axis of values (B, H·d, *grid)."""
    lines = _lines(kernel, values, axis)  # (B, H, d·P, S, Q)
    weights = kernel / kernel.shape[-1]
    if lines.shape[-1] == 1:
        return (lines.squeeze(-1) @ weights.mT).view(values.shape)
    return (weights[:, :, None] @ lines).view(values.shape)


def _kernel_gradient(d_out: Tensor, values: Tensor, axis: int, kernel: Tensor) -> Tensor:
    """Return (1/S) Σ d_out_i v_j over all lines along the axis, (B, H, S, S)."""
    left, right = _lines(kernel, d_out, axis), _lines(kernel, values, axis)
    if left.shape[-1] == 1:
        products = left.squeeze(-1).mT @ right.squeeze(-1)
    else:
        products = (left @ right.mT).sum(2)
    return products / kernel.shape[-1]


def _lines(kernel: Tensor, values: Tensor, axis: int) -> Tensor:
    _, size, after = sides(values.shape[2:], axis)
    return values.reshape(*kernel.shape[:2], -1, size, after)
