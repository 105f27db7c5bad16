"""The two things made of the gradient d of an axis' result, for Hopper: the integral of d with Kᵀ, the gradient of K.

Per head and line (S points, 64 channels), with s the values that were integrated,

    outᵀ = dᵀ K / S          (64, S) = (64, S) (S, S),
    dK  += d sᵀ / S          (S, S) += (S, 64) (64, S),

and d is read once for both. At S = 256 the sums dK are as large as all registers of a multiprocessor, so programs take
a block of 128 columns each, of K, of dK, and of the points of out; of s they need these 128 points only, of d the whole
line, which the programs of a line, neighbours in the grid, read at the same time: once from memory, then from L2.

One warp asks the copy engine for lines, d and its block of s in a slot of a ring. Two warpgroups multiply every one:

    out: 64 of the block's points each, turned as in `axial_stream_triton`, through a buffer of their own;
    dK:  half of the rows each, in registers from the first line to the last.

Products are queued, one of either kind at a time: out of this line behind dK of the one before, whose end gives back
the slot, then dK of this line, which runs while out is rounded and stored. While lines come,
the tensor cores have work.

Slots change hands by two barriers each:

    full: one arrival, the producer's announcement of the bytes; done when they have come.
    free: two arrivals, one of each consumer after its last product with the slot.

A barrier tells a round only from the next, which is enough: the producer announces round r + 1 of a slot after both
consumers have given round r back, hence seen it full; and none of them gives back round r + 1 before it is announced,
hence before the producer has seen round r free. (A new barrier counts as having ended a round.) A slot is given back
when the next line is full: with two slots or more, that line waits for lines before it only, so nothing waits for ever.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ergoflow.ops.axial_stream_triton import HEAD_DIM, LAYOUT, load_tile, store_tile

COLUMNS = 128
"""Of K in a program: what the registers of two warpgroups hold of dK at S = 256."""
BUFFERS = {128: 5, 256: 3}
"""Slots of the ring by the length of a line: beside K and the results as many as fit in 227 kB."""


def pair(kernel: Tensor, d_out: Tensor, values: Tensor, shape: tuple[int, int, int], parts: Tensor) -> Tensor:
    """Return (1/S) Σ_j K_ji d_j like `d_out` (B, N, H·d); write (1/S) Σ d_i v_j to `parts` (B, T, H, S, S), float32.

    The second is summed over the lines of a grid (P, S, Q) and the channels of a head; T programs share the lines of a
    block, and their parts are still to be added up.
    """
    before, size, after = shape
    batch, heads = kernel.shape[:2]
    walkers = parts.shape[1]
    assert parts.is_contiguous(), "the kernel counts from part to part"
    assert walkers <= before * after, "every program needs a line"
    out = torch.empty_like(d_out)

    def describe(field: Tensor, points: int) -> TensorDescriptor:
        lines = field.unflatten(1, shape).flatten(0, 1)  # (B·P, S, Q, H·d)
        return TensorDescriptor.from_tensor(lines, [1, points, 1, HEAD_DIM], LAYOUT)

    _pair_kernel[(size // COLUMNS, heads, batch * walkers)](
        TensorDescriptor.from_tensor(kernel, [1, 1, size, COLUMNS // 2], LAYOUT),
        describe(d_out, size),
        describe(values, COLUMNS),
        describe(out, COLUMNS // 2),
        parts,
        after,
        before * after,
        walkers,
        BUFFERS=BUFFERS[size],
        num_warps=4,
    )
    return out


@gluon.jit
def _pair_kernel(
    kernel: tma.tensor_descriptor,  # (B, heads, size, size)
    d_out: tma.tensor_descriptor,  # (B·P, size, after, heads·d)
    values: tma.tensor_descriptor,  # the same
    out: tma.tensor_descriptor,  # the same
    parts: gl.tensor,  # (B, walkers, heads, size, size), float32
    after: gl.tensor,
    lines: gl.tensor,  # P·after
    walkers: gl.tensor,
    BUFFERS: gl.constexpr,
) -> None:
    SIZE: gl.constexpr = d_out.block_shape[1]
    DIM: gl.constexpr = d_out.block_shape[3]
    WIDTH: gl.constexpr = values.block_shape[1]
    HALF: gl.constexpr = out.block_shape[1]
    # Blocks come first, then heads: those that read the same lines, and the same rows of memory, run together.
    first = gl.program_id(0) * WIDTH
    head = gl.program_id(1)
    walker = gl.program_id(2) % walkers
    sample = gl.program_id(2) // walkers
    # Half of the columns, and of the results, for each consumer.
    weights = gl.allocate_shared_memory(kernel.dtype, [2, 1, 1, SIZE, HALF], kernel.layout)
    results = gl.allocate_shared_memory(out.dtype, [2, 1, HALF, 1, DIM], out.layout)
    left = gl.allocate_shared_memory(d_out.dtype, [BUFFERS, 1, SIZE, 1, DIM], d_out.layout)
    right = gl.allocate_shared_memory(values.dtype, [BUFFERS, 1, WIDTH, 1, DIM], values.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for slot in gl.static_range(BUFFERS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=2)
    memory = (weights, left, right, ready, full, free)
    walk = (sample * (lines // after), head, first, after, walker, lines, walkers)
    matrix = gl.program_id(2) * gl.num_programs(1) + head
    part = parts + matrix.to(gl.int64) * (SIZE * SIZE) + first
    gl.warp_specialize(
        [
            (_consume, (out, part, results, memory, walk, 0)),
            (_consume, (out, part, results, memory, walk, 1)),
            (_produce, (kernel, d_out, values, sample, memory, walk)),
        ],
        # Warps, and registers of a thread, of all but the first: the sums take 128 + 32 of a consumer's.
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _produce(
    kernel: tma.tensor_descriptor,
    d_out: tma.tensor_descriptor,
    values: tma.tensor_descriptor,
    sample: gl.tensor,
    memory: gl.tuple,
    walk: gl.tuple,
) -> None:
    """Load the columns of K, then line after line into the ring."""
    weights, left, right, ready, full, free = memory
    outer, head, first, after, walker, lines, walkers = walk
    BUFFERS: gl.constexpr = left.shape[0]
    DIM: gl.constexpr = left.shape[4]
    mbarrier.expect(ready, 2 * kernel.block_type.nbytes)
    for own in gl.static_range(2):
        load_tile(kernel, [sample, head, 0, first + own * kernel.block_shape[3]], ready, weights.index(own))
    for step in range(gl.cdiv(lines - walker, walkers)):
        line = walker + step * walkers
        slot = step % BUFFERS
        arrived = full.index(slot)
        mbarrier.wait(free.index(slot), (step // BUFFERS & 1) ^ 1)
        mbarrier.expect(arrived, d_out.block_type.nbytes + values.block_type.nbytes)
        load_tile(d_out, [outer + line // after, 0, line % after, head * DIM], arrived, left.index(slot))
        load_tile(values, [outer + line // after, first, line % after, head * DIM], arrived, right.index(slot))


@gluon.jit
def _consume(
    out: tma.tensor_descriptor,
    part: gl.tensor,
    results: gl.shared_memory_descriptor,
    memory: gl.tuple,
    walk: gl.tuple,
    own: gl.constexpr,
) -> None:
    """Integrate half of the block's points of every line, and add up half of the rows of dK."""
    weights, left, right, ready, full, free = memory
    outer, head, first, after, walker, lines, walkers = walk
    BUFFERS: gl.constexpr = left.shape[0]
    SIZE: gl.constexpr = left.shape[2]
    DIM: gl.constexpr = left.shape[4]
    WIDTH: gl.constexpr = right.shape[2]
    HALF: gl.constexpr = WIDTH // 2
    ROWS: gl.constexpr = SIZE // 2
    of_line: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    of_kernel: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    k = weights.index(own).reshape([SIZE, HALF])
    result = results.index(own)
    # Neither is set anew in the loop, nor where the loop might be passed by: with a product under way, the assembler
    # would have every matrix instruction wait for the one before.
    integral = gl.zeros([DIM, HALF], gl.float32, of_line)
    total = gl.zeros([ROWS, WIDTH], gl.float32, of_kernel)
    steps = gl.cdiv(lines - walker, walkers)
    gl.assume(steps > 0)
    mbarrier.wait(ready, 0)
    for step in range(steps):
        line = walker + step * walkers
        slot = step % BUFFERS
        d = left.index(slot).reshape([SIZE, DIM])
        s = right.index(slot).reshape([WIDTH, DIM])
        mbarrier.wait(full.index(slot), step // BUFFERS & 1)
        integral = warpgroup_mma(d.permute([1, 0]), k, integral, use_acc=False, is_async=True)
        # All but the newest have ended: the slot of the line before has been read.
        total = warpgroup_mma_wait(1, deps=[total])
        mbarrier.arrive(free.index((step + BUFFERS - 1) % BUFFERS), count=1, pred=step > 0)
        total = warpgroup_mma(d.slice(own * ROWS, ROWS), s.permute([1, 0]), total, is_async=True)
        integral, total = warpgroup_mma_wait(1, deps=[integral, total])
        # The result before has been read out.
        tma.store_wait(0)
        result.reshape([HALF, DIM]).permute([1, 0]).store((integral * (1 / SIZE)).to(out.dtype))
        fence_async_shared()
        store_tile(out, [outer + line // after, first + own * HALF, line % after, head * DIM], result)
    total = warpgroup_mma_wait(0, deps=[total])
    i = own * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, of_kernel))
    j = gl.arange(0, WIDTH, gl.SliceLayout(0, of_kernel))
    gl.store(part + i[:, None] * SIZE + j[None, :], total * (1 / SIZE))
    tma.store_wait(0)
