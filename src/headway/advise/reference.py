"""Write the table of docs/doctor.md from the rules: `python -m headway.advise.reference`."""

import sys
from pathlib import Path

from headway.advise.rules import RULES, Rule

BEGIN, END = "<!-- rules -->", "<!-- end of rules -->"


def table() -> str:
    """Return the table: one line for each rule, in the order of `RULES`."""
    head = "| name | symptom | goes by | cause | fix |"
    head += "\n| --- | --- | --- | --- | --- |"
    return "\n".join([head, *map(row, RULES)])


def row(rule: Rule) -> str:
    """Return the line of one rule."""
    reads = ", ".join(rule.reads)
    cells = (f"`{rule.name}`", rule.symptom, reads, rule.cause, rule.remedy)
    return f"| {' | '.join(cells)} |"


def with_table(page: str) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/doctor.md")
    target.write_text(with_table(target.read_text(encoding="utf-8")), encoding="utf-8")
