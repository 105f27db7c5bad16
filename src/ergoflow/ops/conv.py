"""Grouped circular convolution on periodic grids of one to three axes.

    y[o, n] = bias[o] + Σ_i Σ_t w[o, i, t] x[i, n + t − c],     c = (k − 1)/2 the centre tap, i over the group of o.

In Fourier space the sum over taps is a product, ŷ[o] = Σ_i ŵ[o, i] x̂[i] with ŵ(κ) = Σ_t w[t] exp(2πi κ(t − c)/S).
For large kernels that is the fast way on a processor without matrix units: with 9×9 taps it has 40 times fewer
multiplications, and the whole layer, transforms included, takes a quarter of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ergoflow.ops.choice import Impl, choose_impl, in_product_dtype
from ergoflow.ops.differentiable import Differentiable, Numbers, Tensors, has_tangent

# Up to this number of taps times samples the sum over taps is the cheaper way: the transform of the kernel is one for
# the whole batch. (On one core, forward and back, 9×9 taps and 32 channels take 8 samples 13 ms instead of 54.)
DIRECT_TAPS = 256


def circular_conv(
    x: Tensor, weight: Tensor, bias: Tensor, *, groups: int = 1, bend: bool = False, impl: Impl = "auto"
) -> Tensor:
    """Return y (B, O, *grid) of x (B, C, *grid), weight (O, C/groups, *kernel) with odd sides and bias (O,).

    With `bend` it is the convolution of GELU(x): "triton" bends what it copies anyway, the others beforehand.
    "reference" and "torch" are torch's own convolution of a padded copy, except that "torch" takes large kernels on
    the CPU through Fourier space, in float32 at least.
    """
    _check(x, weight)
    tensors = in_product_dtype(x, weight, bias)
    chosen = choose_impl(tensors[0], impl)
    fast = chosen != "reference" and not has_tangent(*tensors) and _is_fast(x, weight, chosen)
    if bend and not (fast and chosen == "triton"):
        return circular_conv(F.gelu(x), weight, bias, groups=groups, impl=impl)
    if not fast:
        return direct_conv(x, weight, bias, groups=groups)
    with torch.autocast(x.device.type, enabled=False):
        if chosen == "torch":
            tensors = tuple(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)
        return _CONV(tensors, (groups, int(bend)), chosen)[0]


def _is_fast(x: Tensor, weight: Tensor, impl: str) -> bool:
    """Return whether there is a faster way than torch's own: Triton on a plane, or many taps on a CPU."""
    if impl == "triton":
        return x.ndim == 4
    return x.device.type == "cpu" and len(x) * math.prod(weight.shape[2:]) > DIRECT_TAPS


