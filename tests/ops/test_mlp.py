"""The MLP of a ConvNeXt block: torch's own against the formula, the Triton twin against float64."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ergoflow.models.convnext import ConvNeXtBlock, ConvNeXtConfig
from ergoflow.ops.choice import use_impl
from ergoflow.ops.mlp import add_mlp

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing")

# Relative errors: float32 sums of some hundred terms; bfloat16 results, saved values, gradients rounded to 2^-9 each.
# "autocast": a float32 stream and float32 weights, rounded for the products.
TOLERANCE = {"float32": 1e-6, "autocast": 1e-2, "bfloat16": 1e-2}
# Shape (*points, D), and hidden channels: no multiples of a tile.
CASES = {"plane": ((2, 5, 7, 6), 24), "line": ((3, 11, 40), 70), "point": ((1, 5), 5)}
LARGE = {"first": ((4, 64, 64, 96), 384), "second": ((4, 32, 32, 192), 768), "third": ((4, 16, 16, 320), 1280)}


def gap(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())


def errors(shape: tuple[int, ...], hidden: int, device: str) -> dict[str, float]:
    """Return the largest relative error of results and gradients; memory that a kernel leaves unwritten is NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    dim = shape[-1]
    worst = {}
    for name in TOLERANCE:
        generator = torch.Generator().manual_seed(hidden)
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        drawn = [torch.randn(shape, generator=generator) for _ in range(2)]
        drawn += [torch.randn(hidden, dim, generator=generator) / dim**0.5, torch.randn(hidden, generator=generator)]
        drawn += [torch.randn(dim, hidden, generator=generator) / hidden**0.5, torch.randn(dim, generator=generator)]
        tensors = [t.to(device, dtype).requires_grad_() for t in drawn]
        exact = [t.detach().double().requires_grad_() for t in tensors]
        with torch.autocast(device, torch.bfloat16, enabled=name == "autocast"):
            out = add_mlp(*tensors, impl="triton")
        assert out.dtype == dtype
        expected = add_mlp(*exact, impl="reference")
        seed = torch.randn(shape, generator=generator).to(device, dtype)
        gradients = torch.autograd.grad(out, tensors, seed)
        wanted = torch.autograd.grad(expected, exact, seed.double())
        gaps = [gap(a, b) for a, b in zip([out, *gradients], [expected, *wanted], strict=True)]
        worst[name] = float("nan") if any(g != g for g in gaps) else max(gaps)
    return worst


def gelu_error() -> float:
    """Return the largest error of the kernel's GELU and of its derivative, anywhere in (−12, 12)."""
    from ergoflow.ops.mlp_triton import gelu, gelu_gradient

    a = torch.linspace(-12, 12, 8 * 128).view(8, 128)
    exact = a.double().requires_grad_()
    torch.nn.functional.gelu(exact).sum().backward()
    slope, again, _ = gelu_gradient(torch.ones_like(a), a, torch.zeros(128))
    value = gelu(a, torch.zeros(128))
    assert torch.equal(value, again)
    off = (value - torch.nn.functional.gelu(a.double())) / a.abs().clamp_min(1)
    return max(float(off.abs().max()), float((slope - exact.grad).abs().max()))


def block_error(device: str, dim: int, grid: tuple[int, int], kernel: int) -> float:
    """Return the error of a whole block with kernels under autocast, and of its gradients, against float64."""
    generator = torch.Generator().manual_seed(dim)
    block = ConvNeXtBlock(ConvNeXtConfig(kernel=kernel), dim, (False, True), generator=generator)
    twin = ConvNeXtBlock(ConvNeXtConfig(kernel=kernel), dim, (False, True)).double()
    twin.load_state_dict({name: value.double() for name, value in block.state_dict().items()})
    block, twin = block.to(device), twin.to(device)
    x = torch.randn(2, *grid, dim, generator=generator).to(device).requires_grad_()
    with torch.autocast(device, torch.bfloat16), use_impl("triton"):
        out = block(x)
    exact = x.detach().double().requires_grad_()
    expected = twin(exact)
    seed = torch.randn(x.shape, generator=generator).to(device)
    gradients = torch.autograd.grad(out, (x, *block.parameters()), seed)
    wanted = torch.autograd.grad(expected, (exact, *twin.parameters()), seed.double())
    return max(gap(a, b) for a, b in zip([out, *gradients], [expected, *wanted], strict=True))


