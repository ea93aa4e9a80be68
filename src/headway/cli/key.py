"""`headway key NAME`: a new API key, shown once, and its row; `key revoke NAME` ends one."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.errors import UsageError
from headway.core.options import KeyOptions

if TYPE_CHECKING:
    from headway.cli.main import Call

REVOKE = "revoke"


def key(call: "Call") -> int:
    """Add the row to `--file` and print the key; without it print the row, the key to stderr."""
    if call.positionals[:1] == [REVOKE]:
        return revoke(call)
    if len(call.positionals) != 1:
        raise UsageError("key takes one name.", "headway key NAME --file keys.yaml")
    from headway.edge.key_file import Row, add_row, check_row, digest, make_key, row_text

    name, made = call.positionals[0], make_key()
    file = call.options[KeyOptions].file
    if file:
        add_row(Path(file), name, made)
        print(
            f"{name} is in {file}; a running server reads it at SIGHUP. Its key:", file=sys.stderr
        )
        print(made)
        return 0
    check_row("headway key", Row(name=name, sha256=digest(made).hex()))
    print(f"The key, which is kept nowhere: {made}", file=sys.stderr)
    print("keys:\n" + row_text(name, made), end="")
    return 0


def revoke(call: "Call") -> int:
    """Say in `--file` that a key is in force no more; its row says what is to be forgotten."""
    file = call.options[KeyOptions].file
    if len(call.positionals) != 2 or not file:
        raise UsageError(
            "key revoke takes one name and --file.", "headway key revoke NAME --file keys.yaml"
        )
    from headway.edge.key_file import revoke_row

    name = call.positionals[1]
    revoke_row(Path(file), name)
    print(
        f"{name} is revoked in {file}. A running server reads it at SIGHUP and forgets the key's "
        "KV blocks, as one that is started later does.",
        file=sys.stderr,
    )
    return 0
