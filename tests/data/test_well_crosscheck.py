"""Our files through The Well's own loader and normalisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ergoflow.data.normalize import Normalizer
from ergoflow.data.store import (
    DatasetInfo,
    ShardWriter,
    TrajectoryStore,
    compute_statistics,
    write_statistics,
)

pytestmark = pytest.mark.crosscheck

WALL, PERIODIC = 0.0, 2.0  # The Well's codes

ONE_FIELD = DatasetInfo(
    name="ours",
    fields=("vorticity",),
    grid=(8, 6),
    length=(2.0, 3.0),
    boundaries=("PERIODIC", "PERIODIC"),
    axes=("x", "y"),
    frame_seconds=0.25,
    parameters={"viscosity": 1e-3},
    provenance={"solver": "test"},
)
THREE_FIELDS = DatasetInfo(
    name="ours",
    fields=("u", "v", "w"),
    grid=(7, 6),
    length=(2.0, 3.0),
    boundaries=("WALL", "PERIODIC"),
    axes=("y", "z"),
    frame_seconds=0.25,
    provenance={"solver": "test"},
)


@pytest.fixture
def the_well() -> Any:
    return pytest.importorskip("the_well.data", reason="needs the package the_well (extra `crosscheck`)")


def make(folder: Path, info: DatasetInfo, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    data = 3.0 + 2.0 * rng.standard_normal((5, 9, len(info.fields), *info.grid)).astype(np.float32)
    data = data.astype(dtype).astype(np.float32)
    for name, rows in (("0", slice(0, 2)), ("1", slice(2, 5))):
        part = data[rows]
        path = folder / "data" / "train" / f"{name}.hdf5"
        with ShardWriter(path, info, count=len(part), frames=9, dtype=dtype) as shard:  # type: ignore[arg-type]
            for t in range(9):
                shard.write(t, part[:, t])
            shard.set_scalar("diverged_at", np.full(len(part), -1))
    write_statistics(folder, compute_statistics(TrajectoryStore(folder), strides=(1, 2)))
    return data


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("info", "codes"),
    [(ONE_FIELD, [[PERIODIC] * 2, [PERIODIC] * 2]), (THREE_FIELDS, [[WALL] * 2, [PERIODIC] * 2])],
    ids=["periodic", "channel"],
)
def test_the_wells_loader_reads_the_same_numbers(
    tmp_path: Path, the_well: Any, info: DatasetInfo, codes: list[list[float]], dtype: str
) -> None:
    data = make(tmp_path, info, dtype)
    loaded = the_well.WellDataset(path=str(tmp_path), well_split_name="train", n_steps_input=2, n_steps_output=1)
    assert len(loaded) == 5 * 7
    assert loaded.metadata.field_names[0] == list(info.fields)
    assert loaded.metadata.spatial_resolution == info.grid
    assert loaded.metadata.n_trajectories_per_file == [2, 3]
    for index in range(len(loaded)):
        sample = loaded[index]
        trajectory, first = divmod(index, 7)
        expected = np.moveaxis(data[trajectory, first : first + 3], 1, -1)  # T *grid C
        fields = torch.cat((sample["input_fields"], sample["output_fields"]))
        np.testing.assert_array_equal(fields.float().numpy(), expected)
        assert sample["boundary_conditions"].tolist() == codes
        assert sample["space_grid"].shape == (*info.grid, 2)
        np.testing.assert_allclose(torch.cat((sample["input_time_grid"], sample["output_time_grid"])), [0.0, 0.25, 0.5])


@pytest.mark.parametrize("info", [ONE_FIELD, THREE_FIELDS], ids=["periodic", "channel"])
def test_the_wells_normalisation_equals_ours(tmp_path: Path, the_well: Any, info: DatasetInfo) -> None:
    normalization = pytest.importorskip("the_well.data.normalization", reason="needs the package the_well")
    data = make(tmp_path, info, "float32")
    theirs = the_well.WellDataset(
        path=str(tmp_path),
        well_split_name="train",
        use_normalization=True,
        normalization_type=normalization.ZScoreNormalization,
    )
    ours = Normalizer.from_store(TrajectoryStore(tmp_path))
    sample = theirs[0]["input_fields"]  # T *grid C
    expected = ours.normalize(torch.from_numpy(data[0, :1])).movedim(1, -1)
    torch.testing.assert_close(sample, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(theirs.norm.flattened_stds_delta["variable"], ours.std_delta)
