"""The options of `headway narrow`: which windows are tried, and what a file may hold and cost."""

from dataclasses import dataclass

from headway.core.options.field import option


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowOptions:
    """A search for windows by layer; the evaluation behind it is `GateOptions`."""

    share: float = option(
        0.25, "Most of the KV that may be left: a share of what the model sees at --context.",
        low=0.001, high=0.99, common=True,
    )  # fmt: skip
    context: int | None = option(
        None, "Context at which the share is counted; by default 2,048 or the model's, if less.",
        low=1, unit="tokens", common=True,
    )  # fmt: skip
    candidates: list[int] = option(
        [64, 96, 128, 192, 256, 512, 1024], "Windows that are tried in each layer.",
        low=1, unit="tokens", common=True,
    )  # fmt: skip
    sinks: int = option(
        4, "First tokens that a layer with a window sees besides.", low=0, high=1024, common=True
    )
    max_loss: float = option(
        0.02, "Loss in any kind of answer that a file may have before it is judged by the gate.",
        low=0, unit="nats per token", common=True,
    )  # fmt: skip
    items: int = option(
        6, "Answers of each skill at each level that windows are measured on.",
        low=1, high=10_000,
    )  # fmt: skip
    calibrate: list[str] = option(
        [], "Texts that windows are measured on besides: a .txt, a .jsonl of texts or chats.",
    )  # fmt: skip
    rows: int = option(16, "Rows of these texts.", low=1, high=100_000)
    row_length: int = option(512, "Tokens of a row.", low=2)
