from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ergoflow.models.positions import (
    KEPT_TABLES,
    PositionCode,
    axis_coordinates,
    draw_frequencies,
    fourier_features,
    fourier_phases,
)

DOUBLE = {"device": torch.device("cpu"), "dtype": torch.float64}


def kernel_estimate(grid, frequencies, coordinate_range=(0.0, 1.0)):
    """(1/m) Σ cos(φ_i − φ_j) for all pairs of points, (N, N)."""
    phases = fourier_phases(grid, frequencies, coordinate_range).flatten(0, -2)  # (N, m)
    features = torch.cat([phases.cos(), phases.sin()], dim=-1)
    return features @ features.T / frequencies.shape[1]


def gaussian_kernel(grid, sigma, coordinate_range=(0.0, 1.0)):
    axes = [axis_coordinates(size, coordinate_range, **DOUBLE) for size in grid]
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)  # (N, A)
    return torch.exp(-2 * math.pi**2 * sigma**2 * torch.cdist(points, points).square())


@pytest.mark.parametrize("coordinate_range", [(0.0, 1.0), (-0.5, 1.7)])
@pytest.mark.parametrize("grid", [(9,), (5, 7), (3, 2, 5)])
def test_features_of_many_frequencies_give_the_gaussian_kernel(grid, coordinate_range):
    sigma, count = 0.6, 60_000
    generator = torch.Generator().manual_seed(1)
    frequencies = draw_frequencies(len(grid), count, sigma, generator=generator).double()
    error = kernel_estimate(grid, frequencies, coordinate_range) - gaussian_kernel(grid, sigma, coordinate_range)
    # A mean of `count` cosines deviates by at most count^(-1/2) in the rms; five of these for the worst pair.
    assert error.abs().max() < 5 / math.sqrt(count)


def test_kernel_error_falls_as_the_square_root_of_the_number_of_frequencies():
    grid, sigma = (7,), 1.5
    exact = gaussian_kernel(grid, sigma)
    generator = torch.Generator().manual_seed(2)

    def rms(count):
        draws = [draw_frequencies(1, count, sigma, generator=generator).double() for _ in range(200)]
        errors = torch.stack([kernel_estimate(grid, frequencies) - exact for frequencies in draws])
        return errors.square().mean().sqrt()

    assert rms(64) / rms(1024) == pytest.approx(4, rel=0.15)


def test_coordinates_exclude_the_end_and_nest_when_the_grid_is_doubled():
    coarse, fine = (axis_coordinates(size, (0.0, 1.0), **DOUBLE) for size in (15, 30))
    assert coarse[0] == 0
    assert coarse[-1] == pytest.approx(1 - 1 / 15)
    torch.testing.assert_close(fine[::2], coarse)
    angles = axis_coordinates(8, (1.0, 1.0 + 2 * math.pi), **DOUBLE)
    torch.testing.assert_close(angles.diff(), torch.full((7,), math.pi / 4, dtype=torch.float64))


def test_phases_of_each_axis_use_the_frequencies_of_that_axis():
    frequencies = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 5.0]], dtype=torch.float64)
    phases = fourier_phases((4, 5), frequencies)
    assert phases.shape == (4, 5, 3)
    expected = 2 * math.pi * torch.tensor([3 / 4, 3 * 2 / 5, 2 * 3 / 4 + 5 * 2 / 5], dtype=torch.float64)
    torch.testing.assert_close(phases[3, 2], expected)


def test_phases_keep_float32_under_autocast():
    frequencies = draw_frequencies(2, 16, 8.0, generator=torch.Generator().manual_seed(3))
    expected = fourier_phases((33, 65), frequencies)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fourier_phases((33, 65), frequencies), expected, rtol=0, atol=0)


def test_code_without_spread_is_the_same_everywhere_and_with_spread_is_not():
    generator = torch.Generator().manual_seed(4)
    flat = PositionCode(6, 2, sigma=0.0, generator=generator)((3, 5))
    assert flat.shape == (3, 5, 6)
    torch.testing.assert_close(flat, flat[:1, :1].expand(3, 5, 6))
    code = PositionCode(6, 2, sigma=1.0, generator=generator)((3, 5))
    assert (code - code[:1, :1]).abs().amax(-1).flatten()[1:].min() > 1e-3


def test_frequencies_are_saved_but_not_trained():
    code = PositionCode(8, 3, sigma=8.0)
    assert "frequencies" in code.state_dict()
    assert sum(p.numel() for p in code.parameters()) == 8 * 8 + 8


def test_odd_width_is_refused():
    with pytest.raises(ValueError, match="dim must be even"):
        PositionCode(7, 1, sigma=1.0)


