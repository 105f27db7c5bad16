"""The Triton kernel against the float64 reference: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ergoflow.ops import lbm
from ergoflow.ops.lbm import Collision

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the triton package is missing")

# (Y, X, Z), steps, collision. No side a power of two; the third box fills two programs per row, the last one barely.
CASES: dict[str, tuple[tuple[int, int, int], int, dict[str, float | str | bool]]] = {
    "channel": ((3, 7, 6), 5, {"smagorinsky": 0.1, "force": 1e-4}),
    "damped": ((2, 5, 10), 2, {"smagorinsky": 0.1, "force": 1e-4, "damping_length": 3.0, "trace_removal": True}),
    "wide": ((2, 23, 26), 2, {"smagorinsky": 0.1, "force": 1e-4}),
    "periodic": ((3, 3, 6), 2, {"force": 1e-4, "walls": False, "trace_removal": True}),
    "regularized": ((3, 3, 6), 2, {"force": 1e-4, "smagorinsky": 0.2, "operator": "regularized"}),
    "traceless": ((2, 3, 6), 2, {"force": 1e-4, "operator": "regularized", "trace_removal": True, "walls": False}),
}
# float32 rounds each of some 40 additions per step to 6e-8; float16 storage each population to 5e-4 per step.
TOLERANCE = {"float32": 3e-6, "float16": 2e-3}


def errors(case: str, device: str, *, rounds: int = 1) -> dict[str, float]:
    """Return ‖kernel − reference‖/‖reference‖ for both storages, NaN where the kernel left an output unwritten."""
    box, steps, options = CASES[case]
    collision = Collision(tau=0.51, **options)  # type: ignore[arg-type]
    start = 1e-3 * torch.randn((19, *box), generator=torch.Generator().manual_seed(len(case)))
    reference = start.double()
    lattices = {"float32": start.to(device), "float16": lbm.to_half_storage(start).to(device)}
    for _ in range(rounds * steps):
        reference = lbm.stream_collide(reference, collision, impl="torch")
        for name, state in lattices.items():
            out = torch.full_like(state, float("nan"))
            lattices[name] = lbm.stream_collide(state, collision, impl="triton", out=out)
    final = {"float32": lattices["float32"].cpu(), "float16": lbm.from_half_storage(lattices["float16"].cpu())}
    return {name: float((state.double() - reference).norm() / reference.norm()) for name, state in final.items()}


@pytest.fixture(scope="module")
def interpreted(interpret) -> dict[str, dict[str, float]]:
    return interpret(__file__, "{case: errors(case, 'cpu') for case in CASES}")


@needs_triton
@pytest.mark.parametrize("storage", ["float32", "float16"])
@pytest.mark.parametrize("case", list(CASES))
def test_interpreted_kernel_is_the_reference(case: str, storage: str, interpreted: dict[str, dict[str, float]]) -> None:
    assert interpreted[case][storage] < TOLERANCE[storage]


@needs_triton
@pytest.mark.slow
def test_interpreted_kernel_is_the_reference_over_many_steps(interpret) -> None:
    long = interpret(__file__, "{'channel': errors('channel', 'cpu', rounds=10)}")["channel"]
    for storage, error in long.items():
        assert error < 5 * TOLERANCE[storage]


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("case", list(CASES))
def test_gpu_kernel_is_the_reference(case: str) -> None:
    for storage, error in errors(case, "cuda").items():
        assert error < TOLERANCE[storage]


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("storage", ["float32", "float16"])
def test_gpu_kernel_is_the_reference_over_many_steps_in_a_large_odd_box(storage: str) -> None:
    collision = Collision(tau=0.55, force=1e-5, smagorinsky=0.1)
    start = 1e-3 * torch.randn((19, 33, 47, 30), generator=torch.Generator().manual_seed(0))
    reference = start.double().cuda()
    state = (lbm.to_half_storage(start) if storage == "float16" else start).cuda()
    for _ in range(100):
        reference = lbm.stream_collide(reference, collision, impl="torch")
        state = lbm.stream_collide(state, collision, impl="triton", out=torch.full_like(state, float("nan")))
    final = lbm.from_half_storage(state) if storage == "float16" else state
    assert float((final.double() - reference).norm() / reference.norm()) < 5 * TOLERANCE[storage]


@needs_triton
def test_kernel_refuses_float64() -> None:
    from ergoflow.ops.lbm_triton import launch

    state = torch.zeros(19, 4, 4, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="float64"):
        launch(state, torch.empty_like(state), Collision(tau=0.6), half=False)
