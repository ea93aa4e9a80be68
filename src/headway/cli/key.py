"""`headway key NAME`: make an API key, shown once, and its row; `key revoke NAME` revokes one."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config.options import KeyOptions
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.cli.main import VerbCall

REVOKE = "revoke"
WHERE = "{} is in {}; a running server reads it at SIGHUP. Its key:"


def key(call: "VerbCall") -> int:
    """Add the row to `--file` and print the key; without it print the row, the key to stderr."""
    options: KeyOptions = call.options[KeyOptions]
    if call.positionals[:1] == [REVOKE]:
        return revoke(call)
    if len(call.positionals) != 1:
        raise UsageError("key takes one name.", "headway key NAME --file keys.yaml")
    from headway.edge.key_file import add_row, make_key, new_row, row_text

    name, made = call.positionals[0], make_key()
    rights = {"admin": options.admin, "gateway": options.gateway}
    if options.file:
        add_row(Path(options.file), name, made, **rights)
        print(WHERE.format(name, options.file), file=sys.stderr)
        print(made)
        return 0
    new_row(name, made, **rights)
    print(f"The key, which is kept nowhere: {made}", file=sys.stderr)
    print("keys:\n" + row_text(name, made, **rights), end="")
    return 0


def revoke(call: "VerbCall") -> int:
    """Mark a key in `--file` as revoked; its row stays, so that servers forget its KV."""
    options: KeyOptions = call.options[KeyOptions]
    file, how = options.file, "headway key revoke NAME --file keys.yaml"
    if options.admin or options.gateway:
        which = "--admin" if options.admin else "--gateway"
        raise UsageError(f"key revoke takes no {which}: the row keeps its rights.", how)
    if len(call.positionals) != 2 or not file:
        raise UsageError("key revoke takes one name and --file.", how)
    from headway.edge.key_file import revoke_row

    name = call.positionals[1]
    revoke_row(Path(file), name)
    print(
        f"{name} is revoked in {file}. A running server reads it at SIGHUP and forgets the key's "
        "KV blocks, as one that is started later does.",
        file=sys.stderr,
    )
    return 0
