"""`ergoflow reproduce figures`: the paper's figures as PNG files, drawn from the results alone.

    RESULTS/figures/<slug>.png      at most 200 kB each
    RESULTS/figures/figures.json    per figure: file (null: no run has what it shows), its cells with fingerprints

A figure whose cells are unchanged is not drawn again; one whose cells have changed is stale until it is.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console

from ergoflow.data.files import write_bytes_atomic
from ergoflow.pipeline.lorenz import lorenz_path
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.runs import write_json
from ergoflow.report.evidence import Evidence, cell_file
from ergoflow.report.panels import draw_lorenz
from ergoflow.report.paper_figures import LORENZ, MAX_BYTES, PICTURES, Picture
from ergoflow.report.saving import to_png

# Raised when drawings change, so that every figure is drawn anew.
FIGURES_FORMAT = 5
# Tried in this order until a file is small enough.
DPI = (130, 100, 80, 60)
COLOURS = 256
EXPECTED_SECONDS_EACH = 1.0


def figures_folder(results: Path) -> Path:
    """Where the pictures live."""
    return results / "figures"


def read_index(results: Path) -> dict[str, Any]:
    """Entries of figures.json by slug; none where nothing was drawn, or drawn by another version."""
    path = figures_folder(results) / "figures.json"
    if not path.exists():
        return {}
    data = json.loads(path.read_text())
    entries: dict[str, Any] = data["figures"] if data.get("format") == FIGURES_FORMAT else {}
    return {slug: e for slug, e in entries.items() if e["file"] is None or (path.parent / e["file"]).exists()}


def stale_figures(evidence: Evidence, results: Path) -> list[str]:
    """Slugs of drawn figures whose cells are no longer the ones they were drawn from."""
    index = read_index(results)
    pictures = [picture for picture in (*PICTURES, LORENZ) if picture.slug in index]
    return [p.slug for p in pictures if index[p.slug]["cells"] != _sources(p, evidence, results)]


def figures_to_draw(evidence: Evidence, results: Path) -> list[Picture]:
    """The figures that the results allow and that are missing or stale."""
    index = read_index(results)
    wanted = []
    for picture in (*PICTURES, LORENZ):
        sources = _sources(picture, evidence, results)
        known = index.get(picture.slug, {})
        if sources and known.get("cells") != sources:
            wanted.append(picture)
    return wanted


def draw_figures(evidence: Evidence, results: Path, *, console: Console) -> Path:
    """Draw what is missing or stale, write the index, and return the folder."""
    folder, index = figures_folder(results), read_index(results)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = figures_to_draw(evidence, results)
    with bar(console, "figures", len(wanted), "figures") as advance:
        for picture in wanted:
            advance(0, note=picture.slug)
            figure = _draw(picture, evidence, results)
            file = None if figure is None else f"{picture.slug}.png"
            if figure is not None:
                write_bytes_atomic(folder / f"{picture.slug}.png", _small_png(figure, picture.slug))
            index[picture.slug] = {"file": file, "cells": _sources(picture, evidence, results)}
            advance()
    write_json(folder / "figures.json", {"format": FIGURES_FORMAT, "figures": dict(sorted(index.items()))})
    return folder


def _draw(picture: Picture, evidence: Evidence, results: Path) -> Figure | None:
    if picture.draw is not None:
        return picture.draw(picture.groups(evidence))
    assert evidence.lorenz is not None
    names = {"solver": "truth", "learned map": "model"}
    with np.load(lorenz_path(results).with_suffix(".npz")) as file:
        orbits = {shown: file[f"orbit/{name}"] for shown, name in names.items()}
        estimates = {shown: file[f"estimates/{name}"] for shown, name in names.items()}
    return draw_lorenz(orbits, estimates, reference=evidence.lorenz["reference"])


def _sources(picture: Picture, evidence: Evidence, results: Path) -> dict[str, str]:
    """The files of a figure and the fingerprint of each; nothing where it has no runs yet."""
    if picture.draw is None:
        files = [str(lorenz_path(results).relative_to(results))] if evidence.lorenz is not None else []
    else:
        files = [cell_file(run.name, run.seed) for group in picture.groups(evidence).values() for run in group.runs]
    return {file: _fingerprint([results / file, (results / file).with_suffix(".npz")]) for file in files}


def _fingerprint(paths: Sequence[Path]) -> str:
    """The first 16 digits of the SHA-256 of some files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _small_png(figure: Figure, slug: str) -> bytes:
    """The figure as a PNG with a palette, at the finest resolution that is small enough."""
    for dpi in DPI:
        content = _with_palette(to_png(figure, dpi=dpi))
        if len(content) <= MAX_BYTES:
            return content
    raise ValueError(
        f"the picture {slug} must have at most {MAX_BYTES:,} bytes, got {len(content):,} at {DPI[-1]} dots per inch; "
        "show fewer rows in it"
    )


def _with_palette(png: bytes) -> bytes:
    """The same picture in COLOURS colours: maps of smooth fields shrink by a factor of three or more.

    Colours are chosen to cover those that occur: the common ones alone would turn the dark end of blue into red.
    Then each moves to the mean of what it stands for, or grey lines would be tinted.
    """
    stream = io.BytesIO()
    image = Image.open(io.BytesIO(png)).convert("RGB")
    few = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    few.save(stream, format="png", optimize=True)
    return stream.getvalue()
