"""Low-rank kernels of axial attention: projections of pooled sequences, turned by phases and multiplied.

    q = s Wqᵀ,  k = s Wkᵀ,     K_ij = m^(−1/2) Σ_c q_ic k_jc cos(φ_ic − φ_jc),

m channels per head, and cos(φ_i − φ_j) = cos φ_i cos φ_j + sin φ_i sin φ_j: two products of the projections scaled by
the cosines and by the sines. The fast twin scales them on the way into the products, where they are rounded as
autocast rounds them, and keeps q and k alone:

    dq = m^(−1/2) (cos φ ⊙ dK (k ⊙ cos φ) + sin φ ⊙ dK (k ⊙ sin φ)),     dk likewise with dKᵀ and q.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ergoflow.ops.choice import Impl, choose_impl, in_product_dtype
from ergoflow.ops.differentiable import Differentiable, Numbers, Tensors, has_tangent


def sequence_kernel(
    sequences: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    table: Tensor,
    heads: Sequence[int],
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Return K (B, H, S, S) of sequences (B, S, D), the i-th of which feeds the next heads[i] of the H heads.

    Wq and Wk are (H·m, D), the table [cos φ, sin φ] is (S, 2m). "reference" writes every step out; the others have no
    gradient for the table. "triton" takes and returns the precision of products, "torch" float32 at least: sequences
    are short, and on a CPU casting them takes longer than a product of them.
    """
    if len(sequences) != len(heads):
        raise ValueError(f"each sequence needs a number of heads, got {len(sequences)} and {tuple(heads)}; give both")
    tensors = in_product_dtype(query, key, *sequences)
    chosen = choose_impl(tensors[0], impl)
    if chosen == "reference" or table.requires_grad or has_tangent(query, key, *sequences):
        q, k = (_split_heads(project(sequences, weight, heads), sum(heads)) for weight in (query, key))
        return turned_product(q, k, table)
    if chosen == "torch":
        dtype = torch.promote_types(query.dtype, torch.float32)
        tensors = tuple(tensor.to(dtype) for tensor in (query, key, *sequences))
    with torch.autocast(query.device.type, enabled=False):
        return _KERNEL((table.contiguous(), *tensors), tuple(heads), chosen)[0]


def turned_product(queries: Tensor, keys: Tensor, table: Tensor) -> Tensor:
    """Return m^(−1/2) Σ_c q_ic k_jc cos(φ_ic − φ_jc), (..., S, S); q, k (..., S, m), [cos φ, sin φ] (S, 2m)."""
    turns = table.unflatten(-1, (2, -1))  # (S, 2, m)
    # The scale goes to the table, which has neither samples nor heads.
    q = (queries[..., None, :] * (turns * turns.shape[-1] ** -0.5)).flatten(-2)  # (..., S, 2m)
    k = (keys[..., None, :] * turns).flatten(-2)
    return q @ k.mT  # (..., S, S)


