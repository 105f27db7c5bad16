"""Lyapunov exponents of any step, solver or learned, by one code (Benettin et al. 1980: tangents and QR)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ergoflow.numerics.trajectory import Step

Push = Callable[[Step, Tensor, Tensor], tuple[Tensor, Tensor]]


def lyapunov_exponents(
    step: Step,
    state: Tensor,
    count: int,
    *,
    num_steps: int = 1000,
    warmup: int = 100,
    step_time: float = 1.0,
    generator: torch.Generator | None = None,
    method: Literal["jvp", "finite_difference"] = "jvp",
    each: bool = False,
    record: Callable[[Step], Step] = lambda differential: differential,
) -> np.ndarray:
    """Return the `count` largest exponents, largest first, per unit of `step_time`: (count,), the mean over the batch,
    or with `each` those of every entry, (B, count).

    Orthonormal tangents Q are pushed through the step, D step(z) Q = Q' R, re-orthonormalised by QR every
    step; lambda_i = <ln R_ii> / step_time after `warmup` steps that only align the tangents. `state` is (B,
    ...) on the attractor; the step must treat batch entries independently, since tangents travel along the
    batch axis. All in the state's dtype except the sum of logarithms. `generator` (a CPU one) draws the first
    tangents; None is a fixed seed. With "jvp" the map [z, q] -> [step(z), D step(z) q] passes through `record`
    first, which may make one CUDA graph of its many kernels. "finite_difference" (central) serves steps without
    forward derivatives. A trajectory that leaves the finite numbers gives inf, and the mean with it.
    """
    _check(state, count, num_steps, warmup, step_time, method)
    push: Push = _push_difference
    if method == "jvp":
        _load_forward_rules()
        push, step = _push_jvp, record(partial(_differential, step))
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    points = state[0].numel()
    draw = torch.randn(len(state), points, count, generator=generator, dtype=torch.float64)
    tangents = torch.linalg.qr(draw)[0].to(state)  # (B, P, count)
    logs = torch.zeros(len(state), count, dtype=torch.float64, device=state.device)
    with torch.no_grad():
        for index in range(warmup + num_steps):
            state, tangents = push(step, state, tangents)
            tangents, r = torch.linalg.qr(tangents)
            if index >= warmup:
                logs += torch.diagonal(r, dim1=1, dim2=2).abs().to(torch.float64).log()
    lost = ~torch.isfinite(state).flatten(1).all(dim=1) | logs.isnan().any(dim=1)
    logs[lost] = torch.inf
    exponents = (logs if each else logs.mean(dim=0)).cpu().numpy() / (num_steps * step_time)
    return np.asarray(np.sort(exponents)[..., ::-1])


def _load_forward_rules() -> None:
    """Make torch load its forward-derivative rules, quietly.

    Their first use compiles them with torch.jit.script, which torch itself (2.13) reports as deprecated.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.script", category=DeprecationWarning)
        torch.func.jvp(torch.sin, (torch.zeros(1),), (torch.ones(1),))


def _differential(step: Step, pair: Tensor) -> Tensor:
    """Return [step(z), D step(z) q] of [z, q], one tensor (2, B, ...) of states and directions."""
    return torch.stack(torch.func.jvp(step, (pair[0],), (pair[1],)))


def _push_jvp(differential: Step, state: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """Return step(z) and its derivative times each tangent; the tangents ride along the batch axis."""
    batch, points, count = tangents.shape
    copies = state.repeat_interleave(count, dim=0)  # (B count, ...)
    directions = tangents.transpose(1, 2).reshape(copies.shape)
    values, pushed = differential(torch.stack((copies, directions)))
    return values[::count].clone(), pushed.reshape(batch, count, points).transpose(1, 2)


def _push_difference(step: Step, state: Tensor, tangents: Tensor) -> tuple[Tensor, Tensor]:
    """Return step(z) and (step(z + e q) - step(z - e q)) / 2e for each tangent q."""
    batch, points, count = tangents.shape
    size = state.reshape(batch, points).norm(dim=1).clamp(min=1.0)
    # Truncation grows like e^2 and rounding like eps / e; they balance at the cube root.
    reach = 0.5 * torch.finfo(state.dtype).eps ** (1 / 3) * size  # (B,)
    offset = tangents.transpose(1, 2) * reach[:, None, None]  # (B, count, P)
    flat = state.reshape(batch, 1, points)
    cloud = torch.cat((flat, flat + offset, flat - offset), dim=1)  # (B, 1 + 2 count, P)
    moved = step(cloud.reshape(-1, *state.shape[1:])).reshape(cloud.shape)
    pushed = (moved[:, 1 : count + 1] - moved[:, count + 1 :]) / (2 * reach[:, None, None])
    return moved[:, 0].reshape(state.shape), pushed.transpose(1, 2)


def _check(state: Tensor, count: int, num_steps: int, warmup: int, step_time: float, method: str) -> None:
    if state.ndim < 2 or not state.is_floating_point():
        raise ValueError(
            f"state must be a floating tensor with a batch axis (B, ...), got {state.dtype} "
            f"{tuple(state.shape)}; "
            "add the axis with state[None]"
        )
    if not bool(torch.isfinite(state).all()):
        raise ValueError("state must be finite, got nan or inf; start from a state on the attractor")
    if not 1 <= count <= state[0].numel():
        raise ValueError(
            f"count must lie between 1 and the state's {state[0].numel()} numbers, got {count}; ask for fewer exponents"
        )
    if num_steps < 1 or warmup < 0 or not step_time > 0:
        raise ValueError(
            f"num_steps >= 1, warmup >= 0 and step_time > 0 are needed, got {num_steps}, {warmup}, "
            f"{step_time}; "
            "pass the time of one step in seconds"
        )
    if method not in ("jvp", "finite_difference"):
        raise ValueError(f'method must be "jvp" or "finite_difference", got {method!r}; choose one of the two')
