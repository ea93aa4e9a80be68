"""`headway doctor --trace URL OUT.json`: write the last seconds of a server for Perfetto."""

import json
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from headway.config.options import TraceOptions
from headway.core.errors import HeadwayError, UsageError

if TYPE_CHECKING:
    from headway.cli.main import VerbCall

TIMEOUT_S = 30.0


def trace(call: "VerbCall") -> int:
    """Fetch the trace, write it, and print how to open it."""
    if len(call.positionals) != 2:
        raise UsageError(
            "--trace takes a URL and a file.", "headway doctor --trace URL OUT.json --seconds 5"
        )
    url, target = call.positionals
    options: TraceOptions = call.options[TraceOptions]
    data = fetch(url, options)
    count = sum(event["ph"] == "X" for event in json.loads(data)["traceEvents"])
    try:
        Path(target).write_bytes(data)
    except OSError as error:
        raise UsageError(
            f"{target} cannot be written: {error.strerror}.", "Name another."
        ) from None
    print(
        f"{target}: {count} spans of the last {options.seconds:g} s. Open https://ui.perfetto.dev"
    )
    return 0


def fetch(url: str, options: TraceOptions) -> bytes:
    """Return the body of GET /trace; HeadwayError with the server's message where it refuses."""
    base = url.rstrip("/").removesuffix("/v1")
    query = urllib.parse.urlencode({"seconds": options.seconds})
    if not base.startswith(("http://", "https://")):
        raise UsageError(f"{url} is not a URL.", "Write http://127.0.0.1:8000")
    headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    request = urllib.request.Request(f"{base}/trace?{query}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            data: bytes = answer.read()
            return data
    except urllib.error.HTTPError as error:
        with error:
            text = error.read().decode("utf-8", "replace")[:300]
        raise HeadwayError(
            f"{base} answered {error.code}: {text}", "Check the URL and --api-key."
        ) from None
    except OSError as error:
        raise HeadwayError(f"{base} cannot be reached: {error}.", "Is the server up?") from None
