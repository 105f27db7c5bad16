"""Gradients that are no longer than usual: lengths, directions, and what becomes usual."""

from __future__ import annotations

import math

import pytest
import torch

from ergoflow.training.clipping import SHARE, clip_to_usual


def gradients(length: float) -> list[torch.Tensor]:
    """Two tensors of total norm `length`, always of one direction."""
    drawn = torch.randn(7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn *= length / drawn.norm()
    return [drawn[:3].clone(), drawn[3:].clone().view(2, 2)]


def length(parts: list[torch.Tensor]) -> float:
    return math.hypot(*(part.norm().item() for part in parts))


@pytest.mark.parametrize(("norm", "kept"), [(0.3, 0.3), (1.9, 1.9), (2.1, 2.0), (1e6, 2.0), (0.0, 0.0)])
def test_gradients_are_shortened_to_the_factor_and_keep_their_direction(norm: float, kept: float) -> None:
    parts = gradients(norm)
    usual = clip_to_usual(parts, torch.tensor(1.0, dtype=torch.float64), 2.0)
    assert length(parts) == pytest.approx(kept)
    for part, direction in zip(parts, gradients(1.0), strict=True):
        torch.testing.assert_close(part, kept * direction)
    assert usual.item() == pytest.approx(1 + SHARE * (kept - 1))


def test_the_first_gradient_is_usual() -> None:
    parts = gradients(5.0)
    assert clip_to_usual(parts, None, 2.0).item() == pytest.approx(5.0)
    assert length(parts) == pytest.approx(5.0)


def test_one_long_gradient_changes_little_and_steady_growth_is_followed() -> None:
    usual = clip_to_usual(gradients(1e9), torch.tensor(1.0, dtype=torch.float64), 2.0)
    assert usual.item() == pytest.approx(1 + SHARE)
    for _ in range(200):
        usual = clip_to_usual(gradients(10.0), usual, 2.0)
    assert usual.item() == pytest.approx(10.0, rel=0.1)


def test_complex_gradients_count_with_their_moduli() -> None:
    parts = [torch.tensor([3.0 + 4.0j]), torch.tensor([[12.0]])]
    clip_to_usual(parts, torch.tensor(1.0), 2.0)
    torch.testing.assert_close(parts[0], torch.tensor([3.0 + 4.0j]) * 2 / 13)
    torch.testing.assert_close(parts[1], torch.tensor([[12.0]]) * 2 / 13)


def test_gradients_that_are_not_finite_stay_so() -> None:
    """The loop tells the user of them; clipping must not hide them."""
    parts = [torch.tensor([1.0, float("inf")])]
    clip_to_usual(parts, torch.tensor(1.0), 2.0)
    assert not parts[0].isfinite().all()
