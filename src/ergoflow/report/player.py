"""Frames for the page's player: every field as 8-bit indices into one colour table, in PNG sprite sheets.

A PNG in a data URL is decoded by every browser, also from a local file, and its row filters compress smooth
fields well. Index 255 is kept for values that are not finite; the error is formed in the page from two
sheets.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import imageio.v3 as imageio
import numpy as np

from ergoflow.report.canvas import color_map, shrink
from ergoflow.report.maps import scale_of, upright

#: Pixels of all sheets of one page; as base64 PNG a pixel takes about one byte.
MAX_PIXELS = 2_400_000
MAX_SIDE = 128
MIN_SIDE = 48
LEVELS = 254
NOT_FINITE = 255


def pack_player(
    steps: np.ndarray,
    truth: np.ndarray,
    models: Mapping[str, np.ndarray],
    *,
    step_seconds: float,
    time_unit: str = "s",
    field: str = "field",
    axes: Sequence[str] = ("x", "y"),
    max_pixels: int = MAX_PIXELS,
) -> dict[str, Any]:
    """The player's data as a JSON-ready dict: steps, size, units, colour tables, sheets, relative errors.

    `truth` and each model are (N, X, Y) at the same `steps`. Many models mean smaller frames, then fewer of
    them.
    """
    side = MAX_SIDE
    while side > MIN_SIDE and (1 + len(models)) * len(steps) * side**2 > max_pixels:
        side -= 16
    stride = max(1, -(-(1 + len(models)) * len(steps) * side**2 // max_pixels))
    name, low, high = scale_of(truth)
    fields = {"truth": truth[::stride], **{f"model:{key}": field[::stride] for key, field in models.items()}}
    sheets = {key: quantize(shrink(upright(field, axes), side)[:, ::-1], low, high) for key, field in fields.items()}
    frames, rows, columns = sheets["truth"].shape
    across = max(1, min(frames, 2048 // columns))
    return {
        "steps": [int(step) for step in steps[::stride]],
        "seconds": step_seconds,
        "time_unit": time_unit,
        "rows": rows,
        "columns": columns,
        "across": across,
        "levels": LEVELS,
        "field": field,
        "low": low,
        "high": high,
        "colors": _color_table(name),
        "error_colors": _color_table("amp"),
        "truth": _sheet_url(sheets["truth"], across),
        "models": [
            {
                "name": key,
                "sheet": _sheet_url(sheets[f"model:{key}"], across),
                "error": _relative_errors(fields[f"model:{key}"], fields["truth"]),
            }
            for key in models
        ],
    }


def quantize(field: np.ndarray, low: float, high: float) -> np.ndarray:
    """uint8 indices 0..254 from low to high (clipped), 255 where the field is not finite."""
    finite = np.isfinite(field)
    scaled = np.where(finite, (np.where(finite, field, low) - low) / (high - low), 0.0)
    index = np.rint(np.clip(scaled, 0.0, 1.0) * LEVELS)
    return np.where(finite, index, NOT_FINITE).astype(np.uint8)


def sprite_sheet(frames: np.ndarray, across: int) -> np.ndarray:
    """Frames (N, R, C) laid out row by row, `across` to a row; the rest of the last row is zero."""
    count, rows, columns = frames.shape
    down = -(-count // across)
    padded = np.zeros((down * across, rows, columns), dtype=np.uint8)
    padded[:count] = frames
    tiles = padded.reshape(down, across, rows, columns).transpose(0, 2, 1, 3)  # (down, R, across, C)
    return tiles.reshape(down * rows, across * columns)


def _sheet_url(frames: np.ndarray, across: int) -> str:
    png = imageio.imwrite("<bytes>", sprite_sheet(frames, across), extension=".png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _color_table(name: str) -> str:
    """The 255 colours of a map as base64 RGB bytes."""
    colors = color_map(name)(np.linspace(0, 1, LEVELS + 1))[:, :3]
    return base64.b64encode(np.rint(colors * 255).astype(np.uint8).tobytes()).decode("ascii")


def _relative_errors(model: np.ndarray, truth: np.ndarray) -> list[float | None]:
    """‖prediction − truth‖/‖truth‖ of each full-resolution frame; None where it is not finite."""
    errors: list[float | None] = []
    for predicted, true in zip(model, truth, strict=True):
        norm = float(np.linalg.norm(true))
        error = float(np.linalg.norm(predicted - true)) / norm if norm > 0 else float("inf")
        errors.append(round(error, 5) if np.isfinite(error) else None)
    return errors
