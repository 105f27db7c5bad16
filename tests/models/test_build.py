from __future__ import annotations

import pytest
import torch

from ergoflow.models import A3M, A3MConfig, ClimatologyConfig, PersistenceConfig, ZeroConfig, build_model


def state(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_persistence_returns_its_input():
    z = state(2, 3, 5, 7)
    assert torch.equal(build_model(PersistenceConfig(), 3, 3, (5, 7))(z), z)


def test_persistence_cannot_invent_channels():
    with pytest.raises(ValueError, match="as many channels out as in, got 1 and 2; predict"):
        build_model(PersistenceConfig(), 1, 2, (5, 7))


def test_climatology_forecasts_the_field_it_holds_and_saves_it():
    model, restored = (build_model(ClimatologyConfig(), 3, 2, (5, 7)) for _ in range(2))
    mean = state(2, 5, 7)
    model.field.copy_(mean)
    restored.load_state_dict(model.state_dict())
    forecast = restored(state(4, 3, 5, 7))
    assert torch.equal(forecast, mean.expand(4, 2, 5, 7))
    # The forecast is a copy: writing into it leaves the field alone.
    forecast.zero_()
    assert torch.equal(restored.field, mean)


def test_climatology_refuses_another_grid():
    with pytest.raises(ValueError, match=r"grid \(5, 7\) was expected, got \(7, 5\); compute"):
        build_model(ClimatologyConfig(), 1, 1, (5, 7))(state(1, 1, 7, 5))


def test_zero_forecasts_zeros_with_the_asked_channels():
    assert torch.equal(build_model(ZeroConfig(), 3, 2, (5, 7))(state(4, 3, 5, 7)), torch.zeros(4, 2, 5, 7))


@pytest.mark.parametrize("config", [PersistenceConfig(), ClimatologyConfig(), ZeroConfig()])
def test_trivial_models_have_no_parameters(config):
    assert not list(build_model(config, 2, 2, (4,)).parameters())


def test_all_axes_are_periodic_unless_said_otherwise():
    config = A3MConfig(
        dim=4,
        latent=4,
        depth=1,
        heads=3,
        head_dim=2,
        sigma=0.0,
        decoder_widths=(4,),
        decoder_kernels=(3,),
        groups=1,
    )
    default, periodic, walls = (
        build_model(config, 1, 1, (6, 6), periodic=axes, generator=torch.Generator().manual_seed(1))
        for axes in (None, (True, True), (False, False))
    )
    assert isinstance(default, A3M)
    z = state(1, 1, 6, 6)
    assert torch.equal(default(z), periodic(z))
    assert not torch.allclose(default(z), walls(z))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1, ()), r"one to 3 axes, got \(\); "),
        ((1, 1, (4, 4, 4, 4)), "one to 3 axes, got .*; "),
        ((0, 1, (4, 4)), "at least one channel in and out was expected, got 0 and 1; "),
    ],
)
def test_impossible_borders_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        build_model(ZeroConfig(), *arguments)


def test_periodicity_of_another_number_of_axes_is_refused():
    with pytest.raises(ValueError, match=r"one entry per axis of \(4, 4\), got \(True,\); give 2"):
        build_model(ZeroConfig(), 1, 1, (4, 4), periodic=(True,))


def test_something_that_is_no_config_is_refused():
    with pytest.raises(ValueError, match="config must be one of the models' config dataclasses"):
        build_model("a3m", 1, 1, (4, 4))  # type: ignore[arg-type]
