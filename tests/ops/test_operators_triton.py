"""The Triton kernels against float64 references: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ergoflow.ops.axial import axial_mix
from ergoflow.ops.conv import circular_conv
from ergoflow.ops.norm import add_layer_norm, group_norm
from ergoflow.ops.pool import axial_pool

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing")

# Relative errors: float32 sums of some hundred terms; bfloat16 results and saved values rounded to 2^-9 each, up to six
# of these on the way to a gradient.
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}


def _pool(impl: str) -> Callable[..., list[Tensor]]:
    return lambda x, *weights: [tensor for pair in axial_pool(x, weights, impl=impl) for tensor in pair]


def _mix(impl: str) -> Callable[..., list[Tensor]]:
    return lambda x, value, merge, *kernels: [axial_mix(x, value, kernels, merge, impl=impl)]


def _conv(groups: int, *, bend: bool = False) -> Callable[[str], Callable[..., list[Tensor]]]:
    return lambda impl: lambda x, weight, bias: [circular_conv(x, weight, bias, groups=groups, bend=bend, impl=impl)]


def _norm(impl: str) -> Callable[..., list[Tensor]]:
    return lambda x, weight, bias: [group_norm(x, 3, weight, bias, impl=impl)]


def _add_norm(impl: str) -> Callable[..., list[Tensor]]:
    return lambda x, code, weight, bias: list(add_layer_norm(x, code, weight, bias, impl=impl))


# Shapes that are no powers of two and fill several tiles, the last one barely.
CASES: dict[str, tuple[Callable[[str], Callable[..., list[Tensor]]], list[tuple[int, ...]]]] = {
    "pool-plane": (_pool, [(2, 3, 19, 6), (20, 6), (5, 6)]),
    "pool-space": (_pool, [(1, 3, 4, 5, 18), (4, 18), (4, 18), (4, 18)]),
    "mix-plane": (_mix, [(2, 3, 18, 6), (8, 6), (17, 8), (2, 2, 3, 3), (2, 2, 18, 18)]),
    "mix-space": (_mix, [(1, 3, 3, 5, 5), (10, 5), (4, 10), (1, 2, 3, 3), (1, 2, 3, 3), (1, 2, 5, 5)]),
    # Heads of the width that the copy engine takes, one at a time in small tiles.
    "mix-wide": (_mix, [(2, 8, 48, 6), (128, 6), (8, 128), (2, 2, 8, 8), (2, 2, 48, 48)]),
    "mix-line": (_mix, [(2, 35, 6), (21, 6), (35, 21), (2, 3, 35, 35)]),
    "conv-wide": (_conv(2), [(1, 6, 5, 11), (10, 3, 9, 9), (10,)]),
    "conv-thin": (_conv(1), [(1, 3, 9, 17), (1, 3, 3, 3), (1,)]),
    "conv-deep": (_conv(2), [(2, 32, 10, 24), (16, 16, 9, 9), (16,)]),
    "conv-rows": (_conv(3), [(2, 12, 10, 21), (6, 4, 5, 5), (6,)]),
    "conv-bent": (_conv(3, bend=True), [(2, 12, 10, 21), (6, 4, 5, 5), (6,)]),
    "conv-bent-wide": (_conv(2, bend=True), [(1, 6, 5, 11), (10, 3, 9, 9), (10,)]),
    "conv-flat": (_conv(1), [(1, 2, 5, 4), (33, 2, 1, 9), (33,)]),
    "add-norm": (_add_norm, [(2, 5, 7, 9), (5, 7, 9), (9,), (9,)]),
    "norm": (_norm, [(2, 66, 7, 10), (66,), (66,)]),
}


def errors(case: str, device: str) -> dict[str, float]:
    """Return the largest relative error of results and gradients; memory that a kernel leaves unwritten is NaN."""
    build, shapes = CASES[case]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    worst = {}
    for name in TOLERANCE:
        dtype = getattr(torch, name)
        generator = torch.Generator().manual_seed(len(case))
        drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        tensors = [tensor.to(device).requires_grad_() for tensor in drawn]
        exact = [tensor.double().requires_grad_() for tensor in drawn]
        results, expected = build("triton")(*tensors), build("reference")(*exact)
        seeds = [torch.randn(result.shape, generator=generator).to(dtype) for result in expected]
        gradients = torch.autograd.grad(results, tensors, [seed.to(device) for seed in seeds])
        wanted = torch.autograd.grad(expected, exact, [seed.double() for seed in seeds])
        pairs = zip([*results, *gradients], [*expected, *wanted], strict=True)
        gaps = [float((a.detach().cpu().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]
        worst[name] = float("nan") if any(gap != gap for gap in gaps) else max(gaps)
    return worst


def _small_tiles() -> None:
    """Make the tiles small, so that small fields fill several of them."""
    from ergoflow.ops import axial_gradient_triton as gradient
    from ergoflow.ops import axial_integral_triton as integral
    from ergoflow.ops import axial_triton, conv_blocks_triton, conv_triton, norm_triton, pool_triton, tiles_triton

    pool_triton.LARGEST_SETTINGS = pool_triton.Settings(points=16, rows=16, warps=4, stages=2)
    pool_triton.GRADIENT_SETTINGS = pool_triton.Settings(points=32, rows=16, warps=4, stages=2)
    pool_triton.GATHER_PAIRS, pool_triton.PROCESSORS = 7, 5
    # Programs walk over several tiles.
    small = tiles_triton.ProductSettings(rows=16, columns=16, depth=16, warps=4, stages=3)
    integral.LONG_SETTINGS = gradient.LONG_SETTINGS = gradient.NORM_SETTINGS = small
    gradient.KERNEL_SETTINGS = small._replace(depth=64)
    integral.LINE_SETTINGS = small._replace(rows=64, columns=32, depth=64)
    tiles_triton.PROCESSORS, axial_triton.CHUNK = 5, 2 * 3 * 18 * 8
    # Blocks of 32 numbers are taken whole, longer ones in pieces; results and taps in several parts.
    conv_triton.CONV_SETTINGS = conv_triton.Settings(blocks=16, width=64, depth=32, warps=4, stages=2)
    conv_triton.NARROW_SETTINGS = conv_triton.CONV_SETTINGS
    conv_triton.WEIGHT_SETTINGS = conv_triton.Settings(blocks=16, width=32, depth=64, warps=4, stages=2)
    conv_blocks_triton.COPIED, conv_blocks_triton.TILE_RESULTS, conv_triton.PROGRAMS = 512, 64, 100
    # Two blocks of channels, five tiles of points shared by two programs, partial sums in two rounds.
    small = norm_triton.Settings(size=1024, channels=64, warps=4, stages=2, programs=8)
    norm_triton.SUMS_SETTINGS = norm_triton.SCALE_SETTINGS = small
    norm_triton.CHUNKS = 1


@pytest.fixture(scope="module")
def interpreted(interpret) -> dict[str, dict[str, float]]:
    cases = "_small_tiles() or {case: errors(case, 'cpu') for case in CASES}"
    return interpret(__file__, cases)


@needs_triton
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("case", list(CASES))
def test_interpreted_kernels_are_the_reference(case: str, dtype: str, interpreted: dict[str, dict[str, float]]) -> None:
    assert interpreted[case][dtype] < TOLERANCE[dtype]


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_are_the_reference_with_their_own_tiles(interpret) -> None:
    for case, gaps in interpret(__file__, "{case: errors(case, 'cpu') for case in CASES}").items():
        for dtype, gap in gaps.items():
            assert gap < TOLERANCE[dtype], (case, dtype)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", list(CASES))
def test_gpu_kernels_are_the_reference(case: str) -> None:
    for dtype, gap in errors(case, "cuda").items():
        assert gap < TOLERANCE[dtype]


@needs_triton
def test_kernels_refuse_float64() -> None:
    with pytest.raises(ValueError, match="accumulate in float32, got float64 tensors; choose"):
        interpret_choice(torch.float64)


def interpret_choice(dtype: torch.dtype) -> str:
    """Return what "triton" means for tensors of this dtype where the interpreter is on."""
    from ergoflow.ops.choice import choose_impl

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ergoflow.ops.choice._INTERPRETED", True)
        return choose_impl(torch.zeros(1, dtype=dtype), "triton")
