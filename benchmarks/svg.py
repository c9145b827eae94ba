"""A picture of figures over time: panels below one another, as SVG text. Needs no library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 960
LEFT: Final = 90
RIGHT: Final = 20
TOP: Final = 36
PANEL: Final = 130
GAP: Final = 46
COLUMNS: Final = 425
"""Most points in a panel; more are merged."""

_STYLE: Final = (
    "text{font-family:sans-serif;font-size:13px;fill:#333}.title{font-weight:600}.tick{fill:#666}"
    ".grid{stroke:#ddd;stroke-width:1}.area{fill-opacity:.15}.line{fill:none;stroke-width:1.3}"
)


@dataclass(frozen=True)
class Panel:
    """One quantity at even intervals, on an axis up to `top`; None where there was nothing to make a value of.

    Of values that share a point, the mean is drawn, or the largest where `is_peak`.
    """

    title: str
    values: Sequence[float | None]
    top: float
    color: str
    unit: str = ""
    is_peak: bool = False


def picture(title: str, panels: Sequence[Panel], hours: float) -> str:
    """The panels over the same `hours`, as an SVG document."""
    height = TOP + len(panels) * (PANEL + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + number * (PANEL + GAP), hours)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, top: float, hours: float) -> list[str]:
    bottom, right = top + PANEL, WIDTH - RIGHT
    parts = [f'<text class="title" x="{LEFT}" y="{top - 8}">{escape(panel.title)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * PANEL
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{right}"/>')
        label = f"{share * panel.top:,.0f}{panel.unit}"
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in _ticks(hours):
        x = LEFT + tick / hours * (right - LEFT)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g} h</text>')
    points = _reduced(panel)
    step = (right - LEFT) / max(1, len(points) - 1)
    shown = [min(value, panel.top) for value in points]
    line = " ".join(f"{LEFT + i * step:.1f},{bottom - PANEL * y / panel.top:.1f}" for i, y in enumerate(shown))
    parts.append(f'<polygon class="area" fill="{panel.color}" points="{LEFT},{bottom} {line} {right},{bottom}"/>')
    parts.append(f'<polyline class="line" stroke="{panel.color}" points="{line}"/>')
    return parts


def _ticks(hours: float) -> list[float]:
    """Round moments, at most a dozen."""
    steps = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 6.0, 12.0, 24.0)
    step = next((step for step in steps if hours / step <= 12), hours)
    return [round(i * step, 3) for i in range(int(hours / step) + 1)]


def _reduced(panel: Panel) -> list[float]:
    """The points to draw."""
    size = -(-len(panel.values) // COLUMNS)
    points: list[float] = []
    for start in range(0, len(panel.values), size):
        known = [value for value in panel.values[start : start + size] if value is not None]
        if known:
            points.append(max(known) if panel.is_peak else sum(known) / len(known))
        else:
            points.append(points[-1] if points else 0.0)
    return points


def round_up(value: float) -> float:
    """The least of 1, 2, 4, 5, 8 and 10 times a power of ten that is no less."""
    power = 1.0
    while value > 10 * power:
        power *= 10
    return power * next(factor for factor in (1, 2, 4, 5, 8, 10) if factor * power >= value)
