"""The D3Q19 lattice: its tables, its equilibrium, its moments.

Nineteen velocities c_i on the cubic lattice with weights w_i and speed of sound c_s² = 1/3 (Qian, d'Humières &
Lallemand, Europhys. Lett. 1992). Populations are kept as f_i − w_i, the departure from rest at density 1, so that
float32 does not spend its digits on a constant. Every function takes populations (19, ...) and any grid after that.

The order is rest, then nine opposite pairs: for odd i, c_{i+1} = −c_i and c_i is the one whose first non-zero
component is positive. The kernels rely on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SOUND_SPEED_SQUARED = 1 / 3

_HEADS = (
    (1, 0, 0),
    (0, 1, 0),
    (0, 0, 1),
    (1, 1, 0),
    (1, -1, 0),
    (1, 0, 1),
    (1, 0, -1),
    (0, 1, 1),
    (0, 1, -1),
)
VELOCITIES: tuple[tuple[int, int, int], ...] = (
    (0, 0, 0),
    *(velocity for x, y, z in _HEADS for velocity in ((x, y, z), (-x, -y, -z))),
)
"""The velocities c_i as (x, y, z), 19 of them."""

_WEIGHT_BY_SPEED_SQUARED = (1 / 3, 1 / 18, 1 / 36)
WEIGHTS: tuple[float, ...] = tuple(_WEIGHT_BY_SPEED_SQUARED[x * x + y * y + z * z] for x, y, z in VELOCITIES)
OPPOSITE: tuple[int, ...] = tuple(VELOCITIES.index((-x, -y, -z)) for x, y, z in VELOCITIES)


def weights_like(tensor: Tensor) -> Tensor:
    """Return the weights (19, 1, ...), shaped to multiply populations (19, ...) like `tensor`."""
    weights = torch.tensor(WEIGHTS, dtype=tensor.dtype, device=tensor.device)
    return weights.reshape(-1, *(1,) * (tensor.ndim - 1))


def density_excess(populations: Tensor) -> Tensor:
    """Return ρ − 1 = Σ_i (f_i − w_i), shape (19, ...) -> (...)."""
    return _combine([1] * len(VELOCITIES), populations)


def first_moment(populations: Tensor) -> Tensor:
    """Return Σ_i c_i f_i, shape (19, ...) -> (3, ...)."""
    return torch.stack([_combine([c[a] for c in VELOCITIES], populations) for a in range(3)])


def second_moment(populations: Tensor) -> Tensor:
    """Return Σ_i c_i c_i (f_i − w_i), shape (19, ...) -> (3, 3, ...). At rest it is (ρ − 1)/3 on the diagonal."""
    entries = [[_combine([c[a] * c[b] for c in VELOCITIES], populations) for b in range(3)] for a in range(3)]
    return torch.stack([torch.stack(row) for row in entries])


def along_velocities(vector: Tensor) -> Tensor:
    """Return c_i·v for each velocity, shape (3, ...) -> (19, ...)."""
    return torch.stack([_combine(c, vector) for c in VELOCITIES])


def trace(tensor: Tensor) -> Tensor:
    """Return the trace of (3, 3, ...), shape (...)."""
    return tensor[0, 0] + tensor[1, 1] + tensor[2, 2]


def from_moments(excess: Tensor, momentum: Tensor, flux: Tensor) -> Tensor:
    """Return the populations f − w (19, ...) of second order in Hermite polynomials with the given moments,

        f_i = w_i [ρ + 3 c_i·m + (9/2)(c_i c_i − 1/3) : Π],

    from ρ − 1 (...), m (3, ...) and Π (3, 3, ...), the second moment less ρ/3 on the diagonal.
    """
    along = along_velocities(momentum)
    projected = torch.stack([_combine(c, [_combine(c, row) for row in flux]) for c in VELOCITIES])
    return weights_like(along) * (excess + 3 * along + 4.5 * projected - 1.5 * trace(flux))


def third_order(skew: Tensor) -> Tensor:
    """Return the populations (19, ...) whose moments up to second order vanish and whose Σ c_a² c_b f is skew[a, b].

    For a ≠ b, (3, 3, ...) -> (19, ...); the diagonal of `skew` is not read. The six polynomials (c_a² − 1/3)c_b are
    all of third order that D3Q19 can tell apart: diagonal velocities in the plane of a and b carry
    ¼(c_b skew[a, b] + c_a skew[b, a]), and the axis b takes back the momentum, −½ c_b Σ_a skew[a, b].
    """
    fields = [torch.zeros_like(skew[0, 0])]
    for velocity in VELOCITIES[1:]:
        axes = [a for a in range(3) if velocity[a]]
        if len(axes) == 1:
            (b,) = axes
            taken = skew[(b + 1) % 3, b] + skew[(b + 2) % 3, b]
            fields.append(-0.5 * velocity[b] * taken)
        else:
            a, b = axes
            fields.append(0.25 * (velocity[b] * skew[a, b] + velocity[a] * skew[b, a]))
    return torch.stack(fields)


def equilibrium(excess: Tensor, velocity: Tensor) -> Tensor:
    """Return f_eq − w (19, ...) for ρ − 1 of shape (...) and a velocity (3, ...):

    f_eq = w_i ρ [1 + 3 c_i·u + (9/2)(c_i·u)² − (3/2)|u|²].
    """
    along = along_velocities(velocity)
    speed_squared = velocity.square().sum(dim=0)
    bracket = 3 * along + 4.5 * along.square() - 1.5 * speed_squared
    return weights_like(along) * (excess + (1 + excess) * bracket)


def _combine(coefficients: Sequence[int], fields: Sequence[Tensor] | Tensor) -> Tensor:
    """Return Σ coefficient·field. Sums and not a matrix product, which on a GPU may round to TF32."""
    total = torch.zeros_like(fields[0])
    for coefficient, field in zip(coefficients, fields, strict=True):
        if coefficient:
            total = total + coefficient * field
    return total
