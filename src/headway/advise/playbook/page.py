"""The playbook as one page: the flowchart of its steps, this server's way through it marked."""

from html import escape
from textwrap import wrap

from headway.advise.diagnosis import Diagnosis
from headway.advise.playbook.show import worth
from headway.advise.playbook.walk import LATER, NEXT, Playbook, Stage
from headway.advise.what_if.asked import shown_gain
from headway.measure.onepage import STYLE

WIDTH, LEFT, BOX, RIGHT, ACT = 1120, 20, 460, 590, 510
LINE, PAD, GAP = 17, 12, 26
BOX_CHARACTERS, ACT_CHARACTERS, DO_CHARACTERS = 62, 68, 58
CHART = """
svg { width: 100%; height: auto; font: 13px system-ui, sans-serif }
svg rect { fill: none; stroke: var(--line); stroke-width: 1.5 }
svg text { fill: var(--text) } svg .faint { fill: var(--faint) }
svg path { stroke: var(--faint); fill: none; stroke-width: 1.5 }
svg marker path { fill: var(--faint) }
svg .next rect { stroke: #d6302b; stroke-width: 3 } svg .next path { stroke: #d6302b }
svg .done rect { stroke: #2f8f4e } svg .later rect { stroke: #c28a11 }
"""
ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z"/></marker></defs>'
)


def html(found: Diagnosis, playbook: Playbook) -> str:
    """One self-contained page."""
    before = "".join(f"<p>First: {escape(text)}</p>" for text in playbook.before)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(found.subject)} · headway doctor --playbook</title>"
        f"<style>{STYLE}{CHART}</style></head><body>"
        f"<h1>{escape(playbook.said)}</h1>"
        f"<p>{escape(found.server)} · {found.seconds:.0f} s · {found.num_ended} requests ended</p>"
        f"{before}{flowchart(playbook)}</body></html>\n"
    )


def flowchart(playbook: Playbook) -> str:
    """The steps from top to bottom as SVG: down where there is nothing to do, right where there
    is."""
    y, drawn = 10, []
    for number, each in enumerate(playbook.stages, 1):
        height = height_of(each)
        drawn.append(drawn_stage(number, each, y, height))
        y += height + GAP
        drawn.append(arrow(LEFT + BOX // 2, y - GAP, LEFT + BOX // 2, y, "no"))
    drawn.append(box(LEFT, y, BOX, 2 * LINE, ["served as well as this machine can"]))
    y += 2 * LINE + 10
    name = escape(f"The playbook of this server; {playbook.said}")
    return (
        f'<svg viewBox="0 0 {WIDTH} {y}" role="img" aria-label="{name}">'
        f"<title>{name}</title>{ARROW}{''.join(drawn)}</svg>"
    )


def lines_of(each: Stage, number: int = 0) -> list[str]:
    """A step's question, and this server's figures."""
    figures = [line for text in each.figures for line in wrap(text, BOX_CHARACTERS)]
    return [f"{number} {each.name}: {each.state}", each.question, *figures]


def act_lines(each: Stage) -> list[str]:
    """What to do, and what that brings."""
    do = wrap(each.do, DO_CHARACTERS)
    gain = [shown_gain(each.simulated)] if each.simulated is not None else []
    texts = [text for text in (each.brings, *gain, worth(each)) if text]
    return [*do, *(line for text in texts for line in wrap(text, ACT_CHARACTERS))]


def height_of(each: Stage) -> int:
    """Of its boxes, the larger."""
    return LINE * max(len(lines_of(each)), len(act_lines(each))) + 2 * PAD


def drawn_stage(number: int, each: Stage, y: int, height: int) -> str:
    """A step's box; beside it what to do, where something is."""
    parts = [box(LEFT, y, BOX, height, lines_of(each, number))]
    if each.state in (NEXT, LATER):
        middle = y + height // 2
        parts.append(arrow(LEFT + BOX, middle, RIGHT, middle, "yes"))
        parts.append(box(RIGHT, y, ACT, height, act_lines(each)))
    kind = each.state if each.state in (NEXT, LATER, "done") else "idle"
    return f'<g class="{kind}" data-step="{each.name}">{"".join(parts)}</g>'


def box(x: int, y: int, width: int, height: int, lines: list[str]) -> str:
    """A box with lines of text, the first in bold."""
    texts = "".join(
        f'<text x="{x + PAD}" y="{y + PAD + LINE * i + 12}"'
        f"{' font-weight=' + chr(34) + '600' + chr(34) if i == 0 else ''}>{escape(line)}</text>"
        for i, line in enumerate(lines)
    )
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>{texts}'


def arrow(x: int, y: int, to_x: int, to_y: int, word: str) -> str:
    """An arrow with a word at it."""
    beside, above = (6, 4) if x == to_x else (-10, -6)
    place = f'x="{(x + to_x) // 2 + beside}" y="{(y + to_y) // 2 + above}"'
    return (
        f'<path d="M{x} {y}L{to_x} {to_y}" marker-end="url(#arrow)"/>'
        f'<text class="faint" {place}>{word}</text>'
    )