def small_tiles() -> None:
    """Make tiles small, so that small fields fill several of them."""
    from ergoflow.ops import mlp_triton as twin

    small = twin.Settings(rows=8, columns=32, warps=1)
    twin.GELU_SETTINGS = twin.GELU_GRADIENT_SETTINGS = twin.ADD_SETTINGS = twin.ROUND_SETTINGS = small
    twin.PROGRAMS = twin.GELU_GRADIENT_PROGRAMS = 6


@pytest.fixture(scope="module")
def interpreted(interpret) -> dict:
    runs = "{case: errors(*CASES[case], 'cpu') for case in CASES}"
    others = "'gelu': gelu_error(), 'block': block_error('cpu', 12, (5, 4), 3)"
    return interpret(__file__, f"small_tiles() or {{**{runs}, {others}}}")


@needs_triton
@pytest.mark.parametrize("name", list(TOLERANCE))
@pytest.mark.parametrize("case", list(CASES))
def test_interpreted_kernels_are_the_reference(case: str, name: str, interpreted: dict) -> None:
    assert interpreted[case][name] < TOLERANCE[name]


@needs_triton
def test_gelu_of_the_kernels_is_exact_to_float32(interpreted: dict) -> None:
    # 7e-8 of the approximation; slopes up to 1.13 are rounded by 6e-8 two or three times.
    assert interpreted["gelu"] < 3e-7


@needs_triton
def test_block_with_kernels_is_the_block_without(interpreted: dict) -> None:
    # Some ten roundings to 2^-9 one after the other.
    assert interpreted["block"] < 2e-2


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_gpu_kernels_are_the_reference(case: str) -> None:
    # Torch's own products in float32, over up to 16,384 points.
    tolerance = {**TOLERANCE, "float32": 5e-6}
    for name, worst in errors(*(CASES | LARGE)[case], "cuda").items():
        assert worst < tolerance[name]


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "grid"), [(96, (64, 64)), (192, (32, 32)), (320, (16, 16)), (5, (9, 7))])
def test_gpu_block_with_kernels_is_the_block_without(dim: int, grid: tuple[int, int]) -> None:
    assert block_error("cuda", dim, grid, 7) < 2e-2


@pytest.mark.parametrize("impl", ["auto", "reference", "torch"])
def test_mlp_is_the_written_formula(impl: str) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 5), (2, 3, 5), (7, 5), (7,), (5, 7), (5,)]
    x, z, expand, b, contract, c = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    a = z @ expand.T + b
    hidden = a * (1 + torch.erf(a / 2**0.5)) / 2
    torch.testing.assert_close(add_mlp(x, z, expand, b, contract, c, impl=impl), x + hidden @ contract.T + c)


@needs_triton
@pytest.mark.slow
def test_kernels_on_hopper_copy_sixteen_bytes_at_a_time_and_spill_nothing(tmp_path: Path) -> None:
    from ergoflow.ops import mlp_triton as twin

    compiled = runpy.run_path(str(Path(__file__).with_name("test_hopper_code.py")))["compiled"]
    half, wide = dict.fromkeys(("a", "d_out", "y", "out"), "*bf16"), dict.fromkeys(("bias", "parts", "x"), "*fp32")
    for dim in (96, 192, 320):
        for kernel, tile, width in (
            (twin._gelu_kernel, twin.GELU_SETTINGS, 4 * dim),
            (twin._gelu_gradient_kernel, twin.GELU_GRADIENT_SETTINGS, 4 * dim),
            (twin._add_kernel, twin.ADD_SETTINGS, dim),
            (twin._round_kernel, twin.ROUND_SETTINGS, dim),
        ):
            arguments = half | wide | {"count": "i32"} | ({"out": "*fp32"} if kernel is twin._add_kernel else {})
            constants = {"WIDTH": width, "ROWS": tile.rows, "COLUMNS": tile.columns}
            settings = SimpleNamespace(warps=tile.warps, stages=1)
            stack, _, code = compiled(kernel, settings, arguments, constants, tmp_path)
            assert stack == 0, kernel
            assert "LDG.E.128" in code, kernel
