from __future__ import annotations

import json

import pytest
import torch

from ergoflow.data.normalize import Normalizer

STATS = {
    "mean": {"rho": 1.0, "velocity": [2.0, 3.0]},
    "std": {"rho": 0.5, "velocity": [4.0, 5.0]},
    "std_delta": {"rho": 0.1, "velocity": [0.2, 0.3]},
}
CHANNELS = ("rho", "velocity_x", "velocity_y")


def normalizer() -> Normalizer:
    return Normalizer.from_statistics(STATS, CHANNELS)


def test_channels_take_their_own_component_of_a_vector() -> None:
    assert normalizer().mean.tolist() == [1.0, 2.0, 3.0]
    assert normalizer().std.tolist() == [0.5, 4.0, 5.0]
    assert normalizer().std_delta.tolist() == pytest.approx([0.1, 0.2, 0.3])


def test_a_scalar_field_with_an_underscore_is_not_a_component() -> None:
    stats = {key: {"velocity_x": 7.0, "velocity": [1.0, 2.0]} for key in ("mean", "std", "std_delta")}
    assert Normalizer.from_statistics(stats, ("velocity_x",)).mean.tolist() == [7.0]


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5), (2, 3, 5, 4), (2, 3, 5, 4, 3)])
def test_each_channel_is_shifted_and_scaled_by_its_own_numbers(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    z = normalizer().normalize(x)
    for channel, (mean, std) in enumerate(((1.0, 0.5), (2.0, 4.0), (3.0, 5.0))):
        torch.testing.assert_close(z[:, channel], (x[:, channel] - mean) / std)
    torch.testing.assert_close(normalizer().denormalize(z), x)


def test_windows_are_normalised_along_the_channel_axis_not_the_time_axis() -> None:
    # Three frames and three channels: only the number of grid axes tells them apart.
    x = torch.randn(2, 3, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    z = normalizer().normalize(x, grid_ndim=2)
    torch.testing.assert_close(z[:, :, 1], (x[:, :, 1] - 2.0) / 4.0)
    torch.testing.assert_close(normalizer().denormalize(z, grid_ndim=2), x)


def test_json_round_trip_is_exact() -> None:
    values = torch.rand(3, 3, generator=torch.Generator().manual_seed(1)) + 0.1
    before = Normalizer(*values)
    after = Normalizer.from_dict(json.loads(json.dumps(before.to_dict())))
    for name in ("mean", "std", "std_delta"):
        assert torch.equal(getattr(before, name), getattr(after, name))
        assert getattr(after, name).dtype == torch.float32
    assert after.to("cpu").mean.device.type == "cpu"


def test_wrong_shapes_and_spreads_raise() -> None:
    one = torch.ones(3)
    with pytest.raises(ValueError, match=r"shape \(C,\)"):
        Normalizer(one, one, torch.ones(2))
    with pytest.raises(ValueError, match="std must be positive"):
        Normalizer(one, torch.tensor([1.0, 0.0, 1.0]), one)
    with pytest.raises(ValueError, match="std_delta must be positive"):
        Normalizer(one, one, torch.tensor([1.0, float("nan"), 1.0]))
    with pytest.raises(ValueError, match="mean must be finite"):
        Normalizer(torch.tensor([1.0, float("inf"), 1.0]), one, one)
    with pytest.raises(ValueError, match=r"C=3, 2 grid axes"):
        normalizer().normalize(torch.zeros(2, 4, 5, 5))


def test_a_stride_the_statistics_do_not_hold_raises_unless_given() -> None:
    with pytest.raises(ValueError, match=r"'std_delta@5' for stride 5.*compute_increment_std"):
        Normalizer.from_statistics(STATS, CHANNELS, stride=5)
    given = Normalizer.from_statistics(STATS, CHANNELS, stride=5, std_delta=[1.0, 2.0, 3.0])
    assert given.std_delta.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="'std_delta' of 'pressure'"):
        Normalizer.from_statistics(STATS, ("pressure",))
