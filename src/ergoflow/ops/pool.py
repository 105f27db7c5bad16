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

import torch
import torch.nn.functional as F
from torch import Tensor

from ergoflow.ops.choice import Impl, choose_impl, in_product_dtype
from ergoflow.ops.differentiable import Differentiable, Numbers, Tensors, has_tangent

# Numbers in the projections that are held at a time: 4 MB of float32.
CHUNK = 2**20


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
    d_x, d_weights = _scatter(x, weights, places, d_largest)
    for axis, gradient in zip(axes, d_means, strict=True):
        before, size, after = sides(x.shape[1:-1], axis)
        view = d_x.view(x.shape[0], before, size, after, x.shape[-1])
        view.add_(gradient[:, None, :, None], alpha=1 / (before * after))
    return [d_x.view(x.shape), *d_weights]


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
    count = min(batch, max(1, CHUNK // (points * width)))
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


def _scatter(
    x: Tensor, weights: Sequence[Tensor], places: Sequence[Tensor], gradients: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Return dx (B·N, D) and the dw of each axis: the two sums of the file's first lines, as bags of rows."""
    # Without gradients of their own, the bags below keep no books.
    rows = x.detach().reshape(-1, x.shape[-1])
    start = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)[:, None, None] * x.shape[1:-1].numel()
    # One line per row of w, (E, B·S).
    keys = [(place + start).flatten(0, 1).mT.contiguous() for place in places]
    values = [gradient.flatten(0, 1).mT.contiguous() for gradient in gradients]
    d_weights = [_bags(key, rows, value) for key, value in zip(keys, values, strict=True)]
    # The number of the row of w, for every pair; nothing here asks the device for a size.
    lines = [torch.arange(len(key), device=x.device, dtype=torch.int32).repeat_interleave(key.shape[1]) for key in keys]
    number = torch.cat([line + sum(map(len, keys[:index])) for index, line in enumerate(lines)])
    key, order = torch.cat([key.view(-1) for key in keys]).sort()
    points = torch.arange(rows.shape[0], device=x.device, dtype=key.dtype)
    offsets = torch.searchsorted(key, points, out_int32=True)
    value = torch.cat([value.view(-1) for value in values])[order]
    return _bags(number[order], torch.cat(list(weights)), value, offsets), d_weights


def _bags(key: Tensor, rows: Tensor, value: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Return Σ value·rows[key] over each line of `key`, or over each stretch of it that `offsets` begins."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    sums = F.embedding_bag(key, rows.to(dtype), offsets, per_sample_weights=value.to(dtype), mode="sum")
    return sums.to(rows.dtype)
