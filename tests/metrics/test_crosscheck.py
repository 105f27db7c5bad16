"""The Well's own metrics against ours, where its package is installed (pip install ergoflow[crosscheck])."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ergoflow.metrics import binned_spectral_error, pearson, vrmse

pytestmark = [pytest.mark.crosscheck, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def well():
    return pytest.importorskip("the_well.benchmark.metrics")


@pytest.fixture(scope="module")
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(3, 4, 2, 24, 24, generator=generator, dtype=torch.float64)
    return true + 0.3 * torch.randn(true.shape, generator=generator, dtype=torch.float64), true


def theirs(field: torch.Tensor) -> torch.Tensor:
    return field.movedim(2, -1)  # channels last


META = SimpleNamespace(n_spatial_dims=2, spatial_ndims=2)


def test_vrmse_agrees(well, pair):
    pred, true = pair
    expected = well.VRMSE()(theirs(pred), theirs(true), META)  # (J, T, C)
    assert vrmse(pred, true).numpy() == pytest.approx(expected.mean(dim=(0, 2)).numpy(), rel=1e-9)


def test_pearson_agrees(well, pair):
    pred, true = pair
    expected = well.PearsonR()(theirs(pred), theirs(true), META)
    # They divide a covariance over n by deviations over n - 1: a perfect forecast scores (n - 1) / n there.
    points = true[0, 0, 0].numel()
    assert pearson(pred, true).numpy() * (points - 1) / points == pytest.approx(expected.mean(dim=2).numpy(), rel=1e-6)


def test_spectral_bins_agree(well, pair):
    pred, true = pair
    result = well.binned_spectral_mse()(theirs(pred), theirs(true), META)
    bins = [result[f"spectral_error_mse_per_bin_{i}"].mean(dim=(0, 2)) for i in range(3)]
    ours = binned_spectral_error(pred, true).numpy()
    assert ours == pytest.approx(torch.stack(bins, dim=1).numpy(), rel=1e-5)
