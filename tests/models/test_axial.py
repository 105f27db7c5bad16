from __future__ import annotations

import math

import pytest
import torch

from ergoflow.models.attention import low_rank_kernel
from ergoflow.models.axial import AxisKernel, apply_along, code_phases
from ergoflow.ops.transport import complex_kernel

D, H, F = 6, 4, 3
A3M = ("mean", "max", "min")


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def field(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def axis_kernel(axis: int, *, pooling=(), periodic=True, codes="complex") -> AxisKernel:
    return AxisKernel(
        D, axis, periodic=periodic, pooling=pooling, heads=H, frequencies=F, codes=codes, generator=seeded()
    ).double()


def derivative(size: int, band: int) -> torch.Tensor:
    """The spectral derivative on S points, modes below `band`, per cycle of the axis: f(i) → f'(i)."""
    offset = torch.arange(size, dtype=torch.float64)[:, None] - torch.arange(size, dtype=torch.float64)
    n = torch.arange(1, band, dtype=torch.float64)
    return -(2 / size) * (n * torch.sin(2 * math.pi * n * offset[..., None] / size)).sum(-1)


# Codes


def test_complex_kernel_is_the_written_sum() -> None:
    q, k = field(2, 5, 6, seed=2), field(2, 5, 6, seed=3)
    phases = code_phases(5, torch.arange(3.0, dtype=torch.float64))
    q_c, k_c = torch.complex(q[..., :3], q[..., 3:]), torch.complex(k[..., :3], k[..., 3:])
    expected = torch.zeros(2, 5, 5, dtype=torch.float64)
    for i in range(5):
        for j in range(5):
            turn = torch.polar(torch.ones(3).double(), 2 * math.pi * torch.arange(3).double() * (j - i) / 5)
            expected[:, i, j] = (q_c[:, i].conj() * k_c[:, j] * turn).real.sum(-1) / math.sqrt(6)
    torch.testing.assert_close(complex_kernel(q, k, phases), expected)


@pytest.mark.parametrize("size", [16, 13])
def test_skew_part_of_a_complex_kernel_holds_advection_by_any_velocity(size: int) -> None:
    """q ~ u, k constant: A = −½(u D + D u), the skew-symmetric form of −u ∂."""
    band = 5
    n = torch.arange(band, dtype=torch.float64)
    u = field(size)
    zeros = torch.zeros(size, band, dtype=torch.float64)
    q = torch.cat((zeros, -u[:, None] * n), dim=-1)  # q_c = −i n u
    k = torch.cat((zeros + 2 * math.sqrt(2 * band) / size, zeros), dim=-1)
    kernel = complex_kernel(q, k, code_phases(size, n))
    d = derivative(size, band)
    advection = -(u[:, None] * d + d * u) / 2
    torch.testing.assert_close((kernel - kernel.mT) / 2, advection)
    turns = 2 * math.pi * 3 * torch.arange(size, dtype=torch.float64) / size + 1
    torch.testing.assert_close(d @ turns.sin(), 3 * turns.cos())


def test_skew_part_of_a_cosine_kernel_vanishes_for_constant_queries_and_keys() -> None:
    """A uniform velocity cannot move anything through even codes."""
    q, k = field(1, 4).expand(9, 4), field(1, 4, seed=2).expand(9, 4)
    frequencies = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    even = low_rank_kernel(q, k, code_phases(9, frequencies))
    torch.testing.assert_close(even, even.mT)
    kernel = complex_kernel(q, k, code_phases(9, frequencies[:2]))
    assert (kernel - kernel.mT).abs().max() > 0.1


def test_phases_repeat_after_the_axis_for_integers_and_after_twice_the_axis_for_half_integers() -> None:
    frequencies = torch.arange(7.0)
    for factor, turns in ((1.0, 1), (0.5, 2)):
        phases = code_phases(40, frequencies * factor)
        torch.testing.assert_close(
            phases.cos(),
            torch.cos(2 * math.pi * torch.arange(40)[:, None] * frequencies * factor / 40),
            atol=1e-5,
            rtol=0,
        )
        end = torch.cos(2 * math.pi * frequencies * factor * turns)
        torch.testing.assert_close(end, torch.ones(7), atol=1e-5, rtol=0)


# Kernels


@pytest.mark.parametrize("pooling", [(), ("mean",), A3M])
@pytest.mark.parametrize("grid", [(7,), (7, 8), (6, 7, 8)])
def test_every_line_has_its_kernel_or_all_share_one(grid: tuple[int, ...], pooling: tuple[str, ...]) -> None:
    x = field(2, *grid, D)
    for axis, size in enumerate(grid):
        others = () if pooling else tuple(side for a, side in enumerate(grid) if a != axis)
        assert axis_kernel(axis, pooling=pooling)(x).shape == (2, H, *others, size, size)


def test_kernel_of_a_line_sees_that_line_alone() -> None:
    x = field(1, 7, 8, D)
    poked = x.clone()
    poked[0, 3, 5] += 1
    along_x, along_y = axis_kernel(0), axis_kernel(1)
    assert (along_x(poked) - along_x(x)).abs().amax((0, 1, 3, 4)).nonzero().flatten().tolist() == [5]
    assert (along_y(poked) - along_y(x)).abs().amax((0, 1, 3, 4)).nonzero().flatten().tolist() == [3]


def test_pooled_sequences_feed_separate_heads() -> None:
    """Without the min, only its own heads change: 2, 1, 1 of four."""
    kernel = axis_kernel(0, pooling=A3M)
    x = field(1, 7, 8, D)
    before = kernel(x)
    with torch.no_grad():
        kernel.reducers[2].mlp.contract.bias.add_(1.0)
    changed = (kernel(x) - before).abs().amax((0, 2, 3))
    assert changed[:3].max() == 0
    assert changed[3] > 0


@pytest.mark.parametrize("codes", ["complex", "cosine", None])
@pytest.mark.parametrize("pooling", [(), A3M])
def test_translation_of_the_features_translates_the_kernel(pooling: tuple[str, ...], codes: str | None) -> None:
    x = field(2, 7, 8, D)
    for axis, other in ((0, 1), (1, 0)):
        kernel = axis_kernel(axis, pooling=pooling, codes=codes)
        expected = kernel(x).roll((3, 3), (-2, -1))
        torch.testing.assert_close(kernel(x.roll(3, 1 + axis)), expected)
        across = kernel(x) if pooling else kernel(x).roll(2, 2)
        torch.testing.assert_close(kernel(x.roll(2, 1 + other)), across)


@pytest.mark.parametrize(("codes", "periodic"), [("random", True), ("complex", False)])
def test_random_codes_and_walls_break_translations(codes: str, periodic: bool) -> None:
    x = field(2, 7, 8, D)
    kernel = axis_kernel(0, codes=codes, periodic=periodic)
    difference = kernel(x.roll(3, 1)) - kernel(x).roll((3, 3), (-2, -1))
    assert difference.norm() > 0.1 * kernel(x).norm()


def test_finer_grid_integrates_to_the_same_function() -> None:
    """The kernel carries the weights 1/S, and smooth periodic functions are integrated exactly."""

    def smooth(size: int) -> torch.Tensor:
        xi = 2 * math.pi * torch.arange(size, dtype=torch.float64) / size
        return torch.stack([torch.ones(size), xi.sin(), xi.cos(), (2 * xi).sin(), xi.cos(), xi.sin()], -1)[None]

    kernel = axis_kernel(0)
    coarse, fine = (apply_along(kernel(smooth(s)), smooth(s)[:, None].expand(-1, H, -1, -1), 0) for s in (16, 32))
    torch.testing.assert_close(fine[:, :, ::2], coarse)


@pytest.mark.parametrize("grid", [(7,), (5, 6), (3, 4, 5)])
def test_kernels_act_along_their_axis(grid: tuple[int, ...]) -> None:
    values = field(2, H, *grid, 3)
    letters = "xyz"[: len(grid)]
    for axis, letter in enumerate(letters):
        size, others = grid[axis], letters.replace(letter, "")
        shared = field(2, H, size, size, seed=4)
        out = letters.replace(letter, "i")
        expected = torch.einsum(f"bhi{letter},bh{letters}d->bh{out}d", shared, values)
        torch.testing.assert_close(apply_along(shared, values, axis), expected)
        own = field(2, H, *(grid[letters.index(o)] for o in others), size, size, seed=5)
        expected = torch.einsum(f"bh{others}i{letter},bh{letters}d->bh{out}d", own, values)
        torch.testing.assert_close(apply_along(own, values, axis), expected)


def test_kernel_stays_in_float32_under_autocast() -> None:
    kernel = axis_kernel(0).float()
    x = field(2, 7, 8, D).float()
    with torch.autocast("cpu", torch.bfloat16):
        rounded = kernel(x)
    assert rounded.dtype == torch.float32
    assert (rounded - kernel(x)).norm() < 2e-2 * rounded.norm()
