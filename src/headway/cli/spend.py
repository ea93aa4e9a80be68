"""`headway gateway spend`: what was spent, out of the ledger of a gateway on this machine."""

import time
from typing import TYPE_CHECKING

from headway.config.options import SpendOptions
from headway.core.errors import RequestError, UsageError

if TYPE_CHECKING:
    from headway.cli.main import VerbCall


def spend(call: "VerbCall") -> int:
    """Print the sums as a table or as CSV; return 0."""
    from headway.gateway.ledger import read_spend
    from headway.gateway.money import format_dollars
    from headway.gateway.spend import FIGURES, csv_text, spend_query
    from headway.gateway.state import ledger_folder

    options: SpendOptions = call.options[SpendOptions]
    if call.positionals:
        raise UsageError("spend takes no file.", "headway gateway spend --by team,day --csv")
    file = ledger_folder(options.data_dir) / "ledger.db"
    if not file.is_file():
        raise UsageError(f"There is no ledger at {file}.", "Name the gateway's --data-dir.")
    given = {"by": options.by, "from": options.since, "to": options.until, "key": options.key}
    try:
        query = spend_query(
            {name: value for name, value in given.items() if value}, None, time.time()
        )
        rows = read_spend(file, query)
    except RequestError as error:
        raise UsageError(error.cause, "docs/gateway.md, section What it costs.") from error
    if options.csv:
        print(csv_text(query.by, rows), end="")
        return 0
    lines = [
        [*query.by, *FIGURES],
        *([*map(str, row[:-1]), format_dollars(row[-1])] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        )
    return 0
