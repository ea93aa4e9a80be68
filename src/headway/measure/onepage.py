"""One self-contained HTML page: text, and plots by plotly, with its script included.

The script is read from the installed package, so the page needs no network. Figures are plain JSON;
nothing of plotly's Python is imported.
"""

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c2024; --faint: #60646c; --line: #d9dce1 }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --text: #e8eaed; --faint: #9aa0a8; --line: #33383e } }
body { margin: 1rem auto; max-width: 75rem; padding: 0 1rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin: 2rem 0 .2rem }
p { color: var(--faint); margin: .2rem 0 }
pre { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; padding: .8rem;
  font: 13px/1.45 ui-monospace, monospace }
.plot { height: 20rem; width: 100% }
"""
SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const ink = dark ? "#e8eaed" : "#1c2024", line = dark ? "#33383e" : "#d9dce1";
const axis = { gridcolor: line, zerolinecolor: line, linecolor: line };
for (const [id, figure] of Object.entries(figures)) {
  const layout = Object.assign({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12 },
    margin: { l: 60, r: 60, t: 10, b: 45 }, legend: { orientation: "h", y: 1.12 },
  }, figure.layout);
  for (const name of ["xaxis", "yaxis", "yaxis2"])
    if (layout[name]) layout[name] = Object.assign({}, axis, layout[name]);
  Plotly.newPlot(id, figure.data, layout, { responsive: true, displaylogo: false });
}
"""

Plot = tuple[str, str, dict[str, Any]]
"""A title, a sentence, a figure as plotly reads it."""


def one_page(
    title: str,
    heading: str,
    before: Sequence[str],
    plots: Sequence[Plot],
    after: Sequence[str] = (),
) -> str:
    """Return the page: a heading, HTML, the plots, HTML."""
    figures = {f"plot{i}": figure for i, (_, _, figure) in enumerate(plots)}
    sections = "\n".join(
        f'<h2>{escape(name)}</h2><p>{escape(caption)}</p><div class="plot" id="plot{i}"></div>'
        for i, (name, caption, _) in enumerate(plots)
    )
    data = msgspec.json.encode(figures).decode().replace("</", "<\\/")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>"
        f"<style>{STYLE}</style><script>{plotly_script()}</script></head><body>"
        f"<h1>{escape(heading)}</h1>"
        f"{''.join(before)}{sections}{''.join(after)}"
        f"<script>const figures = {data};{SCRIPT}</script></body></html>\n"
    )


def preformatted(text: str) -> str:
    """Return text as a preformatted block."""
    return f"<pre>{escape(text)}</pre>"


def plotly_script() -> str:
    """Return the script of the installed package."""
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def line(x: list[float], y: Any, name: str) -> dict[str, Any]:
    """Return a line."""
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y}


def axes(x: str, y: str) -> dict[str, Any]:
    """Return two titled axes."""
    return {
        "xaxis": {"title": {"text": x}},
        "yaxis": {"title": {"text": y}, "rangemode": "tozero"},
    }


def right(title: str) -> dict[str, Any]:
    """Return a second vertical axis."""
    return {
        "title": {"text": title},
        "overlaying": "y",
        "side": "right",
        "rangemode": "tozero",
        "showgrid": False,
    }
