"""Plots of a report as SVG: lines, points and bars on linear, logarithmic or named axes.

The style sheet of the page (`onepage.py`) colours them, light and dark; hovering over a point or a
bar shows its values. Nothing is run in the browser.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from math import ceil, floor, isfinite, log10
from typing import Literal

WIDTH, HEIGHT, ROW_HEIGHT = 860, 300, 22
MARGIN_LEFT, MARGIN_RIGHT, MARGIN_TOP, MARGIN_BOTTOM = 62, 20, 14, 44
NAME_CHARS = 34
"""Characters of a name on an axis; the whole name is shown on hovering."""
CHAR_WIDTH = 6.4
MAX_HOVER = 400
"""Points of a series that each show their values; more are drawn as one path."""
PALETTE = 8
GOOD, WARN, BAD, SILENT = "good", "warn", "bad", "silent"
"""Colours with a meaning, bar_series the numbers of the palette."""

Value = float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Values of one name. Names on an axis are strings; `low` and `high` are ends of 95% intervals
    along the axis of numbers. `right` uses the second vertical axis."""

    name: str = ""
    kind: Literal["line", "points", "both", "bars"] = "line"
    x: Sequence[Value]
    y: Sequence[Value]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    notes: Sequence[str] = ()
    colour: int | str | None = None
    dashed: bool = False
    right: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One plot: its title, a sentence, its axes and series.

    `verticals` and `horizontals` are dashed lines at values; `cut` are spans of x in grey.
    """

    title: str
    caption: str
    x: str
    y: str
    series: Sequence[Series]
    right: str = ""
    log_x: bool = False
    verticals: Sequence[float] = ()
    horizontals: Sequence[float] = ()
    cut: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to pixels, and has the values that get a grid line, with their labels."""

    at: Callable[[Value], float]
    ticks: list[tuple[Value, str]]


def line(name: str, x: Sequence[Value], y: Sequence[Value], *, right: bool = False) -> Series:
    """Return a line."""
    return Series(name=name, x=x, y=y, right=right)


def bars(name: str, x: Sequence[Value], y: Sequence[Value]) -> Series:
    """Return bars."""
    return Series(kind="bars", name=name, x=x, y=y)


def svg(plot: Plot) -> str:
    """Return the plot as SVG, with its legend above."""
    plot = replace(plot, series=[coloured(each, i) for i, each in enumerate(plot.series) if each.x])
    names_y = names([each.y for each in plot.series])
    longest = max(map(len, names_y), default=0)
    start = max(MARGIN_LEFT, 14 + round(CHAR_WIDTH * min(NAME_CHARS, longest)))
    height = MARGIN_TOP + MARGIN_BOTTOM + ROW_HEIGHT * len(names_y) if names_y else HEIGHT
    right_edge = WIDTH - (MARGIN_LEFT if plot.right else MARGIN_RIGHT)
    x = axis_x(plot, start, right_edge)
    y, second = (axis_y(plot, height, names_y, right=on_right) for on_right in (False, True))
    parts = [
        *frame(plot, x, y, start, right_edge, height),
        *(right_labels(second, right_edge) if plot.right else ()),
        *marks(plot, x, second, y),
    ]
    title = escape(f"{plot.title}: {plot.y or 'values'} by {plot.x or 'name'}")
    return (
        f'{legend(plot.series)}<div class="plot"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{title}">{"".join(parts)}</svg></div>'
    )


def coloured(series: Series, number: int) -> Series:
    """Return the series with a colour of the palette, unless it has one."""
    return series if series.colour is not None else replace(series, colour=number % PALETTE)


def legend(series: Sequence[Series]) -> str:
    keys = [
        f'<li class="c-{each.colour}">{escape(each.name)}{" (right)" if each.right else ""}</li>'
        for each in series
        if each.name
    ]
    return f'<ul class="legend">{"".join(keys)}</ul>' if len(keys) > 1 or keys else ""


# ── axes ────────────────────────────────────────────────────────────────────────────────────


def names(columns: Sequence[Sequence[Value]]) -> list[str]:
    """Return the names of an axis in the order in which they first appear; [] for numbers."""
    return list(dict.fromkeys(v for column in columns for v in column if isinstance(v, str)))


