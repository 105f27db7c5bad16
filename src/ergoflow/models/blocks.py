"""The block of `a3m` and `factformer`, x ← x + code(ξ), x ← x + mix(GELU(merged(LayerNorm(x)))), and chains of blocks.

The two models differ in how the heads are mixed and merged, and in nothing else here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from ergoflow.models.positions import PositionCode
from ergoflow.ops.norm import add_layer_norm, mix_add, mix_add_layer_norm


class Attention(Protocol):
    """A layer norm, heads that are mixed along the grid and merged, and the linear map behind their GELU."""

    norm: nn.LayerNorm
    mix: nn.Linear

    def merged(self, normed: Tensor) -> Tensor:
        """Return the merged heads, (B, *grid, D), of normalised features (B, *grid, D)."""
        ...


class Update(NamedTuple):
    """What a block adds to the stream, GELU(merged)·mixᵀ, before it is multiplied out."""

    merged: Tensor
    """The merged heads, (B, *grid, D)."""
    mix: Tensor
    """The block's last linear map, (D, D)."""


class AttentionBlock(nn.Module):
    """x ← x + code(ξ), x ← x + mix(GELU(merged(LayerNorm(x)))) on features (B, *grid, D), float32 under autocast."""

    attention: Attention

    def __init__(self, position: PositionCode, attention: Attention) -> None:
        super().__init__()
        self.position = position
        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """Return the features after the block."""
        placed, normed = self.placed(x)
        return mix_add(placed, *self.update(normed))

    def placed(self, x: Tensor, update: Update | None = None) -> tuple[Tensor, Tensor]:
        """Return the features, with the update of the block before and their own code, and the layer norm of these."""
        code, norm = self.position(x.shape[1:-1]), self.attention.norm
        if update is None:
            return add_layer_norm(x, code, norm.weight, norm.bias)
        return mix_add_layer_norm(x, *update, code, norm.weight, norm.bias)

    def update(self, normed: Tensor) -> Update:
        """Return what the block adds to the features, given their layer norm."""
        return Update(self.attention.merged(normed), self.attention.mix.weight)


def attend(blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
    """Return the features x (B, *grid, D) after a chain of at least one `AttentionBlock`.

    The last map of a block is applied where the next one begins: the stream is read and written once per block.
    """
    update: Update | None = None
    for block in blocks:
        assert isinstance(block, AttentionBlock)
        x, normed = block.placed(x, update)
        update = block.update(normed)
    assert update is not None
    return mix_add(x, *update)
