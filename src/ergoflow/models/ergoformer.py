"""`ergoformer`: a vorticity is carried along by its own flow; a ConvNeXt U-Net, with attention or not, adds the rest.

The U-Net is `ergoflow.models.convnext`, unchanged; with `attention=None` and `flow=None` this model *is* that one,
weight for weight. Five things can be added:

    flow      "carried", for a vorticity on a periodic plane: the prediction is z∘X + s·net, X the paths of the flow
              itself (`ergoflow.models.advection`) and s the spread of increments, less its mean: a vorticity has none;
    inputs    z∘X and the velocities of z and of half a step later, u = ∂y ψ, v = −∂x ψ, −∇²ψ = z; cosines of a wall's
              coordinate;
    noise     as further inputs, where a state does not determine its future (`ergoflow.models.noise`);
    layers    before the last `attention_blocks` blocks of each stage on `attention_levels`, with K_X, K_Y the kernels
              of `ergoflow.models.axial` along the axes:
                kernel="free"     x ← x + W_o norm(K_Y K_X W_v LN(x))            the paper's attention
                kernel="unitary"  x ← E_Y exp(A_Y) E_X exp(A_X) x, A = (K − Kᵀ)/2  transport and dissipation
                kernel="linear"   x ← E_Y (I + K_Y) E_X (I + K_X) x                the same, nothing enforced
    operator  G at the coarsest level between the way down and the way up (paper section 3.3).

`attention` says what K is made of: "lines" gives every line of an axis a kernel of its own, from the features on
it; "a3m" pools the other axes first, by mean, max and min in separate heads, so that all lines share one kernel; "mean"
pools by the mean alone. A kernel shared by all rows cannot shear: u(y) ∂x needs lines, unless the state is carried.

At the start W_o = 0 and exp(A) is close to I, so every setting begins as the U-Net with the same weights, and the head
is zero: a model of increments begins as persistence, or as an inviscid flow where the state is carried.

A carried vorticity needs no global layers: they are off by default, and what each is worth is in docs/lab_log.md.

Parameters of the default configuration on a plane, one vorticity in and out: 4,472,228, those of the U-Net with 6
channels in. "lines" adds 2 × (LayerNorm 384; queries and keys 2 × 36,864; rates 8) = 148,240. kernel="free" has values
and merge, 73,728, in place of the rates of a layer; "mean" adds 2 reducers × 148,416 to a layer and "a3m" 6. An
operator at 256 channels has 65,536 (exact: 32,640). Multiply-adds of the default: 4.47 G at 128², 17.9 G at 256²,
less than a tenth of `a3m`'s.

Symmetries. Along periodic axes the model commutes with translations by the stride of the U-Net (8 points by default),
for every setting but `codes="random"`. Between walls it knows where it is. Reflections and rotations hold for no
setting: `ergoflow.training.symmetries` teaches them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ergoflow.models.advection import STILL, Pace, carried
from ergoflow.models.attention import POOLINGS
from ergoflow.models.axial import AxisKernel, Codes, apply_along
from ergoflow.models.checks import check_choice, check_counts, check_state
from ergoflow.models.convnext import STRIDE, ConvNeXt, ConvNeXtConfig
from ergoflow.models.layers import at_least_float32, linear
from ergoflow.models.noise import block_noise
from ergoflow.models.operator import LatentOperator, OperatorMode
from ergoflow.models.transport import Transport
from ergoflow.models.velocity import scaled_velocity
from ergoflow.ops.axial import head_norm

Attention = Literal["a3m", "mean", "lines"]
Kernel = Literal["free", "linear", "unitary"]
Flow = Literal["velocity", "carried"]
POOLING: dict[str, tuple[str, ...]] = {"a3m": POOLINGS, "mean": ("mean",), "lines": ()}

# What a flow adds to the inputs: u; z∘X, u₀ and u_½.
FLOW_CHANNELS = {None: 0, "velocity": 2, "carried": 5}
# Cosines cos(πnξ), n = 1, 2, .., of the coordinate ξ in (0, 1) across an axis between walls.
WALL_MODES = 8


@dataclass(frozen=True, kw_only=True)
class ErgoformerConfig:
    """The architecture of `ergoformer`."""

    unet: ConvNeXtConfig = field(default_factory=lambda: ConvNeXtConfig(widths=(96, 192, 256), blocks=(3, 3, 3, 3, 3)))
    """The local part, of a size whose weights fit in 10 MB; `unet.kernel=1` leaves its convolutions out."""
    flow: Flow | None = "carried"
    """What is made of a vorticity's own flow: "velocity" joins the inputs, "carried" is the start of the prediction,
    too; None for anything but one vorticity on a periodic plane."""
    wall_code: bool = True
    """Whether the coordinate across walls joins the inputs; nothing where all axes are periodic."""
    noise: int = 0
    """Channels of noise that join the inputs, a number on each block that is a point of the coarsest level: with an
    objective of several members, a step draws its answer."""
    attention: Attention | None = None
    """What the kernels are made of; None means no global layers."""
    attention_levels: tuple[int, ...] = (1,)
    """Levels of the U-Net with global layers; 0 is the finest."""
    attention_blocks: int = 1
    """Blocks of each such stage, the last ones, that follow a global layer."""
    kernel: Kernel = "unitary"
    dissipation: bool = True
    """Whether transport is followed by the heat kernel; nothing with kernel="free"."""
    heads: int = 4
    frequencies: int = 12
    """F: integer frequencies 0 .. F − 1 of the codes; queries and keys have 2F channels per head."""
    codes: Codes | None = "complex"
    """The codes of a kernel's positions: "complex", "cosine" (even), "random" (the paper's, absolute), None."""
    operator: OperatorMode | None = None
    """The latent operator at the coarsest level; None means none."""

    def __post_init__(self) -> None:
        """Check every field that can be checked without the data."""
        if self.noise < 0:
            raise ValueError(f"noise must be 0 channels or more, got {self.noise}; 0 is a step that draws nothing")
        check_counts(self, "attention_blocks", "heads", "frequencies")
        check_choice(self, "flow", (*get_args(Flow), None))
        check_choice(self, "attention", (*get_args(Attention), None))
        check_choice(self, "kernel", get_args(Kernel))
        check_choice(self, "codes", (*get_args(Codes), None))
        check_choice(self, "operator", (*get_args(OperatorMode), None))
        if self.attention is not None:
            self._check_layers()

    def _check_layers(self) -> None:
        levels = len(self.unet.widths)
        if len(set(self.attention_levels)) < len(self.attention_levels) or not set(self.attention_levels) <= set(
            range(levels)
        ):
            raise ValueError(
                f"attention_levels must be distinct numbers in 0 .. {levels - 1}, got {self.attention_levels}; "
                "choose levels of the U-Net"
            )
        for level in self.attention_levels:
            if self.unet.widths[level] % self.heads:
                raise ValueError(
                    f"heads must divide the width {self.unet.widths[level]} of level {level}, got {self.heads}; "
                    "choose other heads or widths"
                )
        if self.heads < len(POOLING[self.attention or "lines"]):
            raise ValueError(
                f"attention={self.attention!r} needs one head per pooling, got {self.heads}; "
                'add heads or choose attention="mean"'
            )


class Ergoformer(nn.Module):
    """The map (B, C_in, *grid) → (B, C_out, *grid) for grids of one to three axes, multiples of the stride."""

    def __init__(
        self,
        config: ErgoformerConfig,
        in_channels: int,
        out_channels: int,
        grid: tuple[int, ...],
        *,
        periodic: tuple[bool, ...],
        pace: Pace = STILL,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check_problem(config, in_channels, out_channels, grid, periodic)
        self.config, self.in_channels, self.periodic, self.pace = config, in_channels, periodic, pace
        walls = sum(not wraps for wraps in periodic) if config.wall_code else 0
        inputs = in_channels + FLOW_CHANNELS[config.flow] + WALL_MODES * walls + config.noise
        # Drawn first, so that all settings share the weights of the U-Net.
        self.unet = ConvNeXt(config.unet, inputs, out_channels, grid, periodic=periodic, generator=generator)
        if config.operator is not None:
            self.unet.middle.append(LatentOperator(config.unet.widths[-1], config.operator, generator=generator))
        for level in config.attention_levels if config.attention is not None else ():
            self._add_layers(level, generator)

    def forward(self, z: Tensor) -> Tensor:
        """Return the decoded field, (B, C_out, *grid)."""
        check_state(z, self.in_channels, len(self.periodic))
        self.unet.check_grid(tuple(z.shape[2:]))
        if self.config.flow != "carried":
            field: Tensor = self.unet(torch.cat([z, *self._further_inputs(z)], dim=1))
            return field
        there, first, half = carried(z, self.pace.turn)
        start = there if self.pace.change is None else (there - z) / self.pace.change
        field = start + self.unet(torch.cat([z, there, first, half, *self._further_inputs(z)], dim=1))
        return field - field.mean((-2, -1), keepdim=True)

    @property
    def operator(self) -> LatentOperator | None:
        """The latent operator G, None where there is none."""
        operators = [module for module in self.unet.middle if isinstance(module, LatentOperator)]
        return operators[0] if operators else None

    def _further_inputs(self, z: Tensor) -> list[Tensor]:
        """Return what joins the state besides its paths: velocity, coordinates across walls, noise."""
        inputs = [scaled_velocity(z)] if self.config.flow == "velocity" else []
        if self.config.wall_code:
            inputs += [wall_cosines(z, axis) for axis in range(len(self.periodic)) if not self.periodic[axis]]
        if self.config.noise:
            inputs.append(block_noise(z, self.config.noise, self.config.unet.stride))
        return inputs

    def _add_layers(self, level: int, generator: torch.Generator | None) -> None:
        """Put a global layer before each of the last blocks of the stages on a level, on the way down and up."""
        unet, coarsest = self.unet, len(self.config.unet.widths) - 1
        stages = [unet.middle] if level == coarsest else [unet.encoder[level], unet.decoder[coarsest - 1 - level]]
        for stage in stages:
            assert isinstance(stage, nn.Sequential)
            blocks = sum(not isinstance(module, LatentOperator) for module in stage)
            for place in range(max(blocks - self.config.attention_blocks, 0), blocks)[::-1]:
                stage.insert(place, global_layer(self.config, level, self.periodic, generator=generator))


class GlobalAttention(nn.Module):
    """x ← x + W_o norm(K_Y K_X W_v LN(x)) on features (B, *grid, D); W_o starts at zero."""

    def __init__(
        self, dim: int, kernels: nn.ModuleList, *, heads: int, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.kernels = kernels
        self.value = linear(dim, dim, bias=False, generator=generator)
        self.merge = linear(dim, dim, bias=False, generator=generator)
        nn.init.zeros_(self.merge.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after the layer."""
        normed = self.norm(x)
        values = at_least_float32(self.value(normed)).unflatten(-1, (self.heads, -1)).movedim(-2, 1)  # (B, H, *grid, d)
        for axis, kernel in enumerate(self.kernels):
            weights = kernel(normed)
            with torch.autocast(x.device.type, enabled=False):
                values = apply_along(weights, values, axis)
        out: Tensor = x + self.merge(head_norm(values).movedim(1, -2).flatten(-2))  # (B, *grid, D)
        return out


