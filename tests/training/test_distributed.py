"""Training on several processes is training on one."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ergoflow.data.windows import ResidentWindows, WindowSampler
from ergoflow.models.operator import LatentOperator
from ergoflow.training.checkpoint import load_weights
from ergoflow.training.distributed import LaunchContext, RankSampler, launch_context
from ergoflow.training.ensemble import ensemble_loss
from ergoflow.training.objectives import ObjectiveConfig, make_objective
from ergoflow.training.stepper import NormalizedStep
from ergoflow.training.trainer import Progress, TrainingConfig, TrainingInterrupted, train

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# A process that waits this long says where, and ends; the launch takes 5 s on two idle cores.
PATIENCE = 240.0
SAMPLER = WindowSampler(5, 8, window=3, stride=1, batch_size=6, seed=3)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.operator = LatentOperator(3, "penalty", generator=generator)
        self.bias = nn.Parameter(torch.randn(3, 1, generator=generator))

    def forward(self, state: Tensor) -> Tensor:
        return self.operator(torch.tanh(state + self.bias).mT).mT


def run(folder: Path, context: LaunchContext, *, resume: bool = False, on_progress=None) -> None:
    data = torch.randn(5, 8, 3, 6, generator=torch.Generator().manual_seed(2))
    config = TrainingConfig(
        epochs=5,
        batch_size=6,
        learning_rate=1e-2,
        ema_decay=0.9,
        clip_norm=0.5,
        log_every=2,
        tensorboard=False,
    )
    train(
        NormalizedStep(Small(), "increment", torch.ones(3)),
        make_objective(ObjectiveConfig(unroll=2), generator=torch.Generator().manual_seed(1)),
        ResidentWindows(data, RankSampler(SAMPLER, context)),
        config=config,
        folder=folder,
        seed=0,
        resume=resume,
        context=context,
        on_progress=on_progress,
        validate=lambda step: {"norm": step.model.bias.norm().item()},
    )


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_shares_of_a_batch_are_disjoint_and_together_the_batch(world_size: int) -> None:
    shares = [
        list(RankSampler(SAMPLER, LaunchContext(rank=rank, world_size=world_size)).batches(2, start=1))
        for rank in range(world_size)
    ]
    whole = list(SAMPLER.batches(2, start=1))
    assert len(whole) == SAMPLER.batches_per_epoch - 1
    for number, batch in enumerate(whole):
        rows = [tuple(row) for share in shares for row in share[number].tolist()]
        assert sorted(rows) == sorted(tuple(row) for row in batch.tolist())
        assert all(len(share[number]) == 6 // world_size for share in shares)


def test_unequal_shares_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the 4 processes, got batch size 6"):
        RankSampler(SAMPLER, LaunchContext(world_size=4))


def test_process_outside_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with launch_context("cpu") as context:
        assert context == LaunchContext()
        assert context.is_main
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="LOCAL_RANK, WORLD_SIZE is missing"), launch_context():
        pass


def test_one_process_of_torchrun_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one process may be recorded as a graph, where sums over a group of processes have no place."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    with launch_context("cpu") as context:
        assert context == LaunchContext()
        assert not torch.distributed.is_initialized()


def test_two_processes_interrupted_and_resumed_train_like_one(tmp_path: Path) -> None:
    run(tmp_path / "one", LaunchContext())
    launch = subprocess.run(
        [*TORCHRUN, __file__, str(tmp_path / "two")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=2 * PATIENCE,
        capture_output=True,
        text=True,
    )
    assert launch.returncode == 0, launch.stderr
    assert "Warning" not in launch.stderr
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) > 10
    assert [step for step, _ in two] == [step for step, _ in one]
    assert [loss for _, loss in two] == pytest.approx([loss for _, loss in one], rel=1e-5)
    models = Small(), Small()
    for name, model in zip(("one", "two"), models, strict=True):
        load_weights(model, tmp_path / name / "model.safetensors")
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def torchrun_main(folder: Path) -> None:
    """Check how processes agree; interrupt a run by a signal that one alone receives; resume it; end in an error."""

    def stop(progress: Progress) -> None:
        if progress.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    with pytest.raises(TrainingInterrupted) as error, launch_context("cpu") as context:  # noqa: PT012
        assert context.largest(3.0 + context.rank, -context.rank) == [4.0, 0.0]
        own = torch.tensor([3.0 + context.rank])
        assert context.mean(own).item() == 3.5
        assert own.item() == 3.0 + context.rank
        assert context.gather(context.rank) == [0, 1]
        assert_shares_of_a_score_average_to_the_whole(context)
        first, second = (torch.Generator().manual_seed(s) for s in context.gather(context.own_seed(5)))
        assert torch.rand(1, generator=first) != torch.rand(1, generator=second)
        expected = "SIGTERM" if context.is_main else "a signal to another process"
        with pytest.raises(TrainingInterrupted, match=f"stopped by {expected} at step 8"):
            run(folder, context, on_progress=stop)
        run(folder, context, resume=True)
        run(folder / "another", context, on_progress=stop)
    # The error's frames are held here, the threads of the group must have ended nevertheless: one that outlives the
    # block may ask for the interpreter's lock from one who waits for it, or after the end of the interpreter.
    assert error.tb is not None
    assert not communication_threads()


def assert_shares_of_a_score_average_to_the_whole(context: LaunchContext) -> None:
    """Its units are means over the batch: of the whole one, not of a process's share."""
    generator = torch.Generator().manual_seed(3)
    members, true, change = (torch.randn(*shape, 6, 1, 8, 8, generator=generator) for shape in ((2,), (), ()))
    change = change * torch.arange(1, 7)[:, None, None, None]
    share = slice(context.rank, None, context.world_size)
    mine = ensemble_loss(members[:, share], true[share], change[share], periodic=(True, True))
    whole = ensemble_loss(members, true, change, periodic=(True, True))
    torch.testing.assert_close(context.mean(mine[None])[0], whole)


def communication_threads() -> list[str]:
    names = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
            names.append((thread / "comm").read_text().strip())
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    torchrun_main(Path(sys.argv[1]))
