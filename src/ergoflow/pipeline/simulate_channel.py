"""Turbulent channel flow to disk: one simulation per split, sampled on planes, segment after segment.

A segment is one shard: `frames` frames on every plane, each plane one trajectory. The next segment continues where the
last one ended. The state after a segment is kept in `state/<split>.pt`, about every half minute, and a stopped run goes
on from there: later segments are made once more, to the bit. Splits never share a simulation, because a downstream
plane replays an upstream one some fifty frames later.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from ergoflow import __version__
from ergoflow.config import SPLITS, ChannelDatasetConfig, to_dict
from ergoflow.data.files import replace_atomically, write_npz_atomic
from ergoflow.data.store import DatasetInfo, ShardWriter
from ergoflow.ops import lbm
from ergoflow.ops.lbm import Impl
from ergoflow.pipeline.progress import bar
from ergoflow.pipeline.shards import FrameQueue, Shard, list_shards, trajectory_seed
from ergoflow.pipeline.workspace import commit
from ergoflow.solvers.channel import ChannelConfig, block, initial_populations, make_step, plane_velocities, refine
from ergoflow.solvers.channel_statistics import check

# The watch-dogs look at the flow this often during the spin-up, and later at every tenth frame and a segment's last.
STEPS_PER_CHECK = 500
FRAMES_PER_CHECK = 10
# Segments that may be written at the same time: the one that is simulated and the one before, which goes to the disk.
WRITERS = 2
# A state is up to gigabytes, and a segment takes seconds on a GPU.
KEEP_SECONDS = 30.0
# Frames that may wait for their writer; 8 planes of 192² are 7 MB.
WAITING_FRAMES = 32
# The paper's start: 50 domain-throughs behind a block, 50 more without it.
BLOCK_THROUGHS = 50
# Lattice updates from which compiling the step (some ten seconds) pays on a CPU.
COMPILE_FROM = 5e7
# The last state of a simulation on three planes, for a picture; streaks are clearest at this height.
BOX_FILE = "box.npz"
PICTURE_HEIGHT_PLUS = 15.0


def make_channel(
    dataset: ChannelDatasetConfig,
    missing: list[Shard],
    folder: Path,
    *,
    device: torch.device,
    console: Console,
    minutes: float | None,
) -> None:
    """Make the missing segments of every split; with `minutes`, each split gets its share of the time.

    A split always gets its first segment, and a segment that has begun is finished.
    """
    started = time.monotonic()
    total = sum(dataset.count(split) for split in SPLITS)
    for split in reversed(SPLITS):
        to_make = sum(shard.split == split for shard in missing)
        if not to_make:
            continue
        share = float("inf") if minutes is None else 60 * minutes * dataset.count(split) / total
        shards = [shard for shard in list_shards(dataset, folder) if shard.split == split]
        state, done = _resume(dataset, folder, split, len(shards) - to_make, device=device, console=console)
        began = kept = time.monotonic()
        with ThreadPoolExecutor(max_workers=WRITERS) as writers:
            written: list[Future[None]] = []
            for shard in shards[done:]:
                if done > 0 and time.monotonic() - began > share:
                    console.print(f"{dataset.name} {split}: {minutes:g} minutes are over after {done} segments")
                    break
                state = _segment(dataset, shard, state, writers, written, device=device, console=console)
                done += 1
                if time.monotonic() - kept > KEEP_SECONDS:
                    _keep(folder, split, done, state, written)
                    kept = time.monotonic()
            _keep(folder, split, done, state, written)
        write_npz_atomic(folder / BOX_FILE, _faces(state, dataset.flow))
    if minutes is not None:
        console.print(f"{dataset.name}: {time.monotonic() - started:.0f} s in all")


def _segment(
    dataset: ChannelDatasetConfig,
    shard: Shard,
    state: Tensor,
    writers: ThreadPoolExecutor,
    written: list[Future[None]],
    *,
    device: torch.device,
    console: Console,
) -> Tensor:
    """Return the state after a shard's last frame; its file, one more of the `written`, is whole some time later."""
    step = make_step(dataset.flow, substeps=dataset.steps_per_frame, device=device, impl=channel_impl(dataset, device))
    planes = dataset.planes[: shard.count]
    first = shard.first // len(dataset.planes) * dataset.frames
    title = f"simulate {dataset.name} {shard.title}"
    # Nothing more is begun once a writer has failed.
    for earlier in written:
        if earlier.done():
            earlier.result()
    frames = FrameQueue(WAITING_FRAMES)
    written.append(writers.submit(_write, dataset, shard, frames))
    try:
        with bar(console, title, dataset.frames * dataset.steps_per_frame, "steps") as advance:
            for t in range(dataset.frames):
                state = step(state)
                if t % FRAMES_PER_CHECK == 0 or t == dataset.frames - 1:
                    check(state, dataset.flow, step=(first + t + 1) * dataset.steps_per_frame)
                frames.put(plane_velocities(state, planes, dataset.flow))
                advance(dataset.steps_per_frame)
    except BaseException as error:
        frames.fail(error)
        raise
    return state


def _write(dataset: ChannelDatasetConfig, shard: Shard, frames: FrameQueue) -> None:
    """Write a shard from its frames; the work of a thread."""
    try:
        info = dataset_info(dataset, shard.split)
        with ShardWriter(shard.path, info, count=shard.count, frames=dataset.frames, dtype=dataset.storage) as writer:
            for t in range(dataset.frames):
                writer.write(t, frames.take())
    except BaseException as error:
        frames.fail(error)
        raise