def project(sequences: Sequence[Tensor], weight: Tensor, heads: Sequence[int]) -> Tensor:
    """Return (B, S, H·m): each sequence (B, S, D) through the rows of its own heads of weight (H·m, D)."""
    rows = [count * (len(weight) // sum(heads)) for count in heads]
    parts = [F.linear(sequence, part) for sequence, part in zip(sequences, weight.split(rows), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _split_heads(projected: Tensor, heads: int) -> Tensor:
    return projected.unflatten(-1, (heads, -1)).transpose(1, 2)  # (B, H, S, m)


def _forward(tensors: Tensors, heads: Numbers, impl: str) -> list[Tensor]:
    """Return K, and q and k (B, S, H·m); torch: K, and both of them turned (2, B, H, S, 2m)."""
    table, query, key, *sequences = tensors
    if impl == "torch":
        turned = _turned(sequences, query, key, table, heads)
        return [turned[0] @ turned[1].mT, turned]
    from ergoflow.ops.low_rank_triton import kernel_product

    q, k = (_projected(sequences, weight, heads) for weight in (query, key))
    return [kernel_product(q, k, table, sum(heads)), q, k]


def _backward(gradients: Tensors, tensors: Tensors, kept: Tensors, heads: Numbers, impl: str) -> list[Tensor]:
    if impl == "torch":
        return _turned_gradient(gradients[0], tensors, kept[0], heads)
    from ergoflow.ops.low_rank_triton import projection_gradient

    (d_kernel,), (table, query, key, *sequences), (q, k) = gradients, tensors, kept
    d_q = projection_gradient(d_kernel, k, table).flatten(0, 1)  # (B·S, H·m)
    d_k = projection_gradient(d_kernel.mT, q, table).flatten(0, 1)
    d_query, d_key = torch.empty_like(query), torch.empty_like(key)
    d_sequences = []
    for sequence, rows in zip(sequences, _rows(query, heads), strict=True):
        flat = sequence.flatten(0, 1)
        torch.mm(d_q[:, rows].mT, flat, out=d_query[rows])
        torch.mm(d_k[:, rows].mT, flat, out=d_key[rows])
        d_sequence = torch.addmm(d_q[:, rows] @ query[rows], d_k[:, rows], key[rows])
        d_sequences.append(d_sequence.view(sequence.shape))
    # Nobody asks for the table's gradient.
    return [torch.empty_like(table), d_query, d_key, *d_sequences]


def _shapes(tensors: Tensors, heads: Numbers, impl: str) -> list[Tensor]:
    table, query, sequence = tensors[0], tensors[1], tensors[3]
    batch, size = sequence.shape[:2]
    if impl == "torch":
        turned = query.new_empty(2, batch, sum(heads), *table.shape)
        return [query.new_empty(batch, sum(heads), size, size), turned]
    q = query.new_empty(batch, size, len(query))
    return [query.new_empty(batch, sum(heads), size, size), q, torch.empty_like(q)]


_KERNEL = Differentiable("sequence_kernel", lambda inputs: 1, _forward, _backward, _shapes)


def _projected(sequences: Sequence[Tensor], weight: Tensor, heads: Numbers) -> Tensor:
    """Return what `project` does, every product written to its place."""
    batch, size = sequences[0].shape[:2]
    out = weight.new_empty(batch, size, len(weight))
    for sequence, rows in zip(sequences, _rows(weight, heads), strict=True):
        torch.mm(sequence.flatten(0, 1), weight[rows].mT, out=out.flatten(0, 1)[:, rows])
    return out


def _turned(sequences: Sequence[Tensor], query: Tensor, key: Tensor, table: Tensor, heads: Numbers) -> Tensor:
    """Return m^(−1/2) [q cos φ, q sin φ] and [k cos φ, k sin φ], (2, B, H, S, 2m): one product for each sequence."""
    weights = _by_sequence(query, key, heads)
    parts = [F.linear(sequence, weight) for sequence, weight in zip(sequences, weights, strict=True)]
    shapes = [(*part.shape[:2], 2, count, -1) for part, count in zip(parts, heads, strict=True)]
    both = torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim=3)  # (B, S, 2, H, m)
    # In the order of the shape, as products want it, and as a compiler is told it is.
    return (both.permute(2, 0, 3, 1, 4)[..., None, :] * _turns(table)).flatten(-2).contiguous()


def _turned_gradient(d_kernel: Tensor, tensors: Tensors, turned: Tensor, heads: Numbers) -> list[Tensor]:
    """Return the gradients of the table (nobody asks for it), of Wq and Wk, and of the sequences."""
    table, query, key, *sequences = tensors
    d_turned = torch.stack((d_kernel @ turned[1], d_kernel.mT @ turned[0])).unflatten(-1, (2, -1))
    d_both = (d_turned * _turns(table)).sum(-2).permute(1, 3, 0, 2, 4)  # (B, S, 2, H, m)
    parts = [part.flatten(2).flatten(0, 1) for part in d_both.split(list(heads), dim=3)]  # (B·S, 2·h·m)
    d_weights = [
        (part.mT @ sequence.flatten(0, 1)).view(2, -1, query.shape[1])
        for part, sequence in zip(parts, sequences, strict=True)
    ]
    weights = _by_sequence(query, key, heads)
    d_sequences = [(part @ weight).view_as(sequences[0]) for part, weight in zip(parts, weights, strict=True)]
    return [torch.empty_like(table), *torch.cat(d_weights, dim=1), *d_sequences]


def _turns(table: Tensor) -> Tensor:
    """Return what q and k are multiplied by, (2, 1, 1, S, 2, m); q takes the scale as well."""
    turns = table.unflatten(-1, (2, -1))  # (S, 2, m)
    return torch.stack((turns * turns.shape[-1] ** -0.5, turns))[:, None, None]


def _by_sequence(query: Tensor, key: Tensor, heads: Numbers) -> list[Tensor]:
    """Return the rows (2·h·m, D) of Wq and Wk that belong to each sequence."""
    rows = [count * (len(query) // sum(heads)) for count in heads]
    return [part.flatten(0, 1) for part in torch.stack((query, key)).split(rows, dim=1)]


def _rows(weight: Tensor, heads: Numbers) -> list[slice]:
    """Return the rows of each sequence's heads."""
    width, first, rows = len(weight) // sum(heads), 0, []
    for count in heads:
        rows.append(slice(first, first + count * width))
        first += count * width
    return rows
