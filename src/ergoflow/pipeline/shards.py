"""The files of a data set: which there are, and the seed of each trajectory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ergoflow.config import SPLITS, ChannelDatasetConfig, DatasetConfig


@dataclass(frozen=True)
class Shard:
    """One file: `count` trajectories of a split, beginning with number `first`."""

    split: str
    first: int
    count: int
    path: Path

    @property
    def title(self) -> str:
        """How a progress bar calls it."""
        return f"{self.split}[{self.first}:{self.first + self.count}]"


def list_shards(dataset: DatasetConfig, folder: Path) -> Iterator[Shard]:
    """Every shard of a data set, in the order of making."""
    size = len(dataset.planes) if isinstance(dataset, ChannelDatasetConfig) else dataset.shard_size
    for split in SPLITS:
        total = dataset.count(split)
        for first in range(0, total, size):
            path = folder / "data" / split / f"{dataset.name}_{first:04d}.hdf5"
            yield Shard(split, first, min(size, total - first), path)


def trajectory_seed(dataset: DatasetConfig, split: str, number: int) -> int:
    """A 63-bit seed, a function of data-set seed, split and trajectory (or simulation) number alone."""
    words = np.random.SeedSequence([dataset.seed, SPLITS.index(split), number]).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))
