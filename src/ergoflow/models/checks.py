"""What the models ask of their settings and states, in one wording each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_counts(config: object, *names: str) -> None:
    """Raise unless the fields of these names are at least 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, got {getattr(config, name)}; choose a positive number")


def check_choice(config: object, name: str, allowed: Sequence[object]) -> None:
    """Raise unless a field is one of the allowed values."""
    if getattr(config, name) not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {getattr(config, name)!r}; choose one of these")


def check_coordinate_range(coordinate_range: tuple[float, float]) -> None:
    """Raise unless the range is (start, stop) with start < stop."""
    start, stop = coordinate_range
    if not start < stop:
        raise ValueError(
            f"coordinate_range must be (start, stop) with start < stop, got {coordinate_range}; choose (0, 1)"
        )


def check_state(z: Tensor, channels: int, num_axes: int) -> None:
    """Raise unless z is (B, channels, *grid) with `num_axes` grid axes."""
    if z.ndim != 2 + num_axes or z.shape[1] != channels:
        raise ValueError(
            f"a state must be (B, {channels}, *grid) with {num_axes} grid axes, got {tuple(z.shape)}; "
            "build the model for these channels and this grid"
        )
