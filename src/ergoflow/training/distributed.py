"""Data-parallel training under `torchrun`: several processes, each with its share of every global batch.

    torchrun --nproc-per-node 4 -m ergoflow train ...

Each of W processes takes its own W-th of every batch of the sampler, so the global batch holds the same windows as on
one process, and the mean of the processes' gradients is the gradient of the mean loss. Process 0 writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ergoflow.data.windows import WindowSampler

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# Between the seeds of two processes: odd and large, because a CPU's generator takes the lower 32 bits of a seed alone.
RANK_STRIDE = 0x9E3779B9


@dataclass(frozen=True, kw_only=True)
class LaunchContext:
    """Which of how many processes this one is, and its device. The default is one process on the CPU."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """True in the one process that writes files and shows progress."""
        return self.rank == 0

    @contextmanager
    def parallel(self, module: nn.Module) -> Iterator[nn.Module]:
        """The module, with gradients averaged over the processes during its backward pass, inside the block."""
        if self.world_size == 1:
            yield module
            return
        device_ids = [self.device] if self.device.type == "cuda" else None
        parallel = nn.parallel.DistributedDataParallel(module, device_ids=device_ids)
        # Every process computes the same buffers; sending them each step would only cost time. (An attribute: what the
        # argument is called depends on the version of torch.)
        parallel.broadcast_buffers = False
        try:
            yield parallel
        finally:
            # It holds the process group, in cycles of references and through the frames of an exception. A group that
            # ends with it, not with the launch, waits for its threads under the interpreter's lock, and they for that.
            vars(parallel).clear()

    def mean(self, values: Tensor) -> Tensor:
        """The mean of a tensor over the processes; all of them must call."""
        return values if self.world_size == 1 else mean_over_processes(values)

    def largest(self, *values: float) -> list[float]:
        """The largest of each number over the processes, so that all of them take one decision.

        All must call.
        """
        if self.world_size == 1:
            return list(values)
        agreed = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return agreed.tolist()

    def own_seed(self, seed: int) -> int:
        """A seed that no other process has; that of process 0 is `seed`."""
        return seed + RANK_STRIDE * self.rank

    def gather(self, value: Any) -> list[Any]:
        """The objects of all processes by rank; all of them must call."""
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value)
        return gathered


def mean_over_processes(values: Tensor) -> Tensor:
    """The mean of a tensor over the processes of a launch, if this is one; all must call, and no gradient passes.

    For terms that divide by a mean over the batch: the mean of the processes' ratios is not the ratio of the means.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


@contextmanager
def launch_context(device: str | torch.device = "cpu") -> Iterator[LaunchContext]:
    """The place of this process in its `torchrun` launch; without torchrun, one process on `device`.

    Under torchrun each process takes the GPU of its local rank (nccl, with gloo for numbers on the host), or
    the CPU (gloo). The process group ends with the block; one process needs none.
    """
    device = torch.device(device)
    missing = [name for name in TORCHRUN_VARIABLES if name not in os.environ]
    if len(missing) == len(TORCHRUN_VARIABLES):
        yield LaunchContext(device=device)
        return
    if missing:
        raise ValueError(
            f"torchrun sets {', '.join(TORCHRUN_VARIABLES)}, but {', '.join(missing)} is missing; "
            "start through torchrun, or unset the others"
        )
    rank, local_rank, world_size = (int(os.environ[name]) for name in TORCHRUN_VARIABLES)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if world_size == 1:
        yield LaunchContext(device=device)
        return
    # Imported while a process group exists (an optimiser does it), this module keeps the group and its threads
    # alive to the end of the interpreter, where a thread still busy aborts the process.
    import_module("torch._dynamo")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield LaunchContext(rank=rank, world_size=world_size, device=device)
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class RankSampler:
    """One process's share of each batch of a sampler: rows rank, rank + world_size, ... (a `WindowOrder`)."""

    sampler: WindowSampler
    context: LaunchContext

    def __post_init__(self) -> None:
        """Shares must be equal, or the mean over processes is not the mean over the batch."""
        if self.sampler.batch_size % self.context.world_size:
            raise ValueError(
                f"batches must be a multiple of the {self.context.world_size} processes, got batch size "
                f"{self.sampler.batch_size}; change training.batch_size or --nproc-per-node"
            )

    @property
    def window(self) -> int:
        """As in the whole sampler."""
        return self.sampler.window

    @property
    def stride(self) -> int:
        """As in the whole sampler."""
        return self.sampler.stride

    @property
    def batches_per_epoch(self) -> int:
        """As in the whole sampler."""
        return self.sampler.batches_per_epoch

    def batches(self, epoch: int, start: int = 0) -> Iterator[Tensor]:
        """This process's indices (B / world_size, 2), batch after batch."""
        for batch in self.sampler.batches(epoch, start):
            yield batch[self.context.rank :: self.context.world_size]
