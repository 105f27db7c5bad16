"""The fast torch operators under autocast on a CPU, in bfloat16, against the references in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from ergoflow.ops.axial import axial_mix
from ergoflow.ops.conv import circular_conv
from ergoflow.ops.low_rank import sequence_kernel
from ergoflow.ops.norm import add_layer_norm, mix_add
from ergoflow.ops.pool import axial_pool

# Rounding to 2^-9 of operands, of what lies between and of results: some 2e-3 each.
TOLERANCE = 1.5e-2
# On a plane of unequal sides, batches larger than one.
CASES: dict[str, tuple[Callable[..., Sequence[Tensor]], list[tuple[int, ...]]]] = {
    "axial_mix": (
        lambda impl, x, value, merge, *kernels: [axial_mix(x, value, kernels, merge, impl=impl)],
        [(3, 9, 7, 6), (8, 6), (5, 8), (3, 2, 9, 9), (3, 2, 7, 7)],
    ),
    "few taps": (
        lambda impl, x, w, b: [circular_conv(x, w, b, groups=2, impl=impl)],
        [(2, 6, 9, 7), (4, 3, 5, 3), (4,)],
    ),
    "many taps": (
        lambda impl, x, w, b: [circular_conv(x, w, b, groups=2, impl=impl)],
        [(9, 6, 9, 7), (4, 3, 7, 5), (4,)],
    ),
    "bent": (
        lambda impl, x, w, b: [circular_conv(x, w, b, bend=True, impl=impl)],
        [(2, 6, 9, 7), (4, 6, 5, 3), (4,)],
    ),
    "add_layer_norm": (
        lambda impl, x, code, w, b: add_layer_norm(x, code, w, b, impl=impl),
        [(3, 9, 7, 6), (9, 7, 6), (6,), (6,)],
    ),
    "mix_add": (lambda impl, x, a, mix: [mix_add(x, a, mix, impl=impl)], [(3, 9, 7, 6), (3, 9, 7, 5), (6, 5)]),
}


def drawn(shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Normal numbers that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).bfloat16().float() for shape in shapes]


@pytest.mark.parametrize("case", CASES)
def test_operator_in_bfloat16_agrees_with_float64_within_its_rounding(case):
    operator, shapes = CASES[case]
    rounded = [tensor.requires_grad_() for tensor in drawn(shapes)]
    exact = [tensor.detach().double().requires_grad_() for tensor in rounded]
    with torch.autocast("cpu", torch.bfloat16):
        results = operator("torch", *rounded)
    expected = operator("reference", *exact)
    seeds = drawn([result.shape for result in expected])
    gradients = torch.autograd.grad(results, rounded, [s.to(r.dtype) for s, r in zip(seeds, results, strict=True)])
    wanted = torch.autograd.grad(expected, exact, [seed.double() for seed in seeds])
    for found, true in zip([*results, *gradients], [*expected, *wanted], strict=True):
        assert (found.double() - true).norm() < TOLERANCE * true.norm()


def test_normed_features_are_rounded_once_and_the_stream_is_not():
    x, code, weight, bias = drawn([(2, 5, 6), (5, 6), (6,), (6,)])
    with torch.autocast("cpu", torch.bfloat16):
        total, normed = add_layer_norm(x, code, weight, bias)
    assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)


def test_kernels_of_sequences_stay_in_float32_on_a_cpu():
    tensors = [tensor.requires_grad_() for tensor in drawn([(2 * 3, 4), (2 * 3, 4), (3, 7, 4), (3, 7, 4)])]
    table = drawn([(7, 6)])[0]

    def kernel(impl, query, key, *sequences):
        return sequence_kernel(sequences, query, key, table.to(query.dtype), [1, 1], impl=impl)

    with torch.autocast("cpu", torch.bfloat16):
        found = kernel("torch", *tensors)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    true = kernel("reference", *exact)
    torch.testing.assert_close(found, true.float(), rtol=1e-5, atol=1e-5)
    for fast, slow in zip(
        torch.autograd.grad(found.square().sum(), tensors),
        torch.autograd.grad(true.square().sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(fast, slow.float(), rtol=1e-4, atol=1e-4)


def test_gradients_of_pooling_in_bfloat16_obey_euler_although_rounding_moves_places():
    """Mean and maxima are homogeneous: ⟨x, dx⟩ = ⟨mean, g⟩ + ⟨largest, g'⟩, and ⟨w, dw⟩ = ⟨largest, g'⟩."""
    x, *weights = [tensor.requires_grad_() for tensor in drawn([(3, 9, 7, 6), (5, 6), (4, 6)])]
    with torch.autocast("cpu", torch.bfloat16):
        pooled = [tensor for pair in axial_pool(x, weights, impl="torch") for tensor in pair]
    exact = [
        tensor for pair in axial_pool(x.double(), [w.double() for w in weights], impl="reference") for tensor in pair
    ]
    for found, true in zip(pooled, exact, strict=True):
        assert (found.double() - true).norm() < TOLERANCE * true.norm()
    seeds = [seed.abs() for seed in drawn([tensor.shape for tensor in pooled])]
    shares = [float((seed * tensor.detach()).sum()) for seed, tensor in zip(seeds, pooled, strict=True)]
    d_x, *d_weights = torch.autograd.grad(
        pooled, [x, *weights], [s.to(p.dtype) for s, p in zip(seeds, pooled, strict=True)]
    )
    largest = shares[1::2]
    assert float((x * d_x).sum().detach()) == pytest.approx(sum(shares), rel=TOLERANCE)
    for weight, d_weight, share in zip(weights, d_weights, largest, strict=True):
        assert float((weight * d_weight).sum().detach()) == pytest.approx(share, rel=TOLERANCE)
