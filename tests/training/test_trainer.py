from __future__ import annotations

import gc
import itertools
import json
import math
import os
import signal
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ergoflow.data.windows import ResidentWindows, WindowSampler
from ergoflow.training.checkpoint import load_state, load_weights
from ergoflow.training.distributed import LaunchContext
from ergoflow.training.objectives import Losses, ObjectiveConfig, make_objective
from ergoflow.training.stepper import NormalizedStep
from ergoflow.training.trainer import TrainingConfig, TrainingDiverged, TrainingInterrupted, train

ROTATION = torch.tensor([[math.cos(0.3), -math.sin(0.3)], [math.sin(0.3), math.cos(0.3)]])


def new_model(seed: int = 0) -> nn.Conv1d:
    model = nn.Conv1d(2, 2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randn(2, 2, 1, generator=torch.Generator().manual_seed(seed)))
    return model


def rotating_windows(batch_size: int = 8) -> ResidentWindows:
    """Six trajectories of nine frames of z' = R z at five points: 48 windows of two frames."""
    frames = [torch.randn(6, 2, 5, generator=torch.Generator().manual_seed(1))]
    for _ in range(8):
        frames.append(torch.einsum("ij,bjx->bix", ROTATION, frames[-1]))
    sampler = WindowSampler(6, 9, window=2, stride=1, batch_size=batch_size, seed=4)
    return ResidentWindows(torch.stack(frames, dim=1), sampler)


def objective(**settings: object):
    config = ObjectiveConfig(**{"unitary_weight": 0.0, **settings})
    return make_objective(config, generator=torch.Generator().manual_seed(0))


def config(**settings: object) -> TrainingConfig:
    return TrainingConfig(**{"epochs": 4, "batch_size": 8, "learning_rate": 0.03, "tensorboard": False, **settings})


