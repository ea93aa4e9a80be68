"""`--batching`: the rule by which newcomers start, and how long a dynamic one waits.

continuous       dynamic       dynamic:80ms       static
"""

from typing import NamedTuple

from headway.config.options.field import parse_seconds
from headway.core.errors import UsageError

WINDOW_S = 0.05
"""How long the first waits for a full batch where nobody says."""
RULES = ("continuous", "dynamic", "static")


class BatchingRule(NamedTuple):
    """The rule's name, and the seconds that `dynamic` waits."""

    name: str
    window_s: float


def batching_rule(text: str) -> BatchingRule:
    """What `--batching` says; UsageError for another rule, and for a time that is none."""
    name, colon, window = text.partition(":")
    if name not in RULES:
        raise UsageError(
            f"--batching: {name!r} is not one of {', '.join(RULES)}.",
            "Dynamic batching may say how long the first waits: dynamic:80ms.",
        )
    if not colon:
        return BatchingRule(name, WINDOW_S)
    if name != "dynamic":
        raise UsageError(f"--batching {text}: {name} has no time to wait.", f"Write {name}.")
    try:
        window_s = float(parse_seconds(window))
    except ValueError:
        window_s = -1.0
    if window_s < 0:
        raise UsageError(f"--batching {text}: {window!r} is no time.", "Write dynamic:80ms.")
    return BatchingRule(name, window_s)
