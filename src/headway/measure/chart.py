"""Line charts as small SVG text, for the pages in docs: panels side by side, one legend."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 360, 250
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 52, 14, 30, 42
LEGEND_WIDTH = 110
COLOURS = (
    *("#0b6e4f", "#c8553d", "#3d5a98", "#8a8a8a"),
    *("#b5892e", "#7a4b94", "#2f9fb0", "#444444"),
)

Line = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart: lines by name, and what its axes say; `log_x` spreads x by decades."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Line]
    log_x: bool = False


def chart(panels: Sequence[Panel]) -> str:
    """Return the SVG of all panels, with the legend below."""
    names = list(dict.fromkeys(name for panel in panels for name in panel.lines))
    width = WIDTH * len(panels)
    columns = max(1, (width - MARGIN_LEFT) // LEGEND_WIDTH)
    height = HEIGHT + 8 + 16 * -(-len(names) // columns)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts.append(f'<g transform="translate({number * WIDTH} 0)">')
        parts += [*draw(panel, names), "</g>"]
    for number, name in enumerate(names):
        x, y = MARGIN_LEFT + number % columns * LEGEND_WIDTH, HEIGHT + 8 + number // columns * 16
        parts.append(f'<path d="M{x} {y}h18" stroke="{COLOURS[number]}" stroke-width="2"/>')
        parts.append(text(x + 24, y + 4, name, "start"))
    return "\n".join([*parts, "</svg>", ""])


def draw(panel: Panel, names: Sequence[str]) -> list[str]:
    """Return title, grid with its numbers, and the lines of one panel."""
    xs = [x for line in panel.lines.values() for x, _ in line]
    ys = [y for line in panel.lines.values() for _, y in line]
    x_ticks = decades(min(xs), max(xs)) if panel.log_x else ticks(max(xs))
    y_ticks = ticks(max(ys))
    right, bottom = WIDTH - MARGIN_RIGHT, HEIGHT - MARGIN_BOTTOM

    def x_at(x: float) -> float:
        scale = log10 if panel.log_x else float
        low, high = scale(x_ticks[0]), scale(x_ticks[-1])
        return MARGIN_LEFT + (scale(x) - low) / (high - low) * (right - MARGIN_LEFT)

    def y_at(y: float) -> float:
        return bottom - y / y_ticks[-1] * (bottom - MARGIN_TOP)

    parts = [text(MARGIN_LEFT, 16, panel.title, "start", bold=True)]
    for x in x_ticks:
        parts.append(f'<path d="M{x_at(x):.1f} {MARGIN_TOP}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(text(x_at(x), bottom + 14, f"{x:g}"))
    for y in y_ticks:
        parts.append(f'<path d="M{MARGIN_LEFT} {y_at(y):.1f}H{right}" stroke="#e4e4e4"/>')
        parts.append(text(MARGIN_LEFT - 6, y_at(y) + 4, f"{y:g}", "end"))
    parts.append(text((MARGIN_LEFT + right) / 2, bottom + 30, panel.x))
    middle = (MARGIN_TOP + bottom) / 2
    parts.append(
        f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(panel.y)}</text>"
    )
    for name, line in reversed(list(panel.lines.items())):
        points = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in line)
        colour = COLOURS[names.index(name)]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
    return parts


def text(x: float, y: float, words: str, anchor: str = "middle", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'


def ticks(high: float) -> list[float]:
    """Return round numbers from 0 to `high` or just beyond: 7.3 → 0 2 4 6 8."""
    step = 10 ** floor(log10(high / 4 or 1))
    step = next(step * factor for factor in (1, 2, 5, 10) if high / (step * factor) <= 5)
    return [round(step * number, 10) for number in range(ceil(high / step) + 1)]


def decades(low: float, high: float) -> list[float]:
    """Return the powers of ten around low … high."""
    return [10.0**power for power in range(floor(log10(low)), ceil(log10(high)) + 1)]
