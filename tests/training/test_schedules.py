from __future__ import annotations

import math

import pytest
import torch

from ergoflow.training.plan import TrainingConfig


def rates(config: TrainingConfig, batches_per_epoch: int) -> list[float]:
    total = config.total_steps(batches_per_epoch)
    return [config.rate(config.fraction(step=step, seconds=0, total_steps=total), step=step) for step in range(total)]


def test_paper_schedule_halves_every_ten_of_fifty_epochs() -> None:
    # 7 batches per epoch: fractions such as 70 / 350 are not exact in binary
    values = rates(TrainingConfig(epochs=50, learning_rate=1e-4, schedule="halving"), batches_per_epoch=7)
    assert values == [1e-4 * 0.5 ** (step // 70) for step in range(350)]


@pytest.mark.parametrize("batches_per_epoch", [1, 3, 13, 997])
def test_halving_falls_on_the_first_step_of_an_epoch(batches_per_epoch: int) -> None:
    # 11 / 3 halvings: 3 / 11 * (11 / 3) is below 1 in floating point
    config = TrainingConfig(epochs=11, halving_epochs=3, learning_rate=1.0, schedule="halving")
    values = rates(config, batches_per_epoch)
    for epochs in (3, 6, 9):
        assert values[epochs * batches_per_epoch] == values[epochs * batches_per_epoch - 1] / 2


def test_cosine_falls_from_the_peak_through_half_to_zero() -> None:
    values = rates(TrainingConfig(epochs=10, learning_rate=2.0, schedule="cosine"), batches_per_epoch=10)
    assert values[0] == 2.0
    assert values[50] == pytest.approx(1.0)
    assert values[25] == pytest.approx(1 + math.sqrt(0.5))
    assert 0 < values[-1] < 1e-3


def test_wsd_is_flat_for_seventy_per_cent_and_then_linear_to_zero() -> None:
    values = rates(TrainingConfig(epochs=10, learning_rate=3.0, schedule="wsd"), batches_per_epoch=10)
    assert all(value == pytest.approx(3.0) for value in values[:71])
    assert values[85] == pytest.approx(1.5)
    assert values[99] == pytest.approx(0.1)


def test_one_cycle_rises_for_a_fifth_of_the_run_and_falls_to_nothing() -> None:
    values = rates(TrainingConfig(epochs=10, learning_rate=2.0, schedule="onecycle"), batches_per_epoch=10)
    assert values[0] == pytest.approx(2e-4)
    assert values[10] == pytest.approx(1.0, rel=1e-3)  # half way up
    assert values[20] == 2.0
    assert max(values) == 2.0
    assert values[60] == pytest.approx(1.0)  # half way down
    config = TrainingConfig(learning_rate=2.0, schedule="onecycle")
    assert config.rate(1.0, step=100) == pytest.approx(2e-9)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_one_cycle_is_the_one_factformer_trains_with() -> None:
    """torch's OneCycleLR with that script's numbers; it counts its phases from the last step, hence one step off."""
    total, peak = 2000, 5e-4
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak, total_steps=total, pct_start=0.2, div_factor=1e4, final_div_factor=1e5
    )
    ours = rates(TrainingConfig(epochs=total, learning_rate=peak, schedule="onecycle"), batches_per_epoch=1)
    expected = []
    for _ in range(total):
        expected.append(theirs.get_last_lr()[0])
        if len(expected) < total:
            theirs.step()
    assert ours == pytest.approx(expected, abs=5e-3 * peak)


def test_warm_up_rises_linearly_to_the_peak_and_never_starts_at_zero() -> None:
    config = TrainingConfig(epochs=1, learning_rate=1.0, schedule="constant", warmup_steps=4)
    assert rates(config, 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_progress_follows_whichever_of_steps_and_time_is_used_up_first() -> None:
    config = TrainingConfig(epochs=10, max_minutes=2.0)
    assert config.fraction(step=10, seconds=90, total_steps=100) == 0.75
    assert config.fraction(step=80, seconds=30, total_steps=100) == 0.8
    assert config.fraction(step=10, seconds=121, total_steps=100) == 1.0


def test_max_steps_shortens_a_run_and_never_lengthens_it() -> None:
    assert TrainingConfig(epochs=5, max_steps=12).total_steps(10) == 12
    assert TrainingConfig(epochs=5, max_steps=1000).total_steps(10) == 50


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"learning_rate": 0.0},
        {"learning_rate": -1e-3},
        {"learning_rate": float("nan")},
        {"optimizer": "sgdw"},
        {"schedule": "linear"},
        {"precision": "fp16"},
        {"betas": (0.9, 1.0)},
        {"ema_decay": 1.0},
        {"ema_decay": 0.0},
        {"clip_norm": 0.0},
        {"max_minutes": 0.0},
        {"max_steps": 0},
        {"warmup_steps": -1},
        {"checkpoint_minutes": -1.0},
        {"log_every": 0},
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))) as error:
        TrainingConfig(**settings)
    assert "\n" not in str(error.value)
