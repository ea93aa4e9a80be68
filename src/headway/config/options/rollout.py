"""The options of `headway gateway rollout`: the new version, the gateway, and the judges."""

from dataclasses import dataclass

from headway.config.options.field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """One new version of a model, from its folder to all requests, or back."""

    to: str = option("", "The gateway's file.", common=True)
    model: str = option("", "The model row; by default the only one.", common=True)
    gateway: str = option("http://127.0.0.1:8080", "The running gateway.", common=True)
    api_key: str = option("", "Key of an operator there.", secret=True)
    quantize: str = option(
        "none",
        "Write FOLDER in this format first, and roll that out.",
        choices=("none", "int4", "int8"),
        common=True,
    )
    against: str = option(
        "", "Gate: compare with this folder or URL; by default the model's first upstream."
    )
    questions: int = option(
        20, "Gate: questions of each skill at each level.", low=1, high=100_000, common=True
    )
    tolerance: float = option(0.02, "Gate: loss that passes.", low=0, high=1, common=True)
    kl_tolerance: float | None = option(
        None, "Gate: divergence that passes; by default as of `headway eval`.",
        low=0, unit="nats per token",
    )  # fmt: skip
    allow_unclear: bool = option(
        False, "Gate: pass where nothing could tell, as beside a server without log-probabilities."
    )
    canary: str = option("", "URL of a server of the new version; without it, one is started.")
    name: str = option("", "The rollout's name; by default that of the folder.")
    version: str = option("", "Another text is another trial; by default the folder's content.")
    steps: list[float] = option([], "Percents of the requests; by default 1, 5, 25, 50.")
    requests: int = option(60, "What both arms must have told before a step ends.", low=1)
    shadow: float = option(0.0, "Percent of the requests copied before the first step.", high=100)
    slo: str = option("", "Objectives that the guard of goodput goes by.")
