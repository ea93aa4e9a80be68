"""`headway gateway --from-litellm config.yaml`: the gateway's file for a LiteLLM proxy's."""

import logging
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from headway.core.errors import UsageError
from headway.core.logs import line_of

if TYPE_CHECKING:
    from headway.cli.main import VerbCall


def from_litellm(call: "VerbCall") -> int:
    """Print the gateway's file for a LiteLLM proxy's; return 0, or 2 where that is none yet.

    The file goes to standard output, what was not converted to standard error.
    """
    import yaml

    from headway.core.yaml_file import read_yaml
    from headway.gateway.config import read_config
    from headway.gateway.from_litellm import convert

    if len(call.positionals) != 1:
        raise UsageError(
            "--from-litellm takes one file.", "headway gateway --from-litellm config.yaml"
        )
    converted = convert(read_yaml(Path(call.positionals[0]), "--from-litellm"))
    text = yaml.safe_dump(converted.content(), sort_keys=False, width=100)
    print(text, end="")
    for line in converted.missing:
        print(line_of(f"not converted: {line}", logging.WARNING, "text"), file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "gateway.yaml"
        file.write_text(text)
        read_config(file)
    return 0
