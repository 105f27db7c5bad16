"""What is particular to training on a CUDA device."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ergoflow.data.normalize import Normalizer
from ergoflow.data.windows import ResidentWindows, WindowSampler
from ergoflow.models.convnext import ConvNeXtConfig
from ergoflow.models.ergoformer import Ergoformer, ErgoformerConfig
from ergoflow.models.operator import LatentOperator
from ergoflow.training.checkpoint import STATE_FILE, load_state
from ergoflow.training.objectives import ObjectiveConfig, make_objective
from ergoflow.training.optimizers import make_optimizer
from ergoflow.training.recorded import RecordedGradients, Rehearse
from ergoflow.training.stepper import NormalizedStep, NormalizedWindows
from ergoflow.training.trainer import Progress, TrainingConfig, TrainingInterrupted, TrainResult, train

pytestmark = pytest.mark.gpu


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.lift = nn.Conv2d(2, 8, 3, padding=1, padding_mode="circular")
        self.operator = LatentOperator(8, "penalty", generator=generator)
        self.head = nn.Conv2d(8, 2, 1)
        self.dropout = nn.Dropout(0.1)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter is not self.operator.weight:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, state: Tensor) -> Tensor:
        features = nn.functional.gelu(self.lift(state)).movedim(1, -1)  # (B, X, Y, 8)
        return self.head(self.dropout(self.operator(features).movedim(-1, 1)))


def run(folder: Path, *, resume: bool = False, on_progress=None, **settings: object) -> TrainResult:
    """Learn a shift by one point along x; 10 trajectories of 33 frames give 77 batches of 4 per epoch."""
    first = torch.randn(10, 2, 8, 6, generator=torch.Generator().manual_seed(2))
    data = torch.stack([torch.roll(first, shift, dims=2) for shift in range(33)], dim=1).cuda()
    sampler = WindowSampler(10, 33, window=3, batch_size=4, seed=3)
    units = Normalizer(mean=torch.zeros(2), std=torch.ones(2), std_delta=torch.ones(2))
    config = TrainingConfig(
        **{
            "epochs": 5,
            "batch_size": 4,
            "learning_rate": 3e-3,
            "clip_norm": 1.0,
            "ema_decay": 0.9,
            "precision": "bf16",
            "tensorboard": False,
            **settings,
        }
    )
    return train(
        NormalizedStep(Net(), "state").cuda(),
        make_objective(ObjectiveConfig(unroll=2), generator=torch.Generator("cuda").manual_seed(1)),
        NormalizedWindows(ResidentWindows(data, sampler), units),
        config=config,
        folder=folder,
        seed=0,
        resume=resume,
        on_progress=on_progress,
    )


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_step_between_two_log_lines_waits_for_the_device(tmp_path: Path) -> None:
    def watch(progress: Progress) -> None:
        if progress.step == 5:
            torch.cuda.set_sync_debug_mode("error")
        if progress.step == 30:
            torch.cuda.set_sync_debug_mode("default")

    try:
        result = run(tmp_path, max_steps=35, log_every=1000, on_progress=watch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert result.step == 35


# torch warns about itself while it imports its compiler.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_training_lowers_the_loss(tmp_path: Path, compiled: bool) -> None:
    run(tmp_path, compile=compiled, schedule="wsd")
    losses = [json.loads(line)["loss"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.6 * losses[0]


def test_resumed_run_follows_the_uninterrupted_one(tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.step == 50:
            os.kill(os.getpid(), signal.SIGTERM)

    run(tmp_path / "whole", max_steps=90, precision="fp32")
    with pytest.raises(TrainingInterrupted):
        run(tmp_path / "parts", max_steps=90, precision="fp32", on_progress=stop)
    run(tmp_path / "parts", max_steps=90, precision="fp32", resume=True)
    whole, parts = (load_state(tmp_path / name / STATE_FILE) for name in ("whole", "parts"))
    # Dropout masks and unit vectors are the same; convolution gradients may be summed in another order.
    assert torch.equal(whole["random"][0]["cuda"], parts["random"][0]["cuda"])
    assert torch.equal(whole["generators"][0], parts["generators"][0])
    for name, value in whole["model"].items():
        torch.testing.assert_close(parts["model"][name], value, rtol=1e-3, atol=1e-4)


def test_optimiser_is_fused_for_real_weights_and_works_for_complex_ones() -> None:
    settings = {"learning_rate": 0.1, "betas": (0.9, 0.999), "weight_decay": 0.0}
    real = nn.Parameter(torch.ones(3, 3, device="cuda"))
    assert make_optimizer("adamw", [real], **settings).defaults["fused"]
    spectral = nn.Parameter(torch.ones(3, 3, device="cuda", dtype=torch.complex64))
    optimizer = make_optimizer("adamw", [real, spectral], **settings)
    (real.square().sum() + spectral.abs().square().sum()).backward()
    optimizer.step()
    torch.testing.assert_close(spectral.detach().real, torch.full((3, 3), 0.9, device="cuda"))


def test_replayed_gradients_are_those_of_plain_calls_for_every_batch_and_stage() -> None:
    net = Net().cuda().eval()
    parameters = list(net.parameters())

    def losses(batch: Tensor, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        state = batch
        for _ in range(2 if progress > 0.5 else 1):
            state = net(state)
        return state.square().mean(), {"largest": state.abs().amax()}

    def plain(batch: Tensor, progress: float) -> list[Tensor]:
        total, parts = losses(batch, progress)
        return [total.detach(), parts["largest"].detach(), *torch.autograd.grad(total, parameters)]

    recorded = RecordedGradients(losses, parameters, stage=lambda progress: int(progress > 0.5))
    for seed in range(4):
        batch = torch.randn(3, 2, 8, 6, generator=torch.Generator().manual_seed(seed)).cuda()
        for progress in (0.2, 0.9, 0.4):
            total, parts = recorded(batch, progress)
            found = [t.clone() for t in (total, parts["largest"], *(p.grad for p in parameters)) if t is not None]
            torch.testing.assert_close(found, plain(batch, progress), rtol=1e-4, atol=1e-6)


def test_replays_draw_the_numbers_that_plain_calls_draw_next_and_recording_draws_none() -> None:
    weight = nn.Parameter(torch.ones(5, device="cuda"))

    def drawn(stage: object) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(7)

        def losses(batch: Tensor, _: float) -> tuple[Tensor, dict[str, Tensor]]:
            return (weight * torch.rand(5, generator=generator, device="cuda") * batch).sum(), {}

        gradients = RecordedGradients(losses, [weight], stage=stage, generator=generator)  # type: ignore[arg-type]
        found = []
        for _ in range(3):
            gradients(torch.ones(5, device="cuda"), 0.0)
            assert weight.grad is not None
            found.append(weight.grad.clone())
        return found

    plain, replayed = drawn(None), drawn(lambda progress: 0)
    torch.testing.assert_close(replayed, plain)
    assert not torch.equal(plain[0], plain[1])


def test_a_capture_that_comes_late_on_a_busy_device_does_not_set_random_numbers_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(torch.cuda.CUDAGraph):
        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda._sleep(10**9)  # half a second, after which it writes the beginning of the random numbers
            super().capture_begin(*args, **kwargs)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Late)
    weight, generator = nn.Parameter(torch.ones(5, device="cuda")), torch.Generator("cuda").manual_seed(7)

    def losses(batch: Tensor, _: float) -> tuple[Tensor, dict[str, Tensor]]:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(2 * 10**9)  # a replay draws a second after it wrote where its numbers go on
        return (weight * torch.rand(5, generator=generator, device="cuda") * batch).sum(), {}

    gradients, found = RecordedGradients(losses, [weight], stage=round, generator=generator), []
    for progress in (0.0, 1.0):  # the second stage's first replay goes on where the first stage's ended
        gradients(torch.ones(5, device="cuda"), progress)
        assert weight.grad is not None
        found.append(weight.grad.clone())
    generator.manual_seed(7)
    torch.testing.assert_close(found, [torch.rand(5, generator=generator, device="cuda") for _ in range(2)])


@pytest.mark.filterwarnings("error")
def test_members_of_a_model_that_draws_are_recorded_and_have_the_gradients_of_plain_calls() -> None:
    unet = ConvNeXtConfig(widths=(8, 16), blocks=(1, 1, 1), kernel=3)
    config = ErgoformerConfig(unet=unet, flow=None, noise=2)
    model = Ergoformer(config, 2, 2, (16, 16), periodic=(False, True), generator=torch.Generator().manual_seed(0))
    nn.init.normal_(model.unet.head.weight)
    step = NormalizedStep(model, "increment", torch.ones(2)).to("cuda")
    settings = ObjectiveConfig(noise=0.01, members=2, unitary_weight=0)

    def drawn(stage: object) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(7)
        objective = make_objective(settings, generator=generator, periodic=(False, True))

        def losses(batch: Tensor, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
            found = objective(step, batch, progress)
            return found.total, found.parts

        gradients = RecordedGradients(losses, step.parameters(), stage=stage, generator=generator)  # type: ignore[arg-type]
        found = []
        for seed in range(3):
            batch = torch.randn(4, 2, 2, 16, 16, generator=torch.Generator().manual_seed(seed)).to("cuda")
            total, _ = gradients(batch, 0.0)
            found += [total.clone(), *(p.grad.clone() for p in step.parameters() if p.grad is not None)]
        return found

    plain, replayed = drawn(None), drawn(lambda progress: 0)
    assert len(plain) == 3 * (1 + len(list(step.parameters())))
    torch.testing.assert_close(replayed, plain, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("error")
def test_recomputed_steps_are_recorded_in_bf16_and_have_the_gradients_of_plain_calls() -> None:
    unet = ConvNeXtConfig(widths=(8, 16), blocks=(1, 1, 1), kernel=3)
    config = ErgoformerConfig(unet=unet, flow=None)
    model = Ergoformer(config, 2, 2, (16, 16), periodic=(False, True), generator=torch.Generator().manual_seed(0))
    nn.init.normal_(model.unet.head.weight)
    step = NormalizedStep(model, "increment", torch.ones(2), relaxation=0.1, kept_means=(0,)).to("cuda")
    batch = torch.randn(4, 4, 2, 16, 16, generator=torch.Generator().manual_seed(0)).to("cuda")

    def found(*, recompute: bool, recorded: bool) -> list[Tensor]:
        settings = ObjectiveConfig(unroll=3, recompute=recompute, unitary_weight=0)
        objective = make_objective(settings, generator=torch.Generator("cuda"), periodic=(False, True))

        def losses(batch: Tensor, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
            with torch.autocast("cuda", torch.bfloat16):
                of = objective(step, batch, progress)
            return of.total, of.parts

        gradients = RecordedGradients(losses, step.parameters(), stage=objective.stage if recorded else None)
        for _ in range(2):
            total, _parts = gradients(batch, 1.0)
        return [total.clone(), *(p.grad.clone() for p in step.parameters() if p.grad is not None)]

    plain = found(recompute=False, recorded=False)
    assert len(plain) == 1 + len(list(step.parameters()))
    torch.testing.assert_close(found(recompute=True, recorded=True), plain, rtol=2e-2, atol=1e-3)


def test_a_rehearsal_is_held_before_the_first_recording_alone_and_leaves_no_trace() -> None:
    weight = nn.Parameter(torch.ones(5, device="cuda"))
    held = []

    def drawn(rehearse: Rehearse | None) -> list[Tensor]:
        generator = torch.Generator("cuda").manual_seed(7)

        def losses(batch: Tensor, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
            # A rehearsal's numbers are anything.
            garbage = float("nan") if len(held) % 2 else 1.0
            return (garbage * weight * torch.rand(5, generator=generator, device="cuda") * batch).sum(), {}

        gradients = RecordedGradients(losses, [weight], stage=round, generator=generator, rehearse=rehearse)
        found = []
        for progress in (0.0, 1.0, 0.0):
            gradients(torch.ones(5, device="cuda"), progress)
            assert weight.grad is not None
            found.append(weight.grad.clone())
        return found

    def rehearse(function: Callable[[], object], device: torch.device) -> None:
        held.append("begun")
        function()
        held.append("ended")

    torch.testing.assert_close(drawn(rehearse), drawn(None), rtol=0, atol=0)
    assert held == ["begun", "ended"]


def test_a_new_stage_frees_the_memory_of_the_last() -> None:
    weight = nn.Parameter(torch.ones(2**22, device="cuda"))

    def losses(batch: Tensor, progress: float) -> tuple[Tensor, dict[str, Tensor]]:
        state = weight * batch
        for _ in range(8):
            state = (state * weight).sin()
        return state.sum(), {}

    gradients = RecordedGradients(losses, [weight], stage=round)
    batch, reserved = torch.ones(2**22, device="cuda"), []
    for progress in (0.0, 1.0, 2.0):
        gradients(batch, progress)
        torch.cuda.empty_cache()
        reserved.append(torch.cuda.memory_reserved())
    assert max(reserved[1:]) < 1.1 * reserved[0]


def test_losses_that_ask_the_device_for_a_number_are_computed_plainly_after_a_warning() -> None:
    weight = nn.Parameter(torch.ones(5, device="cuda"))

    def losses(batch: Tensor, _: float) -> tuple[Tensor, dict[str, Tensor]]:
        return (weight * batch).sum() * float(batch.max()), {}

    gradients = RecordedGradients(losses, [weight], stage=lambda progress: 0)
    batch = torch.arange(5.0, device="cuda")
    with pytest.warns(UserWarning, match="kernel by kernel"):
        gradients(batch, 0.0)
    for _ in range(2):
        torch.testing.assert_close(weight.grad, 4 * batch)
        gradients(batch, 0.0)
