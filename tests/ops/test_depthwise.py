"""The depthwise convolution and its norm: torch's own against first principles, the Triton twin against float64."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.ops.depthwise import depthwise_norm

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing")

# Relative errors: float32 sums of some hundred terms; bfloat16 results, saved values, gradients rounded to 2^-9 each.
# "autocast": a float32 stream and float32 weights, of which only y, z and their gradients are rounded.
TOLERANCE = {"float32": 1e-6, "autocast": 1e-2, "bfloat16": 1e-2}

# Shape (B, X, Y, D), taps, periodic axes, what lies beyond walls. Sides that patches fit and such that they do not,
# shorter than a patch and than the kernel; channels of one warp, and of two or three with the last one barely filled.
Case = tuple[tuple[int, int, int, int], int, tuple[bool, bool], str]
CASES: dict[str, Case] = {
    "plane": ((1, 8, 8, 5), 7, (True, True), "replicate"),
    "odd": ((1, 5, 7, 33), 3, (True, True), "replicate"),
    "narrow": ((1, 3, 5, 6), 7, (True, True), "replicate"),
    "wide": ((1, 2, 4, 96), 3, (True, True), "replicate"),
    "one": ((2, 5, 3, 7), 1, (True, False), "replicate"),
    "channel": ((1, 6, 8, 20), 5, (False, True), "replicate"),
    "channel-zeros": ((1, 6, 8, 20), 3, (True, False), "zeros"),
    "box": ((2, 2, 9, 8), 3, (False, False), "replicate"),
    "box-zeros": ((2, 7, 2, 8), 3, (False, False), "zeros"),
}
# The precisions that are interpreted with small tiles.
QUICK = dict.fromkeys(CASES, ("float32",)) | {"one": tuple(TOLERANCE), "channel": ("autocast",)}
# The levels of the default `convnext` on 128², and a channel flow.
LARGE: dict[str, Case] = {
    "first": ((4, 64, 64, 96), 7, (True, True), "replicate"),
    "second": ((4, 32, 32, 192), 7, (True, True), "replicate"),
    "third": ((4, 16, 16, 320), 7, (True, True), "replicate"),
    "walls": ((2, 36, 40, 96), 7, (False, True), "replicate"),
}


def draw(case: Case, name: str, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return tensors for the kernels, and the same in float64 for the reference."""
    (batch, *grid, dim), taps, _, _ = case
    generator = torch.Generator().manual_seed(dim + taps)
    shapes = [(batch, *grid, dim), (dim, 1, taps, taps), (dim,), (dim,), (dim,)]
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    drawn = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    return [t.to(device).requires_grad_() for t in drawn], [t.to(device).double().requires_grad_() for t in drawn]


def gap(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())


def errors(case: Case, device: str, names: tuple[str, ...] = tuple(TOLERANCE)) -> dict[str, float]:
    """Return the largest relative error of results and gradients; memory that a kernel leaves unwritten is NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    _, _, periodic, walls = case
    worst = {}
    for name in names:
        tensors, exact = draw(case, name, device)
        with torch.autocast(device, torch.bfloat16, enabled=name == "autocast"):
            stream, z = depthwise_norm(*tensors, periodic=periodic, wall_padding=walls, impl="triton")
        assert stream.dtype == tensors[0].dtype
        assert z.dtype == (torch.float32 if name == "float32" else torch.bfloat16)
        expected = depthwise_norm(*exact, periodic=periodic, wall_padding=walls, impl="reference")
        generator = torch.Generator().manual_seed(1)
        seeds = [torch.randn(z.shape, generator=generator).to(device, result.dtype) for result in (stream, z)]
        gradients = torch.autograd.grad((stream, z), tensors, seeds)
        wanted = torch.autograd.grad(expected, exact, [seed.double() for seed in seeds])
        gaps = [gap(a, b) for a, b in zip([stream, z, *gradients], [*expected, *wanted], strict=True)]
        worst[name] = float("nan") if any(g != g for g in gaps) else max(gaps)
    return worst


def tangent_error() -> float:
    """Return how far a forward-mode derivative is from the reference's where the kernels are asked for."""
    case = CASES["channel"]
    tensors, exact = ([t.detach() for t in ts] for ts in draw(case, "float32", "cpu"))

    def pushed(impl: str, x: Tensor, *weights: Tensor) -> Tensor:
        norm = lambda x: depthwise_norm(x, *weights, periodic=case[2], impl=impl)[1]  # noqa: E731
        return torch.func.jvp(norm, (x,), (x.cos(),))[1]

    return gap(pushed("triton", *tensors), pushed("reference", *exact))


def opaque_error() -> float:
    """Return how far the operator that a compiler sees is from the one of eager mode, results and gradients."""
    from ergoflow.ops.depthwise import _DEPTHWISE_NORM

    tensors, _ = draw(CASES["one"], "float32", "cpu")
    ours = _DEPTHWISE_NORM.opaque(tensors, [0, 1, 0, 1], "triton")[:2]
    theirs = _DEPTHWISE_NORM(tensors, (0, 1, 0, 0), "triton")
    seeds = [result.detach().cos() for result in theirs]
    pairs = zip(torch.autograd.grad(ours, tensors, seeds), torch.autograd.grad(theirs, tensors, seeds), strict=True)
    return max(gap(a, b.double()) for a, b in [*zip(ours, theirs, strict=True), *pairs])


