"""Transport along lines: its matrices against first principles, the Triton twin against float64."""

from __future__ import annotations

import importlib.util
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ergoflow.models.axial import code_phases
from ergoflow.ops.transport import (
    MAX_ANGLE,
    MOST_POINTS,
    heat_kernel,
    rotation_minus_identity,
    skew_part,
    transport_lines,
)

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing")

# Relative errors of results and gradients: some ten products one after the other, each to a few 2^-23; "autocast" has
# queries and keys in bfloat16, and so their gradients, rounded to 2^-9.
TOLERANCE = {"float32": 2e-6, "autocast": 5e-3}

# Shape (B, *grid, D), heads, F, axis, periodic, gain of the queries and keys, dissipation.
Case = tuple[tuple[int, ...], int, int, int, bool, float, bool]
CASES: dict[str, Case] = {
    "first": ((2, 16, 3, 6), 2, 3, 0, True, 3.0, True),
    "last": ((1, 2, 32, 96), 2, 12, 1, True, 3.0, True),
    "walls": ((2, 24, 2, 15), 3, 5, 0, False, 3.0, True),
    "rotation": ((1, 3, 16, 20), 1, 4, 1, True, 3.0, False),
    "line": ((2, 5, 3), 1, 1, 0, True, 3.0, True),
    "space": ((1, 2, 20, 3, 6), 3, 2, 1, False, 3.0, True),
    # Angles of some 1e-3, and far beyond MAX_ANGLE.
    "small": ((1, 2, 16, 8), 2, 4, 1, True, 0.1, False),
    "large": ((1, 2, 32, 8), 2, 4, 1, True, 30.0, True),
    "larger": ((2, 24, 2, 12), 3, 5, 0, False, 300.0, False),
}
# The layers of `ergoformer` on 128² and 256².
LARGE: dict[str, Case] = {
    "128 first": ((4, 32, 32, 192), 4, 12, 0, True, 3.0, True),
    "128 last": ((4, 32, 32, 192), 4, 12, 1, True, 3.0, True),
    "128 large": ((4, 32, 32, 192), 4, 12, 1, True, 30.0, True),
    "256": ((1, 64, 64, 192), 4, 12, 0, False, 3.0, True),
}


def draw(case: Case, device: str) -> tuple[list[Tensor], Tensor]:
    """Return x, queries and keys, and the rates, and the phases."""
    shape, heads, frequencies, axis, periodic, gain, dissipation = case
    generator = torch.Generator().manual_seed(shape[1 + axis])
    x = torch.randn(shape, generator=generator)
    projected = gain * torch.randn(*shape[:-1], heads * 4 * frequencies, generator=generator)
    rates = [1e-2 * torch.rand(heads, generator=generator)] if dissipation else []
    phases = code_phases(shape[1 + axis], torch.arange(frequencies).double() * (1.0 if periodic else 0.5))
    return [t.to(device) for t in (x, projected, *rates)], phases.to(device)


def run(case: Case, tensors: list[Tensor], phases: Tensor, impl: str) -> Tensor:
    _, heads, _, axis, periodic, _, _ = case
    x, projected, *rates = tensors
    return transport_lines(
        x, projected, phases, rates[0] if rates else None, axis=axis, heads=heads, periodic=periodic, impl=impl
    )


def gap(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact.detach()).norm() / exact.detach().norm())


