"""`headway key NAME`: a new API key, shown once, and its row for a key file."""

import sys
from typing import TYPE_CHECKING

from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.cli.main import Call


def key(call: "Call") -> int:
    """Print the key to stderr and the row to stdout, so that `>> keys.yaml` keeps the row alone."""
    if len(call.positionals) != 1:
        raise UsageError("key takes one name.", "headway key NAME")
    from headway.server.keys import make_key, row_text

    made = make_key()
    print(f"The key, which is kept nowhere: {made}", file=sys.stderr)
    print(row_text(call.positionals[0], made), end="")
    return 0