def small_tiles() -> None:
    """Make patches and tiles small, so that small fields fill several of them."""
    from ergoflow.ops import depthwise_triton as triton_twin
    from ergoflow.ops import layer_norm_triton

    small = triton_twin.Settings(rows=2, columns=4, warps=8)
    triton_twin.CONV_SETTINGS, triton_twin.CONV_GRADIENT_SETTINGS = small, small._replace(columns=2)
    triton_twin.TAPS_GRADIENT_SETTINGS, triton_twin.TAPS_PROGRAMS = small._replace(rows=4, warps=2), 2
    small_norm = layer_norm_triton.NormSettings(size=256, warps=1)
    layer_norm_triton.NORM_SETTINGS = layer_norm_triton.NORM_GRADIENT_SETTINGS = small_norm
    layer_norm_triton.NORM_PROGRAMS = 3


@pytest.fixture(scope="module")
def interpreted(interpret) -> dict:
    runs = "{case: errors(CASES[case], 'cpu', QUICK[case]) for case in CASES}"
    return interpret(__file__, f"small_tiles() or {{**{runs}, 'tangent': tangent_error(), 'opaque': opaque_error()}}")


@needs_triton
@pytest.mark.parametrize("case", list(CASES))
def test_interpreted_kernels_are_the_reference(case: str, interpreted: dict) -> None:
    for name in QUICK[case]:
        assert interpreted[case][name] < TOLERANCE[name]


@needs_triton
def test_forward_mode_takes_the_reference(interpreted: dict) -> None:
    assert interpreted["tangent"] < TOLERANCE["float32"]


@needs_triton
def test_operator_of_a_compiler_is_that_of_eager_mode(interpreted: dict) -> None:
    assert interpreted["opaque"] == 0


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_are_the_reference_with_their_own_tiles(interpret) -> None:
    for case, gaps in interpret(__file__, "{case: errors(CASES[case], 'cpu') for case in CASES}").items():
        for name, worst in gaps.items():
            assert worst < TOLERANCE[name], (case, name)


@needs_triton
@pytest.mark.parametrize(("sums", "factors"), [(4, 7), (7, 4), (2, 1), (1, 3)])
def test_assembly_adds_the_products_of_a_window(sums: int, factors: int) -> None:
    from ergoflow.ops.window_triton import assembly_of, operands_of

    generator = torch.Generator().manual_seed(0)
    draw = {"values": sums + factors - 1, "factors": factors, "sums": sums}
    values, weights, old = (torch.randn(size, generator=generator).tolist() for size in draw.values())
    operands: list = [None] * sums + values + weights + old
    for line in assembly_of(sums, factors).strip(";").split(";"):
        out, *terms = (int(number) for number in re.findall(r"\$(\d+)", line.replace("fma.rn.f32 ", "")))
        operands[out] = operands[terms[0]] * operands[terms[1]] + operands[terms[2]]
    windows = [values[m : m + factors] for m in range(sums)]
    expected = [
        first + sum(v * w for v, w in zip(row, weights, strict=True)) for first, row in zip(old, windows, strict=True)
    ]
    assert operands[:sums] == pytest.approx(expected, rel=1e-12)
    assert operands[sums:] == values + weights + old
    assert operands_of(sums, factors).split(",") == ["=&f"] * sums + ["f"] * (len(operands) - sums)


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_gpu_kernels_are_the_reference(case: str) -> None:
    # Sums over 16,384 points in float32.
    tolerance = {**TOLERANCE, "float32": 5e-6}
    for name, worst in errors((CASES | LARGE)[case], "cuda").items():
        assert worst < tolerance[name]


@pytest.mark.parametrize("wall_padding", ["replicate", "zeros"])
@pytest.mark.parametrize("impl", ["auto", "reference", "torch"])
def test_channels_are_convolved_alone_and_normed_together(impl: str, wall_padding: str) -> None:
    x, weight, bias, gamma, beta = draw(((2, 7, 6, 5), 5, (True, False), wall_padding), "float32", "cpu")[1]
    stream, z = depthwise_norm(
        x, weight, bias, gamma, beta, periodic=(True, False), wall_padding=wall_padding, impl=impl
    )
    assert stream is x
    y = torch.zeros_like(x)
    for i in range(7):
        for j in range(6):
            for s in range(5):
                for t in range(5):
                    column = j + t - 2
                    if wall_padding == "replicate" or 0 <= column < 6:
                        y[:, i, j] += weight[:, 0, s, t] * x[:, (i + s - 2) % 7, min(max(column, 0), 5)]
    y = y + bias
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, keepdim=True, unbiased=False) + nn.LayerNorm(1).eps).sqrt()
    torch.testing.assert_close(z, y * gamma + beta)


