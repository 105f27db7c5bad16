from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from ergoflow.training.checkpoint import load_state, load_weights, save_state, save_weights


class Spectral(nn.Module):
    """Real, complex, buffer and transposed (non-contiguous) tensors in one model."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(width)
        self.weight = nn.Parameter(torch.randn(2, width, generator=generator).t())
        self.modes = nn.Parameter(torch.randn(width, dtype=torch.complex64, generator=generator))
        self.register_buffer("field", torch.randn(4, generator=generator))


class Other(Spectral):
    pass


class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


def test_weights_survive_the_disk_bit_for_bit_with_their_metadata(tmp_path: Path) -> None:
    model, copy = Spectral(), Spectral()
    with torch.no_grad():
        for tensor in copy.state_dict().values():
            tensor.zero_()
    save_weights(model, tmp_path / "model.safetensors", metadata={"step": "12"})
    metadata = load_weights(copy, tmp_path / "model.safetensors")
    assert metadata == {"step": "12", "model": "Spectral"}
    for name, value in model.state_dict().items():
        assert torch.equal(copy.state_dict()[name], value), name


def test_weights_file_is_readable_without_this_package(tmp_path: Path) -> None:
    save_weights(Spectral(), tmp_path / "w.safetensors", metadata={})
    with safe_open(tmp_path / "w.safetensors", framework="numpy") as file:
        assert set(file.keys()) == {"weight", "modes", "field"}
        assert file.get_tensor("weight").shape == (3, 2)


def test_weights_of_another_model_class_are_refused(tmp_path: Path) -> None:
    save_weights(Other(), tmp_path / "w.safetensors", metadata={})
    with pytest.raises(ValueError, match=r"must hold weights of Spectral, holds Other; use the recipe"):
        load_weights(Spectral(), tmp_path / "w.safetensors")


def test_weights_of_another_width_are_refused_with_name_and_both_shapes(tmp_path: Path) -> None:
    save_weights(Spectral(width=5), tmp_path / "w.safetensors", metadata={})
    model = Spectral(width=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"weight must have shape \(3, 2\), has \(5, 2\); build"):
        load_weights(model, tmp_path / "w.safetensors")
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    model = Wider()
    save_weights(model, tmp_path / "w.safetensors", metadata={})
    model.other = nn.Linear(1, 1)
    del model.extra
    with pytest.raises(ValueError, match=r"lacks other.bias, other.weight and has unexpected extra.bias"):
        load_weights(model, tmp_path / "w.safetensors")


@pytest.mark.parametrize("content", [None, b"", b"half a file"])
def test_absent_or_broken_weights_are_a_one_line_value_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"w\.safetensors") as error:
        load_weights(Spectral(), path)
    assert "\n" not in str(error.value)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_weights(Spectral(), path, metadata={})
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="complete safetensors file"):
        load_weights(Spectral(), path)


def test_state_of_an_unknown_format_is_refused(tmp_path: Path) -> None:
    torch.save({"format": 999, "model": {}}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match=r"format 1, got format 999; resume with the ergoflow version"):
        load_state(tmp_path / "state.pt")


@pytest.mark.parametrize("cut", [0, 10, -100])
def test_truncated_state_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "state.pt"
    save_state(path, {"weights": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match="cannot be read"):
        load_state(path)


def test_state_file_cannot_smuggle_code(tmp_path: Path) -> None:
    torch.save({"format": 1, "model": Path("/")}, tmp_path / "state.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        load_state(tmp_path / "state.pt")


def test_failed_write_leaves_the_previous_state_and_no_litter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state" / "state.pt"
    save_state(path, {"value": 1})

    def full_disk(state: object, file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_state(path, {"value": 2})
    assert load_state(path)["value"] == 1
    assert list(path.parent.iterdir()) == [path]
