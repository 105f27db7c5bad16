"""Small layers shared by the models: seeded linear maps and convolutions, the gated MLP, padding per axis.

Every weight is drawn from an explicit generator, with PyTorch's default law U(−1/√fan_in, 1/√fan_in), so that
a model is a function of its config and its seed alone, and building it leaves the global generator untouched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ergoflow.ops.choice import is_reference
from ergoflow.ops.conv import circular_conv

WallPadding = Literal["replicate", "zeros"]

CONVOLUTIONS: dict[int, type[nn.Conv1d] | type[nn.Conv2d] | type[nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}


def linear(
    in_features: int, out_features: int, *, bias: bool = True, generator: torch.Generator | None = None
) -> nn.Linear:
    """Return a linear layer drawn from `generator`."""
    # Built on the meta device: the constructor's own draw from the global generator would be thrown away.
    layer = nn.Linear(in_features, out_features, bias=bias, device="meta").to_empty(device="cpu")
    _draw_weights(layer, in_features, generator)
    return layer


def convolution(
    in_channels: int,
    out_channels: int,
    kernel: int,
    num_axes: int,
    *,
    groups: int = 1,
    generator: torch.Generator | None = None,
) -> nn.Conv1d | nn.Conv2d | nn.Conv3d:
    """Return an unpadded convolution with bias over `num_axes` grid axes, drawn from `generator`."""
    build = CONVOLUTIONS[num_axes]
    layer = build(in_channels, out_channels, kernel, groups=groups, device="meta").to_empty(device="cpu")
    _draw_weights(layer, in_channels // groups * kernel**num_axes, generator)
    return layer


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32, or unchanged when it is wider: the precision in which statistics are taken."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def complex_dtype() -> torch.dtype:
    """Return the dtype of complex weights: pairs of torch's default real numbers."""
    return torch.get_default_dtype().to_complex()


