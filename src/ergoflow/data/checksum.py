"""The content checksum of a file: sha256 over its frames, then over everything else it says.

The frames come first, in time order, each as the bytes of (J, C, *grid) in the stored dtype (little endian),
so the sum can be formed while frames are written. Attributes, coordinates and scalars follow as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from ergoflow.data.layout import ShardLayout

CHECKSUM_ATTRIBUTE = "sha256"
# Frames are read back in blocks of about this size.
BLOCK_BYTES = 32 * 2**20


def frame_bytes(frames: np.ndarray) -> memoryview:
    """Return the little-endian bytes of an array, as they stand in the file."""
    little_endian = np.ascontiguousarray(frames, dtype=frames.dtype.newbyteorder("<"))
    return little_endian.reshape(-1).view(np.uint8).data


def metadata_bytes(file: h5py.File) -> bytes:
    """Return every attribute and every array that is not a field, in a fixed order, as JSON."""
    entries: list[Any] = [["/", _attributes(file)]]

    def visit(name: str, item: Any) -> None:
        is_field = name.split("/")[0] in ("t0_fields", "t1_fields", "t2_fields")
        is_array = isinstance(item, h5py.Dataset)
        content = np.asarray(item[()]).tolist() if is_array and not is_field else None
        entries.append([name, _attributes(item), content])

    file.visititems(visit)
    return json.dumps(sorted(entries, key=lambda entry: entry[0])).encode()


def read_blocks(file: h5py.File, layout: ShardLayout) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (first frame, block (T, J, C, *grid)) through the whole file in time order."""
    per_frame = layout.count * len(layout.info.fields) * int(np.prod(layout.info.grid)) * layout.dtype.itemsize
    length = max(1, BLOCK_BYTES // max(1, per_frame))
    for start in range(0, layout.frames, length):
        stop = min(start + length, layout.frames)
        shape = (stop - start, layout.count, len(layout.info.fields), *layout.info.grid)
        block = np.empty(shape, dtype=layout.dtype)
        channel = 0
        for field in layout.stored:
            frames = slice(start, stop)
            values = file[field.dataset][(slice(None), frames) if field.sample_varying else frames]
            if not field.sample_varying:
                values = np.broadcast_to(values, (layout.count, *values.shape))
            values = values.reshape(*values.shape[: 2 + len(layout.info.grid)], field.components)  # J T *grid K
            block[:, :, channel : channel + field.components] = np.moveaxis(values, (0, -1), (1, 2))
            channel += field.components
        yield start, block


def _attributes(item: Any) -> dict[str, Any]:
    names = sorted(set(item.attrs) - {CHECKSUM_ATTRIBUTE})
    return {name: np.asarray(item.attrs[name]).tolist() for name in names}
