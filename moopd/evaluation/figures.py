"""How figures look and how they are written: the same results give the same bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

_INK = "#10141a"
"""Dark on paper; in an inlined figure the page's text colour replaces it."""

COLORS = (
    "#8a94a3",
    "#2f7fd1",
    "#b08a3e",
    "#d9822b",
    "#1f9d76",
    "#5cbf9a",
    "#cf4a5a",
    "#9a68d0",
    "#c0579b",
    "#4aa8c0",
    "#7d8f2e",
    "#6d78d6",
    "#a9705a",
)
"""By place of a row in the table; each stands out on white and on near-black."""


@dataclass(frozen=True)
class Layout:
    """Room that a figure has: inches, panels side by side, letters of a label's line."""

    width: float
    columns: int
    label_letters: int
    wide: bool


WIDE = Layout(width=9.6, columns=4, label_letters=26, wide=True)
NARROW = Layout(width=3.6, columns=2, label_letters=15, wide=False)

Plot = Callable[[Layout], Figure]


class Drawn(NamedTuple):
    """One figure for files and for the page: `png` bytes, `svg` text, both of the wide layout, and
    the narrow layout's svg."""

    png: bytes
    svg: str
    narrow_svg: str


def draw(plot: Plot) -> Drawn:
    """Both layouts, each laid out once."""
    with _style():
        wide, narrow = plot(WIDE), plot(NARROW)
        png = io.BytesIO()
        svg = _svg(wide)
        # Laying out again would cost as much as drawing and change nothing.
        wide.set_layout_engine("none")
        FigureCanvasAgg(wide)
        wide.savefig(png, format="png", dpi=160, facecolor="white", metadata={"Software": None})
        return Drawn(png.getvalue(), svg, _svg(narrow))


def write_files(drawn: Drawn, stem: Path) -> tuple[Path, Path]:
    """Write `stem`.png and `stem`.svg; returns both paths."""
    png, svg = stem.with_suffix(".png"), stem.with_suffix(".svg")
    png.write_bytes(drawn.png)
    svg.write_text(drawn.svg, encoding="utf-8")
    return png, svg


def inline(svg: str, name: str) -> str:
    """The <svg> element with the page's text colour; its ids start with `name`."""
    text = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    return re.sub(r'<svg\b[^>]*?(viewBox="[^"]*")[^>]*>', r"<svg \1>", text, count=1)


def _svg(figure: Figure) -> str:
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    return buffer.getvalue()


_NO_METADATA: dict[str, None] = {"Date": None, "Creator": None, "Format": None, "Type": None}


@contextmanager
def _style() -> Iterator[None]:
    settings: dict[Any, Any] = {  # rcParams names are literals in the stubs
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "text.parse_math": False,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _INK,
        "axes.labelcolor": _INK,
        "axes.titlecolor": _INK,
        "axes.linewidth": 0.7,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#808080",
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "xtick.labelsize": 8.5,
        "ytick.labelsize": 8.5,
        "xtick.major.size": 3,
        "ytick.major.size": 0,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "lines.linewidth": 1.6,
        "svg.hashsalt": "moopd",
        "svg.fonttype": "none",
        "figure.constrained_layout.use": True,
    }
    with matplotlib.rc_context(settings):
        yield