def errors(case: Case, device: str) -> dict[str, float]:
    """Return the largest relative error of results and gradients; memory that a kernel leaves unwritten is NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    worst = {}
    for name in TOLERANCE:
        drawn, phases = draw(case, device)
        if name == "autocast":
            drawn[1] = drawn[1].bfloat16()
        tensors = [tensor.requires_grad_() for tensor in drawn]
        exact = [tensor.detach().double().requires_grad_() for tensor in drawn]
        out = run(case, tensors, phases.float(), "triton")
        assert out.dtype == torch.float32
        expected = run(case, exact, phases, "reference")
        seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
        gradients = torch.autograd.grad(out, tensors, seed)
        wanted = torch.autograd.grad(expected, exact, seed.double())
        assert [g.dtype for g in gradients] == [t.dtype for t in tensors]
        gaps = [gap(a, b) for a, b in zip([out, *gradients], [expected, *wanted], strict=True)]
        worst[name] = float("nan") if any(g != g for g in gaps) else max(gaps)
    return worst


def norm_error(device: str, gain: float) -> float:
    """Return by how much the norm of one line and head differs from what it was, at most, relative to it."""
    case = ((1, 4, 32, 96), 2, 12, 1, True, gain, False)
    tensors, phases = draw(case, device)
    before = tensors[0].double().unflatten(-1, (2, -1)).norm(dim=(2, 4))  # (B, X, H)
    after = run(case, tensors, phases.float(), "triton").double().unflatten(-1, (2, -1)).norm(dim=(2, 4))
    return float((after / before - 1).abs().max())


@pytest.fixture(scope="module")
def interpreted(interpret) -> dict:
    runs = "{case: errors(CASES[case], 'cpu') for case in CASES}"
    return interpret(__file__, f"{{**{runs}, 'norm': [norm_error('cpu', gain) for gain in (0.3, 3.0, 30.0)]}}")


@needs_triton
@pytest.mark.parametrize("name", list(TOLERANCE))
@pytest.mark.parametrize("case", list(CASES))
def test_interpreted_kernels_are_the_reference(case: str, name: str, interpreted: dict) -> None:
    assert interpreted[case][name] < TOLERANCE[name]


@needs_triton
def test_kernels_preserve_the_norm_of_every_line_and_head(interpreted: dict) -> None:
    assert max(interpreted["norm"]) < 1e-6


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE])
def test_gpu_kernels_are_the_reference(case: str) -> None:
    for name, worst in errors((CASES | LARGE)[case], "cuda").items():
        assert worst < TOLERANCE[name]


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("gain", [0.3, 3.0, 30.0])
def test_gpu_kernels_preserve_the_norm_of_every_line_and_head(gain: float) -> None:
    assert norm_error("cuda", gain) < 1e-6


@needs_triton
@pytest.mark.slow
def test_kernels_on_hopper_use_matrix_instructions_and_spill_little(tmp_path: Path) -> None:
    from ergoflow.ops import transport_triton as twin

    compiled = runpy.run_path(str(Path(__file__).with_name("test_hopper_code.py")))["compiled"]
    wide = ("x", "turns", "heat", "out", "turned", "d_out", "d_x", "d_turned", "d_rates")
    arguments = dict.fromkeys(wide, "*fp32") | {"projected": "*bf16", "d_projected": "*bf16", "after": "i32"}
    sizes = {"SIZE": 32, "FREQUENCIES": 12, "DIM": 48, "HEADS": 4, "HEAT": True, "WEIGHT": 24**-0.5 / 32}
    for kernel, table, most in (
        (twin._transport_kernel, twin.SETTINGS, 8),
        (twin._values_gradient_kernel, twin.VALUES_SETTINGS, 64),
        # Six of the matrices, of which a thread has 64 bytes each.
        (twin._codes_gradient_kernel, twin.CODES_SETTINGS, 400),
    ):
        own = table[32]
        blocks = {"BLOCK_S": 32, "BLOCK_F": 16, "BLOCK_D": own.columns, "PRECISION": own.precision}
        constants = {name: value for name, value in (sizes | blocks).items() if name in kernel.arg_names}
        settings = SimpleNamespace(warps=own.warps, stages=1, registers=own.registers)
        stack, _, code = compiled(kernel, settings, arguments, constants, tmp_path)
        assert stack <= most, kernel
        assert "HMMA.1688.F32.TF32" in code, kernel


# The operator


def test_transport_of_every_line_is_the_written_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 6, 4, generator=generator, dtype=torch.float64)
    projected = 3 * torch.randn(2, 5, 6, 2 * 8, generator=generator, dtype=torch.float64)
    rates = torch.tensor([0.01, 0.3], dtype=torch.float64)
    phases = code_phases(6, torch.arange(2.0, dtype=torch.float64))
    moved = transport_lines(x, projected, phases, rates, axis=1, heads=2, periodic=True)
    for b, row, head in ((0, 0, 0), (1, 3, 1), (0, 4, 1)):
        q, k = projected[b, row, :, 8 * head : 8 * head + 8].chunk(2, dim=-1)
        q, k = (torch.complex(c[:, :2], c[:, 2:]) * torch.polar(torch.ones_like(phases), phases) for c in (q, k))
        kernel = (q.conj() @ k.mT).real / (6 * math.sqrt(4))
        rotation = torch.linalg.matrix_exp((kernel - kernel.mT) / 2)
        heat = heat_kernel(6, rates, periodic=True)[head]
        values = x[b, row, :, 2 * head : 2 * head + 2]
        torch.testing.assert_close(
            moved[b, row, :, 2 * head : 2 * head + 2], heat @ rotation @ values, rtol=0, atol=1e-9
        )


def test_more_points_than_registers_hold_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ergoflow.ops.choice._INTERPRETED", True)
    size = MOST_POINTS + 1
    x, projected = torch.randn(1, size, 2), torch.randn(1, size, 4)
    phases = torch.zeros(size, 1)
    fast, plain = (
        transport_lines(x, projected, phases, None, axis=0, heads=1, periodic=True, impl=impl)
        for impl in ("triton", "reference")
    )
    assert torch.equal(fast, plain)


def test_transport_refuses_phases_of_another_axis_and_channels_that_do_not_fit() -> None:
    x, projected = torch.zeros(1, 4, 6, 4), torch.zeros(1, 4, 6, 16)
    with pytest.raises(ValueError, match="with 6 points, as phases has, along axis 0, got"):
        transport_lines(x, projected, torch.zeros(6, 2), None, axis=0, heads=2, periodic=True)
    with pytest.raises(ValueError, match="projected 2 × 4 × 3, got 4 and 16"):
        transport_lines(x, projected, torch.zeros(4, 3), None, axis=0, heads=2, periodic=True)


def field(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def skew(size: int, angle: float, *, batch: tuple[int, ...] = (), seed: int = 1) -> torch.Tensor:
    """A random skew matrix of spectral norm `angle`."""
    a = skew_part(field(*batch, size, size, seed=seed))
    return a * (angle / torch.linalg.matrix_norm(a, 2))[..., None, None]


def rotation(a: torch.Tensor) -> torch.Tensor:
    return rotation_minus_identity(a) + torch.eye(a.shape[-1], dtype=a.dtype)


# The rotation


@pytest.mark.parametrize("size", [1, 2, 7, 16])
@pytest.mark.parametrize("angle", [1e-3, 0.5, 2.0])
def test_rotation_is_the_matrix_exponential(size: int, angle: float) -> None:
    a = skew(size, angle, batch=(2, 3)) if size > 1 else torch.zeros(2, 3, 1, 1, dtype=torch.float64)
    torch.testing.assert_close(rotation(a), torch.linalg.matrix_exp(a), rtol=0, atol=1e-9)


@pytest.mark.parametrize("angle", [0.0, 1e-6, 1.0, MAX_ANGLE, 1e6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 3e-6)])
def test_rotation_is_orthogonal_for_every_skew_matrix(angle: float, dtype: torch.dtype, tolerance: float) -> None:
    u = rotation(skew(32, angle, batch=(4,)).to(dtype))
    torch.testing.assert_close(u.mT @ u, torch.eye(32, dtype=dtype).expand(4, -1, -1), rtol=0, atol=tolerance)


def test_small_rotation_keeps_its_digits_in_single_precision() -> None:
    a = skew(16, 1e-4)
    exact = torch.linalg.matrix_exp(a) - torch.eye(16, dtype=torch.float64)
    error = (rotation_minus_identity(a.float()).double() - exact).norm()
    assert error < 1e-6 * exact.norm()


def test_largest_rotation_is_bounded_and_its_direction_kept() -> None:
    a = skew(8, 1e4)
    limited = rotation(a)
    # The bound on the norm is not sharp for a random matrix: the angles are between a third of MAX_ANGLE and all of it.
    angles = torch.linspace(MAX_ANGLE / 3, MAX_ANGLE, 201, dtype=torch.float64).tolist()
    errors = [(torch.linalg.matrix_exp(a / 1e4 * angle) - limited).abs().max().item() for angle in angles]
    assert min(errors) < 2e-2


@pytest.mark.parametrize("cells", [0.3, 1.0])
@pytest.mark.parametrize("size", [15, 16])
def test_rotation_by_a_uniform_advection_moves_a_wave_by_that_many_cells(size: int, cells: float) -> None:
    points = torch.arange(size, dtype=torch.float64)
    n = torch.arange(1, (size + 1) // 2, dtype=torch.float64)
    offset = points[:, None] - points
    spectral = -(2 / size) * (n * torch.sin(2 * math.pi * n * offset[..., None] / size)).sum(-1)
    u = rotation(-cells * 2 * math.pi / size * spectral)
    wave = torch.sin(2 * math.pi * 3 * points / size)
    torch.testing.assert_close(u @ wave, torch.sin(2 * math.pi * 3 * (points - cells) / size), rtol=0, atol=1e-9)


def test_rotation_has_the_gradient_of_the_exponential_and_a_finite_one_at_zero() -> None:
    a = field(2, 4, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda k: rotation_minus_identity(skew_part(k)), (a,))
    assert torch.autograd.gradcheck(lambda k: rotation_minus_identity(skew_part(20 * k)), (a,))
    zero = torch.zeros(4, 4, requires_grad=True)
    rotation_minus_identity(skew_part(zero)).sum().backward()
    assert zero.grad.isfinite().all()


# The heat kernel


@pytest.mark.parametrize("size", [8, 9])
def test_heat_kernel_damps_waves_by_the_square_of_their_number(size: int) -> None:
    rates = torch.tensor([0.0, 0.02, 0.3], dtype=torch.float64)
    points = torch.arange(size, dtype=torch.float64)
    for n in range(size // 2 + 1):
        around = torch.cos(2 * math.pi * n * points / size + 0.4)
        expected = torch.exp(-rates * n**2)[:, None] * around
        torch.testing.assert_close(heat_kernel(size, rates, periodic=True) @ around, expected)
    for n in range(size):
        across = torch.cos(math.pi * n * (points + 0.5) / size)
        expected = torch.exp(-rates * (n / 2) ** 2)[:, None] * across
        torch.testing.assert_close(heat_kernel(size, rates, periodic=False) @ across, expected)


@pytest.mark.parametrize("periodic", [True, False])
def test_heat_kernel_is_a_symmetric_contraction_that_keeps_the_mean(periodic: bool) -> None:
    heat = heat_kernel(11, torch.tensor([0.01, 1.0], dtype=torch.float64), periodic=periodic)
    torch.testing.assert_close(heat, heat.mT)
    values = torch.linalg.eigvalsh(heat)
    assert values.min() > -1e-12
    assert values.max() < 1 + 1e-12
    torch.testing.assert_close(heat.sum(-1), torch.ones(2, 11, dtype=torch.float64))


def test_heat_spreads_around_a_periodic_axis_and_stops_at_walls() -> None:
    rate = torch.tensor([0.05], dtype=torch.float64)
    around, across = (heat_kernel(16, rate, periodic=p)[0] for p in (True, False))
    torch.testing.assert_close(around[0, 15], around[0, 1])
    assert across[0, 15].abs() < 1e-3 * across[0, 1]
