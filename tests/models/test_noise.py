from __future__ import annotations

import pytest
import torch

from ergoflow.models.noise import _STEP, _mixed, white_noise


def state(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_words_are_those_of_splitmix64() -> None:
    """The first outputs of the generator with seed 0, as its reference implementation prints them."""
    words = _mixed(_STEP * torch.arange(1, 4))
    assert [word % 2**64 for word in words.tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_noise_is_white() -> None:
    """Channels, points, samples and the state itself: of 61,440 numbers, means and correlations are .004 by chance."""
    z = state(4, 2, 64, 48)
    noise = white_noise(z, 5)
    assert noise.mean().abs() < 0.02
    assert noise.var().item() == pytest.approx(1, abs=0.02)
    assert noise.abs().max() < 3**0.5
    assert (noise[:, 1:] * noise[:, :-1]).mean().abs() < 0.02
    assert (noise[1:] * noise[:-1]).mean().abs() < 0.02
    assert (noise * z[:, :1]).mean().abs() < 0.02
    assert (noise * z[:, 1:]).mean().abs() < 0.02
    for axis in (-1, -2):
        assert (noise * noise.roll(1, axis)).mean().abs() < 0.02


def test_noise_is_a_function_of_every_digit_of_every_field() -> None:
    z = state(2, 3, 32, 24)
    noise = white_noise(z, 4)
    assert torch.equal(noise, white_noise(z.clone(), 4))
    for channel in range(3):
        moved = z.clone()
        moved[:, channel] = torch.nextafter(moved[:, channel], torch.tensor(torch.inf))
        assert (noise * white_noise(moved, 4)).mean().abs() < 0.03


def test_noise_moves_with_the_state_and_does_not_know_its_precision() -> None:
    z = state(2, 2, 12, 10)
    noise = white_noise(z, 3)
    assert torch.equal(white_noise(z.roll(3, -1), 3), noise.roll(3, -1))
    assert torch.equal(white_noise(z.double(), 3), noise)
    assert torch.equal(white_noise(z, 2), noise[:, :2])


@pytest.mark.parametrize("grid", [(13,), (5, 7, 6)])
def test_noise_has_the_axes_of_its_state_and_no_derivative(grid: tuple[int, ...]) -> None:
    z = state(2, 3, *grid).requires_grad_()
    noise = white_noise(z, 2)
    assert noise.shape == (2, 2, *grid)
    assert not noise.requires_grad
