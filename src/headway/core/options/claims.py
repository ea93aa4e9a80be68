"""The options of `headway claims`."""

from dataclasses import dataclass

from headway.core.options.field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimsOptions:
    """Which claims are asked, how often what is timed is repeated, and where it is written."""

    out: str = option("", "Write the page here: one HTML file.", common=True)
    json: str = option("", "Write every figure here, as JSON.", common=True)
    only: list[str] = option(
        [],
        "Only these claims or families: kv-13b, batching; `list` names them all.",
        common=True,
    )
    runs: int = option(9, "How often what is timed is repeated.", low=3, high=1000)
    api_key: str = option("", "Key of the server, where it wants one.", secret=True)
