"""One self-contained HTML page of a report: a headline with the answer, plots, and text.

It needs no network and runs no script. Its colours are those of the live page, light and dark.
"""

from collections.abc import Sequence
from html import escape

from headway.measure.plot import Plot, svg

LIGHT = """
  --bg: #f5f6f8; --surface: #fff; --sunk: #eef0f4; --line: #dfe3e9; --grid: #e8ebf0;
  --ink: #171b22; --muted: #59626f; --accent: #2457d6; --on-accent: #fff;
  --decode: #2f6fde; --prefill: #bf6f00; --second: #8b5cd6; --good: #177245; --warn: #8a5a00;
  --bad: #bf2630;"""
DARK = """
  --bg: #0e1116; --surface: #161a21; --sunk: #1e232c; --line: #2a313c; --grid: #232a34;
  --ink: #e7eaef; --muted: #9ba5b4; --accent: #7ba7ff; --on-accent: #0b1220;
  --decode: #6b9fff; --prefill: #e2a545; --second: #b794f6; --good: #55c78f; --warn: #e6bb55;
  --bad: #ff8d8d;"""
STYLE = (
    f":root {{ color-scheme: light dark; {LIGHT} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}\n"
    """
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1.2rem 1rem 3rem; background: var(--bg);
  color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  font-variant-numeric: tabular-nums }
h1 { font-size: 1.6rem; line-height: 1.25; letter-spacing: -.015em; margin: .2rem 0;
  text-wrap: balance; overflow-wrap: anywhere }
h1.good { color: var(--good) } h1.bad { color: var(--bad) } h1.warn { color: var(--warn) }
h2 { font-size: 1rem; margin: 0 }
h3 { font-size: .95rem; margin: .8rem 0 0 }
p { margin: .2rem 0; overflow-wrap: anywhere } .quiet { color: var(--muted); font-size: 13px }
section { background: var(--surface); border: 1px solid var(--line); border-radius: 12px;
  padding: 1rem 1.1rem; margin: 1rem 0 }
pre { overflow-x: auto; margin: .6rem 0 0;
  font: 12.5px/1.45 ui-monospace, Menlo, Consolas, monospace }
summary { cursor: pointer; font-weight: 600; padding: .2rem 0 }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr));
  gap: .7rem 1.2rem; margin: 0 }
.figures dt { font-size: 13px; color: var(--muted) }
.figures dd { margin: 0; font-size: 1.35rem; font-weight: 600 }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; list-style: none;
  margin: .4rem 0 0; padding: 0; font-size: 13px }
.legend li::before { content: ""; display: inline-block; width: 10px; height: 10px;
  border-radius: 3px; margin-right: 5px; background: var(--key) }
.plot { overflow-x: auto; margin-top: .3rem }
.plot svg { display: block; width: 100%; min-width: 34rem; height: auto }
svg text { fill: var(--muted); font-size: 12px } svg .grid { stroke: var(--grid) }
svg .promise { stroke: var(--muted); stroke-dasharray: 4 4 } svg .cut { fill: var(--sunk) }
svg .line { fill: none; stroke: var(--key); stroke-width: 1.75; stroke-linejoin: round }
svg .dashed { stroke-dasharray: 2 4 } svg .bar, svg circle { fill: var(--key) }
svg .bar { opacity: .85 } svg .range { stroke: var(--ink); stroke-width: 1.2; opacity: .65 }
svg .dots { stroke: var(--key); stroke-width: 4; stroke-linecap: round; opacity: .7 }
.c-0 { --key: var(--decode) } .c-1 { --key: var(--prefill) } .c-2 { --key: var(--second) }
.c-3 { --key: #2aa198 } .c-4 { --key: #d05a8c } .c-5 { --key: #8a94a3 } .c-6 { --key: #7a9a01 }
.c-7 { --key: #b0763c } .c-good { --key: var(--good) } .c-warn { --key: var(--warn) }
.c-bad { --key: var(--bad) } .c-silent { --key: var(--muted) }
"""
)


def one_page(
    title: str,
    headline: str,
    context: str,
    plots: Sequence[Plot],
    after: Sequence[str] = (),
    *,
    figures: Sequence[tuple[str, str]] = (),
    tone: str = "",
) -> str:
    """Return the page: what was measured, the answer, its figures, the plots, then HTML.

    `tone` colours the headline: good, warn or bad.
    """
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in figures
    )
    drawn = "".join(
        f'<section><h2>{escape(plot.title)}</h2><p class="quiet">{escape(plot.caption)}</p>'
        f"{svg(plot)}</section>"
        for plot in plots
        if any(each.x for each in plot.series)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<p class="quiet">{escape(context)}</p><h1 class="{tone}">{escape(headline)}</h1>'
        + (f'<section><dl class="figures">{cells}</dl></section>' if cells else "")
        + f"{drawn}{''.join(after)}</body></html>\n"
    )


def section(title: str, body: str) -> str:
    """Return a part of the page with a title; `body` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def preformatted(text: str) -> str:
    """Return text as a preformatted block."""
    return f"<pre>{escape(text)}</pre>"