def numbers(series: Sequence[Series], field: str) -> list[float]:
    """Return the finite numbers of a field, with the ends of the intervals."""
    values = [v for each in series for v in getattr(each, field) if not isinstance(v, str)]
    if field == "y" or any(isinstance(v, str) for each in series for v in each.y):
        values += [end for each in series for end in (*each.low, *each.high)]
    return [float(value) for value in values if isfinite(value)]


def axis_x(plot: Plot, start: float, right: float) -> Axis:
    """Return the horizontal axis: names side by side, decades, or numbers."""
    labels = names([each.x for each in plot.series])
    if labels:
        step = (right - start) / len(labels)
        places = {name: start + step * (i + 0.5) for i, name in enumerate(labels)}
        return Axis(lambda v: places[str(v)], [(name, name) for name in labels])
    values = [*numbers(plot.series, "x"), *plot.verticals]
    if plot.log_x:
        positive = [value for value in values if value > 0] or [1.0]
        low, high = floor(log10(min(positive))), ceil(log10(max(positive)))
        high = max(high, low + 1)
        scale = (right - start) / (high - low)
        decades = [10.0**power for power in range(low, high + 1)]
        return Axis(
            lambda v: start + scale * (log10(max(float(v), 10.0**low)) - low),
            [(value, number(value)) for value in decades],
        )
    named = bool(names([each.y for each in plot.series]))
    return linear([*values, 0.0] if named else values, start, right)


def axis_y(plot: Plot, height: float, labels: list[str], *, right: bool) -> Axis:
    """Return a vertical axis: names below each other, or numbers from 0."""
    if labels:
        places = {name: MARGIN_TOP + ROW_HEIGHT * (i + 0.5) for i, name in enumerate(labels)}
        return Axis(lambda v: places[str(v)], [(name, name) for name in labels])
    mine = [each for each in plot.series if each.right == right]
    values = [0.0, *numbers(mine, "y"), *(() if right else plot.horizontals)]
    return linear(values, height - MARGIN_BOTTOM, MARGIN_TOP)