# Kept features


def written(grid, frequencies):
    phases = fourier_phases(grid, frequencies)
    return torch.cat([phases.cos(), phases.sin()], dim=-1)


def small_code(seed=5):
    return PositionCode(6, 2, sigma=2.0, generator=torch.Generator().manual_seed(seed))


def written_code(code, grid):
    return code.project(written(grid, code.frequencies).to(code.project.weight.dtype))


def test_features_are_made_once_per_grid_and_dtype():
    frequencies = draw_frequencies(2, 3, 2.0, generator=torch.Generator().manual_seed(5))
    features = fourier_features((4, 5), frequencies)
    torch.testing.assert_close(features, written((4, 5), frequencies), rtol=0, atol=0)
    assert fourier_features([4, 5], frequencies) is features
    assert fourier_features((5, 4), frequencies).shape == (5, 4, 6)
    half = fourier_features((4, 5), frequencies, dtype=torch.bfloat16)
    torch.testing.assert_close(half, features.bfloat16(), rtol=0, atol=0)
    assert fourier_features((4, 5), frequencies) is features
    shifted = fourier_features((4, 5), frequencies, (0.5, 1.5))
    torch.testing.assert_close(
        shifted, torch.cat([(p := fourier_phases((4, 5), frequencies, (0.5, 1.5))).cos(), p.sin()], -1)
    )


def test_only_some_grids_are_kept():
    frequencies = draw_frequencies(1, 3, 2.0, generator=torch.Generator().manual_seed(5))
    first = fourier_features((3,), frequencies)
    others = [fourier_features((size,), frequencies) for size in range(4, 4 + KEPT_TABLES)]
    assert fourier_features((3,), frequencies) is not first
    assert fourier_features((3 + KEPT_TABLES,), frequencies) is others[-1]


def test_changed_frequencies_give_another_code():
    code, other = small_code(), small_code(seed=6)
    before = code((3, 4))
    code.load_state_dict(other.state_dict())
    torch.testing.assert_close(code((3, 4)), other((3, 4)), rtol=0, atol=0)
    assert not torch.allclose(code((3, 4)), before)
    code.frequencies.mul_(2)
    torch.testing.assert_close(code((3, 4)), written_code(code, (3, 4)))
    code.frequencies = code.frequencies + 1
    torch.testing.assert_close(code((3, 4)), written_code(code, (3, 4)))
    code.load_state_dict({name: value + 1 for name, value in other.state_dict().items()}, assign=True)
    torch.testing.assert_close(code((3, 4)), written_code(code, (3, 4)))


def test_moved_and_copied_codes_have_features_of_their_own():
    code = small_code()
    code((3, 4))
    copies = [copy.deepcopy(code), pickle.loads(pickle.dumps(code))]
    for twin in copies:
        twin.frequencies.add_(1)
        torch.testing.assert_close(twin((3, 4)), written_code(twin, (3, 4)))
    torch.testing.assert_close(code((3, 4)), written_code(code, (3, 4)))
    assert code.double()((3, 4)).dtype == torch.float64
    torch.testing.assert_close(code((3, 4)), written_code(code, (3, 4)))
    assert set(code.state_dict()) == {"frequencies", "project.weight", "project.bias"}
    assert code.to("meta")((3, 4)).is_meta


def without_data(code):
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert code((3, 4)).shape == (3, 4, 6)


def test_features_made_in_inference_mode_or_while_tracing_do_not_reach_training():
    for first in (
        without_data,
        lambda code: torch.inference_mode()(code)((3, 4)),
        lambda code: torch.func.vjp(lambda x: x * code((3, 4)), torch.ones(6)),
        lambda code: torch.func.vmap(lambda x: x * code((3, 4)))(torch.ones(2, 6)),
    ):
        code = small_code()
        first(code)
        result = code((3, 4))
        result.sum().backward()
        torch.testing.assert_close(result, written_code(code, (3, 4)))
        torch.testing.assert_close(code.project.weight.grad[0], written((3, 4), code.frequencies).sum((0, 1)))


def test_trainable_frequencies_receive_a_gradient():
    frequencies = draw_frequencies(1, 3, 2.0, generator=torch.Generator().manual_seed(5)).requires_grad_()
    fourier_features((5,), frequencies).sum().backward()
    assert frequencies.grad.abs().min() > 0


def test_code_under_autocast_is_the_product_of_rounded_features():
    code = small_code()
    with torch.autocast("cpu", torch.bfloat16):
        result, expected = code((9, 7)), written_code(code, (9, 7))
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert code((9, 7)).dtype == torch.float32
