"""Forecasts without parameters, in normalised units: what every learned model has to beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class PersistenceConfig:
    """Tomorrow is like today; it has no settings."""


@dataclass(frozen=True, kw_only=True)
class ClimatologyConfig:
    """Tomorrow is the mean field; it has no settings."""


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Tomorrow is zero; it has no settings."""


class Persistence(nn.Module):
    """The forecast z_{k+1} = z_k."""

    def forward(self, z: Tensor) -> Tensor:
        """Return the input (B, C, *grid) itself."""
        return z


class Climatology(nn.Module):
    """The forecast z_{k+1} = `field`, a buffer (C, *grid), zero until it is filled with the training mean."""

    field: Tensor

    def __init__(self, channels: int, grid: tuple[int, ...]) -> None:
        super().__init__()
        self.register_buffer("field", torch.zeros(channels, *grid))

    def forward(self, z: Tensor) -> Tensor:
        """Return one copy of the field per sample, (B, C, *grid)."""
        if z.shape[2:] != self.field.shape[1:]:
            raise ValueError(
                f"a state on the grid {tuple(self.field.shape[1:])} was expected, got {tuple(z.shape[2:])}; "
                "compute the climatology on the grid of the states"
            )
        return self.field.to(z.dtype).expand(z.shape[0], *self.field.shape).clone()


class Zero(nn.Module):
    """The forecast z_{k+1} = 0 with `channels` channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels

    def forward(self, z: Tensor) -> Tensor:
        """Return zeros (B, C, *grid)."""
        return z.new_zeros(z.shape[0], self.channels, *z.shape[2:])
