"""The values and their integral along the first axis for Hopper, in one kernel: the values stay in registers.

A multiprocessor keeps K of one head (128 kB at S = 256) and that head's rows of Wv (16 kB) in shared memory, a ring of
buffers, a piece of a line of features in each (64 points, D channels: 16 kB), and a line of results (S points, 64
channels: 32 kB). One warp asks the copy engine for pieces. Two warpgroups take whole lines in turn:

    vᵀ = Wv xᵀ            (64, 64) = (64, D) (D, 64)        of every piece; rounded, it is the left side of
    uᵀ = Σ vᵀ Kᵀ / S      (64, S) = (64, 64) (64, S)        the sum over the pieces, j of Kᵀ being a piece's points.

The next piece is projected before this one is multiplied, so that one rounds while the other is multiplied. With its
last piece a warpgroup leaves the ring to the other one, and rounds and stores its line meanwhile. Every feature is read
once per head, from L2, where a sample's stay (17 MB of bfloat16 at 256²); the values (134 MB) are not written, unless
the gradient wants them: then each piece over its features, from where the copy engine stores it.

Buffers change hands by barriers of one arrival each:

    full: the producer's announcement of the bytes; done when they have come. A barrier tells a round only from the
          next, and a consumer does not see the rounds of the other one's pieces: each has barriers of its own, taken in
          turn, as many as buffers. Of these it has seen every round before, and the producer is at most one ahead: to
          be two ahead, more pieces than buffers would have to be out.
    free: the consumer's, when a piece is projected, or its values have been read out, which is waited for after the
          next one is projected: two buffers are needed. The producer waits for the round before, in order; a new
          barrier counts as having ended one.
    idle: the consumer's, when its store has been read out. Every line waits for the one before: of the rounds but one
          before that it has ended the last itself.

No wait is for anything later: a piece's is for the one whose buffer it takes, a line's for its pieces, and, when all of
these are free again, for the store of the line before.
"""

from __future__ import annotations

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

FEATURES = 128
"""Channels D of the features."""
PIECE = 64
"""Points of a line that are projected at a time: a swizzled row of K, and 32 registers of a thread."""
BUFFERS = {128: 8, 256: 3}
"""Pieces in the ring by the length of a line; beside the rest three fill the 227 kB."""
# Its names in newer and in older releases of triton.
_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


def project_and_integrate(
    kernel: Tensor,
    features: Tensor,
    value: Tensor,
    out: Tensor,
    shape: tuple[int, int, int],
    walkers: int,
    *,
    values: Tensor | None = None,
) -> None:
    """Write (1/S) Σ_j K_ij v_j of v = x Wvᵀ to `out`, and v to `values` (None: not wanted).

    See `axial_integral_triton.integrate_values`. `walkers` programs share the lines of a head.
    """
    before, size, after = shape
    batch, heads = kernel.shape[:2]

    def pieces_of(field: Tensor, points: int, channels: int) -> TensorDescriptor:
        lines = field.unflatten(1, shape).flatten(0, 1)  # (B·P, S, Q, channels)
        return TensorDescriptor.from_tensor(lines, [1, points, 1, channels], LAYOUT)

    _value_kernel[(heads, batch * walkers)](
        TensorDescriptor.from_tensor(kernel, [1, 1, size, PIECE], LAYOUT),
        TensorDescriptor.from_tensor(value[None, None], [1, 1, HEAD_DIM, FEATURES], LAYOUT),
        pieces_of(features, PIECE, FEATURES),
        pieces_of(out, size, HEAD_DIM),
        None if values is None else pieces_of(values, PIECE, HEAD_DIM),
        after,
        before * after,
        walkers,
        BUFFERS=BUFFERS[size],
        num_warps=4,
    )