def global_layer(
    config: ErgoformerConfig, level: int, periodic: tuple[bool, ...], *, generator: torch.Generator | None = None
) -> nn.Module:
    """Return a freshly drawn global layer for features (B, *grid, D) of a level of the U-Net."""
    assert config.attention is not None
    dim, heads = config.unet.widths[level], config.heads
    kernels = nn.ModuleList(
        AxisKernel(
            dim,
            axis,
            periodic=wraps,
            pooling=POOLING[config.attention],
            heads=heads,
            frequencies=config.frequencies,
            codes=config.codes,
            generator=generator,
        )
        for axis, wraps in enumerate(periodic)
    )
    if config.kernel == "free":
        return GlobalAttention(dim, kernels, heads=heads, generator=generator)
    return Transport(dim, kernels, periodic, heads=heads, mode=config.kernel, dissipation=config.dissipation)


def wall_cosines(z: Tensor, axis: int) -> Tensor:
    """Return cos(πn(i + ½)/S), n = 1 .. WALL_MODES, of a grid axis as channels (B, WALL_MODES, *grid)."""
    size = z.shape[2 + axis]
    dtype = at_least_float32(z).dtype
    n = torch.arange(1, WALL_MODES + 1, device=z.device, dtype=dtype)
    centres = (torch.arange(size, device=z.device, dtype=dtype) + 0.5) / size
    code = torch.cos(math.pi * n[:, None] * centres)  # (n, S)
    shape = [1, WALL_MODES, *(size if other == axis else 1 for other in range(z.ndim - 2))]
    return code.reshape(shape).expand(z.shape[0], -1, *z.shape[2:])


def _check_problem(
    config: ErgoformerConfig, in_channels: int, out_channels: int, grid: tuple[int, ...], periodic: tuple[bool, ...]
) -> None:
    """Refuse a flow that cannot be had and codes too fine for a level of the grid."""
    if config.flow is not None and not (in_channels == 1 and periodic == (True, True)):
        raise ValueError(
            f"flow={config.flow!r} needs one vorticity on a periodic plane, got {in_channels} channels and "
            f"periodic={periodic}; set model.flow=none"
        )
    if config.flow == "carried" and out_channels != 1:
        raise ValueError(f"flow='carried' predicts one vorticity, got {out_channels} channels out; set model.flow=none")
    for level in config.attention_levels if config.attention is not None else ():
        points = [size // (config.unet.patch * STRIDE**level) for size in grid]
        if 2 * config.frequencies > min(points):
            raise ValueError(
                f"frequencies must be at most half the {min(points)} points of an axis on level {level} of the grid "
                f"{grid}, got {config.frequencies}; set model.frequencies={max(min(points) // 2, 1)} or a finer level"
            )
