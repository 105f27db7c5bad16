"""What the operators of the axial models cost beside their references, and how their kernels' settings compare.

Sizes are those of one block and of the decoder of `a3m`. Each row carries the operations of the forward pass and the
bytes of all inputs, results and gradients, each once, so that a time can be read as a share of what the device allows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ergoflow.ops.axial import axial_mix
from ergoflow.ops.choice import Impl
from ergoflow.ops.conv import circular_conv
from ergoflow.ops.low_rank import sequence_kernel
from ergoflow.ops.norm import add_layer_norm, group_norm, mix_add_layer_norm
from ergoflow.ops.pool import axial_pool, sides

Row = dict[str, Any]
WARM_UP, REPEATS = 3, 10


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of `a3m` (by default on 256² with 16 heads) and the batch."""

    batch: int = 8
    grid: tuple[int, int] = (256, 256)
    dim: int = 128
    heads: int = 16
    head_dim: int = 64
    latent: int = 256
    widths: tuple[int, ...] = (128, 64, 32)
    taps: tuple[int, ...] = (9, 7, 5)
    groups: int = 16


@dataclass(frozen=True)
class Case:
    """An operator, `run(impl, *tensors)` → results, with the multiply-adds of its forward pass per sample."""

    name: str
    run: Callable[..., Sequence[Tensor]]
    tensors: list[Tensor]
    multiply_adds: int


def operator_rows(
    sizes: Sizes, *, device: torch.device, dtype: torch.dtype, impls: Sequence[Impl] = ("reference", "auto")
) -> list[Row]:
    """Return a row per operator and implementation: milliseconds per sample of the forward pass and of both passes."""
    rows = []
    for case in operator_cases(sizes, device=device, dtype=dtype):
        for impl in impls:
            rows.append({"operator": case.name, "impl": impl} | _costs(case, impl, sizes.batch, device))
    return rows


