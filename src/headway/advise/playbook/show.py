"""The playbook as a table, the next step first."""

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.text import Text

from headway.advise.playbook.walk import NEXT, Playbook, Stage
from headway.advise.show import plain
from headway.advise.what_if.asked import shown_gain
from headway.advise.words import dollars, duration, percent

STYLES = {NEXT: "bold red", "later": "yellow", "done": "green"}


def show(found: Playbook, console: Console) -> None:
    """Print it."""
    console.print(Group(*parts(found)), highlight=False)


def parts(found: Playbook) -> list[RenderableType]:
    """The next step, what disturbs, and all steps in their order."""
    lines: list[RenderableType] = [Text.from_markup(f"[bold]{escape(found.said)}[/]")]
    lines += [Text.from_markup(f"  [yellow]first: {escape(text)}[/]") for text in found.before]
    table = plain("step", "", "this server", "what to do, and what it would bring", "worth")
    table.padding = (0, 2, 1, 0)
    table.expand = True
    for column, ratio in zip(table.columns, (None, None, 5, 6, 2), strict=True):
        column.ratio, column.no_wrap = ratio, ratio is None
    for number, each in enumerate(found.stages, 1):
        style = STYLES.get(each.state, "dim")
        table.add_row(
            f"[bold]{number} {each.name}[/]",
            f"[{style}]{each.state}[/]",
            escape("\n".join(each.figures)),
            escape(advice(each)),
            escape(worth(each)),
        )
    return [*lines, Text(), table]


def advice(each: Stage) -> str:
    """What to do and what it gives, by formula and by simulation."""
    if not each.do:
        return ""
    gain = f"\n{shown_gain(each.simulated)}" if each.simulated is not None else ""
    return f"{each.do}: {each.brings}{gain}"


def worth(each: Stage) -> str:
    """Its share, with seconds or dollars where they are known."""
    if not each.rule:
        return ""
    found = f"{percent(each.share)} of {each.of}"
    if each.saves_s is not None:
        found += f", {duration(each.saves_s)} a request"
    if each.usd_per_hour is not None:
        found += f", {dollars(each.usd_per_hour)} an hour"
    return found
