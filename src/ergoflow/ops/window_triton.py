"""Sums of products over a window that slides along a row of values: what a convolution does between its loads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ergoflow.ops.choice import interpreted

# Whether they are one piece of assembly, which is NVIDIA's.
ASSEMBLY = tl.constexpr(torch.version.hip is None and not interpreted())


@triton.jit
def add_products(
    sums: tl.tuple, values: tl.tuple, factors: tl.tuple, SUMS: tl.constexpr, FACTORS: tl.constexpr
) -> tl.tuple:
    """Return sums[m] + Σ_t values[m + t] · factors[t].

    One piece of assembly, for the compiler's sake: its coalescing pass follows every load and store through the whole
    program, four fifths of the 15 s that a kernel of 1,568 multiplications took to compile. With 28 of them in one
    operation it compiles in 3, to the same machine code to the bit where it is a convolution.
    """
    if ASSEMBLY:
        assembly: tl.constexpr = assembly_of(SUMS, FACTORS)
        operands: tl.constexpr = operands_of(SUMS, FACTORS)
        return tl.inline_asm_elementwise(
            assembly, operands, values + factors + sums, dtype=(tl.float32,) * SUMS, is_pure=True, pack=1
        )
    else:  # noqa: RET505  (Triton needs the branch that is not taken to stay out of the function's type)
        added: tl.tuple = ()
        for m in tl.static_range(SUMS):
            total = sums[m]
            for t in tl.static_range(FACTORS):
                total = tl.fma(values[m + t], factors[t], total)
            added += (total,)
        return added


@triton.constexpr_function
def assembly_of(sums: int, factors: int) -> str:
    """Return the multiplications of `add_products`: operands are the new sums, the values, the factors, the sums."""
    value, factor = sums, sums + sums + factors - 1
    total = factor + factors
    return " ".join(
        f"fma.rn.f32 ${m}, ${value + m + t}, ${factor + t}, ${m if t else total + m};"
        for m in range(sums)
        for t in range(factors)
    )


@triton.constexpr_function
def operands_of(sums: int, factors: int) -> str:
    """Return the kinds of those operands: results that are written before the last input is read, and inputs."""
    return ",".join(["=&f"] * sums + ["f"] * (sums + factors - 1 + factors + sums))
