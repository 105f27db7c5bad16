"""Axial pooling: for every coordinate of every axis, the mean of the features and the maxima of linear maps of them.

    mean_a[s] = (1/R) Σ x[n],     largest_a[s, e] = max ⟨w_a[e], x[n]⟩,     n over the R points with n_a = s.

A minimum is the maximum of the negated map. The projected features (N × E per axis) are needed only up to the
place where each maximum is taken: the gradient of `largest` is a sum over S·E pairs (place, row of w),

    dx[n] = Σ g[s, e] w[e],     dw[e] = Σ_s g[s, e] x[n],     n = place[s, e],

a hundredth of the work of the dense products. Where several points share a maximum the first one gets the whole
gradient (torch's `amax` shares it equally): another element of the same subdifferential. In half precision "triton"
takes any one of those that differ by less than some 2⁻¹⁷ of their value, far below the rounding of its results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from ergoflow.ops.choice import Impl, choose_impl, in_product_dtype
from ergoflow.ops.differentiable import Differentiable, Numbers, Tensors, has_tangent

# Bytes of the projections that are held at a time.
CHUNK = 2**22


def axial_pool(
    x: Tensor, weights: Sequence[Tensor], axes: Sequence[int] | None = None, *, impl: Impl = "auto"
) -> list[tuple[Tensor, Tensor]]:
    """Return for each axis the mean (B, S, D) of x (B, *grid, D) and the largest (B, S, E) of x wᵀ over all others.

    `weights` has one (E, D) map per axis of `axes` (None: all axes in order). "reference" projects everything and
    reduces; "torch" keeps the projections of one sample at a time and differentiates through the places of the
    maxima; "triton" never writes projections at all.
    """
    axes = tuple(range(x.ndim - 2)) if axes is None else tuple(axes)
    if len(weights) != len(axes):
        raise ValueError(f"axial_pool needs one weight per axis of {axes}, got {len(weights)}; give as many")
    tensors = in_product_dtype(x, *weights)
    chosen = choose_impl(tensors[0], impl)
    # On a 1-D grid there is nothing to pool over, and without rows of w there are no maxima.
    plain = x.ndim == 3 or not all(len(weight) for weight in weights)
    if plain or chosen == "reference" or has_tangent(x, *weights):
        return [_reference_pool(x, weight, axis) for weight, axis in zip(weights, axes, strict=True)]
    with torch.autocast(x.device.type, enabled=False):
        flat = _POOL(tensors, axes, chosen)
    return list(zip(flat[: len(axes)], flat[len(axes) :], strict=True))


def _reference_pool(x: Tensor, weight: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    others = [dim for dim in range(1, x.ndim - 1) if dim != axis + 1]
    if not others:
        return x, F.linear(x, weight)
    mean = x.mean(others)  # (B, S, D)
    return mean, F.linear(x, weight).amax(others) if len(weight) else mean[..., :0]


def sides(grid: Sequence[int], axis: int) -> tuple[int, int, int]:
    """Return the number of points before, on and after an axis: a grid is (P, S, Q) as seen from it."""
    return math.prod(grid[:axis]), grid[axis], math.prod(grid[axis + 1 :])


def _forward(tensors: Tensors, axes: Numbers, impl: str) -> list[Tensor]:
    """Return means, largest and places; a place is the flat index of a point within its sample, int32."""
    x, *weights = tensors
    x = x.contiguous()
    views = [x.view(x.shape[0], *sides(x.shape[1:-1], axis), x.shape[-1]) for axis in axes]  # (B, P, S, Q, D)
    if impl == "triton":
        from ergoflow.ops.pool_triton import launch_largest

        pooled = [launch_largest(view, weight) for view, weight in zip(views, weights, strict=True)]
        means, largest, places = zip(*pooled, strict=True)
        return [*means, *largest, *places]
    largest, places = zip(*(_largest(view, weight) for view, weight in zip(views, weights, strict=True)), strict=True)
    return [*(view.mean((1, 3)) for view in views), *largest, *places]


def _backward(gradients: Tensors, tensors: Tensors, places: Tensors, axes: Numbers, impl: str) -> list[Tensor]:
    x, *weights = tensors
    d_means, d_largest = gradients[: len(axes)], gradients[len(axes) :]
    if impl == "triton":
        from ergoflow.ops.pool_triton import launch_gradient

        return launch_gradient(x.contiguous(), weights, places, axes, d_means, d_largest)
    # The means come first; what each maximum adds goes to its place.
    share = [x.shape[1 + axis] / x.shape[1:-1].numel() for axis in axes]
    parts = [_along(d_mean * s, axis, x.ndim) for axis, d_mean, s in zip(axes, d_means, share, strict=True)]
    d_x = reduce(torch.add, parts).expand(x.shape).contiguous()
    for place, gradient, weight in zip(places, d_largest, weights, strict=True):
        _add_at(d_x.flatten(1, -2), place.long(), gradient, weight)
    rows = x.detach().reshape(-1, x.shape[-1]).to(torch.promote_types(x.dtype, torch.float32))
    d_weights = [_gathered(rows, *pair).to(x.dtype) for pair in zip(places, d_largest, strict=True)]
    return [d_x, *d_weights]


def _shapes(tensors: Tensors, axes: Numbers, impl: str) -> list[Tensor]:
    x, *weights = tensors
    sizes = [x.shape[1 + axis] for axis in axes]
    means = [x.new_empty(x.shape[0], size, x.shape[-1]) for size in sizes]
    largest = [x.new_empty(x.shape[0], size, len(weight)) for size, weight in zip(sizes, weights, strict=True)]
    return [*means, *largest, *(torch.empty_like(values, dtype=torch.int32) for values in largest)]


_POOL = Differentiable("axial_pool", lambda inputs: 2 * (inputs - 1), _forward, _backward, _shapes)


def _largest(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return max and place (B, S, E) of x wᵀ over P and Q for x (B, P, S, Q, D), a few samples at a time."""
    batch, before, size, after, dim = x.shape
    width = weight.shape[0]
    largest = x.new_empty(batch, size, width)
    place = torch.empty(batch, size, width, device=x.device, dtype=torch.int32)
    points = before * size * after
    count = min(batch, max(1, CHUNK // (points * width * x.itemsize)))
    # Reused from chunk to chunk, it stays in the cache.
    projected = x.new_empty(count * points, width)
    for start in range(0, batch, count):
        part = x[start : start + count].view(-1, dim)
        values = torch.mm(part, weight.mT, out=projected[: len(part)])
        maxima = _channelwise_max(values.view(-1, before, size, after, width))
        largest[start : start + count], place[start : start + count] = maxima
    return largest, place


def _channelwise_max(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return max and flat place (B, S, E) of y (B, P, S, Q, E) over P and Q.

    Max pooling of channel-last images is the one vectorised reduction of torch that also returns the places.
    """
    batch, before, size, after, width = y.shape
    if after > 1:
        image = y.view(batch * before, size, after, width).permute(0, 3, 1, 2)  # (B·P, E, S, Q)
        y, place = F.max_pool2d(image, (1, after), return_indices=True)  # (B·P, E, S, 1)
        y, place = (tensor.permute(0, 2, 3, 1).view(batch, before, size, width) for tensor in (y, place))  # s·Q + q
    elif before == 1:
        place = torch.arange(size, device=y.device)[:, None].expand(batch, size, width)
    if before == 1:
        return y.view(batch, size, width), place.reshape(batch, size, width)
    image = y.view(batch, before, size, width).permute(0, 3, 1, 2)  # (B, E, P, S)
    y, row = F.max_pool2d(image, (before, 1), return_indices=True)  # (B, E, 1, S)
    y, row = (tensor.permute(0, 2, 3, 1) for tensor in (y, row))  # (B, 1, S, E), p·S + s
    if after > 1:
        line = row // size  # p
        row = place.gather(1, line) + line * (size * after)
    return y[:, 0], row[:, 0]


def _along(sequence: Tensor, axis: int, ndim: int) -> Tensor:
    """Return a sequence (B, S, D) as features (B, .., S, .., D) that are constant along all other axes."""
    shape = [1] * ndim
    shape[0], shape[1 + axis], shape[-1] = sequence.shape
    return sequence.view(shape)


def _add_at(d_x: Tensor, place: Tensor, gradient: Tensor, weight: Tensor) -> None:
    """Add Σ g[s, e] w[e] to d_x (B, N, D) at the points place[s, e]; place and g are (B, S, E).

    No two s have a point in common, so the gradients are entries of a matrix (N, E), and the sum is a dense product of
    it, a few samples at a time: most entries are zeros, but sorting the others by place takes longer.
    """
    points, width = d_x.shape[1], len(weight)
    count = min(len(d_x), max(1, CHUNK // (points * width * d_x.itemsize)))
    for start in range(0, len(d_x), count):
        part = slice(start, start + count)
        rows = place[part] + torch.arange(len(d_x[part]), device=place.device)[:, None, None] * points
        at_places = weight.new_zeros(len(d_x[part]) * points, width)
        at_places.put_(rows * width + torch.arange(width, device=place.device), gradient[part].to(weight.dtype))
        d_x[part].flatten(0, 1).addmm_(at_places, weight)


def _gathered(rows: Tensor, place: Tensor, gradient: Tensor) -> Tensor:
    """Return dw[e] = Σ_s g[s, e] x[n] over all samples, (E, D), for the rows x[n] (B·N, D): bags of rows."""
    points = len(rows) // len(place)
    key = place + torch.arange(len(place), device=place.device, dtype=place.dtype)[:, None, None] * points
    key, value = (tensor.flatten(0, 1).mT.contiguous() for tensor in (key, gradient))  # (E, B·S)
    return F.embedding_bag(key, rows, per_sample_weights=value.to(rows.dtype), mode="sum")