def direct_conv(x: Tensor, weight: Tensor, bias: Tensor, *, groups: int) -> Tensor:
    """Return y from a padded copy of x and torch's convolution; on a CPU of a plane whose channels lie together.

    (There the gradients of grouped convolutions in bfloat16 are six times slower otherwise.)
    """
    widths = [taps // 2 for taps in reversed(weight.shape[2:]) for _ in range(2)]
    convolve = (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
    if x.device.type == "cpu" and x.ndim == 4:
        padded = F.pad(in_product_dtype(x)[0], widths, mode="circular").contiguous(memory_format=torch.channels_last)
        return convolve(padded, weight.contiguous(memory_format=torch.channels_last), bias, groups=groups)
    return convolve(F.pad(x, widths, mode="circular"), weight, bias, groups=groups)


def _check(x: Tensor, weight: Tensor) -> None:
    for axis, (size, taps) in enumerate(zip(x.shape[2:], weight.shape[2:], strict=True)):
        if size < taps // 2:
            raise ValueError(
                f"a circular convolution with {taps} taps needs at least {taps // 2} points per axis, "
                f"got {size} on axis {axis}; use a finer grid or a smaller kernel"
            )


def _forward(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    """Return y, x̂ and ŵ, the spectra as one matrix for every frequency and group; Triton: y, and x or GELU(x) in
    blocks."""
    (x, weight, bias), (groups, bend) = tensors, numbers
    if impl == "triton":
        from ergoflow.ops.conv_blocks_triton import blocks_of, in_blocks
        from ergoflow.ops.conv_triton import conv

        blocks = blocks_of(x.shape[2:], weight, groups)
        x_blocks = in_blocks(x.movedim(1, -1).contiguous(), blocks, bend=bool(bend))
        return [conv(x_blocks, weight, bias, blocks).movedim(-1, 1), x_blocks]
    x_hat, w_hat = _spectra(x, groups), _kernel_spectra(weight, x.shape[2:], groups)
    y_hat = torch.bmm(x_hat, w_hat.mT)  # (F·G, B, O/G)
    # The bias belongs to frequency zero, whose coefficient is the sum over the grid.
    y_hat[:groups] += bias.view(groups, 1, -1) * x.shape[2:].numel()
    return [_fields(y_hat, x.shape[2:], groups), x_hat, w_hat]


def _backward(gradients: Tensors, tensors: Tensors, kept: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    (x, weight, bias), (groups, bend) = tensors, numbers
    if impl == "triton":
        from ergoflow.ops.conv_triton import conv_gradient

        gradient = gradients[0].movedim(1, -1).contiguous()  # (B, X, Y, O)
        bent = x.movedim(1, -1).contiguous() if bend else None
        d_x, d_weight, d_bias = conv_gradient(gradient, kept[0], weight, groups, bent=bent)
        return [d_x.movedim(-1, 1), d_weight, d_bias.to(bias.dtype)]
    x_hat, w_hat = kept
    y_hat = _spectra(gradients[0], groups)
    d_x = _fields(torch.bmm(y_hat, w_hat.conj()), x.shape[2:], groups)
    d_weight = _kernels(torch.bmm(y_hat.mH, x_hat), x.shape[2:], weight.shape[2:])
    return [d_x, d_weight, y_hat[:groups].real.sum(1).flatten()]


def _shapes(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    (x, weight, _), (groups, _) = tensors, numbers
    if impl == "triton":
        from ergoflow.ops.conv_blocks_triton import blocks_of

        x_blocks = x.new_empty(len(x), groups, *blocks_of(x.shape[2:], weight, groups).shape)
        return [x.new_empty(len(x), *x.shape[2:], len(weight)).movedim(-1, 1), x_blocks]
    frequencies = math.prod(x.shape[2:-1]) * (x.shape[-1] // 2 + 1) * groups
    x_hat = x.new_empty(frequencies, len(x), weight.shape[1], dtype=x.dtype.to_complex())
    w_hat = x_hat.new_empty(frequencies, len(weight) // groups, weight.shape[1])
    return [x.new_empty(len(x), len(weight), *x.shape[2:]), x_hat, w_hat]


def _spared(numbers: Numbers) -> tuple[int, ...]:
    """Return the index of x: the gradient takes what is kept of it, and x itself only where that was bent."""
    return () if numbers[1] else (0,)


_CONV = Differentiable("circular_conv", lambda inputs: 1, _forward, _backward, _shapes, spared=_spared)


def _spectra(x: Tensor, groups: int) -> Tensor:
    """Return x̂ (F·G, B, C/G) of x (B, C, *grid): one matrix for every frequency and group."""
    x_hat = torch.fft.rfftn(x, dim=tuple(range(2, x.ndim))).flatten(2)  # (B, C, F)
    return x_hat.unflatten(1, (groups, -1)).permute(3, 1, 0, 2).flatten(0, 1)


def _fields(y_hat: Tensor, grid: Sequence[int], groups: int) -> Tensor:
    """Return the inverse of `_spectra`, (B, O, *grid)."""
    batch, width = y_hat.shape[1:]
    # A plain transpose and a permutation of whole rows: half the time of one permutation of all axes.
    y_hat = y_hat.view(-1, groups * batch * width).mT.contiguous()  # (G·B·O/G, F)
    y_hat = y_hat.view(groups, batch, width, -1).transpose(0, 1).reshape(batch, groups * width, -1)  # (B, O, F)
    y_hat = y_hat.unflatten(2, (*grid[:-1], grid[-1] // 2 + 1))
    return torch.fft.irfftn(y_hat, s=tuple(grid), dim=tuple(range(2, y_hat.ndim)))


def _kernel_spectra(weight: Tensor, grid: Sequence[int], groups: int) -> Tensor:
    """Return ŵ (F·G, O/G, C/G), transformed axis by axis: taps are few, so a matrix product is the fast transform."""
    w_hat = weight.movedim((0, 1), (-2, -1)).to(weight.dtype.to_complex())  # (*kernel, O, C/G)
    for axis in reversed(range(len(grid))):
        # Takes the last axis of taps that is left and puts its frequencies first.
        waves = _waves(weight.shape[2 + axis], grid, axis, w_hat)
        w_hat = torch.tensordot(waves, w_hat, dims=([1], [len(grid) - 1]))
    return w_hat.reshape(-1, weight.shape[0] // groups, weight.shape[1])


def _kernels(d_hat: Tensor, grid: Sequence[int], kernel: Sequence[int]) -> Tensor:
    """Return the transpose of `_kernel_spectra` applied to (F·G, O/G, C/G): real (O, C/G, *kernel).

    A sum over all frequencies counts every coefficient of a half spectrum twice, except those that are their own
    mirror image along the last axis.
    """
    last = grid[-1] // 2 + 1
    count = torch.full((last, 1, 1), 2 / math.prod(grid), dtype=d_hat.real.dtype, device=d_hat.device)
    count[0] /= 2
    if grid[-1] % 2 == 0:
        count[-1] /= 2
    d_hat = d_hat.reshape(*grid[:-1], last, -1, d_hat.shape[-1]) * count  # (*F, O, C/G)
    for axis in range(len(grid)):
        # Takes the first axis, of frequencies, and puts its taps last before the channels.
        waves = _waves(kernel[axis], grid, axis, d_hat)
        d_hat = torch.tensordot(waves, d_hat, dims=([0], [0])).movedim(0, len(grid) - 1)
    return d_hat.real.movedim((-2, -1), (0, 1))


def _waves(taps: int, grid: Sequence[int], axis: int, like: Tensor) -> Tensor:
    """Return exp(2πi κ(t − c)/S), (F, taps), for the frequencies of one axis; half of them on the last one."""
    size = grid[axis]
    frequencies = torch.arange(size // 2 + 1 if axis == len(grid) - 1 else size, device=like.device)
    # Whole turns are removed in integers, so that the angles are exact to the last digit.
    turns = frequencies[:, None] * (torch.arange(taps, device=like.device) - taps // 2) % size
    angles = turns.to(like.real.dtype) * (2 * math.pi / size)
    return torch.polar(torch.ones_like(angles), angles)
