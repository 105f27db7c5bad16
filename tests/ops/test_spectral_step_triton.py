"""The fused kernels against the float64 step: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from ergoflow.numerics.fourier import dealias_mask
from ergoflow.solvers.kolmogorov import KolmogorovConfig, initial_vorticity, make_step

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing")

# Both radices on each axis, one program and several per axis; domains other than 2π. Values: fields and substeps.
CASES: dict[str, tuple[tuple[int, int], int, int]] = {
    "64x64": ((64, 64), 2, 2),
    "256x64": ((256, 64), 1, 1),
    "64x256": ((64, 256), 1, 1),
}
# Rounding to 6e-8 in some ten additions of each of two transforms, at each of 5 stages and at both ends.
TOLERANCE = 1.5e-6


def flow(grid: tuple[int, int]) -> KolmogorovConfig:
    return KolmogorovConfig(grid=grid, length=(3.0, 5.0), forcing_wavenumber=3, forcing_amplitude=40.0)


def white_noise(config: KolmogorovConfig, count: int) -> Tensor:
    """Noise whose velocity is of order one at every scale; what lies outside the mask is for the step to drop."""
    generator = torch.Generator().manual_seed(count)
    return 20 * torch.randn(count, 1, *config.grid, dtype=torch.float64, generator=generator)


def errors(case: str, device: str) -> dict[str, float]:
    """Return ‖triton − float64‖/‖float64‖, the same of torch's float32, and how far the state moved."""
    grid, count, substeps = CASES[case]
    config = flow(grid)
    start = white_noise(config, count)
    exact = make_step(config, substeps=substeps, dtype=torch.float64)(start)
    # Uninitialised memory is filled with NaN, so that a number nobody wrote cannot pass.
    torch.use_deterministic_algorithms(True)
    try:
        results = {
            impl: make_step(config, substeps=substeps, device=device, impl=impl)(start.float().to(device))  # type: ignore[arg-type]
            for impl in ("triton", "torch")
        }
    finally:
        torch.use_deterministic_algorithms(False)
    found = {impl: float((r.cpu().double() - exact).norm() / exact.norm()) for impl, r in results.items()}
    inside = torch.fft.irfft2(torch.fft.rfft2(start) * dealias_mask(grid), s=grid)
    from_rest = make_step(config, dtype=torch.float64)(torch.zeros_like(start))
    changes = {"moved": exact - inside, "forced": from_rest}
    return found | {name: float(change.norm() / exact.norm()) for name, change in changes.items()}


def derivative_message() -> str:
    step = make_step(flow((64, 64)), impl="triton")
    try:
        step(torch.zeros(1, 1, 64, 64, requires_grad=True))
    except ValueError as error:
        return str(error)
    return ""


def judge(found: dict[str, float]) -> None:
    assert found["moved"] > 0.01
    assert found["forced"] > 1e-4
    assert found["triton"] < TOLERANCE
    assert found["triton"] < 2 * found["torch"]


@pytest.fixture(scope="module")
def interpreted(interpret) -> dict[str, dict[str, float]]:
    return interpret(__file__, "{case: errors(case, 'cpu') for case in CASES} | {'message': derivative_message()}")


@needs_triton
@pytest.mark.parametrize("case", list(CASES))
def test_interpreted_kernels_are_the_float64_step(case: str, interpreted: dict[str, dict[str, float]]) -> None:
    judge(interpreted[case])


@needs_triton
def test_kernels_refuse_derivatives(interpreted: dict[str, dict[str, float]]) -> None:
    assert "choose impl='torch'" in str(interpreted["message"])


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", list(CASES))
def test_gpu_kernels_are_the_float64_step(case: str) -> None:
    judge(errors(case, "cuda"))


@needs_triton
@pytest.mark.gpu
def test_gpu_kernels_follow_float64_at_full_size_over_many_steps_and_chunks() -> None:
    from ergoflow.ops.spectral_step_triton import FIELDS_PER_CHUNK

    config = KolmogorovConfig()
    start = initial_vorticity(config, 3, seed=5, dtype=torch.float64).cuda()
    many = start.float().repeat(FIELDS_PER_CHUNK, 1, 1, 1)
    exact = make_step(config, substeps=24, device="cuda", dtype=torch.float64)(start)
    step = make_step(config, substeps=12, device="cuda", impl="triton")
    fields = step(step(many))
    # Trajectories do not see each other, whatever chunk and program they are in.
    assert torch.equal(fields[:3], fields[-3:])
    assert float((fields[:3].double() - exact).norm() / exact.norm()) < 2e-5
    assert torch.equal(many, start.float().repeat(FIELDS_PER_CHUNK, 1, 1, 1))
