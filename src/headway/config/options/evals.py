"""The options of `headway eval`: what is asked, of whom, against what, and what is written."""

from dataclasses import dataclass

from headway.config.options.field import Seconds, option


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """One evaluation, and perhaps its comparison with another."""

    suite: str = option(
        "auto",
        "text scores texts; skills asks questions with checkable answers; tasks those of --tasks, "
        "or at hand in --data; all is all of them; auto is the texts, and the skills and tasks "
        "that the model (of two, A) can do; context: a URL that shortens "
        "prompts, asked with whole and with cut documents.",
        choices=("auto", "text", "skills", "tasks", "all", "context"),
        common=True,
    )
    against: str = option(
        "",
        "Compare with this, A: a folder, a GGUF file, a URL, or a JSON that --json wrote. Formats "
        "such as --quantization hold for the model alone, --against-quantization for A.",
        common=True,
    )
    gate: bool = option(
        False,
        "Exit with 5 when the model is surely worse than --against or nothing could tell, or when "
        "--suite context cuts no better than chance.",
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
        "0.1 where the model holds fewer than 7 bits a weight and A does not.",
        low=0,
        unit="nats per token",
    )
    json: str = option("", "Write the report with every item here.", common=True)
    html: str = option("", "Write one page with plots here; it needs no network.", common=True)
    questions: int = option(
        50,
        "Questions of each skill at each level.",
        low=1,
        high=100_000,
        common=True,
    )
    tasks: list[str] = option(
        [],
        "Standard tasks: lambada-choices, gsm8k, ifeval, humaneval, whose data is in --data, and "
        "files of your own, a question a line.",
        common=True,
    )
    task_questions: int = option(100, "Most questions of each task.", low=1, high=100_000)
    run_code: bool = option(
        False,
        "humaneval: run the programs that the model writes, with bounds and no sandbox. Without "
        "it the reference solutions are scored as a text.",
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
        "A file of text, or a folder with some of text/val.txt, eval/wikitext-2, eval/lambada, "
        "eval/gsm8k and so on, instead of the text that comes along.",
        common=True,
    )
    windows: int = option(200, "text: most windows of each text, evenly spread.", low=2)
    model: str = option("", "URL: model to ask for; the server's first by default.", common=True)
    against_model: str = option("", "The same, where --against is a URL.")
    api_key: str = option("", "URL: key to send.", secret=True)
    concurrency: int = option(8, "URL: requests at a time.", low=1, high=1024)
    timeout: Seconds = option(
        Seconds(600), "URL: longest wait for one answer.", low=0.01, unit="seconds"
    )
