"""The Triton twin of `ergoflow.ops.axial`: channel-last values (B, N, H·d) throughout, no permuted copy anywhere.

The values are the large thing (134 MB per sample at 256² with 16 heads of 64 in bfloat16), and each of the steps

    v = x Wvᵀ  →  one product per axis  →  u  →  y = u (r Wm)ᵀ + shift

reads and writes them once; on Hopper the first two are one kernel, which writes v only for the gradient. Only u is kept
until then; v and the partly integrated values are computed again, a few samples at a time. The other products with
dense weights are torch's own; the rest have kernels: the integral along an axis (`axial_integral_triton`; the last one
also takes the statistics of u), the gradient of a kernel, and the gradient of u, in which the head norm adds
slope·u + offset to a product of two matrices (`axial_gradient_triton`). On Hopper one kernel makes the gradient of a
kernel and the next integral of the same values (`axial_pair_triton`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ergoflow.ops.axial import fold_norm, norm_gradient
from ergoflow.ops.axial_gradient_triton import add_norm_gradient, kernel_gradient
from ergoflow.ops.axial_integral_triton import integrate, integrate_values, is_hopper, statistics_of
from ergoflow.ops.pool import sides
from ergoflow.ops.tiles_triton import INTERPRETED, can_describe, count_walkers

# Numbers in the values that are worked on at a time: one sample at 256² with 16 heads of 64.
CHUNK = 2**26


def mix(x: Tensor, value: Tensor, merge: Tensor, kernels: Sequence[Tensor]) -> list[Tensor]:
    """Return y (B, *grid, E), μ and r (B, H, 1) in float32, and u (B, N, H·d)."""
    features = x.contiguous().view(x.shape[0], -1, x.shape[-1])  # (B, N, D)
    grid, last = x.shape[1:-1], len(kernels) - 1
    u = x.new_empty(*features.shape[:2], len(value))
    moments = []
    for part in _chunks(u):
        if last == 0:
            values = F.linear(features[part], value)
        else:
            values = integrate_values(kernels[0][part], features[part], value, grid)
        for axis in range(1, last):
            values, _ = integrate(kernels[axis][part], values, grid, axis)
        moments.append(integrate(kernels[-1][part], values, grid, last, out=u[part], statistics=True)[1])
    mean, rate = statistics_of(torch.cat(moments))
    scaled, shift = fold_norm(merge, mean, rate)
    scaled, shift = scaled.to(u.dtype), shift.to(u.dtype)[:, 0]
    y = u.new_empty(*u.shape[:2], len(merge))
    for sample in range(len(u)):
        # A batched product would first copy the shift to every point; here cuBLAS adds it to its result.
        torch.addmm(shift[sample], u[sample], scaled[sample], out=y[sample])
    return [y.view(*x.shape[:-1], -1), mean, rate, u]


def mix_gradient(
    gradient: Tensor, x: Tensor, value: Tensor, merge: Tensor, kernels: Sequence[Tensor], kept: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradients of x, value, merge and the kernels."""
    mean, rate, u = kept
    batch, grid = x.shape[0], x.shape[1:-1]
    features = x.contiguous().view(batch, -1, x.shape[-1])  # (B, N, D)
    g = gradient.reshape(batch, -1, len(merge)).contiguous()  # (B, N, E)
    parts = _chunks(u)
    moments = u.new_empty(batch, len(value), len(merge))  # uᵀg
    for part in parts:
        torch.bmm(u[part].mT, g[part], out=moments[part])
    d_merge, scaled, slope, offset = norm_gradient(moments, g, merge, mean, rate)
    d_x = torch.empty_like(features)
    d_value = value.new_empty(len(parts), *value.shape)
    shapes, first = [sides(grid, axis) for axis in range(len(kernels))], parts[0]
    paired = [_can_pair(kernel[first], u[first], shape) for kernel, shape in zip(kernels, shapes, strict=True)]
    sums = [_new_sums(k[first], batch, s, paired=p) for k, s, p in zip(kernels, shapes, paired, strict=True)]
    for index, part in enumerate(parts):
        stages = [torch.empty_like(u[part])]
        if len(kernels) == 1:
            torch.matmul(features[part], value.mT, out=stages[0])
        else:
            stages.append(integrate_values(kernels[0][part], features[part], value, grid, values=stages[0]))
        for axis in range(1, len(kernels) - 1):
            stages.append(integrate(kernels[axis][part], stages[-1], grid, axis)[0])
        d_values = add_norm_gradient(g[part], scaled[part], u[part], slope[part], offset[part])
        for axis in reversed(range(len(kernels))):
            kernel, own = kernels[axis][part], sums[axis][part]
            d_values = _axis_gradient(kernel, d_values, stages.pop(), grid, axis, own, paired=paired[axis])
        torch.matmul(d_values, value, out=d_x[part])
        torch.mm(d_values.flatten(0, 1).mT, features[part].flatten(0, 1), out=d_value[index])
    weights = [d_value.sum(0, dtype=torch.float32).to(value.dtype), d_merge]
    return [d_x.view(x.shape), *weights, *(d.sum(1).to(kernel.dtype) for d, kernel in zip(sums, kernels, strict=True))]


def _new_sums(kernel: Tensor, batch: int, shape: tuple[int, int, int], *, paired: bool) -> Tensor:
    """Return room for the gradient (batch, T, H, S, S) of all samples' kernels in T parts, given some samples' kernel.

    One sum over the parts of all samples costs half of what one for each does.
    """
    before, size, after = shape
    parts = 1
    if paired:
        from ergoflow.ops.axial_pair_triton import COLUMNS

        parts = count_walkers(kernel.shape[:2].numel() * size // COLUMNS, before * after, 1)
    return torch.empty(batch, parts, *kernel.shape[1:], device=kernel.device, dtype=torch.float32)


def _axis_gradient(
    kernel: Tensor, d_out: Tensor, values: Tensor, grid: Sequence[int], axis: int, sums: Tensor, *, paired: bool
) -> Tensor:
    """Return the gradient of the values that an axis integrated, and write that of its kernel to `sums`, in parts."""
    if paired:
        from ergoflow.ops.axial_pair_triton import pair

        return pair(kernel, d_out, values, sides(grid, axis), sums)
    kernel_gradient(d_out, values, grid, axis, kernel.shape[1], out=sums[:, 0])
    return integrate(kernel.mT, d_out, grid, axis)[0]


def _can_pair(kernel: Tensor, values: Tensor, shape: tuple[int, int, int]) -> bool:
    """Return whether `axial_pair_triton` takes a kernel and values and gradients like these."""
    if INTERPRETED or not values.is_cuda or not is_hopper(values.device):
        return False
    from ergoflow.ops.axial_pair_triton import BUFFERS, HEAD_DIM

    return shape[1] in BUFFERS and values.shape[2] == HEAD_DIM * kernel.shape[1] and can_describe(kernel, values)


def _chunks(u: Tensor) -> list[slice]:
    """Return the samples of u (B, N, H·d) to work on at a time, in parts of equal length: so have their statistics.

    Never less than a sample: by groups of heads, each in L2 when the next kernel reads it, all was slower on an H200.
    """
    most = max(1, CHUNK // u[0].numel())
    count = max(divisor for divisor in range(1, min(most, len(u)) + 1) if len(u) % divisor == 0)
    return [slice(start, start + count) for start in range(0, len(u), count)]
