"""The options of `headway eval`: what is asked, of whom, against what, and what is written."""

from dataclasses import dataclass

from headway.core.options.field import Seconds, option


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """One evaluation, and perhaps its comparison with another."""

    suite: str = option(
        "skills",
        "skills asks questions with checkable answers; text scores texts; all is both; context: a "
        "URL that shortens prompts, asked with whole and with cut documents; examples: a URL, "
        "asked recorded chats with fewer of their examples.",
        choices=("skills", "text", "all", "context", "examples"),
        common=True,
    )
    against: str = option(
        "",
        "Compare with this: a folder, a URL, or a JSON that --json wrote.",
        common=True,
    )
    gate: bool = option(
        False,
        "Exit with 5 when the model is surely worse than --against, or when --suite context cuts "
        "no better than chance.",
        common=True,
    )
    tolerance: float = option(
        0.02, "Loss that the gate lets pass: a share of the items, or of the bits.",
        low=0, high=1, common=True,
    )  # fmt: skip
    kl_tolerance: float = option(
        0.02, "Divergence that the gate lets pass.", low=0, unit="nats per token"
    )
    json: str = option("", "Write the report with every item here.", common=True)
    html: str = option("", "Write one page with plots here; it needs no network.", common=True)
    questions: int = option(
        50,
        "Questions of each skill at each level; examples: most chats asked.",
        low=1,
        high=100_000,
        common=True,
    )
    skills: list[str] = option([], "Only these skills.")
    levels: list[int] = option([], "Only these levels, of 1, 2 and 3.", low=1, high=3)
    distances: list[int] = option(
        [], "Lookups with so many characters of stories between list and question are asked too.",
        low=0, high=100_000, unit="characters",
    )  # fmt: skip
    test_seed: int = option(1_000_003, "Same seed, same questions.", low=0)
    data: str = option(
        "",
        "text: folder with text/val.txt, eval/wikitext-2 and eval/lambada; examples: recorded "
        "chats, a body a line.",
        common=True,
    )
    windows: int | None = option(
        None, "text: this many windows of each text, evenly spread; all by default.", low=2
    )
    model: str = option("", "URL: model to ask for; the server's first by default.", common=True)
    against_model: str = option("", "The same, where --against is a URL.")
    api_key: str = option("", "URL: key to send.", secret=True)
    concurrency: int = option(8, "URL: requests at a time.", low=1, high=1024)
    timeout: Seconds = option(
        Seconds(600), "URL: longest wait for one answer.", low=0.01, unit="seconds"
    )
