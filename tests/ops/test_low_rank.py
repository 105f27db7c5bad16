"""What surrounds the value path of a block, kernels of sequences and the residual sum, against float64 references.

Triton runs on a GPU where there is one, else in its interpreter.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ergoflow.ops.low_rank import project, sequence_kernel, turned_product
from ergoflow.ops.norm import add_layer_norm, mix_add, mix_add_layer_norm

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing")

# Relative errors: float32 sums of some hundred terms; bfloat16 results and factors rounded to 2^-9 each.
TOLERANCE = {"float32": 1e-6, "bfloat16": 1e-2}


def turns(size: int, width: int, like: Tensor) -> Tensor:
    """The table [cos, sin] (S, 2m) of phases between 0 and 20, at least in float32."""
    phases = torch.linspace(0, 20, size * width, dtype=torch.float64).reshape(size, width)
    table = torch.cat([phases.cos(), phases.sin()], dim=-1)
    return table.to(like.device, torch.promote_types(like.dtype, torch.float32))


def _kernel(*heads: int) -> Callable[[str], Callable[..., list[Tensor]]]:
    def run(impl: str, query: Tensor, key: Tensor, *sequences: Tensor) -> list[Tensor]:
        table = turns(sequences[0].shape[1], len(query) // sum(heads), query)
        # Tables stay float32 beside half-precision projections; the plain formula needs them alike.
        return [sequence_kernel(sequences, query, key, table, heads, impl=impl)]

    return lambda impl: lambda *tensors: run(impl, *tensors)


def _mix_add(impl: str) -> Callable[..., list[Tensor]]:
    return lambda x, activation, mix: [mix_add(x, activation, mix, impl=impl)]


def _mix_add_norm(impl: str) -> Callable[..., list[Tensor]]:
    return lambda *tensors: list(mix_add_layer_norm(*tensors, impl=impl))


# Shapes that are no powers of two and fill several tiles, the last one barely.
CASES: dict[str, tuple[Callable[[str], Callable[..., list[Tensor]]], list[tuple[int, ...]]]] = {
    "kernel": (_kernel(2, 1), [(3 * 18, 5), (3 * 18, 5), (2, 19, 5), (2, 19, 5)]),
    "kernel-short": (_kernel(2), [(2 * 3, 4), (2 * 3, 4), (3, 7, 4)]),
    "mix-add": (_mix_add, [(3, 5, 7, 9), (3, 5, 7, 11), (9, 11)]),
    "mix-add-norm": (_mix_add_norm, [(3, 5, 7, 18), (3, 5, 7, 11), (18, 11), (5, 7, 18), (18,), (18,)]),
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
        given = [seed.to(device, result.dtype) for seed, result in zip(seeds, results, strict=True)]
        gradients = torch.autograd.grad(results, tensors, given)
        wanted = torch.autograd.grad(expected, exact, [seed.double() for seed in seeds])
        pairs = zip([*results, *gradients], [*expected, *wanted], strict=True)
        gaps = [float((a.detach().cpu().double() - b.detach()).norm() / b.detach().norm()) for a, b in pairs]
        worst[name] = float("nan") if any(gap != gap for gap in gaps) else max(gaps)
    return worst


def _small_tiles() -> None:
    """Make the tiles small, so that small fields fill several of them, and programs go through several tiles."""
    from ergoflow.ops import low_rank_triton, residual_triton

    low_rank_triton.PRODUCT_SETTINGS = low_rank_triton.Settings(rows=16, columns=16, depth=16, warps=4, stages=2)
    low_rank_triton.GRADIENT_SETTINGS = low_rank_triton.PRODUCT_SETTINGS
    # Three tiles of points: four programs share the samples too, two go through several tiles.
    small = residual_triton.Settings(points=16, warps=4, stages=2, programs=4)
    residual_triton.NORM_SETTINGS = residual_triton.MIX_SETTINGS = small
    residual_triton.NORM_GRADIENT_SETTINGS = residual_triton.MIX_GRADIENT_SETTINGS = small._replace(programs=2)


@pytest.fixture(scope="module")
def interpreted(interpret) -> dict[str, dict[str, float]]:
    return interpret(__file__, "_small_tiles() or {case: errors(case, 'cpu') for case in CASES}")


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


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_product_is_the_sum_of_cosines_of_differences() -> None:
    q, k, phases = randn(2, 3, 5, 4), randn(2, 3, 5, 4, seed=1), 30 * randn(5, 4, seed=2)
    cosines = torch.cos(phases[:, None] - phases[None])  # (S, S, m)
    expected = torch.einsum("bhic,bhjc,ijc->bhij", q, k, cosines) / 2  # √m = 2
    torch.testing.assert_close(turned_product(q, k, torch.cat([phases.cos(), phases.sin()], -1)), expected)


def test_each_sequence_feeds_its_own_heads() -> None:
    sequences, weight = [randn(2, 5, 3), randn(2, 5, 3, seed=1)], randn(3 * 4, 3, seed=2)
    projected = project(sequences, weight, (2, 1))
    torch.testing.assert_close(projected[..., :8], F.linear(sequences[0], weight[:8]))
    torch.testing.assert_close(projected[..., 8:], F.linear(sequences[1], weight[8:]))


def test_sequences_without_a_number_of_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs a number of heads, got 1 and \(1, 1\); give both"):
        sequence_kernel([randn(1, 2, 3)], randn(4, 3), randn(4, 3), randn(2, 4), (1, 1))


def test_sum_is_the_written_chain() -> None:
    x, a, mix, code = randn(2, 3, 5, 4), randn(2, 3, 5, 6, seed=1), randn(4, 6, seed=2), randn(3, 5, 4, seed=3)
    weight, bias = randn(4, seed=4), randn(4, seed=5)
    bent = 0.5 * a * (1 + torch.erf(a / math.sqrt(2)))
    total = x + torch.einsum("...e,de->...d", bent, mix) + code
    gap = total - total.mean(-1, keepdim=True)
    expected = gap / (gap.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    result, normed = mix_add_layer_norm(x, a, mix, code, weight, bias)
    torch.testing.assert_close(result, total)
    torch.testing.assert_close(normed, expected)


def test_stream_is_float32_even_when_it_begins_in_half_precision() -> None:
    x, code = randn(2, 3, 4).bfloat16(), randn(3, 4, seed=1).bfloat16()
    total, _ = add_layer_norm(x, code, torch.ones(4), torch.zeros(4))
    assert total.dtype == torch.float32
    assert torch.equal(total, x.float() + code.float())
    assert mix_add(x, x, torch.zeros(4, 4).bfloat16()).dtype == torch.float32
