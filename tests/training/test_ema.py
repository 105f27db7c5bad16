from __future__ import annotations

import pytest
import torch
from torch import nn

from ergoflow.training.ema import averaged_weights, copy_average, decay_at, start_average, update_average


def set_weight(model: nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)
        model.bias.fill_(-value)


def test_average_of_a_ramp_has_its_closed_form() -> None:
    """With w_t = t and a constant decay d, e_t = t - d (1 - d^t) / (1 - d)."""
    decay, steps = 0.05, 20  # below 1/10, so that the warm-up never acts
    model = nn.Linear(3, 2).double()
    set_weight(model, 0.0)
    average = start_average(model)
    for t in range(1, steps + 1):
        set_weight(model, float(t))
        update_average(average, model, decay=decay, update=t)
    expected = steps - decay * (1 - decay**steps) / (1 - decay)
    torch.testing.assert_close(average["weight"], torch.full((2, 3), expected, dtype=torch.float64))
    torch.testing.assert_close(average["bias"], torch.full((2,), -expected, dtype=torch.float64))


def test_memory_of_the_initial_weights_is_the_product_of_the_decays() -> None:
    model = nn.Linear(1, 1).double()
    set_weight(model, 1.0)
    average = start_average(model)
    set_weight(model, 0.0)
    memory = 1.0
    for t in range(1, 51):
        update_average(average, model, decay=0.8, update=t)
        memory *= min(0.8, t / (t + 9))
    assert average["weight"].item() == pytest.approx(memory, rel=1e-12)


def test_decay_warms_up_from_one_tenth_to_its_value() -> None:
    values = [decay_at(0.99, t) for t in range(1, 2000)]
    assert values[0] == 0.1
    assert values == sorted(values)
    assert values[-1] == 0.99


def test_models_weights_return_after_the_block_even_after_an_error() -> None:
    model = nn.Linear(2, 2)
    set_weight(model, 1.0)
    average = start_average(model)
    set_weight(model, 2.0)

    def failing_validation() -> None:
        with averaged_weights(average, model):
            assert torch.equal(model.weight, torch.ones(2, 2))
            raise RuntimeError("validation failed")

    with pytest.raises(RuntimeError, match="validation"):
        failing_validation()
    assert torch.equal(model.weight, torch.full((2, 2), 2.0))


def test_average_is_independent_of_the_model_it_was_copied_from_and_to() -> None:
    model = nn.Linear(2, 2)
    average = start_average(model)
    kept = average["weight"].clone()
    set_weight(model, 5.0)
    copy_average(average, model)
    set_weight(model, 7.0)
    assert torch.equal(average["weight"], kept)


def test_complex_weights_and_frozen_weights_are_averaged_and_left_alone() -> None:
    model = nn.ParameterDict(
        {
            "spectral": nn.Parameter(torch.ones(3, dtype=torch.complex64) * 1j),
            "frozen": nn.Parameter(torch.ones(2), requires_grad=False),
        }
    )
    average = start_average(model)
    with torch.no_grad():
        model["spectral"].fill_(1.0)
    update_average(average, model, decay=0.1, update=1)
    torch.testing.assert_close(average["spectral"], torch.full((3,), 0.9 + 0.1j, dtype=torch.complex64))
    assert list(average) == ["spectral"]
