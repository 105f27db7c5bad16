from __future__ import annotations

import base64
import dataclasses
import io
import itertools
import re
import sys
from collections.abc import Callable

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image

from ergoflow.report import board, canvas, diagnostics, figures, maps, saving
from ergoflow.report.figures import Curve
from ergoflow.report.names import shared_prefix
from ergoflow.report.runs import RunView, group_runs
from ergoflow.report.sections import figure_items

RNG = np.random.default_rng(3)
X = np.arange(1.0, 12.0)
STYLES = canvas.line_styles(["m", "a <b> $x$ 流"])


def line(axes: Axes, label: str) -> Line2D:
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return found


def drawn(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    found = line(axes, label)
    return list(found.get_xdata()), list(found.get_ydata())


def words(figure: Figure) -> list[str]:
    """All texts of a board."""
    return [text.get_text() for text in figure.axes[0].texts]


def test_error_growth_draws_models_and_references() -> None:
    model, reference = RNG.random(11) + 0.1, RNG.random(11) + 0.1
    figure = figures.draw_error_growth(
        {"m": Curve(X, model)}, {"persistence": Curve(X, reference)}, step="0.1 s", styles=STYLES
    )
    (axes,) = figure.axes
    assert drawn(axes, "m") == (list(X), list(model))
    assert drawn(axes, "persistence") == (list(X), list(reference))
    assert axes.get_yscale() == "log"
    assert "0.1 s" in axes.get_xlabel()


def test_bands_enclose_what_they_are_given() -> None:
    y = RNG.random(11) + 1
    figure = figures.draw_autocorrelation({}, Curve(X, y, y - 0.2, y + 0.3), step="0.1 s", styles=STYLES)
    (band,) = figure.axes[0].collections
    vertices = band.get_paths()[0].vertices
    for x, value in zip(X, y, strict=True):
        at_x = vertices[np.isclose(vertices[:, 0], x), 1]
        assert at_x.min() == pytest.approx(value - 0.2)
        assert at_x.max() == pytest.approx(value + 0.3)


def test_spectrum_leaves_out_shell_zero_and_divides_by_the_truth() -> None:
    shells = np.arange(9.0)
    truth, model = RNG.random(9) + 1, RNG.random(9) + 1
    top, bottom = figures.draw_spectrum({"m": Curve(shells, model)}, Curve(shells, truth), styles=STYLES).axes
    assert drawn(top, "m") == (list(shells[1:]), list(model[1:]))
    assert drawn(top, "truth") == (list(shells[1:]), list(truth[1:]))
    np.testing.assert_allclose(line(bottom, "m").get_ydata(), model[1:] / truth[1:])


def test_rounding_errors_of_empty_shells_do_not_stretch_the_spectrum() -> None:
    shells, truth = np.arange(9.0), 10.0 ** -np.arange(9)
    top, _ = figures.draw_spectrum({"m": Curve(shells, truth)}, Curve(shells, truth), styles=STYLES).axes
    assert top.get_ylim()[0] < truth[-1]
    empty = np.where(shells < 8, truth, 1e-30)
    top, _ = figures.draw_spectrum({"m": Curve(shells, truth)}, Curve(shells, empty), styles=STYLES).axes
    assert top.get_ylim()[0] == pytest.approx(truth[1] / figures.SPECTRUM_SPAN)


def test_shells_of_the_page_add_up_to_the_mean_square_of_the_field(make_run: Callable[..., RunView]) -> None:
    side = 15
    wave = 2 * np.pi * np.arange(side) / side
    field = 3 * np.sin(2 * wave)[:, None] * np.cos(wave) + np.sin(5 * wave)[:, None]
    modes = np.abs(np.fft.fft2(field)) ** 2
    numbers = np.fft.fftfreq(side, 1 / side)
    shell = np.floor(np.hypot(numbers[:, None], numbers) + 0.5).astype(int)
    raw = np.bincount(shell.ravel(), weights=modes.ravel())[: side // 2 + 1]
    curves = {
        "spectrum/shells": np.arange(side // 2 + 1),
        "spectrum/truth": raw,
        "spectrum/model": 3 * raw,
        "series/steps": np.arange(4),
        "series/energy/truth": np.full((2, 4), (field**2).mean() / 2),
    }
    run = dataclasses.replace(make_run(), curves=curves, recipe={"dataset": {"kind": "channel"}})
    (spectrum,) = [item for item in figure_items(group_runs([run]), side=16) if item.slug == "spectrum"]
    top, bottom = spectrum.figure.axes
    np.testing.assert_allclose(line(top, "truth").get_ydata(), raw[1:] / side**4, atol=1e-12)
    assert np.sum(line(top, "truth").get_ydata()) == pytest.approx((field**2).mean())
    assert np.sum(line(top, "kf64-a3m").get_ydata()) == pytest.approx(3 * (field**2).mean())
    np.testing.assert_allclose(np.asarray(line(bottom, "kf64-a3m").get_ydata())[[1, 4]], 3)
    assert top.get_ylabel() == "|u|² per shell (u_τ²)"


@pytest.mark.parametrize(
    ("dataset", "fields", "field", "enstrophy", "tke"),
    [
        ({"kind": "kolmogorov"}, None, "vorticity (1/s)", "enstrophy (1/s²)", "TKE (length²/s²)"),
        ({"kind": "files"}, ["height", "speed"], "height", "enstrophy", "TKE"),
        ({}, None, "field", "enstrophy", "TKE"),
    ],
)
def test_axes_tell_units_where_the_data_have_known_ones(
    make_run: Callable[..., RunView],
    dataset: dict[str, str],
    fields: list[str] | None,
    field: str,
    enstrophy: str,
    tke: str,
) -> None:
    run = make_run()
    scores = run.scores if fields is None else {**run.scores, "fields": fields}
    run = dataclasses.replace(run, recipe={"dataset": dataset}, scores=scores)
    items = {item.slug: item.figure for item in figure_items(group_runs([run]), side=16)}
    assert items["pdf"].axes[0].get_xlabel() == field
    assert items["enstrophy"].axes[0].get_ylabel() == enstrophy
    assert words(items["kinetic-energy-1-kf64-a3m"]).count(tke) == 1
    assert words(items["snapshots-1-kf64-a3m"]).count(field) == 2


@pytest.mark.parametrize(("axes", "text"), [("xy", "x to the right, y upwards"), ("yz", "z to the right, y upwards")])
def test_captions_of_maps_say_where_the_axes_point(make_run: Callable[..., RunView], axes: str, text: str) -> None:
    run = make_run()
    run.scores["axes"] = list(axes)  # type: ignore[index]
    captions = {item.slug: item.caption for item in figure_items(group_runs([run]), side=16)}
    assert captions["snapshots-1-kf64-a3m"].endswith(f"Axes: {text}.")
    assert "Axes" not in captions["attention-1-kf64-a3m"]
    assert "Axes" not in captions["spectrum"]


def test_spectra_on_other_shells_are_compared_where_they_meet() -> None:
    truth, short = Curve(np.arange(9.0), np.full(9, 2.0)), Curve(np.arange(5.0), np.full(5, 3.0))
    _, bottom = figures.draw_spectrum({"m": short}, truth, styles=STYLES).axes
    assert drawn(bottom, "m") == ([1, 2, 3, 4], [1.5] * 4)


def test_density_is_logarithmic() -> None:
    (axes,) = figures.draw_density({"m": Curve(X, X)}, Curve(X, 2 * X), styles=STYLES).axes
    assert drawn(axes, "m") == (list(X), list(X))
    assert axes.get_yscale() == "log"


def test_series_draws_every_trajectory_the_band_and_each_divergence() -> None:
    truth = 2 + 0.1 * RNG.standard_normal((3, 11))
    model = np.full((3, 11), 2.0)
    model[1, 6:] = np.inf
    figure = figures.draw_series(
        {"m": Curve(X, model)}, truth, quantity="energy", diverged_at={"m": [-1, 7, 3]}, styles=STYLES
    )
    (axes,) = figure.axes
    trajectories = [found for found in axes.lines if len(found.get_xdata()) == 11]
    assert [list(found.get_ydata()) for found in trajectories] == [list(row) for row in model]
    crosses = [found for found in axes.lines if found.get_marker() == "x"]
    # The second left the finite numbers after its sixth value; the third is only listed.
    assert [float(np.ravel(found.get_xdata())[0]) for found in crosses] == [6.0, 3.0]
    (band,) = [patch for patch in axes.patches if str(patch.get_label()).startswith("truth ±")]
    bounds = band.get_extents().transformed(axes.transData.inverted())
    assert bounds.y0 == pytest.approx(truth.mean() - 5 * truth.std())
    assert bounds.y1 == pytest.approx(truth.mean() + 5 * truth.std())


def test_many_trajectories_become_one_median_per_model_in_which_a_failure_is_infinite() -> None:
    truth = 1 + 0.3 * RNG.standard_normal((3, 11))
    good, bad = np.arange(62.0)[:, None] + np.zeros(11), np.ones((3, 11))
    bad[0, 4], bad[1:, 7] = np.nan, np.inf
    (axes,) = figures.draw_series(
        {"m": Curve(X, good), "a <b> $x$ 流": Curve(X, bad)}, truth, quantity="energy", diverged_at={}, styles=STYLES
    ).axes
    assert drawn(axes, "m") == (list(X), [30.5] * 11)
    assert drawn(axes, STYLES["a <b> $x$ 流"].label)[1] == [1.0] * 7 + [np.inf] + [1.0] * 3
    # Energies are not negative: the band's lower half must not take a third of the picture.
    assert axes.get_ylim()[0] == 0.0


def test_long_series_are_thinned() -> None:
    steps, series = np.arange(10_000.0), np.ones((8, 10_000))
    (axes,) = figures.draw_series(
        {"m": Curve(steps, series)}, series, quantity="energy", diverged_at={}, styles=STYLES
    ).axes
    assert sum(len(found.get_xdata()) for found in axes.lines) < 1.1 * figures.MAX_SERIES_POINTS


def test_a_curve_that_becomes_infinite_ends_in_a_cross() -> None:
    y = np.where(X < 5, X, np.inf)
    (axes,) = figures.draw_error_growth({"m": Curve(X, y)}, {}, step="1 s", styles=STYLES).axes
    (cross,) = [found for found in axes.lines if found.get_marker() == "x"]
    assert (np.ravel(cross.get_xdata())[0], np.ravel(cross.get_ydata())[0]) == (4.0, 4.0)


def test_walls_draw_every_source_in_every_panel() -> None:
    profiles = {source: Curve(X, RNG.random(11)) for source in ("truth", "dns", "m")}
    mean, rms = figures.draw_walls(profiles, {"u′⁺": profiles}, styles=STYLES).axes
    for axes in (mean, rms):
        for label, source in (("truth", "truth"), ("DNS", "dns"), ("m", "m")):
            assert drawn(axes, label) == (list(X), list(profiles[source].y))
    assert mean.get_xscale() == "log"


def test_a_diverged_model_does_not_flatten_the_walls() -> None:
    truth, wild, rest = (Curve(X, np.linspace(*ends, 11)) for ends in ((0, 18), (-500, 500), (0, 0)))
    panels = {"u′⁺": {"truth": truth}, "v′⁺": {"truth": rest, "m": wild}}
    mean, rms, still = figures.draw_walls({"truth": truth, "m": wild}, panels, styles=STYLES).axes
    np.testing.assert_allclose(mean.get_ylim(), (-9.9, 27.9))
    np.testing.assert_allclose(rms.get_ylim(), (-0.9, 18.9))
    assert still.get_ylim()[0] < -500 < 500 < still.get_ylim()[1]  # a truth at rest has no range to stay near


def test_operator_shows_eigenvalues_and_sorted_singular_values() -> None:
    eigenvalues, values = np.array([1j, -1.0, 0.5 + 0.5j]), np.array([0.5, 2.0, 1.0])
    circle, right = diagnostics.draw_operator({"m": eigenvalues}, {"m": values}, styles=STYLES).axes
    assert drawn(circle, "m") == (list(eigenvalues.real), list(eigenvalues.imag))
    assert list(line(right, "m").get_ydata()) == [2.0, 1.0, 0.5]


def test_lyapunov_exponents_are_numbered_from_one() -> None:
    (axes,) = diagnostics.draw_lyapunov({"m": np.array([0.6, 0.1])}, np.array([0.7, 0.2, -0.1]), styles=STYLES).axes
    assert drawn(axes, "m") == ([1, 2], [0.6, 0.1])
    assert drawn(axes, "truth") == ([1, 2, 3], [0.7, 0.2, -0.1])


def test_training_shows_loss_and_validation() -> None:
    log = [{"step": n, "loss": 1 / (n + 1)} for n in range(5)] + [
        {"step": 5, "loss": 0.1, "valid": {"relative_l2@1": 0.3}}
    ]
    (axes,) = diagnostics.draw_training({"m": log}, styles=STYLES).axes
    assert drawn(axes, "m") == (list(range(6)), [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5, 0.1])
    assert any(list(found.get_xdata()) == [5] and list(found.get_ydata()) == [0.3] for found in axes.lines)


def test_kinetic_energy_maps_are_upright_and_the_error_is_a_percentage() -> None:
    truth = 1 + RNG.random((6, 4))
    images = maps.draw_kinetic_energy(truth, 1.1 * truth, side=64).axes[0].images
    np.testing.assert_allclose(images[0].get_array(), truth.T)
    np.testing.assert_allclose(images[1].get_array(), 1.1 * truth.T)
    np.testing.assert_allclose(images[2].get_array(), 10.0)


def test_channel_planes_keep_the_wall_normal_axis_upright() -> None:
    truth = 1 + RNG.random((6, 4))
    figure = maps.draw_kinetic_energy(truth, truth, side=64, axes=("y", "z"))
    np.testing.assert_allclose(figure.axes[0].images[0].get_array(), truth)


def test_snapshots_show_truth_prediction_and_difference() -> None:
    truth, model = RNG.standard_normal((2, 3, 6, 4))
    figure = maps.draw_snapshots(np.array([1, 5, 9]), truth, model, side=64, step_seconds=0.1)
    shown = figure.axes[0].images
    for n in range(3):
        for image, field in zip(shown[3 * n :], (truth[n], model[n], model[n] - truth[n]), strict=False):
            np.testing.assert_allclose(image.get_array(), field.T)
    left, right, bottom, top = np.transpose([image.get_extent() for image in shown[:9]]).reshape(4, 3, 3)
    # Columns are lead times from the left, rows are truth, prediction and difference from above.
    assert (right[:-1] < left[1:]).all()
    assert (top[:, 1:] < bottom[:, :-1]).all()
    np.testing.assert_allclose((top - bottom) / (right - left), 4 / 6)
    assert shown[0].get_clim()[0] == -shown[0].get_clim()[1]


def test_attention_shows_a_row_of_heads_per_axis() -> None:
    kernels = {"x": RNG.standard_normal((3, 5, 5)), "y": RNG.standard_normal((2, 7, 7))}
    shown = maps.draw_attention(kernels, side=64).axes[0].images
    for image, kernel in zip(shown, [*kernels["x"], *kernels["y"]], strict=True):
        np.testing.assert_allclose(image.get_array(), kernel)


@pytest.mark.filterwarnings("error")
def test_attention_of_a_diverged_state_is_scaled_by_what_is_finite() -> None:
    kernel = np.array([[[2.0, -3.0], [np.inf, np.nan]], [[6e4, -6e4], [0, 1]], [[np.nan] * 2] * 2], dtype=np.float16)
    figure = maps.draw_attention({"x": kernel}, side=64)
    saving.to_png(figure, dpi=72)
    shown = figure.axes[0].images
    assert [image.get_clim()[1] for image in shown] == [3, float(np.float16(6e4)), 1]
    assert [np.ma.count(image.get_array()) for image in shown] == [2, 4, 0]


def test_signed_fields_get_a_symmetric_scale_and_positive_ones_do_not() -> None:
    name, low, high = maps.scale_of(RNG.standard_normal(1000))
    assert (name, low) == ("balance", -high)
    name, low, high = maps.scale_of(5 + RNG.random(1000))
    assert name == "thermal"
    assert 5 <= low < high <= 6


def test_shrinking_averages_blocks_also_where_they_do_not_fit() -> None:
    field = RNG.random((2, 5, 9))
    small = canvas.shrink(field, 3)
    assert small.shape == (2, 3, 3)
    assert small[1, 0, 2] == pytest.approx(field[1, 0:2, 6:9].mean())
    assert small[1, 2, 0] == pytest.approx(field[1, 4:5, 0:3].mean())
    assert canvas.shrink(field, 9) is field


def test_forty_runs_have_forty_distinct_styles() -> None:
    styles = canvas.line_styles([str(n) for n in range(40)])
    assert len({(style.color, str(style.dash)) for style in styles.values()}) == 40


def test_a_name_in_the_shared_order_looks_the_same_among_whatever_others() -> None:
    def looks(names: list[str]) -> dict[str, tuple[str, str]]:
        styles = canvas.line_styles(names, ["mno", "uno", "a3m"]).values()
        return {style.label: (style.color, str(style.dash)) for style in styles}

    many, few = looks(["kf-a3m", "kf-uno", "kf-mno", "kf-new"]), looks(["tcf-other", "tcf-a3m"])
    assert many["a3m"] == few["a3m"]
    assert len(set(many.values())) == 4
    assert len(set(few.values())) == 2


#: Linear RGB as seen without green and without red cones (Machado, Oliveira & Fernandes 2009, severity 1).
WITHOUT_CONES = (
    ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
)


def linear(color: str) -> np.ndarray:
    channels = np.array(to_rgb(color))
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lightness_and_hue(rgb: np.ndarray) -> np.ndarray:
    """CIELAB of linear RGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ np.clip(rgb, 1e-3, 1) / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", WITHOUT_CONES)
def test_colour_blind_readers_can_tell_any_two_of_twenty_runs_by_colour_or_dash(
    seen: tuple[tuple[float, ...], ...],
) -> None:
    styles = canvas.line_styles([str(n) for n in range(20)]).values()
    for one, other in itertools.combinations(styles, 2):
        if one.dash == other.dash:
            a, b = (lightness_and_hue(np.array(seen) @ linear(style.color)) for style in (one, other))
            assert float(np.linalg.norm(a - b)) > 15, (one, other)


def test_legends_leave_out_what_all_names_share() -> None:
    assert [s.label for s in canvas.line_styles(["kf128-a3m", "kf128-a3m-free"]).values()] == ["a3m", "a3m-free"]
    assert [s.label for s in canvas.line_styles(["kf128-a3m"]).values()] == ["kf128-a3m"]
    assert shared_prefix(["kf128-a3m", "kf128-coarse-a3m"]) == "kf128-"
    assert shared_prefix(["kf128-a", "kf12-b"]) == ""
    assert shared_prefix(["same-name", "same-name"]) == ""


@pytest.mark.parametrize("length", [1, 12, 30])
@pytest.mark.parametrize("width", [5.0, 7.6])
def test_no_legend_is_wider_than_its_figure(length: int, width: float) -> None:
    figure, ((axes,),) = canvas.new_figure(width, 3.0)
    for n in range(9):
        axes.plot([0, 1], label=f"{n}-coarse-ergoformer-sigma16-exact"[:length])
    canvas.add_legend(figure, axes)
    saving.to_png(figure, dpi=72)
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1
    assert box.y0 >= 0


def luminance(color: str) -> float:
    channels = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return float(np.dot((0.2126, 0.7152, 0.0722), channels))


@pytest.mark.parametrize("ground", ["#ffffff", "#191f27"])
def test_every_line_colour_can_be_seen_on_both_pages(ground: str) -> None:
    for color in canvas.PALETTE:
        bright, dim = sorted((luminance(color), luminance(ground)), reverse=True)
        assert (bright + 0.05) / (dim + 0.05) >= 3.0, color


def test_svg_inherits_ink_keeps_its_labels_and_refers_only_to_itself() -> None:
    figure = figures.draw_density({"a <b> $x$ 流": Curve(X, X)}, Curve(X, 2 * X), styles=STYLES)
    figure.axes[0].set_xticks([1.23456], labels=["1.23456"])
    svg = saving.to_svg(figure, identifier="one", label="alt")
    assert "1.23456<" in svg
    assert "currentColor" in svg
    assert canvas.INK not in svg
    assert "http" not in svg
    assert "font-family" not in svg
    assert "a &lt;b&gt; $x$ 流" in svg
    identifiers = re.findall(r' id="([^"]+)"', svg)
    assert len(set(identifiers)) == len(identifiers)
    assert set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg)) == set(identifiers)
    assert all(identifier.startswith("one-") for identifier in identifiers)


def test_images_inside_a_drawing_keep_every_colour_and_take_a_byte_per_pixel() -> None:
    field = RNG.random((20, 20))
    made = board.new_board(1, 1, width=2.0, shape=field.shape)
    board.draw_field(made, 0, 0, field, "thermal", 0.0, 1.0)
    found = re.findall(r'base64,([^"]*)"', saving.to_svg(made.figure, identifier="one", label="alt"))
    (image,) = [Image.open(io.BytesIO(base64.b64decode(code))) for code in found]
    assert image.mode == "P"
    # The drawing turns the image over: its first row is the lowest.
    wanted = np.rint(255 * canvas.color_map("thermal")(field)[..., :3])
    shown = np.asarray(image.convert("RGB"), float)
    assert min(np.abs(shown - wanted).max(), np.abs(shown[::-1] - wanted).max()) <= 1


def test_a_run_that_a_figure_lacks_keeps_its_colour_from_the_others(make_run: Callable[..., RunView]) -> None:
    groups = group_runs([make_run(name=name) for name in ("one", "two", "three")])
    del groups[1].first.curves["spectrum/model"]
    colours = {}
    for item in figure_items(groups, side=16):
        if item.slug in ("error-growth", "spectrum"):
            colours[item.slug] = {line.get_label(): line.get_color() for line in item.figure.axes[0].lines}
    assert "two" not in colours["spectrum"]
    assert len({colours["error-growth"][name] for name in ("one", "two", "three")}) == 3
    for name in ("one", "three"):
        assert colours["spectrum"][name] == colours["error-growth"][name]


def test_drawing_leaves_the_global_style_and_pyplot_alone(make_run: Callable[..., RunView]) -> None:
    before = dict(matplotlib.rcParams)
    for item in figure_items(group_runs([make_run(walls=True)]), side=16):
        saving.to_svg(item.figure, identifier="x", label="")
    assert dict(matplotlib.rcParams) == before
    assert sys.modules["matplotlib.pyplot"].get_fignums() == []


def test_unknown_colour_maps_are_refused() -> None:
    with pytest.raises(ValueError, match="must be one of cmocean's, got 'jet'; try balance"):
        canvas.color_map("jet")