@pytest.mark.parametrize("axes", [1, 3])
def test_lines_and_boxes_take_torchs_convolution(axes: int) -> None:
    generator = torch.Generator().manual_seed(axes)
    x = torch.randn(2, *(6, 5, 4)[:axes], 3, generator=generator)
    weight, bias = torch.randn(3, 1, *[3] * axes, generator=generator), torch.randn(3, generator=generator)
    _, z = depthwise_norm(x, weight, bias, bias, bias, periodic=(True,) * axes)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    padded = F.pad(x.movedim(-1, 1), [1] * 2 * axes, mode="circular")
    y = convolve(padded, weight, bias, groups=3).movedim(1, -1)
    torch.testing.assert_close(z, F.layer_norm(y, (3,), bias, bias))


@pytest.mark.parametrize(
    ("shape", "weight", "message"),
    [
        ((1, 4, 4, 5), (5, 1, 4, 4), r"equal odd sides, got \(1, 4, 4, 5\) and \(5, 1, 4, 4\); move"),
        ((1, 4, 4, 5), (5, 1, 3, 5), r"equal odd sides, got .*; move the channels last"),
        ((1, 5, 4, 4), (5, 1, 3, 3), r"equal odd sides, got .*; move the channels last"),
        ((1, 4, 5), (5, 1, 3), r"with 2 grid axes .*, got .*; move"),
        ((1, 2, 4, 5), (5, 1, 7, 7), r"7 taps on a periodic axis need at least 3 points, got 2 on axis 0; use"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape: tuple, weight: tuple, message: str) -> None:
    vector = torch.zeros(5)
    with pytest.raises(ValueError, match=message) as error:
        depthwise_norm(torch.zeros(shape), torch.zeros(weight), vector, vector, vector, periodic=(True, True))
    assert "\n" not in str(error.value)


def hopper_kernels():
    """Kernels with warps, argument types and constants at the levels of `convnext`, and with walls at the first."""
    from ergoflow.ops import depthwise_triton as twin
    from ergoflow.ops import layer_norm_triton
    from ergoflow.ops.tiles_triton import block

    whole = dict.fromkeys(("rows", "columns", "height", "width", "batch"), "i32") | {"eps": "fp32"}
    half = dict.fromkeys(("y", "z", "d_y", "d_z", "gradient"), "*bf16")
    wide = dict.fromkeys(("x", "taps", "bias", "weight", "stream", "parts"), "*fp32")
    forward, backward = wide | half | whole | {"out": "*bf16"}, wide | half | whole | {"x": "*bf16", "out": "*fp32"}
    for dim, walls in ((96, False), (192, False), (320, False), (96, True)):
        rows, columns, warps = twin.CONV_SETTINGS
        shape = {"DIM": dim, "TAPS": 7, "ROWS": rows, "COLUMNS": columns, "PATCHES": warps, "CHANNELS": 32}
        shape |= {"EDGE_X": int(walls), "EDGE_Y": 0, "EVEN_X": True, "EVEN_Y": True}
        conv = shape | {"TURNED": False, "BIAS": True, "STREAM": False, "PAD_X": 0, "PAD_Y": 0}
        yield twin._conv_kernel, warps, forward, conv
        turned = conv | {"TURNED": True, "BIAS": False, "STREAM": not walls}
        turned |= {"EDGE_X": 2, "PAD_X": 3, "EVEN_X": False} if walls else {}
        yield twin._conv_kernel, warps, backward, turned
        yield twin._taps_gradient_kernel, warps, forward, shape
        if not walls:
            own, width = layer_norm_triton.NORM_SETTINGS, block(dim)
            norm = {"DIM": dim, "POINTS": own.size // width, "BLOCK_D": width}
            yield layer_norm_triton._norm_kernel, own.warps, forward, norm
            own = layer_norm_triton.NORM_GRADIENT_SETTINGS
            yield layer_norm_triton._norm_gradient_kernel, own.warps, forward, norm


@needs_triton
@pytest.mark.slow
def test_kernels_on_hopper_mostly_multiply_and_spill_nothing(tmp_path: Path) -> None:
    compiled = runpy.run_path(str(Path(__file__).with_name("test_hopper_code.py")))["compiled"]
    for kernel, warps, arguments, constants in hopper_kernels():
        settings = SimpleNamespace(warps=warps, stages=1)
        stack, _, code = compiled(kernel, settings, arguments, constants, tmp_path)
        name = f"{kernel.__name__} {constants}"
        assert stack == 0, name
        if kernel.__name__ == "_conv_kernel":
            assert code.count("FFMA") == 49 * constants["ROWS"] * constants["COLUMNS"], name
            if constants["BIAS"] and not constants["EDGE_X"]:
                instructions = code.count("/* 0x") // 2 - code.count(" NOP")
                assert code.count("FFMA") > 0.7 * instructions, name
        if "norm" in kernel.__name__:
            assert "LDG.E.128" in code, name
