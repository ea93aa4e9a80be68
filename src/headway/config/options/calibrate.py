"""The options of `headway gateway calibrate`: which cascade, which questions, how sure."""

from dataclasses import dataclass

from headway.config.options.field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions:
    """The evidence of one cascade of a gateway's file."""

    model: str = option("", "The model row; by default the one that has a cascade.", common=True)
    suite: str = option(
        "skills",
        "skills: the questions of headway eval, a task class each; or a file of JSON lines with "
        "task, messages and answer (or pattern).",
        common=True,
    )
    questions: int = option(
        150, "skills: questions of each skill at each level.", low=1, high=100_000, common=True
    )
    skills: list[str] = option([], "skills: only these.")
    levels: list[int] = option([], "skills: only these levels, of 1, 2 and 3.", low=1, high=3)
    test_seed: int = option(7, "skills: same seed, same questions.", low=0)
    tolerance: float = option(
        0.05, "Share of a task's right answers that may be lost.", low=0, high=1, common=True
    )
    alpha: float = option(
        0.05, "How often a task that loses more may pass.", low=1e-6, high=0.5, common=True
    )
    concurrency: int = option(4, "Questions asked at a time.", low=1, high=1024)
