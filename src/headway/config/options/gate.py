"""The options of a gate on a folder that was just written: `headway prune`, `headway distill`."""

from dataclasses import dataclass

from headway.config.options.field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    """What the new folder is compared with, by the rules of `headway eval`."""

    against: str = option(
        "", "Evaluate OUT and compare it with this folder, URL or JSON of `headway eval`.",
        common=True,
    )  # fmt: skip
    gate: bool = option(
        False,
        "Write no OUT, and exit with 5, when it is surely worse than --against or nothing could "
        "tell.",
        common=True,
    )
    allow_unclear: bool = option(
        False, "Let the gate pass where no required measure has the items to see a loss."
    )
    tolerance: float = option(
        0.02, "Loss that the gate lets pass: a share of the items, or of the bits.",
        low=0, high=1, common=True,
    )  # fmt: skip
    kl_tolerance: float | None = option(
        None,
        "Divergence that the gate lets pass, and with it same top token and perplexity: 0.02, or "
        "0.1 where OUT holds fewer than 7 bits a weight and --against does not.",
        low=0,
        unit="nats per token",
    )
    questions: int = option(
        10, "Questions of each skill at each level that the evaluation asks.",
        low=1, high=100_000, common=True,
    )  # fmt: skip
    distances: list[int] = option(
        [], "Lookups with so many characters of stories between list and question are asked too.",
        low=0, high=100_000, unit="characters",
    )  # fmt: skip
    eval_data: str = option(
        "", "Texts to evaluate instead of the one that comes along: a file, or a folder with some "
        "of text/val.txt, eval/wikitext-2 and eval/lambada.",
        common=True,
    )  # fmt: skip
    windows: int = option(200, "Most windows of each text, evenly spread.", low=2)
    json: str = option("", "Write the report of the evaluation here.")
