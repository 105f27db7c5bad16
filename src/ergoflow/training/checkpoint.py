"""Weights and full training states on disk.

`model.safetensors` holds the weights to use (averaged, if the run averages) with a few facts as metadata.
`state/state.pt` holds all that a run needs to continue bit for bit. Both are written to a temporary name,
synced and renamed, so that at every moment the folder holds one complete file, the previous or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from ergoflow.data.files import replace_atomically, write_bytes_atomic

WEIGHTS_FILE = "model.safetensors"
STATE_FILE = "state/state.pt"
# One entry, because safetensors writes several in random order, and equal runs should give equal files.
METADATA_KEY = "ergoflow"
# Raise it when the meaning of an entry changes, and teach `load_state` to read the older one.
STATE_FORMAT = 1


def save_weights(model: nn.Module, path: Path, *, metadata: Mapping[str, str]) -> None:
    """Write the weights of a model and the name of its class, atomically."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    facts = json.dumps({**metadata, "model": type(model).__name__}, sort_keys=True)
    write_bytes_atomic(path, safetensors_bytes(tensors, metadata={METADATA_KEY: facts}))


def load_weights(model: nn.Module, path: Path) -> dict[str, str]:
    """Give a model the weights of a file; returns the file's metadata.

    Nothing is loaded unless the class, the names and the shapes all agree.
    """
    metadata, tensors = _read_weights(path)
    expected, found = type(model).__name__, metadata.get("model", type(model).__name__)
    if found != expected:
        raise ValueError(f"{path} must hold weights of {expected}, holds {found}; use the recipe it was trained by")
    _check_tensors(path, model.state_dict(), tensors)
    model.load_state_dict(tensors)
    return metadata


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a training state (tensors and plain values), atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(path) as temporary, temporary.open("wb") as file:
        torch.save({**state, "format": STATE_FORMAT}, file)


def load_state(path: Path) -> dict[str, Any]:
    """Read a training state onto the CPU; a file of an unknown format is refused."""
    unreadable = f"{path} must be a complete training state, but it cannot be read; train anew with --overwrite"
    # The directory of a zip archive is at its end, so a file that was cut short is no archive.
    with path.open("rb") as file:  # where reading is not allowed, that is the error
        whole = is_zipfile(file)
    if not whole:
        raise ValueError(unreadable)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, UnpicklingError) as error:
        raise ValueError(unreadable) from error
    found = state.get("format") if isinstance(state, dict) else None
    if found != STATE_FORMAT:
        raise ValueError(
            f"{path} must be a training state of format {STATE_FORMAT}, got format {found}; "
            "resume with the ergoflow version that wrote it, or remove it and train again"
        )
    return state


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The state of torch's own generators: the CPU's, and the device's if it is a GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """The inverse of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def _read_weights(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not path.is_file():
        raise ValueError(f"expected a weights file {path}, found none; train the recipe first")
    try:
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            facts = json.loads((file.metadata() or {}).get(METADATA_KEY, "{}"))
            return facts, {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(
            f"{path} must be a complete safetensors file, but it cannot be read ({error}); "
            "resume or repeat the training that wrote it"
        ) from error


def _check_tensors(path: Path, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    if missing or unexpected:
        raise ValueError(
            f"{path} must hold the {len(expected)} tensors of the model, lacks {_some(missing)} and has "
            f"unexpected {_some(unexpected)}; build the model from the recipe.json beside the weights"
        )
    for name, value in expected.items():
        if value.shape != found[name].shape:
            raise ValueError(
                f"{path}: {name} must have shape {tuple(value.shape)}, has {tuple(found[name].shape)}; "
                "build the model from the recipe.json beside the weights"
            )


def _some(names: list[str], limit: int = 3) -> str:
    """The first few names, and how many more there are."""
    if not names:
        return "none"
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
