"""A run that stops, in whatever way, and is resumed is the run that never stopped."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ergoflow.data.windows import ResidentWindows, WindowSampler
from ergoflow.models.operator import LatentOperator
from ergoflow.training.checkpoint import STATE_FILE, load_state
from ergoflow.training.distributed import LaunchContext
from ergoflow.training.interrupt import stop_requests
from ergoflow.training.objectives import ObjectiveConfig, make_objective
from ergoflow.training.state import RunState, capture, restore
from ergoflow.training.stepper import NormalizedStep
from ergoflow.training.trainer import Progress, TrainingConfig, TrainingInterrupted, TrainResult, train

STEPS = 40  # of 7 batches per epoch: five epochs and a part of the sixth


class Noisy(nn.Module):
    """A model that draws on every source of state: dropout, running buffers, a penalised operator."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.operator = LatentOperator(3, "penalty", generator=generator)
        self.dropout = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(3)
        self.bias = nn.Parameter(torch.randn(3, 1, generator=generator))

    def forward(self, state: Tensor) -> Tensor:
        return self.operator(self.dropout(self.norm(state)).mT).mT + self.bias


def careless_validation(step: NormalizedStep) -> dict[str, float]:
    """Scores that draw on the random numbers training uses."""
    return {"noise": torch.rand(1).item(), "norm": step.model.bias.norm().item()}


def run(
    folder: Path,
    *,
    resume: bool = False,
    on_progress=None,
    validate=careless_validation,
    checkpoint_minutes: float = 1000.0,
    **settings: object,
) -> TrainResult:
    data = torch.randn(5, 8, 3, 6, generator=torch.Generator().manual_seed(2))
    sampler = WindowSampler(5, 8, window=3, stride=1, batch_size=4, seed=3)
    config = TrainingConfig(
        **{
            "epochs": 50,
            "batch_size": 4,
            "max_steps": STEPS,
            "optimizer": "adamw",
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "schedule": "wsd",
            "warmup_steps": 5,
            "clip_norm": 1.0,
            "ema_decay": 0.9,
            "log_every": 4,
            "checkpoint_minutes": checkpoint_minutes,
            "tensorboard": False,
            **settings,
        }
    )
    objective = make_objective(ObjectiveConfig(unroll=2, unitary_samples=2), generator=torch.Generator().manual_seed(1))
    return train(
        NormalizedStep(Noisy(), "increment", torch.ones(3)),
        objective,
        ResidentWindows(data, sampler),
        config=config,
        folder=folder,
        seed=0,
        resume=resume,
        on_progress=on_progress,
        validate=validate,
    )


