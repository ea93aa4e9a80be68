"""The options of `headway distill`: what is learned from, how, and what the student becomes."""

from dataclasses import dataclass

from headway.config.options.field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillOptions:
    """One run; all but `threads` and `save_every` decide its result."""

    data: list[str] = option(
        [], "Learn from this: a .txt, a .jsonl of texts or chats, or the word skills; FILE:0.3 has "
        "a share of 0.3, shares not given are alike.",
        common=True,
    )  # fmt: skip
    steps: int = option(500, "Steps of training.", low=1, high=10**9, common=True)
    step_tokens: int = option(4608, "Tokens of a step.", low=2, high=10**7)
    row_length: int = option(384, "Tokens of a row, which begins at a document.", low=2)
    learning_rate: float = option(
        3e-4, "Peak of the rate, after a warm-up and before half a cosine.",
        low=0, high=1, common=True,
    )  # fmt: skip
    temperature: float = option(1.0, "Both distributions are softened by it.", low=0.05, high=100)
    cross_entropy: float = option(
        0.0, "Share of the loss that the text itself has, beside the teacher.", low=0, high=1
    )
    quantize: str = option(
        "none", "Train under this rounding of the layers, and write them so.",
        choices=("none", "int8", "int4"), common=True,
    )  # fmt: skip
    quantize_group: int = option(64, "Inputs that share an int4 scale: 32, 64 or 128.")
    fresh: bool = option(
        False, "Begin with random weights: STUDENT needs config.json and a tokenizer alone."
    )
    keep_zeros: bool = option(
        True, "Weights that are exactly zero in STUDENT stay so, where a layer has 1% of them."
    )
    seed: int = option(0, "The same seed, the same rows.", low=0)
    threads: int = option(1, "Threads of torch.", low=1, high=1024)
    save_every: int = option(100, "Steps from one checkpoint to the next.", low=1)
