"""The integral along an axis for Hopper, as a stream of lines: load, product and store of different lines overlap.

A multiprocessor keeps K of one head in shared memory (128 kB at S = 256) and a ring of buffers, a line of values
(S points, 64 channels) in each: three of 32 kB. One warp asks the copy engine for lines. Two warpgroups take them in
turn, each multiplies a whole line,

    uᵀ = vᵀ Kᵀ / S        (64, S) = (64, S) (S, S),

writes u over v, has the copy engine store it, and hands the buffer back. While one rounds and stores, the other
multiplies; neither waits for the other, and every value is read once and written once.

Transposed, because a matrix instruction reads both its operands from shared memory for every 64 rows: per line K once
and v once (160 kB, with loads and stores 256 kB, 2048 clocks, as long as the products take), instead of K once and v
four times (256 and 352 kB).

Buffers change hands by barriers of one arrival each:

    full: the producer's announcement of the bytes; done when they have come. Loads may end out of order, so that a
          consumer could be a round ahead of the other one, and a barrier tells a round only from the next: every
          consumer has barriers of its own, one per buffer, and of these has seen every round before.
    free: the consumer's, when its store has been read out. The producer waits for the round before, in order; a new
          barrier counts as having ended one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HEAD_DIM = 64
"""Rows of a matrix instruction."""
BUFFERS = {128: 8, 256: 3}
"""Lines in the ring by their length; beside K three of the longest fill the 227 kB."""
LAYOUT = gl.NVMMASharedLayout(128, 16, 4)
"""Of K and of lines in shared memory: swizzled rows of 128 bytes of 16-bit numbers, four axes."""
# Names from triton 3.7 on, and before.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def stream(
    kernel: Tensor, values: Tensor, out: Tensor, shape: tuple[int, int, int], walkers: int, *, statistics: bool
) -> Tensor:
    """Write (1/S) Σ_j K_ij v_j to `out` and return the moments (B, H, parts, 3); see `axial_integral_triton.integrate`.

    `walkers` programs share the lines of a head, two or more each. A part is a channel of a consumer.
    """
    before, size, after = shape
    batch, heads = kernel.shape[:2]
    transposed = kernel.stride(3) != 1
    parts = walkers * 2 * HEAD_DIM if statistics else 0
    moments = torch.empty(batch, heads, parts, 3, device=values.device, dtype=torch.float32)
    describe, line = TensorDescriptor.from_tensor, [1, size, 1, HEAD_DIM]
    _stream_kernel[(heads, batch * walkers)](
        describe(kernel.mT if transposed else kernel, [1, 1, size, size], LAYOUT),
        describe(values.unflatten(1, shape).flatten(0, 1), line, LAYOUT),  # (B·P, S, Q, H·d)
        describe(out.unflatten(1, shape).flatten(0, 1), line, LAYOUT),
        moments,
        after,
        before * after,
        walkers,
        STATISTICS=statistics,
        TRANSPOSED=transposed,
        BUFFERS=BUFFERS[size],
        num_warps=4,
    )
    return moments


@gluon.jit
def _stream_kernel(
    kernel: tma.tensor_descriptor,  # (B, heads, size, size): rows i, or rows j if transposed
    values: tma.tensor_descriptor,  # (B·P, size, after, heads·d)
    out: tma.tensor_descriptor,  # the same
    moments: gl.tensor,  # (B, heads, walkers, 2, d, 3), float32
    after: gl.tensor,
    lines: gl.tensor,  # P·after
    walkers: gl.tensor,
    STATISTICS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    BUFFERS: gl.constexpr,
) -> None:
    # Heads come first: those that read the same rows of memory run together.
    head = gl.program_id(0)
    walker = gl.program_id(1) % walkers
    sample = gl.program_id(1) // walkers
    SIZE: gl.constexpr = values.block_shape[1]
    DIM: gl.constexpr = values.block_shape[3]
    weights = gl.allocate_shared_memory(kernel.dtype, [1, 1, SIZE, SIZE], kernel.layout)
    ring = gl.allocate_shared_memory(values.dtype, [BUFFERS, 1, SIZE, 1, DIM], values.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    for slot in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(slot), count=1)
    for slot in gl.static_range(BUFFERS):
        mbarrier.init(free.index(slot), count=1)
    memory = (weights, ring, ready, full, free)
    walk = (sample * (lines // after), head, after, walker, lines, walkers)
    part = moments + ((sample * gl.num_programs(0) + head) * walkers + walker) * (2 * DIM * 3)
    gl.warp_specialize(
        [
            (_consume, (out, part, memory, walk, 0, STATISTICS, TRANSPOSED)),
            (_consume, (out, part, memory, walk, 1, STATISTICS, TRANSPOSED)),
            (_produce, (kernel, values, sample, memory, walk)),
        ],
        # Warps, and registers of a thread, of all but the first: the sums of a line take 128 of a consumer's.
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _produce(
    kernel: tma.tensor_descriptor, values: tma.tensor_descriptor, sample: gl.tensor, memory: gl.tuple, walk: gl.tuple
) -> None:
    """Load K, then line after line into the ring."""
    weights, ring, ready, full, free = memory
    outer, head, after, walker, lines, walkers = walk
    BUFFERS: gl.constexpr = ring.shape[0]
    mbarrier.expect(ready, kernel.block_type.nbytes)
    load_tile(kernel, [sample, head, 0, 0], ready, weights)
    for step in range(gl.cdiv(lines - walker, walkers)):
        line = walker + step * walkers
        slot = step % BUFFERS
        mbarrier.wait(free.index(slot), (step // BUFFERS & 1) ^ 1)
        arrived = full.index(step % (2 * BUFFERS))
        mbarrier.expect(arrived, values.block_type.nbytes)
        load_tile(values, [outer + line // after, 0, line % after, head * ring.shape[4]], arrived, ring.index(slot))


@gluon.jit
def _consume(
    out: tma.tensor_descriptor,
    part: gl.tensor,
    memory: gl.tuple,
    walk: gl.tuple,
    own: gl.constexpr,
    STATISTICS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
) -> None:
    """Integrate every second line, from the first or second on, where it lies, and store it.

    The statistics are those of every channel, about its own mean: no exchange between warps.
    """
    weights, ring, ready, full, free = memory
    outer, head, after, walker, lines, walkers = walk
    BUFFERS: gl.constexpr = ring.shape[0]
    SIZE: gl.constexpr = ring.shape[2]
    DIM: gl.constexpr = ring.shape[4]
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    channels: gl.constexpr = gl.SliceLayout(1, sums)
    k = weights.reshape([SIZE, SIZE])
    if not TRANSPOSED:
        k = k.permute([1, 0])
    count = 0.0
    mean = gl.zeros([DIM], gl.float32, channels)
    squares = gl.zeros([DIM], gl.float32, channels)
    mbarrier.wait(ready, 0)
    for step in range(own, gl.cdiv(lines - walker, walkers), 2):
        line = walker + step * walkers
        slot = step % BUFFERS
        buffer = ring.index(slot)
        tile = buffer.reshape([SIZE, DIM]).permute([1, 0])
        mbarrier.wait(full.index(step % (2 * BUFFERS)), step // (2 * BUFFERS) & 1)
        acc = gl.zeros([DIM, SIZE], gl.float32, sums)
        result = warpgroup_mma(tile, k, acc, use_acc=False) * (1 / SIZE)
        tile.store(result.to(out.dtype))
        fence_async_shared()
        store_tile(out, [outer + line // after, 0, line % after, head * DIM], buffer)
        if STATISTICS:
            of_line = gl.sum(result, 1) / SIZE
            gap = result - of_line[:, None]
            share = 1 / (count + 1)
            shift = of_line - mean
            mean += shift * share
            squares += gl.sum(gap * gap, 1) + shift * shift * (SIZE * count * share)
            count += 1
        tma.store_wait(0)
        mbarrier.arrive(free.index(slot), count=1)
    if STATISTICS:
        place = part + (own * DIM + gl.arange(0, DIM, channels)) * 3
        gl.store(place, mean * (SIZE * count))
        gl.store(place + 1, squares)
        gl.store(place + 2, gl.zeros_like(mean) + SIZE * count)