def outcome(folder: Path) -> tuple[bytes, list[tuple], dict[str, Tensor]]:
    """The weights file, the logged losses and validation scores, the raw weights and Adam's moments."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    logged = [(line["step"], line["loss"], line["parts"], line["lr"], line.get("valid")) for line in lines]
    state = load_state(folder / STATE_FILE)
    tensors = dict(state["model"])
    for number, moments in state["optimizer"]["state"].items():
        tensors |= {f"{number}/{name}": value for name, value in moments.items()}
    return (folder / "model.safetensors").read_bytes(), logged, tensors


def assert_same_run(folder: Path, reference: Path) -> None:
    weights, logged, tensors = outcome(folder)
    expected_weights, expected_logged, expected_tensors = outcome(reference)
    assert logged == expected_logged
    assert weights == expected_weights
    assert tensors.keys() == expected_tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(value, expected_tensors[name]), name


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    run(folder)
    return folder


def stop_after(step: int, number: signal.Signals):
    def stop(progress: Progress) -> None:
        if progress.step == step:
            os.kill(os.getpid(), number)

    return stop


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signalled_run_says_how_to_resume_and_resumes_bit_for_bit(
    tmp_path: Path, uninterrupted: Path, number: signal.Signals
) -> None:
    # 10 lies inside an epoch and a log interval; 28 ends an epoch and an interval; 39 is the last but one.
    # The signal arrives after step n has been counted, so the loop sees it at the end of step n + 1.
    for step in (9, 27, 38):
        with pytest.raises(TrainingInterrupted, match=f"{number.name} at step {step + 1} of 40.*--resume"):
            run(tmp_path, resume=True, on_progress=stop_after(step, number))
    run(tmp_path, resume=True)
    assert_same_run(tmp_path, uninterrupted)


def test_second_signal_ends_the_program_at_once() -> None:
    # A test run that was started in the background inherits a SIGINT that is ignored.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)

    def impatient() -> None:
        with stop_requests() as request:
            os.kill(os.getpid(), signal.SIGINT)
            assert request.reason == "SIGINT"
            os.kill(os.getpid(), signal.SIGINT)

    try:
        with pytest.raises(KeyboardInterrupt):
            impatient()
    finally:
        signal.signal(signal.SIGINT, inherited)


def test_every_resumption_sees_other_random_numbers_than_the_start(uninterrupted: Path) -> None:
    """The comparison above could not fail if the model were deterministic."""
    state = load_state(uninterrupted / STATE_FILE)
    fresh = torch.Generator().manual_seed(0).get_state()
    assert not torch.equal(state["random"][0]["cpu"], fresh)
    assert not torch.equal(state["generators"][0], torch.Generator().manual_seed(1).get_state())


def test_each_process_continues_with_its_own_random_numbers() -> None:
    model = nn.Linear(2, 2)
    run = RunState(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        average=None,
        generator=torch.Generator(),
        device=torch.device("cpu"),
    )
    streams = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)]
    mine = {"random": [{"cpu": stream} for stream in streams], "generators": streams[::-1]}
    state = capture(run, {}, LaunchContext()) | mine
    with torch.random.fork_rng(devices=[]):
        for rank, stream in enumerate(streams):
            restore(run, state, {}, LaunchContext(rank=rank, world_size=2))
            assert torch.equal(torch.get_rng_state(), stream)
            assert torch.equal(run.generator.get_state(), streams[1 - rank])
        # As earlier versions kept it.
        shared = state | {"generator": streams[0]}
        del shared["generators"]
        restore(run, shared, {}, LaunchContext(rank=1, world_size=2))
    assert torch.equal(run.generator.get_state(), streams[0])


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, str(folder), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_run_killed_at_a_random_step_resumes_bit_for_bit(tmp_path: Path, uninterrupted: Path) -> None:
    last_step = random.Random(os.getpid()).randint(5, 35)
    with start(tmp_path) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == last_step:
                process.kill()
                break
    assert process.returncode == -signal.SIGKILL
    saved = load_state(tmp_path / STATE_FILE)["position"]["step"]
    assert last_step - 1 <= saved < STEPS, f"killed at {last_step}"
    # What a dying process may leave: lines beyond the checkpoint, the last one cut short.
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"step": 38, "loss": 0.0, "parts": {}, "lr": 0}\n{"step": 40, "lo')
    run(tmp_path, resume=True)
    assert_same_run(tmp_path, uninterrupted)


def test_run_killed_while_writing_a_checkpoint_resumes_bit_for_bit(tmp_path: Path, uninterrupted: Path) -> None:
    with start(tmp_path, "--die-in-save", "11") as process:
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    litter = [path for path in (tmp_path / "state").iterdir() if path.name != "state.pt"]
    assert len(litter) == 1, "the process died elsewhere than inside the write"
    assert load_state(tmp_path / STATE_FILE)["position"]["step"] == 10
    run(tmp_path, resume=True)
    assert_same_run(tmp_path, uninterrupted)
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["state.pt"]


def test_run_may_be_lengthened_when_it_is_resumed(tmp_path: Path) -> None:
    # A run validates at its end, so the shorter run must not spend random numbers there.
    settings = {"schedule": "constant", "validate": None}
    run(tmp_path / "short", max_steps=12, **settings)
    run(tmp_path / "short", max_steps=20, resume=True, **settings)
    run(tmp_path / "long", max_steps=20, **settings)
    short, long = (outcome(tmp_path / name)[0] for name in ("short", "long"))
    assert short == long


def die_in_save(number: int) -> None:
    """Make the `number`-th torch.save write half of its bytes and then kill the process."""
    import io

    original, calls = torch.save, 0

    def save(state: object, file: io.BufferedWriter) -> None:
        nonlocal calls
        calls += 1
        if calls < number:
            original(state, file)
            return
        whole = io.BytesIO()
        original(state, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save


if __name__ == "__main__":
    if "--die-in-save" in sys.argv:
        die_in_save(int(sys.argv[-1]))
    run(
        Path(sys.argv[1]),
        checkpoint_minutes=0.0,
        on_progress=lambda progress: print(progress.step, flush=True),
    )
