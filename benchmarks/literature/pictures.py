"""Pictures of a finding, as plotly reads them: bars, bars in groups, lines."""

from collections.abc import Mapping, Sequence
from typing import Any

Picture = dict[str, Any]


def bars(rows: Sequence[tuple[str, float]], title: str) -> Picture:
    """A bar a row."""
    names, values = [name for name, _ in rows], [round(float(value), 4) for _, value in rows]
    return {"data": [{"type": "bar", "x": names, "y": values}], "layout": axes("", title)}


def groups(across: Sequence[str], rows: Mapping[str, Sequence[float]], title: str) -> Picture:
    """For each of `across` a bar of every row."""
    data = [
        {"type": "bar", "name": name, "x": list(across), "y": rounded(values)}
        for name, values in rows.items()
    ]
    return {"data": data, "layout": axes("", title) | {"barmode": "group"}}


def lines(x: Sequence[float], rows: Mapping[str, Sequence[float]], across: str, up: str) -> Picture:
    """A line a row."""
    data = [
        {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(x), "y": rounded(y)}
        for name, y in rows.items()
    ]
    return {"data": data, "layout": axes(across, up)}


def axes(across: str, up: str) -> Picture:
    """Two axes, the upright one from 0."""
    return {
        "xaxis": {"title": {"text": across}},
        "yaxis": {"title": {"text": up}, "rangemode": "tozero"},
    }


def rounded(values: Sequence[float]) -> list[float]:
    """Numbers of numpy become ours."""
    return [round(float(value), 4) for value in values]