def operator_cases(sizes: Sizes, *, device: torch.device, dtype: torch.dtype) -> list[Case]:
    """Return the operators with random tensors that require gradients; the residual stream is float32."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    def field(channels: int) -> Tensor:
        """(B, C, X, Y) whose channels lie together in memory on a GPU, as the decoder has them."""
        values = drawn(sizes.batch, *sizes.grid, channels).detach().movedim(-1, 1)
        return (values if device.type == "cuda" else values.contiguous()).requires_grad_()

    batch, (rows, columns), dim = sizes.batch, sizes.grid, sizes.dim
    points, width = rows * columns, sizes.heads * sizes.head_dim
    features = drawn(batch, rows, columns, dim)
    kernels = [drawn(batch, sizes.heads, size, size) for size in sizes.grid]
    wide = torch.promote_types(dtype, torch.float32)
    stream = drawn(batch, rows, columns, dim, dtype=wide)
    scale = [drawn(dim, dtype=wide), drawn(dim, dtype=wide)]
    cases = [
        Case("pool", _pool, [features, drawn(2 * dim, dim), drawn(2 * dim, dim)], 4 * points * dim**2),
        Case(
            "mix",
            _mix,
            [features, drawn(width, dim), drawn(dim, width), *kernels],
            points * width * (2 * dim + rows + columns),
        ),
        Case("add and layer norm", _add_norm, [stream, drawn(rows, columns, dim), *scale], 0),
        Case(
            "mix, add and layer norm",
            _mix_add_norm,
            [stream, features, drawn(dim, dim), drawn(rows, columns, dim), *scale],
            points * dim**2,
        ),
        Case(
            "kernel",
            _kernel(sizes.heads, torch.rand(rows, 4 * sizes.head_dim, generator=generator).to(device, wide)),
            [drawn(2 * width, dim), drawn(2 * width, dim), drawn(batch, rows, dim)],
            4 * rows * width * (dim + rows),
        ),
    ]
    inputs = sizes.latent
    cases.append(
        Case(
            "group norm", _norm(sizes.groups), [field(inputs), drawn(inputs, dtype=wide), drawn(inputs, dtype=wide)], 0
        )
    )
    for outputs, taps in zip(sizes.widths, sizes.taps, strict=True):
        weight = drawn(outputs, inputs // sizes.groups, taps, taps)
        tensors = [field(inputs), weight, drawn(outputs)]
        cases.append(Case(f"convolution {taps}×{taps}", _conv(sizes.groups), tensors, points * weight.numel()))
        inputs = outputs
    return cases


def tuning_rows(sizes: Sizes, *, device: torch.device, dtype: torch.dtype) -> list[Row]:
    """Return milliseconds of every Triton kernel of the room under each of a few settings, the one in use first.

    A setting that does not fit into shared memory is a row with the error in words.
    """
    rows: list[Row] = []
    for name, settings, launch in _tunable(sizes, device, dtype):
        for index, setting in enumerate(dict.fromkeys(settings)):
            row = {"kernel": name, "setting": str(tuple(setting)), "in use": index == 0}
            rows.append(row | {"ms": _milliseconds_or_why_not(partial(launch, settings=setting), device)})
    return rows


# Settings to compare: (rows, columns, depth, warps, stages, programs per multiprocessor: 1) of products, (points, rows,
# warps, stages, programs per multiprocessor) of maxima, (blocks, width, depth, warps, stages) of convolutions; chosen
# so that accumulators and operands leave registers free.
PRODUCTS = [(64, 128, 256, 4, 4), (64, 256, 256, 8, 3), (64, 256, 256, 4, 3), (128, 128, 64, 8, 3)]
OUTER_PRODUCTS = [(256, 128, 64, 8, 4), (256, 128, 64, 16, 4), (128, 256, 64, 8, 4), (128, 128, 64, 4, 3, 2)]
NORM_PRODUCTS = [
    (64, 128, 128, 8, 4),
    (128, 128, 128, 16, 3),
    (128, 128, 128, 8, 3),
    (64, 256, 128, 8, 3),
    (128, 128, 64, 8, 3),
]
MAXIMA = [(64, 256, 8, 2, 2), (128, 256, 8, 3, 1), (128, 128, 8, 2, 2), (64, 128, 4, 2, 3)]
MAXIMA_GRADIENTS = [(64, 256, 4, 1, 2), (64, 256, 8, 1, 2), (128, 256, 8, 1, 1), (64, 256, 4, 2, 2)]
CONVOLUTIONS = [(128, 128, 64, 4, 3), (256, 128, 64, 8, 3), (128, 256, 64, 8, 3), (256, 128, 128, 8, 2)]
CONVOLUTION_WEIGHTS = [(64, 128, 256, 8, 3), (128, 128, 256, 8, 2), (64, 128, 128, 8, 3), (64, 128, 128, 4, 3)]


def _tunable(
    sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, list[Any], Callable[..., Any]]]:
    """Yield kernels with their settings, the one in use first, and a function of `settings` that launches them."""
    from ergoflow.ops import axial_gradient_triton, axial_integral_triton, conv_triton, pool_triton
    from ergoflow.ops.conv_blocks_triton import blocks_of, in_blocks
    from ergoflow.ops.tiles_triton import ProductSettings

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    batch, grid, dim, heads, groups = sizes.batch, sizes.grid, sizes.dim, sizes.heads, sizes.groups
    points = grid[0] * grid[1]
    values = drawn(batch, points, heads * sizes.head_dim)

    def each(launch: Callable[..., Any], *tensors: Tensor, settings: Any) -> None:
        """Launch on one sample after the other, as `mix` does at the sizes that matter."""
        for sample in zip(*(tensor.split(1) for tensor in tensors), strict=True):
            launch(*sample, settings=settings)

    for axis, size in enumerate(grid):
        last = axis == len(grid) - 1
        integrate = partial(axial_integral_triton.integrate, grid=grid, axis=axis, statistics=last)
        kernel = drawn(batch, heads, size, size)
        settings = [axial_integral_triton.LINE_SETTINGS, *(ProductSettings(*setting) for setting in PRODUCTS)]
        yield f"integrate axis {axis}", settings, partial(each, integrate, kernel, values)
        gradient = partial(axial_gradient_triton.kernel_gradient, grid=grid, axis=axis, heads=heads)
        settings = [axial_gradient_triton.KERNEL_SETTINGS, *(ProductSettings(*setting) for setting in OUTER_PRODUCTS)]
        yield f"kernel gradient axis {axis}", settings, partial(each, gradient, values.flip(0), values)
    ones = torch.ones(batch, heads, 1, device=device)
    fields = [drawn(batch, points, dim), drawn(batch, heads * sizes.head_dim, dim), values, ones, ones]
    settings = [axial_gradient_triton.NORM_SETTINGS, *(ProductSettings(*setting) for setting in NORM_PRODUCTS)]
    yield "norm gradient", settings, partial(each, axial_gradient_triton.add_norm_gradient, *fields)

    pool, features, rows = pool_triton.Settings, drawn(batch, *grid, dim), drawn(2 * dim, dim)
    for axis in range(len(grid)):
        view = features.view(batch, *sides(grid, axis), dim)
        mean, largest, place = pool_triton.launch_largest(view, rows)
        maxima = [pool_triton.LARGEST_SETTINGS, *(pool(*setting) for setting in MAXIMA)]
        yield f"largest axis {axis}", maxima, partial(pool_triton.launch_largest, view, rows)
        ends = [pool_triton.GRADIENT_SETTINGS, *(pool(*setting) for setting in MAXIMA_GRADIENTS)]
        yield (
            f"pool gradient axis {axis}",
            ends,
            partial(pool_triton.launch_gradient, features, [rows], [place], [axis], [mean], [largest]),
        )

    inputs, outputs, taps = sizes.latent, sizes.widths[0], sizes.taps[0]
    weight, convolve = drawn(outputs, inputs // groups, taps, taps), conv_triton.Settings
    seen = blocks_of(grid, weight, groups)
    given = blocks_of(grid, weight, groups, transposed=True)
    field = in_blocks(drawn(batch, *grid, inputs), seen)
    result = in_blocks(drawn(batch, *grid, outputs), given)
    own = [conv_triton.CONV_SETTINGS, *(convolve(*setting) for setting in CONVOLUTIONS)]
    yield "convolution", own, partial(conv_triton.conv, field, weight, None, seen)
    yield "convolution transposed", own, partial(conv_triton.conv, result, weight, None, given, transposed=True)
    own = [conv_triton.WEIGHT_SETTINGS, *(convolve(*setting) for setting in CONVOLUTION_WEIGHTS)]
    yield "convolution weights", own, partial(conv_triton.weight_gradient, result, field, weight, given)


def _pool(impl: Impl, x: Tensor, *weights: Tensor) -> list[Tensor]:
    return [tensor for pair in axial_pool(x, weights, impl=impl) for tensor in pair]


def _mix(impl: Impl, x: Tensor, value: Tensor, merge: Tensor, *kernels: Tensor) -> list[Tensor]:
    return [axial_mix(x, value, kernels, merge, impl=impl)]


def _add_norm(impl: Impl, x: Tensor, code: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
    # Under autocast, where the norm is asked for half precision.
    with torch.autocast(x.device.type, torch.bfloat16, enabled=code.dtype == torch.bfloat16):
        return list(add_layer_norm(x, code, weight, bias, impl=impl))


def _mix_add_norm(impl: Impl, x: Tensor, activation: Tensor, mix: Tensor, code: Tensor, *scale: Tensor) -> list[Tensor]:
    with torch.autocast(x.device.type, torch.bfloat16, enabled=code.dtype == torch.bfloat16):
        return list(mix_add_layer_norm(x, activation, mix, code, *scale, impl=impl))


def _kernel(heads: int, table: Tensor) -> Callable[..., list[Tensor]]:
    """One pooled sequence for all heads, with twice as many channels of q and k as of values."""

    def run(impl: Impl, query: Tensor, key: Tensor, sequence: Tensor) -> list[Tensor]:
        with torch.autocast(query.device.type, torch.bfloat16, enabled=query.dtype == torch.bfloat16):
            return [sequence_kernel([sequence], query, key, table, [heads], impl=impl)]

    return run


def _norm(groups: int) -> Callable[..., list[Tensor]]:
    return lambda impl, x, weight, bias: [group_norm(x, groups, weight, bias, impl=impl)]


def _conv(groups: int) -> Callable[..., list[Tensor]]:
    return lambda impl, x, weight, bias: [circular_conv(x, weight, bias, groups=groups, impl=impl)]


def _costs(case: Case, impl: Impl, batch: int, device: torch.device) -> Row:
    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return case.run(impl, *case.tensors)

    seeds = [torch.ones_like(result) for result in forward()]

    def both() -> None:
        torch.autograd.grad(case.run(impl, *case.tensors), case.tensors, seeds)

    moved = 2 * sum(t.numel() * t.element_size() for t in [*case.tensors, *seeds])
    row = {"forward ms": _milliseconds(forward, device) / batch, "both ms": _milliseconds(both, device) / batch}
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        both()
        row["peak MB"] = (torch.cuda.max_memory_allocated(device) - before) / batch / 1e6
    return row | {"forward GFLOP": 2 * case.multiply_adds / 1e9, "least MB": moved / batch / 1e6}


def _milliseconds_or_why_not(function: Callable[[], Any], device: torch.device) -> float | str:
    from triton.runtime.errors import OutOfResources

    try:
        return _milliseconds(function, device)
    except OutOfResources as error:
        return str(error).splitlines()[0]


def _milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    """Median over some calls after a warm-up, the device synchronised around each."""
    times = []
    for index in range(WARM_UP + REPEATS):
        _synchronize(device)
        started = time.perf_counter()
        function()
        _synchronize(device)
        if index >= WARM_UP:
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