def read_log(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("predict", ["state", "increment"])
def test_training_finds_the_rotation_that_made_the_data(tmp_path: Path, optimizer: str, predict: str) -> None:
    model = new_model()
    step = NormalizedStep(model, predict, torch.full((2,), 0.5))
    settings = config(epochs=60, optimizer=optimizer, schedule="cosine")
    result = train(step, objective(), rotating_windows(), config=settings, folder=tmp_path, seed=0)
    truth = ROTATION if predict == "state" else (ROTATION - torch.eye(2)) / 0.5
    torch.testing.assert_close(model.weight[..., 0].detach(), truth, atol=1e-3, rtol=0)
    assert result.step == 60 * 6
    assert result.loss < 1e-3


def test_data_of_a_run_are_freed_with_it_and_wait_for_no_collector_of_cycles(tmp_path: Path) -> None:
    windows = rotating_windows()
    held = weakref.ref(windows)
    gc.collect()
    gc.disable()
    try:
        train(NormalizedStep(new_model()), objective(), windows, config=config(epochs=1), folder=tmp_path, seed=0)
        del windows
        assert held() is None
    finally:
        gc.enable()


def test_weights_file_holds_the_weights_in_the_returned_step(tmp_path: Path) -> None:
    for decay in (None, 0.9):
        folder, model = tmp_path / str(decay), new_model()
        result = train(
            NormalizedStep(model),
            objective(),
            rotating_windows(),
            config=config(ema_decay=decay),
            folder=folder,
            seed=0,
            metadata={"recipe": "toy"},
        )
        loaded = new_model(seed=9)
        metadata = load_weights(loaded, result.weights)
        assert torch.equal(loaded.weight, model.weight)
        assert metadata == {
            "recipe": "toy",
            "step": "24",
            "averaged": "false" if decay is None else "true",
            "model": "Conv1d",
        }
        raw = load_state(folder / "state" / "state.pt")["model"]["weight"]
        assert torch.equal(raw, model.weight) == (decay is None)


def test_validation_sees_averaged_weights_in_eval_mode_and_leaves_training_alone(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def validate(step: NormalizedStep) -> dict[str, float]:
        assert not step.training
        assert not torch.is_grad_enabled()
        seen.append(step.model.weight.clone())
        return {"relative_l2": 0.25}

    finals = []
    for name, hook in (("with", validate), ("without", None)):
        model = new_model()
        train(
            NormalizedStep(model),
            objective(),
            rotating_windows(),
            config=config(ema_decay=0.9, validate_every_epochs=2),
            folder=tmp_path / name,
            seed=0,
            validate=hook,
        )
        finals.append(model.weight.detach().clone())
    assert torch.equal(*finals)
    assert len(seen) == 2  # epochs 2 and 4
    assert torch.equal(seen[-1], finals[0])
    valid = {line["step"]: line["valid"] for line in read_log(tmp_path / "with") if "valid" in line}
    assert valid == {12: {"relative_l2": 0.25}, 24: {"relative_l2": 0.25}}


def test_gradient_after_clipping_obeys_the_bound(tmp_path: Path) -> None:
    norms = {}
    for bound in (None, 1e-3):
        model = new_model()
        train(
            NormalizedStep(model),
            objective(),
            rotating_windows(),
            config=config(max_steps=1, clip_norm=bound),
            folder=tmp_path / str(bound),
            seed=0,
        )
        norms[bound] = torch.linalg.vector_norm(model.weight.grad).item()
    assert norms[None] > 0.1
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-3)


def test_log_has_the_mean_loss_of_each_interval_once(tmp_path: Path) -> None:
    for log_every in (1, 5):
        train(
            NormalizedStep(new_model()),
            objective(),
            rotating_windows(),
            config=config(log_every=log_every, max_steps=17),
            folder=tmp_path / str(log_every),
            seed=0,
        )
    every, coarse = read_log(tmp_path / "1"), read_log(tmp_path / "5")
    assert [line["step"] for line in every] == list(range(1, 18))
    assert [line["step"] for line in coarse] == [5, 10, 15, 17]
    assert [line["epoch"] for line in every] == [1] * 6 + [2] * 6 + [3] * 5
    single = [line["loss"] for line in every]
    for line, part in zip(coarse, (single[:5], single[5:10], single[10:15], single[15:]), strict=True):
        assert line["loss"] == pytest.approx(sum(part) / len(part), rel=1e-6)
        assert line["parts"]["relative_l2"] == pytest.approx(line["loss"])
    assert set(coarse[0]) == {"step", "epoch", "loss", "parts", "lr", "samples_per_s", "seconds"}


def test_logged_rate_is_the_samples_of_each_interval_over_its_time(tmp_path: Path) -> None:
    ticks = itertools.count()
    train(
        NormalizedStep(new_model()),
        objective(),
        rotating_windows(),
        config=config(log_every=5, max_steps=17),
        folder=tmp_path,
        seed=0,
        clock=lambda: next(ticks) ** 2.0,  # every step takes longer than the one before
    )
    lines = read_log(tmp_path)
    elapsed = [b - a for a, b in itertools.pairwise([0.0, *(line["seconds"] for line in lines)])]
    samples = [line["samples_per_s"] * t for line, t in zip(lines, elapsed, strict=True)]
    assert samples == pytest.approx([40, 40, 40, 16])


def test_time_budget_ends_the_run_and_drives_its_schedule(tmp_path: Path) -> None:
    """The clock ticks 2.5 s per step: half a minute is 12 steps, whatever the number of epochs."""
    ticks = itertools.count()
    result = train(
        NormalizedStep(new_model()),
        objective(),
        rotating_windows(),
        config=config(epochs=1000, max_minutes=0.5, schedule="cosine", log_every=1),
        folder=tmp_path,
        seed=0,
        clock=lambda: 2.5 * next(ticks),
    )
    assert result.step == 12
    assert result.seconds == 30
    rates = [line["lr"] for line in read_log(tmp_path)]
    assert rates == pytest.approx([0.015 * (1 + math.cos(math.pi * step / 12)) for step in range(12)])


def test_time_budget_does_not_pay_for_the_first_update(tmp_path: Path) -> None:
    """The first update takes 1000 s, as one that compiles kernels does, others 2.5 s: twelve fit in half a minute."""
    seconds = itertools.accumulate([1000.0, *itertools.repeat(2.5, 50)], initial=0.0)
    now = [next(seconds)]

    class Slow:
        generator = torch.Generator()

        def __call__(self, step: NormalizedStep, batch: Tensor, progress: float = 1.0) -> Losses:
            now[0] = next(seconds)
            return objective()(step, batch, progress)

    result = train(
        NormalizedStep(new_model()),
        Slow(),
        rotating_windows(),
        config=config(epochs=1000, max_minutes=0.5),
        folder=tmp_path,
        seed=0,
        clock=lambda: now[0],
    )
    assert (result.step, result.seconds) == (13, 30)


def test_time_budget_counts_the_time_before_a_resumption(tmp_path: Path) -> None:
    def clock_from(start: float):
        ticks = itertools.count()
        return lambda: start + 2.5 * next(ticks)

    def stop_at_five(progress) -> None:
        if progress.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = config(epochs=1000, max_minutes=0.5)
    with pytest.raises(TrainingInterrupted):
        train(
            NormalizedStep(new_model()),
            objective(),
            rotating_windows(),
            config=settings,
            folder=tmp_path,
            seed=0,
            clock=clock_from(0.0),
            on_progress=stop_at_five,
        )
    result = train(
        NormalizedStep(new_model()),
        objective(),
        rotating_windows(),
        config=settings,
        folder=tmp_path,
        seed=0,
        clock=clock_from(9000.0),
        resume=True,
    )
    assert (result.step, result.seconds) == (12, 30)


def test_checkpoints_come_at_their_interval(tmp_path: Path) -> None:
    """10 s per step and a checkpoint each half minute: after steps 3, 6 and 8, the last."""
    ticks, saved = itertools.count(), []

    def watch(progress) -> None:
        path = tmp_path / "state" / "state.pt"
        saved.append(load_state(path)["position"]["step"] if path.exists() else None)

    train(
        NormalizedStep(new_model()),
        objective(),
        rotating_windows(),
        config=config(max_steps=8, checkpoint_minutes=0.5),
        folder=tmp_path,
        seed=0,
        clock=lambda: 10.0 * next(ticks),
        on_progress=watch,
    )
    assert saved == [None, None, None, 3, 3, 3, 6, 6]
    assert load_state(tmp_path / "state" / "state.pt")["position"]["step"] == 8


def test_diverging_loss_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    class Exploding:
        generator = torch.Generator()
        calls = 0

        def __call__(self, step: NormalizedStep, batch: Tensor, progress: float = 1.0) -> Losses:
            self.calls += 1
            loss = step(batch[:, 0]).square().mean() * (float("nan") if self.calls >= 8 else 1.0)
            return Losses(loss, {"energy": loss})

    ticks = itertools.count()
    with pytest.raises(TrainingDiverged, match="the loss is nan at step 8; the checkpoint of step 6") as error:
        train(
            NormalizedStep(new_model()),
            Exploding(),
            rotating_windows(),
            config=config(log_every=5, checkpoint_minutes=0.5),
            folder=tmp_path,
            seed=0,
            clock=lambda: 10.0 * next(ticks),  # a checkpoint every third step
        )
    assert "\n" not in str(error.value)
    assert "learning_rate" in str(error.value)
    state = load_state(tmp_path / "state" / "state.pt")
    assert state["position"]["step"] == 6
    assert torch.isfinite(state["model"]["weight"]).all()
    assert [line["step"] for line in read_log(tmp_path)] == [5]


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    """The loss sqrt(0 * w) is 0, but its gradient is nan."""

    class SecretlyBroken:
        generator = torch.Generator()

        def __call__(self, step: NormalizedStep, batch: Tensor, progress: float = 1.0) -> Losses:
            loss = (0 * step(batch[:, 0]).square().sum()).sqrt()
            return Losses(loss, {"loss": loss})

    with pytest.raises(TrainingDiverged, match="the weights are not finite at step 1; no checkpoint"):
        train(
            NormalizedStep(new_model()),
            SecretlyBroken(),
            rotating_windows(),
            config=config(checkpoint_minutes=0.0),
            folder=tmp_path,
            seed=0,
        )
    assert not list(tmp_path.rglob("*.pt"))
    assert not list(tmp_path.rglob("*.safetensors"))


def test_folder_with_a_checkpoint_is_refused_unless_resumed(tmp_path: Path) -> None:
    settings = config(max_steps=3)
    train(NormalizedStep(new_model()), objective(), rotating_windows(), config=settings, folder=tmp_path, seed=0)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="--resume"):
        train(
            NormalizedStep(new_model()),
            objective(),
            rotating_windows(),
            config=settings,
            folder=tmp_path,
            seed=0,
        )
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_resuming_a_finished_run_changes_nothing_and_returns_its_result(tmp_path: Path) -> None:
    settings = config(max_steps=7, ema_decay=0.8)
    arguments = {"config": settings, "folder": tmp_path, "seed": 0}
    first = train(NormalizedStep(new_model()), objective(), rotating_windows(), **arguments)
    files = {name: (tmp_path / name).read_bytes() for name in ("model.safetensors", "log.jsonl")}
    model = new_model(seed=5)
    second = train(NormalizedStep(model), objective(), rotating_windows(), resume=True, **arguments)
    assert (second.step, second.epoch, second.loss) == (first.step, first.epoch, first.loss)
    assert files == {name: (tmp_path / name).read_bytes() for name in files}
    loaded = new_model(seed=6)
    load_weights(loaded, first.weights)
    assert torch.equal(loaded.weight, model.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": "adamw"}, "optimizer: it was adam, now it is adamw"),
        ({"ema_decay": 0.9}, "averaging of weights"),
        ({"batch_size": 4}, "batch size: it was 8, now it is 4"),
        ({"seed": 1}, "seed: it was 0, now it is 1"),
    ],
)
def test_resuming_with_another_setting_that_matters_is_refused(tmp_path: Path, change: dict, message: str) -> None:
    settings = {"max_steps": 3}
    train(
        NormalizedStep(new_model()),
        objective(),
        rotating_windows(),
        config=config(**settings),
        folder=tmp_path,
        seed=0,
    )
    seed = change.pop("seed", 0)
    with pytest.raises(ValueError, match=message):
        train(
            NormalizedStep(new_model()),
            objective(),
            rotating_windows(change.get("batch_size", 8)),
            config=config(**settings, **change),
            folder=tmp_path,
            seed=seed,
            resume=True,
        )


