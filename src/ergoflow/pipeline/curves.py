"""What the report draws, as arrays in curves.npz (names as in docs/reference.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from ergoflow.config import ChannelDatasetConfig, Recipe
from ergoflow.data.files import write_npz_atomic
from ergoflow.data.store import TrajectoryStore
from ergoflow.metrics import StatisticsResult, dns_profiles, wall_profiles
from ergoflow.metrics.dns import REYNOLDS_TAU
from ergoflow.metrics.resampling import COVERAGE
from ergoflow.metrics.result import correlation, histogram, mean_spectrum, stands_still, tke_map
from ergoflow.models.a3m import A3M
from ergoflow.models.operator import LatentOperator
from ergoflow.models.own import OwnConfig
from ergoflow.pipeline.exponents import Exponents
from ergoflow.pipeline.predict import PLANE
from ergoflow.pipeline.reference import Reference
from ergoflow.pipeline.runs import load_run
from ergoflow.pipeline.shortterm import consecutive_steps, mean_interval
from ergoflow.pipeline.simulate_channel import BOX_FILE

BAND_RESAMPLES = 100
# The trajectory that is shown.
SHOWN = 0
SNAPSHOT_STEPS = (1, 5, 10, 25, 50)
PLAYER_SIDE = 128
# Profiles under the names the report knows.
WALL_NAMES = {"u_plus": "U_plus", "u_rms": "rms_u", "v_rms": "rms_v", "w_rms": "rms_w", "uv": "uv"}
# The histogram is fine enough for tail quantiles; a density is drawn over this many bins at a time.
BINS_PER_POINT = 8


def write_curves(
    folder: Path,
    recipe: Recipe,
    store: TrajectoryStore,
    rollout: TrajectoryStore,
    reference: Reference,
    model: StatisticsResult,
    errors: Mapping[str, np.ndarray],
    exponents: Exponents | None,
) -> None:
    """Write curves.npz of a run."""
    arrays = _error_curves(errors) | _statistics_curves(model, reference.truth)
    if not isinstance(recipe.model, OwnConfig):
        arrays |= _operator(folder, store)
    if len(store.info.grid) == PLANE:
        arrays |= _fields(store, rollout, stride=recipe.task.stride)
    else:
        arrays = {name: values for name, values in arrays.items() if not name.startswith("tke/")}
    if isinstance(recipe.dataset, ChannelDatasetConfig):
        arrays |= _wall_curves(model, reference.truth, recipe.dataset.flow.reynolds_tau)
        with np.load(Path(store.folder) / BOX_FILE) as faces:
            arrays |= {f"box/{name}": faces[name] for name in faces}
    if exponents is not None:
        arrays |= {"lyapunov/truth": exponents.truth.mean(axis=0), "lyapunov/model": exponents.model.mean(axis=0)}
    write_npz_atomic(folder / "curves.npz", arrays, compress=True)


def _error_curves(errors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    arrays = {f"relative_l2/{name}": values.mean(axis=0) for name, values in errors.items()}
    arrays["relative_l2/steps"] = np.arange(1, errors["model"].shape[1] + 1)
    intervals = [mean_interval(column, resamples=BAND_RESAMPLES) for column in errors["model"].T]
    arrays["relative_l2_low/model"] = np.array([interval.low for interval in intervals])
    arrays["relative_l2_high/model"] = np.array([interval.high for interval in intervals])
    return arrays


def _statistics_curves(model: StatisticsResult, truth: StatisticsResult) -> dict[str, np.ndarray]:
    """Spectra, correlations, TKE maps and densities; those of a roll-out set that failed in part are left out.

    So is the correlation of a forecast that stands still.
    """
    arrays: dict[str, np.ndarray] = {
        "spectrum/shells": np.arange(truth.spectrum_sum.shape[1]),
        "autocorrelation/lags": np.arange(truth.max_lag + 1),
        "series/steps": np.arange(model.energy.shape[1]),
        "series/energy/model": model.energy,
        "series/enstrophy/model": model.enstrophy,
        "series/energy/truth": truth.energy,
        "series/enstrophy/truth": truth.enstrophy,
    }
    quantities: dict[str, Callable[[StatisticsResult, np.ndarray], np.ndarray]] = {
        "spectrum": mean_spectrum,
        "autocorrelation": lambda r, w: correlation(r, w) / correlation(r, w)[0],
        "tke": tke_map,
    }
    sides = {"truth": truth} if (model.failed_at >= 0).any() else {"truth": truth, "model": model}
    moving = {side: result for side, result in sides.items() if not _stands_still(result, truth)}
    for name, function in quantities.items():
        found = moving if name == "autocorrelation" else sides
        arrays |= {f"{name}/{side}": function(result, result.survivors()) for side, result in found.items()}
    for name in ("spectrum", "autocorrelation"):
        low, high = _half_band(truth, quantities[name])
        arrays |= {f"{name}_low/truth": low, f"{name}_high/truth": high}
    return arrays | _densities(sides, truth.edges[0])


def _stands_still(result: StatisticsResult, truth: StatisticsResult) -> bool:
    return stands_still(correlation(result, result.survivors()), correlation(truth, truth.survivors()))


def _densities(sides: Mapping[str, StatisticsResult], edges: np.ndarray) -> dict[str, np.ndarray]:
    """Probability densities of the first channel's values over the bins that any side reaches."""
    edges = edges[::BINS_PER_POINT]
    counts = {
        side: histogram(result, result.survivors())[0].reshape(-1, BINS_PER_POINT).sum(axis=1)
        for side, result in sides.items()
    }
    reached = np.flatnonzero(sum(counts.values()))
    kept = slice(reached[0], reached[-1] + 1)
    densities = {f"pdf/{side}": (c / (c.sum() * np.diff(edges)))[kept] for side, c in counts.items()}
    return {"pdf/centers": ((edges[1:] + edges[:-1]) / 2)[kept], **densities}


