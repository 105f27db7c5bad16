"""The words beside each figure: its title, how its numbers are defined and what to look for."""

from __future__ import annotations

TITLES = {
    "error-growth": "Error over lead time",
    "spectrum": "Energy spectrum",
    "autocorrelation": "Time correlation",
    "pdf": "Distribution of values",
    "energy": "Energy over the roll-out",
    "enstrophy": "Enstrophy over the roll-out",
    "walls": "Wall statistics",
    "box": "The channel",
    "operator": "The latent operator",
    "lyapunov": "Lyapunov spectrum",
    "training": "Training",
    "kinetic-energy": "Turbulent kinetic energy",
    "snapshots": "Forecast beside the truth",
    "attention": "Attention kernels",
}

_STABILITY = (
    "at every step of the free-running model (first seed): one line per test trajectory or, where there are many, one "
    "line per model, the median over its trajectories. A stable model stays in the band, the truth's mean ± 5 standard "
    "deviations. A slow drift is a wrong climate; a cross marks a roll-out that diverged."
)

CAPTIONS = {
    "error-growth": (
        "Relative L2: mean over test trajectories of ‖prediction − truth‖ / ‖truth‖ at each lead time, one "
        "norm over grid and channels. On the logarithmic axis chaos is a straight line: look for how low a "
        "model starts and when it meets the grey forecasts; unrelated states of one flow score about 1.4 times "
        "climatology. Bands: 95 % bootstrap over trajectories, or ± one standard deviation over seeds. A cross marks "
        "where a roll-out fails."
    ),
    "spectrum": (
        "|u|² summed over the modes of each shell, n = floor(|k| + ½), corners dropped, averaged over trajectories "
        "and time; with shell 0, the mean flow, the truth's shells add up to the mean of |u|², twice its energy. The "
        "lower panel divides by the truth: a faithful model stays inside the truth-against-truth band. A fall at the "
        "right is lost fine structure, a rise is noise that will grow."
    ),
    "autocorrelation": (
        "Correlation of the field with itself some steps later, mean field removed, the same origins for "
        "all lags. A mixing flow forgets monotonically; a model that forgets too slowly has collapsed or "
        "frozen, one that rings is nearly periodic. Δλ compares exponential fits to these curves: read it "
        "beside the integral time and the largest gap."
    ),
    "pdf": (
        "Probability density of the point values over all trajectories and times. Look at the tails: the "
        "logarithmic axis shows whether extremes are as frequent as they should be."
    ),
    "energy": f"Energy, the mean of ½|u|² over the grid, {_STABILITY}",
    "enstrophy": f"Enstrophy, the mean of ½ω² over the grid, {_STABILITY}",
    "box": (
        "Streamwise velocity of the truth at one moment: a plane along the stream at the back, one across it at the "
        "end, and below the plane at y⁺ ≈ 15 above the lower wall, where streaks of slow and fast fluid run along the "
        "stream. δ is half the height; the data are planes like the one at the end."
    ),
    "walls": (
        "Mean streamwise velocity and fluctuations in wall units, both walls averaged. Dotted: the law of "
        "the wall, U⁺ = y⁺ and U⁺ = 2.5 ln y⁺ + 5.5. Circles: direct numerical simulation at Re_τ = 180. "
        "Look at the peak of u′⁺ near y⁺ = 15. Panels end half the truth's range beyond it; a model far off leaves "
        "them."
    ),
    "operator": (
        "Eigenvalues of the latent operator G in the complex plane and its singular values in descending "
        "order (first seed). An orthogonal G has all eigenvalues on the circle and all singular values at "
        "one; a penalty that only fixes the mean gain lets them scatter."
    ),
    "lyapunov": (
        "Exponents of the solver and of the learned map by the same code (tangent vectors, QR at every "
        "step). The first sets how fast forecasts lose their worth; matching it is needed for the right "
        "predictability, and does not suffice for the right climate."
    ),
    "training": (
        "Training loss over optimiser steps (first seed); dots: validation relative L2 of one step. A loss is what a "
        "recipe minimises, of normalised fields and over as many steps as it unrolls by then: compare dots between "
        "models, a line only with itself; a jump may be a longer unroll."
    ),
    "kinetic-energy": (
        "(1/d) Σ Var(uᵢ) per grid point, pooled over time and trajectories, and its absolute error in per cent of the "
        "truth (of a twentieth of its mean where there is less), averaged over the map; the table's TKE error is of "
        "the truth's mean instead. Errors near its floor are sampling noise; larger ones say where the fluctuations "
        "are wrong."
    ),
    "snapshots": (
        "First channel of one test trajectory: truth, prediction, and their difference, at growing lead "
        "times. Early, look for blur and displaced vortices; late, the two may differ entirely and still "
        "share one climate."
    ),
    "attention": (
        "Axial kernels, each on its own symmetric scale: red is positive, blue negative. A strong diagonal is local "
        "transport; a smooth plane is a global mean."
    ),
}