def test_windows_of_another_batch_size_than_configured_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="batch_size is 8, but the windows come in batches of 4"):
        train(
            NormalizedStep(new_model()),
            objective(),
            rotating_windows(4),
            config=config(),
            folder=tmp_path,
            seed=0,
        )


def test_model_without_parameters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Identity has none"):
        train(
            NormalizedStep(nn.Identity()),
            objective(),
            rotating_windows(),
            config=config(),
            folder=tmp_path,
            seed=0,
        )


def test_bf16_training_learns_with_float32_weights_and_losses(tmp_path: Path) -> None:
    inputs = []

    class Watching(nn.Conv1d):
        def forward(self, state: Tensor) -> Tensor:
            output = super().forward(state)
            inputs.append((state.dtype, output.dtype))
            return output

    model = Watching(2, 2, 1, bias=False)
    model.load_state_dict(new_model().state_dict())
    result = train(
        NormalizedStep(model),
        objective(unroll=1),
        rotating_windows(),
        config=config(epochs=40, precision="bf16", schedule="cosine"),
        folder=tmp_path,
        seed=0,
    )
    assert set(inputs) == {(torch.float32, torch.bfloat16)}
    assert model.weight.dtype == torch.float32
    assert result.loss < 0.02  # bfloat16 resolves 2^-8


