"""Unitary transport along the lines of a grid axis: every line moves its features by a rotation that it chooses itself.

On each line of S points and for each head, with queries q, keys k (S, 2F: F real parts, then F imaginary ones), phases
φ (S, F) and values x (S, d),

    K = 1/(S √(2F)) Re Σ_c (q_c e^{iφ_c})* k_c e^{iφ_c},     A = (K − Kᵀ)/2,     y = E exp(A) x,

exp(A) orthogonal, E = exp(r ∂²) the heat kernel with one rate r per head. The exponential needs products only (a
batched solve of many small systems, as Cayley's transform needs, is slow on a GPU): a polynomial and repeated squaring
of exp(A) − I, which keeps round-off relative to the departure from the identity. A fixed number of squarings needs a
bound on A: ‖A‖² ≤ max row sum of |A²|, which is needed anyway and nearly sharp for a translation. A larger A is scaled
down to MAX_ANGLE, for the shortest wave an advection by over one cell.

Torch writes some forty matrices per line and head to memory. The fast twin reads q, k and x where they lie, channels
last, keeps the matrices of a line on the chip, and writes y and one of them, from which its gradient makes the others.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ergoflow.ops.choice import SINGLE, Impl, choose_impl
from ergoflow.ops.differentiable import Differentiable, Numbers, Tensors, has_tangent

# The largest angle, in radians, by which exp(A) turns a mode; π moves the shortest wave by one cell.
MAX_ANGLE = 4.0
# With MAX_ANGLE the polynomial of degree 8 is used up to ¼: it errs by ¼⁹/9!, after squaring by 2e-10.
SQUARINGS = 4
# The kernels hold a dozen S×S matrices in registers.
MOST_POINTS = 64


def transport_lines(
    x: Tensor,
    projected: Tensor,
    phases: Tensor,
    rates: Tensor | None,
    *,
    axis: int,
    heads: int,
    periodic: bool,
    impl: Impl = "auto",
) -> Tensor:
    """Return E exp(A) x along one grid axis of the features x (B, *grid, D), in the dtype of x.

    `projected` (B, *grid, H·4F) holds the queries, then the keys, of one head after the other; phases (S, F); rates
    (H,) of the heat kernel, None for none. All products are in float32 at least: rounded to bfloat16 the map would not
    preserve the norm. "reference" and "torch" are torch's own; "triton" has no gradient for the phases.
    """
    _check(x, projected, phases, axis, heads)
    tensors = (x, projected, phases) if rates is None else (x, projected, phases, rates)
    with torch.autocast(x.device.type, enabled=False):
        if _takes_kernels(x, phases, impl) and not has_tangent(*tensors):
            return _TRANSPORT(tensors, (axis, heads, periodic), "triton")[0]
        return reference_transport(x, projected, phases, rates, axis, heads, periodic)


def reference_transport(
    x: Tensor, projected: Tensor, phases: Tensor, rates: Tensor | None, axis: int, heads: int, periodic: bool
) -> Tensor:
    """Return E exp(A) x with every matrix written out."""
    dtype = torch.promote_types(x.dtype, phases.dtype)
    size, lines = x.shape[1 + axis], _lines(x.to(dtype), axis, heads).contiguous()
    queries, keys = _lines(projected.to(dtype), axis, heads).chunk(2, dim=-1)  # (B, H, *others, S, 2F)
    departure = rotation_minus_identity(skew_part(complex_kernel(queries, keys / size, phases)))
    moved = (lines + departure @ lines).movedim(-2, 2)  # (B, H, S, *others, d)
    if rates is not None:
        heat = heat_kernel(size, rates, periodic=periodic)
        moved = (heat @ moved.flatten(3)).view(moved.shape)
    return moved.movedim(2, 2 + axis).movedim(1, -2).flatten(-2).to(x.dtype)


def complex_kernel(queries: Tensor, keys: Tensor, phases: Tensor) -> Tensor:
    """Return (2F)^(−1/2) Re Σ_c (q_ic e^{iφ_ic})* k_jc e^{iφ_jc}, (..., S, S); q, k (..., S, 2F), φ (S, F).

    The first F channels are real parts, the last F imaginary ones.
    """
    cosines, sines = phases.cos(), phases.sin()

    def turned(x: Tensor) -> Tensor:
        real, imaginary = x.chunk(2, dim=-1)
        return torch.cat((real * cosines - imaginary * sines, real * sines + imaginary * cosines), dim=-1)

    return (turned(queries) * queries.shape[-1] ** -0.5) @ turned(keys).mT


def skew_part(kernel: Tensor) -> Tensor:
    """Return (K − Kᵀ)/2."""
    return (kernel - kernel.mT) / 2


def rotation_minus_identity(skew: Tensor) -> Tensor:
    """Return exp(A) − I for skew A (..., S, S); A whose angles may exceed MAX_ANGLE is scaled down to it."""
    square = skew @ skew
    bound = square.abs().sum(-1).amax(-1).clamp_min(MAX_ANGLE**2)  # (...), at least ‖A‖²
    scale = (MAX_ANGLE / 2**SQUARINGS / bound.sqrt())[..., None, None]
    a, a2 = skew * scale, square * scale.square()
    a3 = a @ a2
    one = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    # Σ_{n=1}^{8} aⁿ/n!, by Paterson and Stockmeyer's scheme in a³.
    inner = a3 @ (one / 720 + a / 5040 + a2 / 40320)
    outer = a3 @ (one / 6 + a / 24 + a2 / 120 + inner)
    turned = a + a2 / 2 + outer
    for _ in range(SQUARINGS):
        turned = 2 * turned + turned @ turned  # (I + Y)² − I
    return turned


def heat_kernel(size: int, rates: Tensor, *, periodic: bool) -> Tensor:
    """Return E = exp(r ∂²) for each rate r ≥ 0, (H,) → (H, S, S), symmetric with eigenvalues exp(−r n²).

    n counts cycles per axis: the Fourier modes 0, ±1, .. on a periodic axis (in Hartley's real basis cos + sin),
    the half-integers of cos(2πn(i + ½)/S) between walls. A rate means the same on every grid.
    """
    basis, cycles = _modes(size, periodic, rates.device, rates.dtype)
    decay = torch.exp(-rates[:, None] * cycles.square())  # (H, n)
    return basis.mT @ (decay[..., None] * basis)


def _modes(size: int, periodic: bool, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the orthonormal modes of an axis, (n, S), and their cycles per axis, (n,)."""
    n = torch.arange(size, device=device, dtype=dtype)
    if periodic:
        turns = torch.remainder(n[:, None] * n, size) * (2 * math.pi / size)
        return (turns.cos() + turns.sin()) / math.sqrt(size), torch.minimum(n, size - n)
    basis = torch.cos(n[:, None] * (n + 0.5) * (math.pi / size)) * math.sqrt(2 / size)
    return torch.cat((basis[:1] / math.sqrt(2), basis[1:])), n / 2


def _lines(x: Tensor, axis: int, heads: int) -> Tensor:
    """Return features (B, *grid, H·c) as (B, H, *other axes, S, c)."""
    return x.unflatten(-1, (heads, -1)).movedim(-2, 1).movedim(2 + axis, -2)


def _takes_kernels(x: Tensor, phases: Tensor, impl: Impl) -> bool:
    # Torch is slow with small matrices in any precision.
    return choose_impl(x, impl, dtypes=SINGLE) == "triton" and len(phases) <= MOST_POINTS and not phases.requires_grad


def _check(x: Tensor, projected: Tensor, phases: Tensor, axis: int, heads: int) -> None:
    size, frequencies = phases.shape
    if x.shape[:-1] != projected.shape[:-1] or not 0 <= axis < x.ndim - 2 or x.shape[1 + axis] != size:
        raise ValueError(
            f"x and projected must be (B, *grid, channels) with {size} points, as phases has, along axis {axis}, got "
            f"{tuple(x.shape)} and {tuple(projected.shape)}; give features of one grid and the phases of its axis"
        )
    if x.shape[-1] % heads or projected.shape[-1] != heads * 4 * frequencies:
        raise ValueError(
            f"x needs a multiple of {heads} channels and projected {heads} × 4 × {frequencies}, got {x.shape[-1]} and "
            f"{projected.shape[-1]}; choose other heads or frequencies"
        )


def _forward(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    """Return y; for the gradient exp(a) − I (lines, H, S, S), [cos φ, sin φ] (2, S, F), heat (2, H, S, S) or (0,)."""
    from ergoflow.ops.transport_triton import transport

    (x, projected, phases, *rates), (axis, heads, periodic) = tensors, numbers
    turns = torch.stack((phases.cos(), phases.sin())).float()
    heat = _heat(rates[0], len(phases), bool(periodic)) if rates else turns.new_empty(0)
    return [*transport(x.contiguous(), projected.contiguous(), turns, heat, axis, heads), turns, heat]


def _backward(gradients: Tensors, tensors: Tensors, kept: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    from ergoflow.ops.transport_triton import codes_gradient, values_gradient

    (x, projected, phases, *rates), (turned, turns, heat), axis = tensors, kept, numbers[0]
    d_x, d_turned, d_rates = values_gradient(gradients[0].contiguous(), x.contiguous(), heat, turned, axis)
    d_projected = codes_gradient(d_turned, projected.contiguous(), turns, axis)
    # Nobody asks for the phases' gradient.
    return [d_x, d_projected, torch.empty_like(phases), *(d_rates.to(rate.dtype) for rate in rates)]


def _shapes(tensors: Tensors, numbers: Numbers, impl: str) -> list[Tensor]:
    (x, _, phases, *rates), heads = tensors, numbers[1]
    size, frequencies = phases.shape
    turns = phases.new_empty(2, size, frequencies, dtype=torch.float32)
    heat = turns.new_empty((2, heads, size, size) if rates else 0)
    turned = turns.new_empty(x.shape[:-1].numel() // size, heads, size, size)
    return [torch.empty_like(x, memory_format=torch.contiguous_format), turned, turns, heat]


_TRANSPORT = Differentiable("transport_lines", lambda inputs: 1, _forward, _backward, _shapes)


def _heat(rates: Tensor, size: int, periodic: bool) -> Tensor:
    """Return E − I and dE/dr, (2, H, S, S) in float32; −n² is the symbol of ∂²."""
    basis, symbol = _known_modes(size, periodic, rates.device)
    exponents = rates.float()[:, None] * symbol  # (H, n)
    decays = torch.stack((exponents.expm1(), symbol * exponents.exp()))
    return basis.mT @ (decays[..., None] * basis)


@lru_cache
def _known_modes(size: int, periodic: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `_modes` with −n² in float32, kept: made anew they would be a dozen launches for every axis."""
    with torch.inference_mode(False):
        basis, cycles = _modes(size, periodic, device, torch.float64)
        return basis.float(), -cycles.square().float()