def _resume(
    dataset: ChannelDatasetConfig, folder: Path, split: str, segments: int, *, device: torch.device, console: Console
) -> tuple[Tensor, int]:
    """The state to continue from a split's `segments` segments, kept on disk or spun up anew, and its own number.

    It is less where a run was killed after its last state was kept: those segments are made once more.
    """
    path = _state_path(folder, split)
    if path.exists():
        kept = torch.load(path, map_location=device, weights_only=True)
        if kept["segments"] <= segments:
            return kept["state"], kept["segments"]
    if segments:
        raise ValueError(
            f"{path} must hold the state after at most {segments} segments to continue {dataset.name} {split}, "
            f"but does not; remove {folder / 'data' / split} to simulate this split again"
        )
    state = spun_up(dataset, trajectory_seed(dataset, split, 0), device=device, console=console)
    _keep(folder, split, 0, state)
    return state, 0


def spun_up(dataset: ChannelDatasetConfig, seed: int, *, device: torch.device, console: Console) -> Tensor:
    """A turbulent state: half-resolution spin-up where asked for, refined, then the fine grid."""
    flow, impl = dataset.flow, channel_impl(dataset, device)
    if dataset.coarse_spin_up:
        x, y, z = flow.box
        coarse = dataclasses.replace(flow, box=(x // 2, y // 2, z // 2))
        state = initial_populations(coarse, seed=seed, device=device)
        state = _run(coarse, state, dataset.coarse_spin_up, f"spin up {dataset.name} on half the cells", console, impl)
        state = refine(state, coarse, flow)
    else:
        state = initial_populations(flow, seed=seed, device=device)
    if flow.init == "block":
        through = BLOCK_THROUGHS * flow.units.through_steps(flow.box[0]) / flow.units.turnover_steps
        state = _run(flow, state, through, f"{dataset.name} behind the block", console, impl, obstacle=block(flow))
        state = _run(flow, state, through, f"{dataset.name} without the block", console, impl)
    return _run(flow, state, dataset.spin_up, f"spin up {dataset.name}", console, impl)


def _run(
    flow: ChannelConfig,
    state: Tensor,
    turnovers: float,
    title: str,
    console: Console,
    impl: Impl,
    *,
    obstacle: Tensor | None = None,
) -> Tensor:
    """Advance a state by `turnovers` δ/u_τ under the eyes of the watch-dogs."""
    steps, done = round(turnovers * flow.units.turnover_steps), 0
    with bar(console, title, steps, "steps") as advance:
        while done < steps:
            chunk = min(STEPS_PER_CHECK, steps - done)
            state = make_step(flow, substeps=chunk, device=state.device, impl=impl, obstacle=obstacle)(state)
            done += chunk
            check(state, flow, step=done)
            advance(chunk)
    return state


def channel_impl(dataset: ChannelDatasetConfig, device: torch.device) -> Impl:
    """The kernel to use: on a CPU, compiling pays as soon as the run is longer than the compiler."""
    if device.type != "cpu":
        return "auto"
    x, y, z = dataset.flow.box
    steps = dataset.spin_up * dataset.flow.units.turnover_steps + dataset.frames * dataset.steps_per_frame
    return "compiled" if x * y * z * steps > COMPILE_FROM else "torch"


def dataset_info(dataset: ChannelDatasetConfig, split: str) -> DatasetInfo:
    """What every file of the data set says about itself."""
    units = dataset.flow.units
    return DatasetInfo(
        name=dataset.name,
        fields=("velocity_x", "velocity_y", "velocity_z"),
        grid=dataset.grid,
        length=(2.0, 2.0 * dataset.flow.box[2] / dataset.flow.box[1]),
        boundaries=("WALL", "PERIODIC"),
        axes=("y", "z"),
        frame_seconds=dataset.frame_seconds,
        parameters={"reynolds_tau": units.reynolds_tau, "frame_plus": dataset.steps_per_frame * units.step_plus},
        provenance={
            "solver": f"ergoflow {__version__} channel",
            "commit": commit(),
            "dataset": to_dict(dataset),
            "seeds": [trajectory_seed(dataset, split, 0)],
            "planes": list(dataset.planes),
        },
    )


def _faces(state: Tensor, flow: ChannelConfig) -> dict[str, np.ndarray]:
    """u⁺ on three planes of the box, for a picture: front (Y, X), side (Y, Z), and floor (X, Z) near y⁺ = 15."""
    streamwise = lbm.velocity(state, force=flow.units.force)[0] / flow.units.friction_velocity  # (Y, X, Z)
    row = min(int(PICTURE_HEIGHT_PLUS / flow.units.cell_plus), flow.box[1] // 2)
    faces = {"front": streamwise[:, :, 0], "side": streamwise[:, 0], "floor": streamwise[row]}
    return {name: face.float().cpu().numpy() for name, face in faces.items()}


def _state_path(folder: Path, split: str) -> Path:
    return folder / "state" / f"{split}.pt"


def _keep(folder: Path, split: str, segments: int, state: Tensor, written: Sequence[Future[None]] = ()) -> None:
    """Keep the state after so many segments, once all their files are whole."""
    for one in written:
        one.result()
    path = _state_path(folder, split)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(path) as temporary:
        torch.save({"segments": segments, "state": state}, temporary)