def _wall_curves(model: StatisticsResult, truth: StatisticsResult, reynolds_tau: float) -> dict[str, np.ndarray]:
    """Profiles in wall units of truth and model, and of DNS where the Reynolds number is its."""
    arrays: dict[str, np.ndarray] = {}
    sides = {"truth": truth} if (model.failed_at >= 0).any() else {"truth": truth, "model": model}
    for side, result in sides.items():
        weights = result.survivors() / (result.survivors() @ result.frames)
        mean, squares, stress = (
            np.tensordot(weights, sums, axes=1).mean(axis=-1)
            for sums in (result.velocity_sum, result.velocity_square_sum, result.stress_sum)
        )
        profiles = wall_profiles(mean, squares, stress, reynolds_tau=reynolds_tau)
        arrays["wall/y_plus"] = profiles["y_plus"]
        arrays |= {f"wall/{WALL_NAMES[name]}/{side}": profiles[name] for name in WALL_NAMES}
    if reynolds_tau == REYNOLDS_TAU:
        dns = dns_profiles()
        for name, shown in WALL_NAMES.items():
            arrays[f"wall/{shown}/dns"] = np.interp(arrays["wall/y_plus"], dns["y_plus"], dns[name])
    return arrays


def _half_band(
    truth: StatisticsResult, function: Callable[[StatisticsResult, np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """95 % range of a quantity over random halves of the truth: what two samples of this size differ by."""
    rng = np.random.default_rng(0)
    count = truth.num_trajectories
    draws = []
    for _ in range(BAND_RESAMPLES):
        half = np.zeros(count)
        half[rng.permutation(count)[: max(1, count // 2)]] = 1.0
        draws.append(function(truth, half))
    low, high = np.percentile(draws, COVERAGE, axis=0)
    return low, high


def _fields(store: TrajectoryStore, rollout: TrajectoryStore, *, stride: int) -> dict[str, np.ndarray]:
    """Snapshots and player frames of one trajectory, truth and model."""
    last = consecutive_steps(rollout, -(-store.num_frames("test") // stride))
    truth = store.read("test", SHOWN, 0, last * stride + 1, stride)  # (T+1, C, *grid)
    model = rollout.read("test", SHOWN, 0, last + 1)
    steps = np.array([k for k in SNAPSHOT_STEPS if k <= last])
    thin = max(1, max(store.info.grid) // PLAYER_SIDE)
    return {
        "snapshots/steps": steps,
        "snapshots/truth": truth[steps],
        "snapshots/model": model[steps],
        "player/steps": np.arange(last + 1),
        "player/truth": truth[:, 0, ::thin, ::thin].astype(np.float16),
        "player/model": model[:, 0, ::thin, ::thin].astype(np.float16),
    }


def _operator(folder: Path, store: TrajectoryStore) -> dict[str, np.ndarray]:
    """Eigenvalues and singular values of G, and the kernels of the first and last block, where the model has them."""
    step = load_run(folder)
    model = step.step.model
    arrays: dict[str, np.ndarray] = {}
    operator = getattr(model, "operator", None)
    if isinstance(operator, LatentOperator):
        matrix = operator.matrix.detach().double()
        arrays["operator/eigenvalues"] = torch.linalg.eigvals(matrix).numpy()
        arrays["operator/singular_values"] = torch.linalg.svdvals(matrix).numpy()
    if isinstance(model, A3M):
        state = torch.from_numpy(store.read("test", SHOWN, 0, 1))
        with torch.inference_mode():
            blocks = model.attention_kernels((state - step.mean[:, None, None]) / step.std[:, None, None])
        for family, kernels in (("attention", blocks[0]), ("attention_last", blocks[-1])):
            arrays |= {f"{family}/{axis}": k[0].numpy() for axis, k in zip(store.info.axes, kernels, strict=True)}
    return arrays
