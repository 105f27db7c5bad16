"""Small training states: half the bytes, the same weights, and a run that goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from ergoflow.data.windows import ResidentWindows, WindowSampler
from ergoflow.training.checkpoint import STATE_FILE, load_state, save_state
from ergoflow.training.compact import compact, expand
from ergoflow.training.objectives import ObjectiveConfig, make_objective
from ergoflow.training.optimizers import OptimizerName, make_optimizer
from ergoflow.training.stepper import NormalizedStep
from ergoflow.training.trainer import TrainingConfig, TrainingInterrupted, TrainResult, train


def trained(optimizer: OptimizerName) -> tuple[nn.Module, torch.optim.Optimizer]:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    chosen = make_optimizer(optimizer, model.parameters(), learning_rate=1e-2, betas=(0.9, 0.999), weight_decay=0.0)
    for _ in range(5):
        chosen.zero_grad()
        model(torch.randn(8, 64, generator=generator)).square().mean().backward()
        chosen.step()
    return model, chosen


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_are_kept_exactly_moments_to_half_precision_and_momenta_not_at_all(
    name: OptimizerName, tmp_path: Path
) -> None:
    model, optimizer = trained(name)
    average = {key: p.detach() + 1e-3 * torch.randn_like(p) for key, p in model.named_parameters()}
    state = {"model": model.state_dict(), "average": average, "optimizer": optimizer.state_dict()}
    save_state(tmp_path / "whole.pt", state)
    save_state(tmp_path / "small.pt", compact(state))
    count = sum(p.numel() for p in model.parameters())
    sizes = {key: (tmp_path / f"{key}.pt").stat().st_size / count for key in ("whole", "small")}
    assert sizes["whole"] > (15 if name == "adamw" else 11)
    # Four bytes of weights, two of the average, two of second moments; the rest is the archive's own.
    assert sizes["small"] < 9.5
    found = expand(load_state(tmp_path / "small.pt"))
    for key, value in state["model"].items():
        assert torch.equal(found["model"][key], value)
        torch.testing.assert_close(found["average"][key], average[key], rtol=0, atol=5e-5)
    _, fresh = trained(name)
    fresh.load_state_dict(found["optimizer"])
    for p, q in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert p.keys() == q.keys()
        for key in p:
            if key in ("exp_avg", "momentum", "mean"):
                assert not q[key].any()
                assert q[key].is_contiguous()
            else:
                torch.testing.assert_close(q[key], p[key], rtol=2**-8, atol=0)


def test_a_whole_state_is_left_as_it_is() -> None:
    assert expand({"model": {}, "average": None}) == {"model": {}, "average": None}


def test_a_run_resumed_from_a_small_state_ends_as_well_as_the_whole_one(tmp_path: Path) -> None:
    data = torch.randn(6, 12, 2, 8, generator=torch.Generator().manual_seed(2))
    # The next frame is this one, rolled by a point.
    frames = torch.stack([data[:, 0].roll(shift, dims=-1) for shift in range(12)], dim=1)

    def run(folder: Path, stop: int | None = None, *, resume: bool = False) -> TrainResult:
        model = nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular")
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()

        def on_progress(progress: object) -> None:
            if progress.step == stop:  # type: ignore[attr-defined]
                os.kill(os.getpid(), signal.SIGTERM)

        return train(
            NormalizedStep(model, "state"),
            make_objective(ObjectiveConfig(unitary_weight=0.0), generator=torch.Generator().manual_seed(0)),
            ResidentWindows(frames, WindowSampler(6, 12, window=2, batch_size=6, seed=0)),
            config=TrainingConfig(
                epochs=30, batch_size=6, learning_rate=2e-2, ema_decay=0.9, compact_state=True, tensorboard=False
            ),
            folder=folder,
            seed=0,
            resume=resume,
            on_progress=on_progress,
        )

    whole = run(tmp_path / "whole")
    with pytest.raises(TrainingInterrupted):
        run(tmp_path / "parts", stop=150)
    assert load_state(tmp_path / "parts" / STATE_FILE)["compact"]
    resumed = run(tmp_path / "parts", resume=True)
    assert resumed.step == whole.step
    assert whole.loss < 0.05
    assert resumed.loss < 2 * whole.loss
