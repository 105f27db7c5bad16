"""Muon: momentum whose matrices are orthogonalised before they are applied; AdamW for everything else.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon): for a weight W (rows, columns) with gradient g,

    m ← β m + (1 − β) g,   u = (1 − β) g + β m   (Nesterov),   O ≈ U V' for u = U S V',   W ← W − η c O.

O comes from five steps of a Newton–Schulz iteration in bfloat16. c = 0.2 √max(rows, columns) gives the update the
root mean square 0.2 that AdamW's has (Liu et al. 2025, "Muon is scalable for LLM training"), so that one learning
rate and one decoupled weight decay serve both kinds of parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
NEWTON_SCHULZ_STEPS = 5
# The published quintic: the steepest start at zero, at the price of a band around one instead of convergence.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Root mean square of an AdamW update, in units of the learning rate (Liu et al. 2025).
ADAMW_RMS = 0.2
# A matrix with a shorter side than this touches the fields (lift, head) and is no hidden one.
SHORTEST_SIDE = 16
ADAM_EPSILON = 1e-8


def is_hidden_matrix(parameter: Tensor) -> bool:
    """Whether Muon takes a parameter: real, (rows, columns) or a kernel (out, in, *kernel), and no thin one.

    A kernel counts as the matrix (out, in · kernel). Left to AdamW: vectors, complex weights, depthwise
    kernels (in = 1: many small filters, not a map), and matrices with a side below 16, which touch the fields.
    """
    if not parameter.is_floating_point() or parameter.ndim < 2 or parameter.shape[1] == 1:
        return False
    return min(parameter.shape[0], math.prod(parameter.shape[1:])) >= SHORTEST_SIDE


def newton_schulz(matrices: Tensor, *, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """Return U f(S) V' of matrices U S V' (batch, rows, columns), all f(s) near one; in the dtype of its input.

    X ← a X + (b A + c A²) X with A = X X', from X = M / ‖M‖_F. After five steps singular values above 1/100 of
    the Frobenius norm lie in [.68, 1.14]; smaller ones have grown at most a⁵ ≈ 485 times.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # A gradient of zeros has no direction; the floor keeps it zero.
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Muon over the groups marked `muon=True`, AdamW over the others.

    Every group has its own `weight_decay`; `betas` are those of AdamW.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        # The number of updates lives in the group, which a state dict carries along.
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "muon": False, "updates": 0}
        super().__init__(groups, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            group["updates"] += 1
            if not parameters:
                continue
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
            if group["muon"]:
                self._muon(parameters, group["lr"])
            else:
                self._adamw(parameters, group)
        return loss

    def _muon(self, parameters: list[nn.Parameter], rate: float) -> None:
        momenta = [self._buffer(p, "momentum") for p in parameters]
        gradients = [p.grad for p in parameters if p.grad is not None]
        torch._foreach_lerp_(momenta, gradients, 1.0 - MOMENTUM)
        directions = torch._foreach_lerp(gradients, momenta, MOMENTUM)
        by_shape: dict[torch.Size, list[int]] = {}
        for i, p in enumerate(parameters):
            by_shape.setdefault(_wide(p).shape, []).append(i)
        # One batched iteration per shape, a matrix and its transpose alike: a net has few shapes and many matrices.
        for (_, columns), members in by_shape.items():
            updates = newton_schulz(torch.stack([_wide(directions[i]) for i in members]).bfloat16())
            moved: list[Tensor] = [parameters[i] for i in members]
            torch._foreach_add_(
                moved,
                [(u.mT if _tall(p) else u).reshape(p.shape) for p, u in zip(moved, updates.to(moved[0]), strict=True)],
                alpha=-rate * ADAMW_RMS * math.sqrt(columns),
            )

    def _adamw(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        first = [_real(self._buffer(p, "mean")) for p in parameters]
        second = [_real(self._buffer(p, "square")) for p in parameters]
        gradients = [_real(p.grad) for p in parameters if p.grad is not None]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(first, gradients, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1.0 - beta2)
        scale = torch._foreach_sqrt(second)
        torch._foreach_div_(scale, math.sqrt(1.0 - beta2 ** group["updates"]))
        torch._foreach_add_(scale, ADAM_EPSILON)
        rate = group["lr"] / (1.0 - beta1 ** group["updates"])
        torch._foreach_addcdiv_([_real(p) for p in parameters], first, scale, -rate)

    def _buffer(self, parameter: nn.Parameter, name: str) -> Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter)
        buffer: Tensor = state[name]
        return buffer


def _tall(values: Tensor) -> bool:
    """Whether a parameter, as the matrix (out, in · kernel), has more rows than columns."""
    return values.shape[0] > math.prod(values.shape[1:])


def _wide(values: Tensor) -> Tensor:
    """A parameter as the matrix (out, in · kernel) or its transpose, the one with more columns."""
    matrix = values.flatten(1)
    return matrix.mT if _tall(values) else matrix


def _real(values: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, in the same memory: their moments are separate."""
    return torch.view_as_real(values) if values.is_complex() else values
