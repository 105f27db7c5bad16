"""The long-term metrics by key: label, unit, variants, and each definition in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ergoflow.metrics.result import StatisticsResult
from ergoflow.metrics.spectrum import default_shells

Source = Literal["sums", "basis", "histogram"]


@dataclass(frozen=True, kw_only=True)
class MetricInfo:
    """How a metric is printed; lower is better for all. `needs` names the part of the sums it uses."""

    label: str
    definition: str
    unit: str = ""
    headline: bool = True
    variant_of: str | None = None
    needs: Source = "sums"


CATALOGUE: dict[str, MetricInfo] = {
    "me_ape": MetricInfo(
        label="ME-APE", definition="mean over shells 1..{third} of |Ep-Et|/Et, spectra averaged first"
    ),
    "me_ape@1..16": MetricInfo(
        label="ME-APE, shells 1..16",
        definition="ME-APE over those of shells 1..{sixteen} that hold more than rounding (1e-10 of the largest)",
        headline=False,
        variant_of="me_ape",
    ),
    "me_ape@1..N/2": MetricInfo(
        label="ME-APE, all shells",
        definition="ME-APE over those of shells 1..{half} that hold more than rounding (1e-10 of the largest)",
        headline=False,
        variant_of="me_ape",
    ),
    "me_lrw": MetricInfo(
        label="ME-LRw",
        definition="sum over shells 1..{third} of w |ln(Ep/Et)| with w = Et/sum Et",
    ),
    "me_lr@uniform": MetricInfo(
        label="ME-LR",
        definition="mean over shells 1..{third} of |ln(Ep/Et)|",
        headline=False,
        variant_of="me_lrw",
    ),
    "me_lr@literal": MetricInfo(
        label="ME-LRw, weights as printed",
        definition="weights Ep/sum Et over shells 1..{third}; at most 1/e per shell for weak models",
        headline=False,
        variant_of="me_lrw",
    ),
    "me_lr@pred": MetricInfo(
        label="ME-LR, model weights",
        definition="weights Ep/sum Ep over shells 1..{third}",
        headline=False,
        variant_of="me_lrw",
    ),
    "tke_error": MetricInfo(
        label="TKE error",
        definition="mean |TKEp-TKEt| / mean TKEt over the grid, variances pooled over time and trajectories",
    ),
    "delta_lambda": MetricInfo(
        label="Δλ",
        unit="1/step",
        definition="difference of the rates fitted to C(t)/C(0), lags 0..{lags}; read with the next two",
    ),
    "integral_time_error": MetricInfo(
        label="Integral time error",
        definition="|Tp/Tt - 1| of the areas under C(t)/C(0), lags 0..{lags} or to the first zero",
    ),
    "acf_max_error": MetricInfo(label="max |ΔC|", definition="largest difference of the two C(t)/C(0), lags 0..{lags}"),
    "energy_drift": MetricInfo(
        label="Energy drift",
        definition="|mean energy of the last tenth of the roll-out / truth's mean - 1|",
    ),
    "enstrophy_drift": MetricInfo(
        label="Enstrophy drift",
        definition="|mean enstrophy of the last tenth of the roll-out / truth's mean - 1|",
    ),
    "pca_kl": MetricInfo(
        label="PCA-KL",
        unit="nat",
        needs="basis",
        definition="mean over the first {components} PCs of KL(truth||model), Scott's kernel density",
    ),
    "pca_kl@joint2": MetricInfo(
        label="PCA-KL, joint",
        unit="nat",
        needs="basis",
        definition="KL(truth||model) of the joint density of PCs 1 and 2, at most {joint} frames a side",
        headline=False,
        variant_of="pca_kl",
    ),
    "sliced_wasserstein": MetricInfo(
        label="Sliced W2",
        unit="σ",
        needs="basis",
        definition="W2 over 512 fixed directions on {whitened} whitened PCs, at most {sliced} frames a side",
    ),
    "pdf_w1": MetricInfo(
        label="Point PDF W1",
        unit="σ",
        needs="histogram",
        definition="W1 of the point PDF over truth's sigma, {bins} bins",
    ),
    "tail_error": MetricInfo(
        label="Tail error 99.9 %",
        needs="histogram",
        definition="|ratio - 1| of the 99.9 % quantiles of |z - mean|, {bins} bins",
    ),
    "tail_error@99.99": MetricInfo(
        label="Tail error 99.99 %",
        needs="histogram",
        definition="|ratio - 1| of the 99.99 % quantiles of |z - mean|, {bins} bins",
        headline=False,
        variant_of="tail_error",
    ),
}

PCA_COMPONENTS = 10
# One evaluation is repeated hundreds of times by the bootstrap: fewer samples than the plain functions use.
JOINT_SAMPLES = 1000
SLICED_SAMPLES = 1000


def available(model: StatisticsResult, truth: StatisticsResult) -> tuple[str, ...]:
    """Return the keys that the two results can give: all but those whose basis or histogram is missing."""
    missing = set()
    if not (model.projections.size and truth.projections.size):
        missing.add("basis")
    if not (model.histogram.size and truth.histogram.size):
        missing.add("histogram")
    return tuple(key for key, info in CATALOGUE.items() if info.needs not in missing)


def definition(key: str, model: StatisticsResult, truth: StatisticsResult) -> str:
    """Return the metric in one sentence with its shells, lags and sample counts filled in."""
    shells = truth.spectrum_sum.shape[1]
    text = CATALOGUE[key].definition.format(
        third=default_shells(shells)[1],
        half=shells - 1,
        sixteen=min(16, shells - 1),
        lags=truth.max_lag,
        components=min(PCA_COMPONENTS, truth.projections.shape[2]),
        joint=JOINT_SAMPLES,
        sliced=SLICED_SAMPLES,
        whitened=truth.projections.shape[2],
        bins=truth.histogram.shape[2],
    )
    samples = (
        f"{model.num_trajectories} x {model.num_frames} model and "
        f"{truth.num_trajectories} x {truth.num_frames} truth frames"
    )
    return f"{text}; {samples}."
