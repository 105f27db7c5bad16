"""Noise out of the digits of a state.

A plane of a channel does not determine its own future: what arrives from upstream must be drawn. Drawn from a
generator, it would make a step depend on more than its state. Here the bits of all fields on a block of
points are mixed into one word, as a hash function does, and the noise is made of that word: the step stays a function,
nothing has to be saved or seeded, and states that differ in the last digit have unrelated noise. The rounds are those
of splitmix64 (Steele, Lea and Flood 2014).

Noise is given in blocks because what is drawn anew at every point shows in the fine scales of a forecast, where a flow
has little.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import interpolate

# As signed numbers; products wrap around.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)
_SHIFTS = (30, 27, 31)
# Leading bits of a word that make a number.
_BITS = 24


@torch.no_grad()
def block_noise(state: Tensor, channels: int, side: int) -> Tensor:
    """Return noise (B, channels, *grid), evenly spread with mean 0 and variance 1, of a state (B, C, *grid).

    It is one number on each block of `side` points along every axis, a function of all the numbers in the block,
    rounded to float32, and has no derivative.
    """
    words = state.detach().to(torch.float32).view(torch.int32).to(torch.int64)
    word = torch.zeros_like(words[:, :1])
    for field in words.split(1, dim=1):
        word = _mixed(word + field + _STEP)
    for axis in range(2, state.ndim):
        word = _mixed(word).unflatten(axis, (-1, side)).sum(axis + 1)
    numbers = torch.arange(1, channels + 1, device=state.device).reshape(-1, *(1,) * (state.ndim - 2))
    drawn = _mixed(word + _STEP * numbers)
    even = (_shifted(drawn, 64 - _BITS).to(torch.float32) + 0.5) / 2**_BITS
    return interpolate(math.sqrt(12) * (even - 0.5), scale_factor=side)


def _mixed(word: Tensor) -> Tensor:
    """Return words every bit of which depends on every bit of the given ones."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        word = (word ^ _shifted(word, shift)) * factor
    return word ^ _shifted(word, _SHIFTS[-1])


def _shifted(word: Tensor, places: int) -> Tensor:
    """Return words shifted right with zeros coming in, where >> would copy the sign."""
    return (word >> places) & (2 ** (64 - places) - 1)
