"""Writes the table of metrics in docs/telemetry.md: `python -m headway.telemetry.reference`."""

import sys
from pathlib import Path

from headway.telemetry.registry import ROWS, MetricRow

BEGIN, END = "<!-- metrics -->", "<!-- end of metrics -->"


def table() -> str:
    """Return the table with one line per metric, in the order of `ROWS`."""
    head = ["| name | kind | what it is | labels |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *map(line, ROWS)])


def line(row: MetricRow) -> str:
    """Return | `preemptions` | counter | Sequences … | `kv` (lost, copied) |."""
    labels = ", ".join(f"`{label}`" for label in row.labels)
    known = f" ({', '.join(row.known)})" if row.known else ""
    return f"| `{row.name}` | {row.kind} | {row.help} | {labels}{known} |"


def with_table(page: str) -> str:
    """Return the page with the table replaced between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/telemetry.md")
    target.write_text(with_table(target.read_text(encoding="utf-8")), encoding="utf-8")
