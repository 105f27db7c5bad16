"""The Triton kernels compiled for an H200 without one: wide copies, matrix instructions, no registers spilled."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing"),
]

HALF, WIDE, PLACES, WHOLE = "*bf16", "*fp32", "*i32", "i32"


# Sixteen bytes per thread and copy, straight from global to shared memory.
STRAIGHT = "LDGSTS.E.BYPASS.128"
# Shared memory that a program may have, in bytes.
SHARED = 227 * 1024


def compiled(kernel, settings, arguments, constants, tmp_path: Path) -> tuple[int, int, str]:
    """Return the stack and the shared memory in bytes and the machine code of a kernel for compute capability 9.0.

    Pointers and integers are declared divisible by 16, as they are at the sizes of `a3m` but for the walkers.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else arguments[name] for name in names}
    whole = [name for name in names if signature[name] == WHOLE and name != "walkers"]
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in whole]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": settings.warps, "num_stages": settings.stages, "enable_fp_fusion": True}
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(result.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    usage, code = (
        subprocess.run([tool, flag, path], capture_output=True, text=True, check=True).stdout
        for flag in ("-res-usage", "-sass")
    )
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None
    return int(stack.group(1)), result.metadata.shared, code


def a3m_kernels():
    """Kernels with settings, argument types and constants at 256² with 16 heads of 64; how they copy."""
    from ergoflow.ops import axial_triton, conv_triton, pool_triton

    axial, pool, half = axial_triton, pool_triton, {"PRECISION": "half"}
    whole = dict.fromkeys(
        ("size", "after", "lines", "heads", "head_dim", "points", "width", "outputs", "dim", "rows"), WHOLE
    )
    whole |= dict.fromkeys(("lines_per_split", "batch", "stride_b", "stride_h", "stride_i", "count", "columns"), WHOLE)
    whole |= dict.fromkeys(("tiles", "tiles_per_split", "walkers", "stride_j"), WHOLE)
    for settings in (axial.INTEGRATE_SETTINGS, axial.LONG_SETTINGS):
        held = {"WHOLE": settings.depth >= 256, "FULL": True}
        blocks = {"BLOCK_D": 64, "BLOCK_L": settings.columns // 64, "BLOCK_I": settings.rows, "BLOCK_J": settings.depth}
        fields = {"kernel": HALF, "values": HALF, "out": HALF, "moments": WIDE, "scale": "fp32"}
        # The first axis, the last with the statistics, and the last in the gradient, where the kernel is transposed.
        for own in ({"stride_j": 1}, {"stride_j": 1, "after": 1}, {"stride_i": 1, "after": 1}):
            last = {"STATISTICS": own == {"stride_j": 1, "after": 1}}
            yield axial._integrate_kernel, settings, whole | fields, half | blocks | held | own | last, STRAIGHT
    settings = axial.KERNEL_SETTINGS
    blocks = {"BLOCK_D": 64, "BLOCK_L": settings.depth // 64, "BLOCK_I": settings.rows, "BLOCK_J": settings.columns}
    fields = {"d_out": HALF, "values": HALF, "parts": WIDE, "scale": "fp32"}
    yield axial._kernel_gradient_kernel, settings, whole | fields, half | blocks, STRAIGHT
    for settings in (axial.NORM_SETTINGS, axial.LONG_SETTINGS):
        blocks = {"BLOCK_N": settings.rows, "BLOCK_W": settings.columns, "BLOCK_E": settings.depth}
        kept = settings.depth >= 128
        blocks |= {"WHOLE": kept, "STAGES": settings.stages if kept else 1}
        fields = {"g": HALF, "scaled": HALF, "u": HALF, "slope": WIDE, "offset": WIDE, "out": HALF}
        yield axial._norm_gradient_kernel, settings, whole | fields, half | blocks, STRAIGHT
    settings = pool.LARGEST_SETTINGS
    blocks = {"BLOCK_R": settings.points, "BLOCK_E": settings.rows, "BLOCK_D": 128}
    fields = {"x": HALF, "weight": HALF, "mean": HALF, "largest": HALF, "place": PLACES}
    yield pool._largest_kernel, settings, whole | fields, half | blocks, STRAIGHT
    settings = pool.GRADIENT_SETTINGS
    blocks = {"BLOCK_N": settings.points, "BLOCK_E": settings.rows, "BLOCK_D": 128, "FIRST": True}
    fields = {"d_x": HALF, "weight": HALF, "place": PLACES, "d_rows": HALF, "d_mean": HALF, "share": "fp32"}
    yield pool._features_gradient_kernel, settings, whole | fields, half | blocks, ""
    fields = {"x": HALF, "table": HALF, "bias": HALF, "out": HALF, "gradient": HALF, "parts": WIDE}
    for inputs, outputs, taps in ((16, 8, 9), (8, 16, 9), (8, 4, 7), (4, 8, 7)):
        shape = {"GROUPS": 16, "GROUP_INPUTS": inputs, "GROUP_OUTPUTS": outputs, "TAPS_X": taps, "TAPS_Y": taps}
        shape |= {"RESULTS": 8, "COLUMNS": 16, "INPUTS": inputs, "OUTPUTS": outputs}
        settings, copy = conv_triton.CONV_SETTINGS, STRAIGHT if inputs >= 8 else ""
        blocks = {"BLOCK_M": settings.blocks, "BLOCK_K": settings.depth, "HAS_BIAS": True}
        yield conv_triton._conv_kernel, settings, whole | fields, half | shape | blocks, copy
        settings = conv_triton.WEIGHT_SETTINGS
        blocks = {"BLOCK_M": settings.blocks, "BLOCK_K": min(settings.depth, 16 * inputs)}
        yield conv_triton._weight_gradient_kernel, settings, whole | fields, half | shape | blocks, copy


def test_kernels_use_hopper_and_spill_nothing(tmp_path):
    for kernel, settings, arguments, constants, copy in a3m_kernels():
        stack, shared, code = compiled(kernel, settings, arguments, constants, tmp_path)
        name = f"{kernel.__name__} {constants}"
        assert stack == 0, name
        assert shared <= SHARED, name
        assert "HGMMA" in code, name
        assert copy in code, name
