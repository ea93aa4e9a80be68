"""The options of `headway gateway drift`: which probes, of whom."""

from dataclasses import dataclass

from headway.config.options.field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftOptions:
    """One comparison of upstreams that should be alike."""

    model: str = option("", "Only this model row of the file.", common=True)
    number: int = option(200, "Probes that each is asked, twice.", low=20, high=10_000, common=True)
    probes: str = option(
        "", "File of JSON lines with messages; by default questions of the skills.", common=True
    )
    json: str = option("", "Write what was found here.")