@gluon.jit
def _value_kernel(
    kernel: tma.tensor_descriptor,  # (B, heads, size, size)
    value: tma.tensor_descriptor,  # (1, 1, heads·d, features)
    features: tma.tensor_descriptor,  # (B·P, size, after, features)
    out: tma.tensor_descriptor,  # (B·P, size, after, heads·d)
    values: tma.tensor_descriptor | None,  # the same, in pieces; None: not wanted
    after: gl.tensor,
    lines: gl.tensor,  # P·after
    walkers: gl.tensor,
    BUFFERS: gl.constexpr,
) -> None:
    # Heads come first: those that read the same features run together.
    head = gl.program_id(0)
    walker = gl.program_id(1) % walkers
    sample = gl.program_id(1) // walkers
    SIZE: gl.constexpr = kernel.block_shape[2]
    PIECE: gl.constexpr = kernel.block_shape[3]
    weights = gl.allocate_shared_memory(kernel.dtype, [SIZE // PIECE, 1, 1, SIZE, PIECE], kernel.layout)
    projection = gl.allocate_shared_memory(value.dtype, value.block_shape, value.layout)
    ring = gl.allocate_shared_memory(features.dtype, [BUFFERS, 1, PIECE, 1, features.block_shape[3]], features.layout)
    result = gl.allocate_shared_memory(out.dtype, out.block_shape, out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    idle = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [2 * BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [BUFFERS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.init(idle, count=1)
    for slot in gl.static_range(2 * BUFFERS):
        mbarrier.init(full.index(slot), count=1)
    for slot in gl.static_range(BUFFERS):
        mbarrier.init(free.index(slot), count=1)
    memory = (weights, projection, ring, result)
    barriers = (ready, full, free, idle)
    walk = (sample * (lines // after), head, after, walker, lines, walkers)
    gl.warp_specialize(
        [
            (_consume, (out, values, memory, barriers, walk, 0)),
            (_consume, (out, values, memory, barriers, walk, 1)),
            (_produce, (kernel, value, features, sample, memory, barriers, walk)),
        ],
        # Warps, and registers of a thread, of all but the first: the sums of a line take 128 of a consumer's.
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _produce(
    kernel: tma.tensor_descriptor,
    value: tma.tensor_descriptor,
    features: tma.tensor_descriptor,
    sample: gl.tensor,
    memory: gl.tuple,
    barriers: gl.tuple,
    walk: gl.tuple,
) -> None:
    """Load Wv and K, then piece after piece into the ring."""
    weights, projection, ring, _ = memory
    ready, full, free, _ = barriers
    outer, head, after, walker, lines, walkers = walk
    BUFFERS: gl.constexpr = ring.shape[0]
    PIECES: gl.constexpr = weights.shape[0]
    PIECE: gl.constexpr = ring.shape[2]
    mbarrier.expect(ready, value.block_type.nbytes + PIECES * kernel.block_type.nbytes)
    load_tile(value, [0, 0, head * projection.shape[2], 0], ready, projection)
    for piece in gl.static_range(PIECES):
        load_tile(kernel, [sample, head, 0, piece * PIECE], ready, weights.index(piece))
    for step in range(gl.cdiv(lines - walker, walkers)):
        line = walker + step * walkers
        for piece in gl.static_range(PIECES):
            count, mine = step * PIECES + piece, step // 2 * PIECES + piece
            slot = count % BUFFERS
            arrived = full.index(step % 2 * BUFFERS + mine % BUFFERS)
            mbarrier.wait(free.index(slot), (count // BUFFERS & 1) ^ 1)
            mbarrier.expect(arrived, features.block_type.nbytes)
            load_tile(features, [outer + line // after, piece * PIECE, line % after, 0], arrived, ring.index(slot))


@gluon.jit
def _consume(
    out: tma.tensor_descriptor,
    values: tma.tensor_descriptor | None,
    memory: gl.tuple,
    barriers: gl.tuple,
    walk: gl.tuple,
    own: gl.constexpr,
) -> None:
    """Project and integrate every second line, from the first or second on, and store it."""
    weights, projection, ring, result = memory
    ready, full, free, idle = barriers
    outer, head, after, walker, lines, walkers = walk
    BUFFERS: gl.constexpr = ring.shape[0]
    PIECES: gl.constexpr = weights.shape[0]
    PIECE: gl.constexpr = ring.shape[2]
    SIZE: gl.constexpr = result.shape[1]
    DIM: gl.constexpr = result.shape[3]
    pieces: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PIECE, 16])
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZE, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    project = projection.reshape([DIM, projection.shape[3]])
    turned = result.reshape([SIZE, DIM]).permute([1, 0])
    empty = gl.zeros([DIM, PIECE], gl.float32, pieces)
    mbarrier.wait(ready, 0)
    for step in range(own, gl.cdiv(lines - walker, walkers), 2):
        line = walker + step * walkers
        acc = gl.zeros([DIM, SIZE], gl.float32, sums)
        v = gl.zeros([DIM, PIECE], out.dtype, left)
        for piece in gl.static_range(PIECES + 1):
            if piece < PIECES:
                slot = (step * PIECES + piece) % BUFFERS
                mine = step // 2 * PIECES + piece
                tile = ring.index(slot).reshape([PIECE, ring.shape[4]]).permute([1, 0])
                mbarrier.wait(full.index(own * BUFFERS + mine % BUFFERS), mine // BUFFERS & 1)
            if piece > 1:
                # Without it the compiler would keep the left sides of all products, more than there are registers.
                acc = warpgroup_mma_wait(0, [acc])
            if piece < PIECES:
                coming = warpgroup_mma(project, tile, empty, use_acc=False, is_async=True)
            if piece > 0:
                k = weights.index(piece - 1).reshape([SIZE, PIECE]).permute([1, 0])
                acc = warpgroup_mma(v, k, acc, use_acc=piece > 1, is_async=True)
            if piece < PIECES:
                projected = warpgroup_mma_wait(1 if piece > 0 else 0, [coming]).to(out.dtype)
                v = gl.convert_layout(projected, left)
            if values is not None and piece > 0:
                tma.store_wait(0)
                mbarrier.arrive(free.index((step * PIECES + piece - 1) % BUFFERS), count=1)
            if piece < PIECES:
                if values is not None:
                    over = _reinterpret(ring.index(slot), out.dtype, [1, PIECE, 1, DIM], out.layout)
                    over.reshape([PIECE, DIM]).permute([1, 0]).store(projected)
                    fence_async_shared()
                    store_tile(values, [outer + line // after, piece * PIECE, line % after, head * DIM], over)
                else:
                    mbarrier.arrive(free.index(slot), count=1)
        u = warpgroup_mma_wait(0, [acc]) * (1 / SIZE)
        mbarrier.wait(idle, (step & 1) ^ 1)
        turned.store(u.to(out.dtype))
        fence_async_shared()
        store_tile(out, [outer + line // after, 0, line % after, head * DIM], result)
        tma.store_wait(0)
        mbarrier.arrive(idle, count=1)