def test_training_leaves_the_callers_random_numbers_and_signal_handlers_alone(tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    step = NormalizedStep(nn.Sequential(nn.Dropout(0.5), new_model()))
    before = torch.get_rng_state()
    train(
        step,
        objective(),
        rotating_windows(),
        config=config(),
        folder=tmp_path,
        seed=0,
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers


def test_processes_and_seeds_draw_numbers_of_their_own_inside_the_model(tmp_path: Path) -> None:
    class Drawing(nn.Conv1d):
        def forward(self, state: Tensor) -> Tensor:
            drawn.append(torch.rand(()).item())
            return super().forward(state)

    drawn: list[float] = []
    for rank, seed in itertools.product((0, 1), (0, 1)):
        train(
            NormalizedStep(Drawing(2, 2, 1)),
            objective(),
            rotating_windows(),
            config=config(max_steps=1),
            folder=tmp_path / f"{rank}{seed}",
            seed=seed,
            context=LaunchContext(rank=rank),
        )
    assert len(set(drawn)) == len(drawn) == 4


def test_tensorboard_gets_the_numbers_of_the_log_also_of_a_resumed_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (12, 24):
        train(
            NormalizedStep(new_model()),
            objective(),
            rotating_windows(),
            config=config(tensorboard=True, log_every=6, max_steps=steps),
            folder=tmp_path,
            seed=0,
            validate=lambda step: {"relative_l2": 0.5},
            resume=True,
        )
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert "samples_per_s" in events.Tags()["scalars"]
    logged = [(line["step"], pytest.approx(line["loss"], rel=1e-6)) for line in read_log(tmp_path)]
    assert [(event.step, event.value) for event in events.Scalars("loss")] == logged
    assert events.Scalars("valid/relative_l2")[-1].value == 0.5


def test_clock_that_stands_still_gives_no_rate(tmp_path: Path) -> None:
    train(
        NormalizedStep(new_model()),
        objective(),
        rotating_windows(),
        config=config(tensorboard=True, max_steps=1),
        folder=tmp_path,
        seed=0,
        clock=lambda: 7.0,
    )
    assert [line["samples_per_s"] for line in read_log(tmp_path)] == [None]


def test_progress_is_reported_after_every_step(tmp_path: Path) -> None:
    reports = []
    train(
        NormalizedStep(new_model()),
        objective(),
        rotating_windows(),
        config=config(),
        folder=tmp_path,
        seed=0,
        on_progress=reports.append,
    )
    assert [report.step for report in reports] == list(range(1, 25))
    assert [report.fraction for report in reports] == [step / 24 for step in range(1, 25)]
    assert math.isnan(reports[0].loss)
    assert reports[-1].loss == read_log(tmp_path)[-1]["loss"]
