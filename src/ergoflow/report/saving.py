"""How a figure is saved: as PNG, and as SVG that follows the theme of the page.

A figure is drawn once. As PNG it gets a white ground; as SVG its ink becomes `currentColor` and its ground is
transparent, so that one drawing serves the light page, the dark page and print.
"""

from __future__ import annotations

import base64
import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from PIL import Image

from ergoflow.report.canvas import INK

#: Dots per inch of pictures, and of what is a picture inside a drawing.
DPI = 160
#: Largest size on the page in pixels per point, so that all figures share one text size.
SVG_SCALE = 1.42


def to_png(figure: Figure, *, dpi: int = DPI) -> bytes:
    """The figure as PNG on white, for sharing."""
    stream = io.BytesIO()
    figure.set(dpi=dpi, facecolor="white")
    # Not `savefig`: it draws every figure twice.
    with _any_glyph():
        FigureCanvasAgg(figure).print_png(stream, metadata={"Software": None})
    return stream.getvalue()


def to_svg(figure: Figure, *, identifier: str, label: str) -> str:
    """The figure as an inline `<svg>` element that inherits ink and font from the page.

    `identifier` (letters, digits, dashes) keeps the ids of several drawings on one page apart; `label` must
    be escaped.
    """
    stream = io.StringIO()
    nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": identifier, "image.composite_image": False}
    figure.set(dpi=DPI, facecolor="none")
    with matplotlib.rc_context(settings), _any_glyph():
        FigureCanvasSVG(figure).print_svg(stream, metadata=nothing)
    svg = stream.getvalue()
    svg = svg[svg.index("<svg") :]
    width, height = figure.get_size_inches() * 72
    svg = re.sub(r"<svg[^>]*>", "", svg, count=1)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"font(?:-family)?: [^;\"]*sans-serif[^;\"]*;? ?", _font_size_only, svg)
    svg = re.sub(r' style="image-rendering:[^"]*"', "", svg)
    svg = re.sub(r"(?<=base64,)[^\"]*", _with_palette, svg)
    svg = svg.replace("xlink:href", "href").replace(INK, "currentColor")
    svg = re.sub(r">\s+<", "><", svg).replace(" \n", " ")
    svg = re.sub(r"<[^>]*>", _short_numbers, _rename_ids(svg, identifier))
    head = f'<svg role="img" aria-label="{label}" viewBox="0 0 {width:.1f} {height:.1f}"'
    return f'{head} style="max-width:{width * SVG_SCALE:.0f}px">{svg}'


@contextmanager
def _any_glyph() -> Iterator[None]:
    """Let names hold letters that matplotlib's font lacks: the page draws them with the reader's fonts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _with_palette(match: re.Match[str]) -> str:
    """A base64 PNG of at most 256 colours, none transparent, with a byte per pixel for four; others as they are."""
    image = Image.open(io.BytesIO(base64.b64decode(match.group())))
    # A pixel as one number: whole numbers are sorted much faster than rows of four.
    pixels = np.asarray(image.convert("RGBA")).view(">u4")[..., 0]
    numbers, index = np.unique(pixels, return_inverse=True)
    colors = numbers[:, None].view(np.uint8)  # (colours, 4)
    if len(colors) > 256 or colors[:, 3].min() < 255:
        return match.group().strip()
    small = Image.fromarray(index.reshape(pixels.shape).astype(np.uint8))
    small.putpalette(np.ascontiguousarray(colors[:, :3]).tobytes())
    stream = io.BytesIO()
    small.save(stream, format="png", optimize=True)
    return base64.b64encode(stream.getvalue()).decode("ascii")


def _short_numbers(tag: re.Match[str]) -> str:
    """Coordinates inside a tag with two decimals: a hundredth of a point is invisible. Text is left alone."""
    return re.sub(r"(\d+\.\d\d)\d+", r"\1", tag.group())


def _font_size_only(match: re.Match[str]) -> str:
    """Drop the font family, keep a size given in the `font` shorthand."""
    size = re.search(r"[\d.]+px", match.group())
    return f"font-size: {size.group()}; " if size else ""


def _rename_ids(svg: str, identifier: str) -> str:
    """Prefix the ids that something refers to and drop the others, so that ids are unique on the page."""
    used = set(re.findall(r"""(?:url\(#|href="#)([^)"]+)""", svg))
    svg = re.sub(r' id="([^"]+)"', lambda m: f' id="{identifier}-{m[1]}"' if m[1] in used else "", svg)
    return re.sub(r"""(url\(#|href="#)""", rf"\1{identifier}-", svg)