def on_pairs(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `fn`, which moves or casts tensors, so that it takes complex ones as pairs of real numbers.

    For `_apply` of a module with complex weights: Module.double() skips them, Module.to(dtype) drops imaginary parts.
    """

    def moved(tensor: Tensor) -> Tensor:
        return torch.view_as_complex(fn(torch.view_as_real(tensor))) if tensor.is_complex() else fn(tensor)

    return moved


def precise_linear(x: Tensor, matrix: Tensor) -> Tensor:
    """Return x·matrixᵀ, (..., M), of x (..., D); autocast rounds x to bfloat16, the matrix (M, D) only to 2⁻¹⁶.

    The matrix is the sum of its rounding to bfloat16 and of the rest, rounded once more: two products on tensor cores,
    where one in float32 would leave them idle. The gradient of x is rounded itself, and one product serves for it.
    """
    if not torch.is_autocast_enabled(x.device.type):
        return F.linear(x, matrix)
    dtype = torch.get_autocast_dtype(x.device.type)
    high = matrix.to(dtype)
    low = (matrix - high.to(matrix.dtype)).to(dtype).detach()
    rows = x.to(dtype).flatten(0, -2)
    # Added in place: torch would copy the first product before it adds the second one.
    return (rows.detach() @ low.mT).addmm_(rows, high.mT).unflatten(0, x.shape[:-1])


class GatedMLP(nn.Module):
    """The gated-GELU MLP D → 2D → D: W₂(GELU(a) ⊙ b) + c₂ with [a, b] = W₁x + c₁ of D channels each."""

    def __init__(self, dim: int, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.expand = linear(dim, 2 * dim, generator=generator)
        self.contract = linear(dim, dim, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., D) to (..., D)."""
        gate, value = self.expand(x).chunk(2, dim=-1)  # (..., D) each
        out: Tensor = self.contract(F.gelu(gate) * value)
        return out


def gated_mlps(mlps: Sequence[GatedMLP], x: Tensor) -> Tensor:
    """Return mlps[r](x[r]) for x (R, N, D), (R, N, D): one batched product for each of the layers."""

    def batched(layers: Sequence[nn.Linear], values: Tensor) -> Tensor:
        """Map (R, in, N) to (R, out, N): weights on the left, so that their gradients come as they are stored."""
        weight = torch.stack([layer.weight for layer in layers])  # (R, out, in)
        bias = torch.stack([layer.bias for layer in layers])[..., None]  # (R, out, 1)
        return torch.baddbmm(bias, weight, values)

    gate, value = batched([mlp.expand for mlp in mlps], x.mT).chunk(2, dim=1)  # (R, D, N) each
    return batched([mlp.contract for mlp in mlps], F.gelu(gate) * value).mT


def pad_axes(x: Tensor, width: int, periodic: Sequence[bool], *, wall_padding: WallPadding = "replicate") -> Tensor:
    """Return x (B, C, *grid) with `width` more points on both ends of every grid axis.

    Periodic axes wrap around. Other axes end at walls: the last value is repeated ("replicate") or zeros are
    added ("zeros"). The edge value is repeated by concatenation because the gradient of torch's replication
    padding is not deterministic on CUDA.
    """
    if width == 0:
        return x
    for axis, wraps in enumerate(periodic):
        if wraps and x.shape[2 + axis] < width:
            raise ValueError(
                f"circular padding by {width} needs at least {width} points per axis, "
                f"got {x.shape[2 + axis]} on axis {axis}; use a finer grid or a smaller convolution kernel"
            )
    if any(periodic):
        # F.pad lists the last axis first.
        wrapped = [width if wraps else 0 for wraps in reversed(periodic) for _ in range(2)]
        x = F.pad(x, wrapped, mode="circular")
    return pad_walls(x, width, periodic, wall_padding=wall_padding)


def pad_walls(x: Tensor, width: int, periodic: Sequence[bool], *, wall_padding: WallPadding = "replicate") -> Tensor:
    """Return x (B, C, *grid) with `width` more points on both ends of the axes that are not periodic."""
    for axis, wraps in enumerate(periodic, start=2):
        if wraps:
            continue
        if wall_padding == "zeros":
            x = F.pad(x, [0, 0] * (x.ndim - 1 - axis) + [width, width])
        else:
            shape = [-1] * x.ndim
            shape[axis] = width
            first, last = x.narrow(axis, 0, 1), x.narrow(axis, x.shape[axis] - 1, 1)
            x = torch.cat([first.expand(shape), x, last.expand(shape)], dim=axis)
    return x


class ResidualConv(nn.Module):
    """A k×k (k, k×k×k) grouped convolution plus a 1×1 grouped one of the same input, both with bias."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        periodic: tuple[bool, ...],
        *,
        groups: int = 1,
        wall_padding: WallPadding = "replicate",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        num_axes = len(periodic)
        self.periodic = periodic
        self.wall_padding: WallPadding = wall_padding
        self.width = kernel // 2
        self.conv = convolution(in_channels, out_channels, kernel, num_axes, groups=groups, generator=generator)
        self.shortcut = convolution(in_channels, out_channels, 1, num_axes, groups=groups, generator=generator)

    def forward(self, x: Tensor, *, bend: bool = False) -> Tensor:
        """Map x (B, C_in, *grid), or with `bend` GELU(x), to (B, C_out, *grid)."""
        if is_reference(x):
            x = F.gelu(x) if bend else x
            padded = pad_axes(x, self.width, self.periodic, wall_padding=self.wall_padding)
            return self.conv(padded) + self.shortcut(x)
        # The 1×1 convolution is one more tap at the centre. Bending commutes with padding, GELU(0) = 0.
        weight = self.conv.weight + F.pad(self.shortcut.weight, [self.width] * 2 * len(self.periodic))
        assert self.conv.bias is not None
        assert self.shortcut.bias is not None
        padded = pad_walls(x, self.width, self.periodic, wall_padding=self.wall_padding)
        bias = self.conv.bias + self.shortcut.bias
        out = circular_conv(padded, weight, bias, groups=self.conv.groups, bend=bend)
        # What wrapped around a wall landed in the padding.
        for axis, wraps in enumerate(self.periodic, start=2):
            out = out if wraps else out.narrow(axis, self.width, x.shape[axis])
        return out


def _draw_weights(
    layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d, fan_in: int, generator: torch.Generator | None
) -> None:
    bound = 1 / math.sqrt(fan_in)
    nn.init.uniform_(layer.weight, -bound, bound, generator=generator)
    if layer.bias is not None:
        nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
