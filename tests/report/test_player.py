from __future__ import annotations

import base64
import json

import imageio.v3 as imageio
import numpy as np

from ergoflow.report.player import LEVELS, NOT_FINITE, pack_player, quantize, sprite_sheet

RNG = np.random.default_rng(5)


def frames_of(packed: dict, url: str) -> np.ndarray:
    """What the page's script reads back: frame n stands in row n // across, column n % across."""
    sheet = imageio.imread(base64.b64decode(url.removeprefix("data:image/png;base64,")))
    rows, columns, across = packed["rows"], packed["columns"], packed["across"]
    places = [((n // across) * rows, (n % across) * columns) for n in range(len(packed["steps"]))]
    return np.stack([sheet[top : top + rows, left : left + columns] for top, left in places])


def test_frames_survive_the_sheet_to_within_half_a_level() -> None:
    truth = RNG.standard_normal((7, 40, 24))
    packed = pack_player(np.arange(7), truth, {"m": truth}, step_seconds=0.1)
    low, high = packed["low"], packed["high"]
    values = low + frames_of(packed, packed["truth"]).astype(float) / LEVELS * (high - low)
    # Shown with x to the right and y upwards: image row 0 is the largest y.
    wanted = np.clip(truth, low, high).transpose(0, 2, 1)[:, ::-1]
    assert np.abs(values - wanted).max() <= 0.51 * (high - low) / LEVELS
    assert (packed["rows"], packed["columns"]) == (24, 40)


def test_values_that_are_not_finite_have_an_index_of_their_own() -> None:
    field = np.array([[0.0, 1.0, np.inf], [-np.inf, np.nan, 0.5]])
    index = quantize(field, 0.0, 1.0)
    assert index.tolist() == [[0, LEVELS, NOT_FINITE], [NOT_FINITE, NOT_FINITE, LEVELS // 2]]


def test_a_diverged_model_is_packed_and_its_error_is_null() -> None:
    truth = RNG.standard_normal((4, 16, 16))
    model = 1.5 * truth
    model[2:] = np.inf
    packed = pack_player(np.arange(4), truth, {"m": model}, step_seconds=0.1)
    assert packed["models"][0]["error"] == [0.5, 0.5, None, None]
    assert (frames_of(packed, packed["models"][0]["sheet"])[2:] == NOT_FINITE).all()
    json.dumps(packed, allow_nan=False)


def test_sheets_fill_row_by_row_and_pad_with_zero() -> None:
    frames = np.arange(1, 4, dtype=np.uint8)[:, None, None] * np.ones((3, 2, 5), dtype=np.uint8)
    sheet = sprite_sheet(frames, 2)
    assert sheet.shape == (4, 10)
    assert [sheet[0, 0], sheet[0, 5], sheet[2, 0], sheet[2, 5]] == [1, 2, 3, 0]


def test_many_models_get_smaller_and_then_fewer_frames() -> None:
    truth = np.zeros((50, 128, 128)) + RNG.random((50, 1, 1))
    models = {str(n): truth for n in range(20)}
    packed = pack_player(np.arange(50), truth, models, step_seconds=0.1, max_pixels=600_000)
    assert 21 * len(packed["steps"]) * packed["rows"] * packed["columns"] <= 600_000
    assert packed["rows"] >= 24
    assert packed["steps"][:2] == [0, packed["steps"][1]]
    assert len(packed["models"][0]["error"]) == len(packed["steps"])
