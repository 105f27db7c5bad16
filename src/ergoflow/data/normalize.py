"""Between physical units and the model's: z = (x - mean) / std per channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ergoflow.data.statistics import compute_increment_std, increment_key
from ergoflow.data.store import TrajectoryStore

__all__ = ["Normalizer", "compute_increment_std"]


@dataclass(frozen=True, eq=False)
class Normalizer:
    """Mean and spread of the state and spread of its increments per channel, each (C,).

    `std_delta` belongs to one stride: it is the standard deviation of x[t + stride] - x[t].
    """

    mean: Tensor
    std: Tensor
    std_delta: Tensor

    def __post_init__(self) -> None:
        """Check that the three agree in shape and that one can divide by the spreads."""
        shapes = [tuple(value.shape) for value in (self.mean, self.std, self.std_delta)]
        if len(set(shapes)) != 1 or self.mean.ndim != 1:
            raise ValueError(f"mean, std and std_delta must all have shape (C,), got {shapes}; align them")
        if not torch.isfinite(self.mean).all():
            raise ValueError(f"mean must be finite, got {self.mean.tolist()}; check the data")
        for name, value in (("std", self.std), ("std_delta", self.std_delta)):
            if not (torch.isfinite(value).all() and (value > 0).all()):
                raise ValueError(f"{name} must be positive and finite, got {value.tolist()}; drop constant channels")

    @classmethod
    def from_statistics(
        cls,
        stats: Mapping[str, Mapping[str, Any]],
        fields: Sequence[str],
        *,
        stride: int = 1,
        std_delta: Sequence[float] | np.ndarray | Tensor | None = None,
    ) -> Normalizer:
        """Return the normaliser of channels `fields` from the contents of `stats.yaml`.

        `std_delta` (C,) is the increments' spread at `stride`; None means that `stats` holds it.
        """
        if std_delta is None:
            key = increment_key(stride)
            if key not in stats:
                raise ValueError(
                    f"statistics must hold {key!r} for stride {stride}, got {sorted(stats)}; "
                    "pass std_delta=compute_increment_std(store, stride)"
                )
            std_delta = _channels(stats, key, fields)
        return cls(
            mean=torch.tensor(_channels(stats, "mean", fields), dtype=torch.float32),
            std=torch.tensor(_channels(stats, "std", fields), dtype=torch.float32),
            std_delta=torch.as_tensor(std_delta, dtype=torch.float32),
        )

    @classmethod
    def from_store(cls, store: TrajectoryStore, *, stride: int = 1) -> Normalizer:
        """Return the normaliser of a data set; a stride missing in `stats.yaml` is computed from the data."""
        stats = store.statistics
        known = increment_key(stride) in stats
        spread = None if known else compute_increment_std(store, stride)
        return cls.from_statistics(stats, store.info.fields, stride=stride, std_delta=spread)

    def normalize(self, state: Tensor, *, grid_ndim: int | None = None) -> Tensor:
        """Return (state - mean) / std for (..., C, *grid); `grid_ndim` None means shape (B, C, *grid)."""
        return (state - self._over(self.mean, state, grid_ndim)) / self._over(self.std, state, grid_ndim)

    def denormalize(self, state: Tensor, *, grid_ndim: int | None = None) -> Tensor:
        """Return state·std + mean for (..., C, *grid); `grid_ndim` None means shape (B, C, *grid)."""
        return state * self._over(self.std, state, grid_ndim) + self._over(self.mean, state, grid_ndim)

    def to(self, device: str | torch.device) -> Normalizer:
        """Return the same normaliser on another device."""
        return Normalizer(mean=self.mean.to(device), std=self.std.to(device), std_delta=self.std_delta.to(device))

    def to_dict(self) -> dict[str, list[float]]:
        """Return the numbers as lists, ready for JSON (float32 survives the round trip exactly)."""
        return {"mean": self.mean.tolist(), "std": self.std.tolist(), "std_delta": self.std_delta.tolist()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Sequence[float]]) -> Normalizer:
        """Return the normaliser that `to_dict` described."""
        return cls(**{name: torch.tensor(content[name]) for name in ("mean", "std", "std_delta")})

    def _over(self, values: Tensor, state: Tensor, grid_ndim: int | None) -> Tensor:
        """Return (C,) shaped to broadcast over the grid axes of a state (..., C, *grid)."""
        ndim = state.ndim - 2 if grid_ndim is None else grid_ndim
        if not 0 <= ndim < state.ndim or state.shape[-1 - ndim] != len(values):
            raise ValueError(
                f"the state must be (..., C={len(values)}, {ndim} grid axes), got {tuple(state.shape)}; give grid_ndim"
            )
        return values.to(state.dtype).reshape(-1, *(1,) * ndim)  # C 1 1


def _channels(stats: Mapping[str, Mapping[str, Any]], key: str, fields: Sequence[str]) -> list[float]:
    """Return one number per channel; `velocity_x` takes its component of the list stored under `velocity`."""
    numbers: list[float] = []
    taken: dict[str, int] = {}
    for name in fields:
        vector = name.rsplit("_", 1)[0]
        if np.ndim(stats[key].get(name, [0])) == 0:
            numbers.append(float(stats[key][name]))
        elif np.ndim(stats[key].get(vector, 0)) > 0:
            components = np.ravel(stats[key][vector])
            numbers.append(float(components[taken.setdefault(vector, 0)]))
            taken[vector] += 1
        else:
            raise ValueError(
                f"statistics must hold {key!r} of {name!r}, got {sorted(stats[key])}; recompute stats.yaml"
            )
    return numbers
