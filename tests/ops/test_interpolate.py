"""Reading between grid points: exact where a cubic is, of fourth order elsewhere, and Triton agrees with gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ergoflow.ops.interpolate import interpolate, reference_interpolate

GRID = (7, 10)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_whole_shifts_move_fields_around_the_periodic_plane() -> None:
    fields = random(2, 3, *GRID)
    for rows, columns in ((0, 0), (1, 0), (-2, 3), (15, -21)):
        shift = torch.tensor([float(rows), float(columns)], dtype=torch.float64).view(1, 2, 1, 1).expand(2, 2, *GRID)
        assert torch.equal(interpolate(fields, shift), fields.roll((-rows, -columns), (2, 3)))


def test_cubics_are_read_exactly_away_from_the_seam() -> None:
    x, y = torch.meshgrid(*(torch.arange(16, dtype=torch.float64) / 16 for _ in range(2)), indexing="ij")

    def polynomial(x: Tensor, y: Tensor) -> Tensor:
        return (1 - 2 * x + x**3) * (y**3 - y**2) + x * y

    shift = 2 * torch.rand(1, 2, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64) - 1
    result = interpolate(polynomial(x, y)[None, None], shift)
    expected = polynomial(x + shift[0, 0] / 16, y + shift[0, 1] / 16)
    inner = slice(2, 13)
    torch.testing.assert_close(result[0, 0, inner, inner], expected[inner, inner], rtol=0, atol=1e-14)


def test_waves_are_read_with_fourth_order() -> None:
    def error(size: int) -> float:
        x = 2 * math.pi * torch.arange(size, dtype=torch.float64) / size
        shift = random(1, 2, size, size, seed=2)
        wave = torch.sin(x)[:, None] * torch.cos(2 * x)
        places = [x[:, None] + 2 * math.pi * shift[0, 0] / size, x + 2 * math.pi * shift[0, 1] / size]
        expected = torch.sin(places[0]) * torch.cos(2 * places[1])
        return (interpolate(wave[None, None], shift)[0, 0] - expected).abs().max().item()

    assert 14 < error(32) / error(64) < 18


def test_gradients_are_those_of_the_formula() -> None:
    # Away from whole shifts: there the second derivative jumps, and differences see both sides.
    shift = random(1, 2, 4, 5, seed=1).floor() + 0.5 + 0.3 * torch.sin(random(1, 2, 4, 5, seed=2))
    fields = random(1, 2, 4, 5)
    assert torch.autograd.gradcheck(interpolate, (fields.requires_grad_(), shift.requires_grad_()))


def errors_of_triton(device: str = "cpu") -> list[float]:
    """Largest errors of values and gradients against float64, relative to the largest number."""
    fields, shift = random(3, 2, *GRID, dtype=torch.float32), 8 * random(3, 2, *GRID, seed=1, dtype=torch.float32)
    weight = random(3, 2, *GRID, seed=2)

    def results(function: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = [tensor.detach().to(device, dtype).requires_grad_() for tensor in (fields, shift)]
        result = function(*inputs)
        result.backward(weight.to(device, dtype))
        return [result.detach(), *(tensor.grad for tensor in inputs)]

    fast = results(lambda *inputs: interpolate(*inputs, impl="triton"), torch.float32)
    exact = results(reference_interpolate, torch.float64)
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(fast, exact, strict=True)]


def test_triton_agrees_in_values_and_gradients(interpret) -> None:
    assert max(interpret(__file__, "errors_of_triton()")) < 1e-6


@pytest.mark.gpu
def test_triton_agrees_on_a_gpu() -> None:
    assert max(errors_of_triton("cuda")) < 1e-6


def test_shift_of_another_grid_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got \(1, 1, 4, 4\) and \(1, 2, 4, 5\); give one shift per point"):
        interpolate(torch.zeros(1, 1, 4, 4), torch.zeros(1, 2, 4, 5))
