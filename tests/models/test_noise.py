from __future__ import annotations

import pytest
import torch

from ergoflow.models.noise import _STEP, _mixed, block_noise


def state(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_words_are_those_of_splitmix64() -> None:
    """The first outputs of the generator with seed 0, as its reference implementation prints them."""
    words = _mixed(_STEP * torch.arange(1, 4))
    assert [word % 2**64 for word in words.tolist()] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def mixed(word: int) -> int:
    """A round of splitmix64 in whole numbers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ word >> shift) * factor % 2**64
    return word ^ word >> 31


def test_noise_is_the_hash_of_the_bits_in_its_block_point_by_point_and_row_by_row() -> None:
    z = state(1, 2, 4, 6)
    noise, bits = block_noise(z, 3, 2)[0], z[0].view(torch.int32).tolist()

    def word(x: int, y: int) -> int:
        first = mixed((bits[0][x][y] + _STEP) % 2**64)
        return mixed((first + bits[1][x][y] + _STEP) % 2**64)

    for x, y in ((0, 0), (2, 4)):
        rows = [mixed(word(x, j)) + mixed(word(x + 1, j)) for j in (y, y + 1)]
        block = sum(mixed(row % 2**64) for row in rows)
        for channel in range(3):
            drawn = mixed((block + _STEP * (channel + 1)) % 2**64) >> 40
            assert noise[channel, x, y].item() == pytest.approx(12**0.5 * ((drawn + 0.5) / 2**24 - 0.5), abs=1e-6)


@pytest.mark.parametrize("side", [1, 2])
def test_noise_is_white(side: int) -> None:
    """Channels, blocks, samples and the state itself: of 61,440 numbers, means and correlations are .004 by chance."""
    z = state(4, 2, 64 * side, 48 * side)
    noise, z = block_noise(z, 5, side)[..., ::side, ::side], z[..., ::side, ::side]
    assert noise.mean().abs() < 0.02
    assert noise.var().item() == pytest.approx(1, abs=0.02)
    assert noise.abs().max() < 3**0.5
    assert (noise[:, 1:] * noise[:, :-1]).mean().abs() < 0.02
    assert (noise[1:] * noise[:-1]).mean().abs() < 0.02
    assert (noise * z[:, :1]).mean().abs() < 0.02
    assert (noise * z[:, 1:]).mean().abs() < 0.02
    for axis in (-1, -2):
        assert (noise * noise.roll(1, axis)).mean().abs() < 0.02


def test_noise_is_one_number_on_each_block() -> None:
    noise = block_noise(state(2, 3, 12, 8), 4, 4)
    coarse = noise[..., ::4, ::4]
    assert torch.equal(noise, coarse.repeat_interleave(4, -1).repeat_interleave(4, -2))
    assert len(coarse.flatten().unique()) == coarse.numel()


@pytest.mark.parametrize("place", [(0, 4, 4), (1, 7, 7), (2, 5, 6)])
def test_a_digit_anywhere_in_a_block_changes_its_noise_and_no_other(place: tuple[int, int, int]) -> None:
    z = state(64, 3, 12, 12)
    noise, moved = block_noise(z, 4, 4), z.clone()
    moved[:, *place] = torch.nextafter(moved[:, *place], torch.tensor(torch.inf))
    changed = block_noise(moved, 4, 4)
    inside = torch.zeros(12, 12, dtype=torch.bool)
    inside[4:8, 4:8] = True
    assert torch.equal(changed[..., ~inside], noise[..., ~inside])
    # Of 256 independent products, the mean is .06 by chance.
    assert (changed * noise)[..., 4, 4].mean().abs() < 0.25


def test_noise_moves_with_the_state_by_whole_blocks_and_does_not_know_its_precision() -> None:
    z = state(2, 2, 12, 10)
    noise = block_noise(z, 3, 2)
    assert torch.equal(block_noise(z.roll(4, -1), 3, 2), noise.roll(4, -1))
    assert torch.equal(block_noise(z.double(), 3, 2), noise)
    assert torch.equal(block_noise(z, 2, 2), noise[:, :2])


@pytest.mark.parametrize("grid", [(15,), (6, 9, 3)])
def test_noise_has_the_axes_of_its_state_and_no_derivative(grid: tuple[int, ...]) -> None:
    z = state(2, 3, *grid).requires_grad_()
    noise = block_noise(z, 2, 3)
    assert noise.shape == (2, 2, *grid)
    assert not noise.requires_grad