def linear(values: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis from `start` to `end` pixels with round numbers around the values."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    steps = round_steps(low, high)
    first, last = steps[0], steps[-1]
    return Axis(
        lambda v: start + (float(v) - first) / (last - first) * (end - start),
        [(value, number(value)) for value in steps],
    )


def round_steps(low: float, high: float) -> list[float]:
    """Return round numbers around low … high: 0, 7.3 → 0 2 4 6 8."""
    span = high - low or abs(high) or 1.0
    unit = 10.0 ** floor(log10(span / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if span / (unit * factor) <= 5)
    first, last = floor(low / step + 1e-9), ceil(high / step - 1e-9)
    return [round(step * i, 12) for i in range(first, max(last, first + 1) + 1)]


def number(value: float) -> str:
    """Format a number: 1200000 → 1.2M, 0.25 → 0.25."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"


# ── drawing ─────────────────────────────────────────────────────────────────────────────────


def frame(plot: Plot, x: Axis, y: Axis, start: float, right: float, height: float) -> Iterator[str]:
    """Yield what is cut, the grid with its labels, the axes' titles and the dashed lines."""
    base = height - MARGIN_BOTTOM
    for low, high in plot.cut:
        shape = box(x.at(low), MARGIN_TOP, x.at(high) - x.at(low), base - MARGIN_TOP)
        yield f'<rect class="cut" {shape}/>'
    for value, label in y.ticks:
        yield f'<path class="grid" d="M{start} {y.at(value):.1f}H{right}"/>'
        yield words(start - 7, y.at(value) + 4, label, "end")
    chars = max(4, int((right - start) / max(len(x.ticks), 1) / CHAR_WIDTH))
    for value, label in x.ticks:
        if not isinstance(value, str):
            yield f'<path class="grid" d="M{x.at(value):.1f} {MARGIN_TOP}V{base}"/>'
        yield words(x.at(value), base + 16, label, "middle", chars)
    yield words((start + right) / 2, height - 8, plot.x, "middle", 200)
    if plot.y:
        turned = (
            f'transform="translate(13 {(MARGIN_TOP + base) / 2}) rotate(-90)" text-anchor="middle"'
        )
        yield f"<text {turned}>{escape(plot.y)}</text>"
    lines = [f"M{x.at(at):.1f} {MARGIN_TOP}V{base}" for at in plot.verticals]
    lines += [f"M{start} {y.at(at):.1f}H{right}" for at in plot.horizontals]
    yield from (f'<path class="promise" d="{d}"/>' for d in lines)


def right_labels(axis: Axis, right: float) -> Iterator[str]:
    for value, label in axis.ticks:
        yield words(right + 7, axis.at(value) + 4, label, "start")


def marks(plot: Plot, x: Axis, second: Axis, first: Axis) -> Iterator[str]:
    """Yield the series; bars of several series stand side by side."""
    bar_series = [each for each in plot.series if each.kind == "bars"]
    for each in plot.series:
        y = second if each.right else first
        parts: Iterator[str] = (
            bar_marks(each, x, y, bar_series.index(each), len(bar_series))
            if each.kind == "bars"
            else line_marks(each, x, y)
        )
        yield f'<g class="c-{each.colour}">{"".join(parts)}</g>'


def bar_marks(series: Series, x: Axis, y: Axis, place: int, count: int) -> Iterator[str]:
    """Yield bars with their intervals; their width is that of a name, or of the values' steps."""
    at = [x.at(value) for value in series.x]
    gaps = [b - a for a, b in pairwise(at) if b > a]
    step = min(gaps, default=80.0)
    is_named = isinstance(series.x[0], str)
    width = min(60.0, step * (0.8 / count if is_named else 1.0))
    offset = (place - (count - 1) / 2) * width if is_named else 0.0
    zero = y.at(0.0)
    for i, (middle, value) in enumerate(zip(at, series.y, strict=True)):
        top = y.at(value)
        shape = box(middle + offset - width / 2, min(top, zero), width, abs(zero - top))
        yield f'<rect class="bar" {shape}>{hover(series, i)}</rect>'
        if series.low:
            ends = y.at(series.low[i]), y.at(series.high[i])
            yield f'<path class="range" d="M{middle + offset:.1f} {ends[0]:.1f}V{ends[1]:.1f}"/>'


def line_marks(series: Series, x: Axis, y: Axis) -> Iterator[str]:
    """Yield a line, points, or both, with their intervals."""
    points = [
        (i, x.at(a), y.at(b))
        for i, (a, b) in enumerate(zip(series.x, series.y, strict=True))
        if all(isinstance(v, str) or isfinite(v) for v in (a, b))
    ]
    if series.kind != "points":
        dash = " dashed" if series.dashed else ""
        d = "".join(f"{'L' if n else 'M'}{a:.1f} {b:.1f}" for n, (_, a, b) in enumerate(points))
        yield f'<path class="line{dash}" d="{d}"/>'
    yield from interval_marks(series, x, y, points)
    if series.kind == "line":
        return
    if len(points) > MAX_HOVER:
        d = "".join(f"M{a:.1f} {b:.1f}h0" for _, a, b in points)
        yield f'<path class="dots" d="{d}"/>'
        return
    for i, a, b in points:
        yield f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4">{hover(series, i)}</circle>'


def interval_marks(
    series: Series, x: Axis, y: Axis, points: Sequence[tuple[int, float, float]]
) -> Iterator[str]:
    """Yield the 95% interval of each point, along the axis of numbers."""
    for i, a, b in points if series.low else ():
        low, high = series.low[i], series.high[i]
        if isinstance(series.y[i], str):
            path = f"M{x.at(low):.1f} {b:.1f}H{x.at(high):.1f}"
        else:
            path = f"M{a:.1f} {y.at(low):.1f}V{y.at(high):.1f}"
        yield f'<path class="range" d="{path}"/>'


def hover(series: Series, i: int) -> str:
    """Return the title of a mark: its series, its values, its note."""
    values = [v if isinstance(v, str) else f"{v:.4g}" for v in (series.x[i], series.y[i])]
    interval = f" ({series.low[i]:.4g} … {series.high[i]:.4g})" if series.low else ""
    note = f"\n{series.notes[i]}" if series.notes else ""
    words_of_mark = f"{series.name} {values[0]}: {values[1]}{interval}{note}"
    return f"<title>{escape(words_of_mark.strip())}</title>"


def box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{max(height, 0):.1f}"'


def words(x: float, y: float, text: str, anchor: str, chars: int = NAME_CHARS) -> str:
    """Return a text, cut to `chars` characters; the whole is its title then."""
    if len(text) <= chars:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    cut = escape(text[: chars - 1]) + "…"
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{cut}'
        f"<title>{escape(text)}</title></text>"
    )
