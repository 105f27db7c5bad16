"""What is measured: functions of trajectories (J, T, C, *grid), and streaming sums for long roll-outs."""

from __future__ import annotations

from ergoflow.metrics.catalogue import CATALOGUE, MetricInfo, definition
from ergoflow.metrics.density import kl_divergence
from ergoflow.metrics.distribution import (
    increment_flatness,
    pca_kl_divergence,
    point_wasserstein,
    quantile_ratios,
    sliced_wasserstein,
    structure_function,
)
from ergoflow.metrics.dns import Check, compare_with_dns, dns_profiles
from ergoflow.metrics.energy import (
    budget_closure,
    enstrophy,
    kinetic_energy,
    relative_drift,
    tke_absolute_error,
    tke_error,
    tke_percentage_error,
    turbulent_kinetic_energy,
)
from ergoflow.metrics.histogram import point_edges
from ergoflow.metrics.longterm import long_term_metrics, survival_summary
from ergoflow.metrics.lyapunov import lyapunov_exponents
from ergoflow.metrics.mixing import (
    autocorrelation,
    fit_mixing_rate,
    integral_time,
    max_correlation_error,
    normalized_correlation,
)
from ergoflow.metrics.pca import PCABasis, fit_pca, project_trajectories
from ergoflow.metrics.pointwise import (
    high_correlation_time,
    pearson,
    relative_l2,
    relative_l2_per_trajectory,
    valid_prediction_time,
    vrmse,
)
from ergoflow.metrics.resampling import Interval, bootstrap, noise_floor, verdict
from ergoflow.metrics.result import StatisticsResult
from ergoflow.metrics.spectrum import (
    binned_spectral_error,
    energy_spectrum,
    me_ape,
    me_lr,
    naive2d_spectrum,
    spanwise_spectrum,
)
from ergoflow.metrics.stability import failure_limit, first_failure, share_in_range, survival
from ergoflow.metrics.statistics import TrajectoryStatistics
from ergoflow.metrics.wall import (
    bulk_velocity,
    flow_rate_drift,
    fold,
    mean_profile,
    reynolds_stress,
    rms_profiles,
    spanwise_correlation,
    wall_profiles,
    wall_shear,
    wall_shear_pdf,
)

__all__ = [
    "CATALOGUE",
    "Check",
    "Interval",
    "MetricInfo",
    "PCABasis",
    "StatisticsResult",
    "TrajectoryStatistics",
    "autocorrelation",
    "binned_spectral_error",
    "bootstrap",
    "budget_closure",
    "bulk_velocity",
    "compare_with_dns",
    "definition",
    "dns_profiles",
    "energy_spectrum",
    "enstrophy",
    "failure_limit",
    "first_failure",
    "fit_mixing_rate",
    "fit_pca",
    "flow_rate_drift",
    "fold",
    "high_correlation_time",
    "increment_flatness",
    "integral_time",
    "kinetic_energy",
    "kl_divergence",
    "long_term_metrics",
    "lyapunov_exponents",
    "max_correlation_error",
    "me_ape",
    "me_lr",
    "mean_profile",
    "naive2d_spectrum",
    "noise_floor",
    "normalized_correlation",
    "pca_kl_divergence",
    "pearson",
    "point_edges",
    "point_wasserstein",
    "project_trajectories",
    "quantile_ratios",
    "relative_drift",
    "relative_l2",
    "relative_l2_per_trajectory",
    "reynolds_stress",
    "rms_profiles",
    "share_in_range",
    "sliced_wasserstein",
    "spanwise_correlation",
    "spanwise_spectrum",
    "structure_function",
    "survival",
    "survival_summary",
    "tke_absolute_error",
    "tke_error",
    "tke_percentage_error",
    "turbulent_kinetic_energy",
    "valid_prediction_time",
    "verdict",
    "vrmse",
    "wall_profiles",
    "wall_shear",
    "wall_shear_pdf",
]
