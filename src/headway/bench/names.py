"""Names that other tools give our figures, and their figures that we do not have.

Worked example: an answer of n tokens with TTFT 2 s and e2e 5 s. Our TPOT is 3 / (n − 1); AIPerf and
guidellm print that as "inter token latency"; guidellm's "time per output token" and LLMPerf's
"inter-token latency" are 5 / n.
"""

from collections.abc import Sequence

from headway.bench.latency import Latency
from headway.bench.percentiles import Distribution, distribution
from headway.core.errors import UsageError
from headway.measure.record import Exchange

OURS: dict[str, dict[str, str]] = {
    "vllm": {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "E2EL"},
    "aiperf": {
        "ttft_s": "Time to First Token",
        "tpot_s": "Inter Token Latency",
        "e2e_s": "Request Latency",
    },
    "guidellm": {
        "ttft_s": "Time to First Token",
        "tpot_s": "Inter Token Latency",
        "e2e_s": "Request Latency",
    },
    "llmperf": {"ttft_s": "ttft_s", "e2e_s": "end_to_end_latency_s"},
}
"""Tool → our figure → its name there."""
WITH_TTFT = {"guidellm": "Time per Output Token", "llmperf": "inter_token_latency_s"}
"""Tools with a figure per token that includes the time to the first: e2e / n."""


def check_words(words: Sequence[str]) -> None:
    """Raise UsageError for an unknown tool."""
    for word in words:
        if word not in OURS:
            raise UsageError(
                f"--words: the words of {word!r} are not known.", f"There are: {', '.join(OURS)}."
            )


def per_token_with_ttft(timed: Sequence[tuple[Exchange, Latency | None]]) -> Distribution | None:
    """Return e2e / n of each answer."""
    return distribution(
        t.e2e_s / x.num_output for x, t in timed if t is not None and x.num_output > 0
    )


def also_called(figure: str, words: Sequence[str]) -> str:
    """Return "vllm: TPOT, aiperf: Inter Token Latency" for tpot_s."""
    return ", ".join(f"{tool}: {OURS[tool][figure]}" for tool in words if figure in OURS[tool])
