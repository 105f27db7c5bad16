"""The Triton kernels compiled for an H200 without one: wide copies, matrix instructions, no registers spilled."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing"),
]

HALF, WIDE, PLACES, WHOLE = "*bf16", "*fp32", "*i32", "i32"


# Sixteen bytes per thread and copy, straight from global to shared memory.
STRAIGHT = "LDGSTS.E.BYPASS.128"
# A whole tile by one thread, through the copy engine.
ENGINE = "UTMALDG"
# Shared memory that a program may have, in bytes.
SHARED = 227 * 1024


def compiled(
    kernel, settings, arguments, constants, tmp_path: Path, odd: Collection[str] = ("walkers",)
) -> tuple[int, int, str]:
    """Return the stack and the shared memory in bytes and the machine code of a kernel for compute capability 9.0.

    Pointers and integers are declared divisible by 16, as they are at the sizes of `a3m` but for the
    odd ones.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else arguments[name] for name in names}
    whole = [name for name in names if signature[name] == WHOLE and name not in odd]
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in whole]
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": settings.warps, "num_stages": settings.stages, "enable_fp_fusion": True}
    # As it is launched: some kernels bound the registers of a thread.
    options |= {"maxnreg": settings.registers} if hasattr(settings, "registers") else {}
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
    from ergoflow.ops import axial_gradient_triton as gradient
    from ergoflow.ops import axial_integral_triton as integral
    from ergoflow.ops import pool_triton, residual_triton

    pool, half = pool_triton, {"PRECISION": "half"}
    whole = dict.fromkeys(
        ("size", "after", "lines", "heads", "head_dim", "points", "width", "outputs", "dim", "rows"), WHOLE
    )
    whole |= dict.fromkeys(("lines_per_split", "batch", "stride_b", "stride_h", "stride_i", "count", "columns"), WHOLE)
    whole |= dict.fromkeys(("tiles", "tiles_per_split", "walkers", "stride_j", "out_width", "u_width"), WHOLE)
    moments = {"kernel": HALF, "moments": WIDE, "scale": "fp32"}
    # The first axis, the last with the statistics, and the last in the gradient, where the kernel is transposed.
    for own in ({"stride_j": 1}, {"stride_j": 1, "after": 1}, {"stride_i": 1, "after": 1}):
        last = {"STATISTICS": own == {"stride_j": 1, "after": 1}}
        settings = integral.LINE_SETTINGS
        rows, columns, depth = settings[:3]
        blocks = {"BLOCK_D": rows, "BLOCK_I": columns, "BLOCK_J": depth, "FULL": True}
        fields = {
            "values": f"tensordesc<bf16[1, {depth}, 1, {rows}]>",
            "out": f"tensordesc<bf16[1, {columns}, 1, {rows}]>",
        }
        yield integral._line_kernel, settings, whole | moments | fields, half | blocks | own | last, ENGINE
        settings = integral.LONG_SETTINGS
        blocks = {"BLOCK_D": 64, "BLOCK_L": settings.columns // 64, "BLOCK_I": settings.rows, "BLOCK_J": settings.depth}
        fields = {"values": HALF, "out": HALF}
        yield integral._tile_kernel, settings, whole | moments | fields, half | blocks | own | last, STRAIGHT
    for settings, described in ((gradient.KERNEL_SETTINGS, True), (gradient.LONG_SETTINGS, False)):
        rows, columns, depth = settings[:3]
        blocks = {"BLOCK_D": 64, "BLOCK_L": depth // 64, "BLOCK_I": rows, "BLOCK_J": columns, "DESCRIBED": described}
        fields = {"d_out": HALF, "values": HALF, "parts": WIDE, "scale": "fp32"}
        if described:
            fields |= {"d_out": f"tensordesc<bf16[{rows}, 64]>", "values": f"tensordesc<bf16[{columns}, 64]>"}
        copy = ENGINE if described else STRAIGHT
        yield gradient._kernel_gradient_kernel, settings, whole | fields, half | blocks, copy
    for settings, described in ((gradient.NORM_SETTINGS, True), (gradient.LONG_SETTINGS, False)):
        rows, columns, depth = settings[:3]
        blocks = {"BLOCK_N": rows, "BLOCK_W": columns, "BLOCK_E": depth}
        blocks |= {"DESCRIBED": described, "STAGES": settings.stages}
        fields = {"g": HALF, "scaled": HALF, "u": HALF, "slope": WIDE, "offset": WIDE, "out": HALF}
        if described:
            fields |= dict.fromkeys(("u", "out"), f"tensordesc<bf16[{rows}, {columns}]>")
            fields |= {"g": f"tensordesc<bf16[{rows}, {depth}]>"}
        copy = ENGINE if described else STRAIGHT
        yield gradient._norm_gradient_kernel, settings, whole | fields, half | blocks, copy
    for after in (256, 1):
        shape = {"count": 256, "size": 256, "after": after, "dim": 128, "rows": 256, "BLOCK_D": 128}
        settings = pool.LARGEST_SETTINGS
        blocks = {"BLOCK_R": settings.points, "BLOCK_E": settings.rows, "STAGES": settings.stages}
        fields = {"x": HALF, "weight": HALF, "mean": HALF, "largest": HALF, "place": PLACES, "pairs": WHOLE}
        yield pool._largest_kernel, settings, whole | fields, half | shape | blocks, STRAIGHT
        settings = pool.GRADIENT_SETTINGS
        blocks = {"BLOCK_R": settings.points, "BLOCK_E": settings.rows, "STAGES": settings.stages, "FIRST": after > 1}
        fields = {"d_x": HALF, "weight": HALF, "place": PLACES, "d_rows": HALF, "d_mean": HALF, "pairs": WHOLE}
        fields |= {"share": "fp32"}
        yield pool._features_gradient_kernel, settings, whole | fields, half | shape | blocks | {"stride": 256}, ""
    fields = {"x": WIDE, "activation": HALF, "mix": HALF, "code": HALF, "weight": WIDE, "bias": WIDE, "total": WIDE}
    fields |= {"normed": HALF, "samples": WHOLE, "eps": "fp32", "d_total": HALF, "d_x": HALF, "d_activation": HALF}
    fields |= {"parts": WIDE}
    shape = {"DIM": 128, "WIDTH": 128, "BLOCK_D": 128, "BLOCK_E": 128}
    settings = residual_triton.MIX_SETTINGS
    blocks = {"MIX": True, "NORM": True, "POINTS": settings.points, "STAGES": settings.stages}
    yield residual_triton._sum_kernel, settings, whole | fields, half | shape | blocks, STRAIGHT
    settings = residual_triton.MIX_GRADIENT_SETTINGS
    blocks = {"COPY": False, "POINTS": settings.points, "STAGES": settings.stages}
    yield residual_triton._mix_gradient_kernel, settings, whole | fields, half | shape | blocks, STRAIGHT


def streams():
    """The streaming integral's argument types and constants at 256² and 128²: first axis, last axis, transposed."""
    from ergoflow.ops import axial_stream_triton

    for size in axial_stream_triton.BUFFERS:
        line, square = (
            f"tensordesc<bf16[{tile}],{axial_stream_triton.LAYOUT!r}>"
            for tile in (f"1,{size},1,64", f"1,1,{size},{size}")
        )
        fields = {"kernel": square, "values": line, "out": line, "moments": WIDE}
        whole = dict.fromkeys(("after", "lines", "walkers"), WHOLE)
        for own in ({}, {"after": 1}):
            last = "after" in own
            for transposed in (False, True):
                blocks = {"STATISTICS": last, "TRANSPOSED": transposed, "BUFFERS": axial_stream_triton.BUFFERS[size]}
                yield axial_stream_triton._stream_kernel, fields | whole, own | blocks


def values():
    """The argument types and constants of the integral that makes its values, at 256² and 128²; also of one line."""
    from ergoflow.ops import axial_value_triton as module

    for size in module.BUFFERS:
        square, weight, piece, line = (
            f"tensordesc<bf16[{tile}],{module.LAYOUT!r}>"
            for tile in (f"1,1,{size},{module.PIECE}", "1,1,64,128", f"1,{module.PIECE},1,128", f"1,{size},1,64")
        )
        part = f"tensordesc<bf16[1,{module.PIECE},1,64],{module.LAYOUT!r}>"
        fields = {"kernel": square, "value": weight, "features": piece, "out": line, "values": part}
        whole = dict.fromkeys(("after", "lines", "walkers"), WHOLE)
        for own in ({}, {"values": None}, {"values": None, "after": 1}):
            yield module._value_kernel, size, fields | whole, own | {"BUFFERS": module.BUFFERS[size]}


def pairs():
    """The argument types and constants of the two gradients in one kernel at 256² and 128²: first axis, last axis."""
    from ergoflow.ops import axial_pair_triton

    for size, buffers in axial_pair_triton.BUFFERS.items():
        shapes = {"kernel": f"1,1,{size},64", "d_out": f"1,{size},1,64", "values": "1,128,1,64", "out": "1,64,1,64"}
        fields = {name: f"tensordesc<bf16[{tile}],{axial_pair_triton.LAYOUT!r}>" for name, tile in shapes.items()}
        whole = {"parts": WIDE} | dict.fromkeys(("after", "lines", "walkers"), WHOLE)
        for own in ({}, {"after": 1}):
            yield axial_pair_triton._pair_kernel, fields | whole, own | {"BUFFERS": buffers}, size


def norms():
    """Kernels of the norms, which have no products, with settings, argument types and constants at 256²."""
    from ergoflow.ops import norm_triton, residual_triton

    whole = dict.fromkeys(("batch", "samples", "points", "channels", "groups"), WHOLE)
    fields = {"x": WIDE, "activation": WIDE, "mix": WIDE, "code": HALF, "weight": WIDE, "bias": WIDE, "total": WIDE}
    fields |= {"normed": HALF, "eps": "fp32", "d_total": WIDE, "d_normed": HALF, "d_p": WIDE, "rounded": HALF}
    fields |= {"code_parts": HALF, "parts": WIDE}
    settings = residual_triton.NORM_SETTINGS
    blocks = {"DIM": 128, "BLOCK_D": 128, "POINTS": settings.points, "STAGES": settings.stages}
    absent = {"WIDTH": 1, "BLOCK_E": 16, "MIX": False, "NORM": True, "PRECISION": "ieee"}
    yield residual_triton._sum_kernel, settings, whole | fields, blocks | absent
    settings = residual_triton.NORM_GRADIENT_SETTINGS
    blocks |= {"POINTS": settings.points, "STAGES": settings.stages}
    yield residual_triton._norm_gradient_kernel, settings, whole | fields, blocks | {"ROUND": True}
    fields = {"p": HALF, "q": HALF, "mean": WIDE, "parts": WIDE, "coefficients": WIDE, "out": HALF}
    for kernel, settings in (
        (norm_triton._channel_sums_kernel, norm_triton.SUMS_SETTINGS),
        (norm_triton._scaled_sum_kernel, norm_triton.SCALE_SETTINGS),
    ):
        blocks = {"TWO": True, "POINTS": settings.size // 256, "CHANNELS": 256, "STAGES": settings.stages}
        yield kernel, settings, whole | fields, blocks


def test_kernels_use_hopper_and_spill_nothing(tmp_path):
    for kernel, settings, arguments, constants, copy in a3m_kernels():
        stack, shared, code = compiled(kernel, settings, arguments, constants, tmp_path)
        name = f"{kernel.__name__} {constants}"
        assert stack == 0, name
        assert shared <= SHARED, name
        assert "HGMMA" in code, name
        assert copy in code, name


def test_streams_copy_through_the_engine_both_ways_and_spill_nothing(tmp_path):
    settings = SimpleNamespace(warps=4, stages=1)
    for kernel, arguments, constants in streams():
        stack, shared, code = compiled(kernel, settings, arguments, constants, tmp_path)
        assert stack == 0, constants
        assert shared <= SHARED, constants
        # A line is one product of 64 rows, in two consumers; the result is turned on its way to shared memory.
        size = re.findall(r"bf16\[1,(\d+)", arguments["values"])[0]
        assert code.count(f"HGMMA.64x{size}x16") == 2 * int(size) // 16, constants
        assert all(name in code for name in (ENGINE, "UTMASTG", "STSM.16.MT88.4")), constants


def test_values_pass_from_product_to_product_in_registers(tmp_path):
    settings = SimpleNamespace(warps=4, stages=1)
    for kernel, size, arguments, constants in values():
        stack, shared, code = compiled(kernel, settings, arguments, constants, tmp_path)
        pieces = size // 64
        assert stack == 0, constants
        assert shared <= SHARED, constants
        # Two consumers; the left side of the second product comes from registers.
        assert code.count("HGMMA.64x64x16") == 2 * 8 * pieces, constants
        assert len(re.findall(rf"HGMMA.64x{size}x16\S* R\d+, R\d+, gdesc", code)) == 2 * size // 16, constants
        # A product is waited for where the kernel says so: with too few registers, after every instruction.
        assert code.count("WARPGROUP.DEPBAR") == 2 * 2 * pieces, constants
        assert all(name in code for name in (ENGINE, "UTMASTG", "STSM.16.MT88.4")), constants


def test_pairs_of_products_overlap_and_spill_nothing(tmp_path):
    settings = SimpleNamespace(warps=4, stages=1)
    for kernel, arguments, constants, size in pairs():
        stack, shared, code = compiled(kernel, settings, arguments, constants, tmp_path)
        assert stack == 0, constants
        assert shared <= SHARED, constants
        # Two consumers: a line's integral at 64 of its points, the sums of half of the kernel's rows.
        assert code.count("HGMMA.64x64x16") == 2 * size // 16, constants
        assert code.count("HGMMA.64x128x16") == 2 * (size // 128) * 4, constants
        # One wait for either product, one at the end: else each instruction waits for the one before.
        assert code.count("WARPGROUP.DEPBAR") == 2 * 3, constants
        assert all(name in code for name in (ENGINE, "UTMASTG", "STSM.16.MT88.4")), constants


def test_norms_copy_sixteen_bytes_at_a_time_and_spill_nothing(tmp_path):
    for kernel, settings, arguments, constants in norms():
        stack, _, code = compiled(kernel, settings, arguments, constants, tmp_path)
        name = f"{kernel.__name__} {constants}"
        assert stack == 0, name
        # Wide loads and stores of every field; what is narrower belongs to one channel each.
        assert "LDG.E.128" in code, name
        assert "STG.E.128" in code or kernel.__name__ == "_channel_sums_kernel", name


class Launch(NamedTuple):
    """A call of a kernel, as `compiled` takes it."""

    kernel: Any
    settings: Any
    arguments: dict[str, str]
    constants: dict[str, Any]
    odd: list[str]


@contextmanager
def launches(module, *names: str) -> Iterator[list[Launch]]:
    """Within the block these kernels of the module are not run but noted down."""
    made: list[Launch] = []

    class Noted:
        def __init__(self, kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid):
            return self.launch

        def launch(self, *values, num_warps: int, num_stages: int = 3, **constants) -> None:
            given = dict(zip(self.kernel.arg_names, values, strict=False))
            constants |= {name: value for name, value in given.items() if isinstance(value, int) and value == 1}
            types = {torch.bfloat16: HALF, torch.float32: WIDE}
            arguments = {n: types[v.dtype] if isinstance(v, torch.Tensor) else WHOLE for n, v in given.items()}
            odd = [name for name, value in given.items() if isinstance(value, int) and value % 16]
            settings = SimpleNamespace(warps=num_warps, stages=num_stages)
            made.append(Launch(self.kernel, settings, arguments, constants, odd))

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(module, name, Noted(getattr(module, name)))
        yield made


def a3m_convolutions() -> Iterator[Launch]:
    """The products of the decoder's convolutions and their gradients, as they are launched on tensors without data."""
    from ergoflow.ops import conv_blocks_triton, conv_triton

    def drawn(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta", dtype=torch.bfloat16)

    products = ("_conv_kernel", "_weight_gradient_kernel")
    for inputs, outputs, taps, bend in ((256, 128, 9, False), (128, 64, 7, True), (64, 32, 5, True)):
        weight = drawn(outputs, inputs // 16, taps, taps)
        seen = conv_blocks_triton.blocks_of((256, 256), weight, 16)
        copies = launches(conv_blocks_triton, "_copy_kernel")
        with copies, launches(conv_triton, *products, "_table_kernel") as made:
            x = drawn(8, 256, 256, inputs)
            field = conv_blocks_triton.in_blocks(x, seen, bend=bend)
            conv_triton.conv(field, weight, drawn(outputs), seen)
            conv_triton.conv_gradient(drawn(8, 256, 256, outputs), field, weight, 16, bent=x if bend else None)
        yield from (launch for launch in made if launch.kernel.__name__ in products)


def test_convolutions_use_hopper_and_spill_next_to_nothing(tmp_path):
    made, stacks = list(a3m_convolutions()), []
    assert len(made) == 9
    for launch in made:
        kernel, settings, arguments, constants, odd = launch
        stack, shared, code = compiled(kernel, settings, arguments, constants, tmp_path, odd)
        stacks.append(stack)
        assert shared <= SHARED, launch
        assert "HGMMA" in code, launch
        assert STRAIGHT in code, launch
    *others, largest = sorted(stacks)
    assert not any(others)
    assert largest <= 112  # bytes in one of them with Triton 3.6 and 3.7, none with 3.9
