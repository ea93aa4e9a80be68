"""Surprisal of text units under a small model: the process behind `context.keep`.

What a small model predicts well, a larger one can do without (Selective Context, Li et al. 2023;
LLMLingua, Jiang et al. 2023). Each input line is JSON, the units of a text in order; each output
line has the mean surprisal of each unit in nats per token. The process ends with its input.
`frontend.shorten.scorer` starts it.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from headway.whole_model import FolderModel

WINDOW_TOKENS = 1024
"""Tokens of a text that are scored at once."""
OPTIONS: dict[str, Any] = {
    **{"device": "cpu", "threads": 1, "max_num_seqs": 2},
    **{"kv_memory": "256MiB", "prefix_cache": "false"},
}
"""Options of its engine, which has one core next to the server."""


def surprisals(model: FolderModel, units: Sequence[str]) -> list[float]:
    """Return the mean surprisal of each unit in nats per token, after the units before it in
    the same window; 0 for a unit without tokens.
    """
    before, *rows = [
        model.tokenizer.encode(text, add_special_tokens=False) for text in ("\n", *units)
    ]
    means: list[float] = []
    for window in windows(rows, min(WINDOW_TOKENS, model.max_model_len - len(before) - 1)):
        [score] = model.score_ids([[*before, *(i for unit in window for i in unit)]])
        start = len(before)
        for unit in window:
            values = [-p for p in score.logprobs[start : start + len(unit)] if p is not None]
            means.append(sum(values) / len(values) if values else 0.0)
            start += len(unit)
    return means


def windows(units: Sequence[Sequence[int]], room: int) -> Iterator[list[Sequence[int]]]:
    """Yield consecutive units that fit into `room` tokens together; a longer unit is cut."""
    window: list[Sequence[int]] = []
    size = 0
    for unit in units:
        unit = unit[:room]
        if window and size + len(unit) > room:
            yield window
            window, size = [], 0
        window.append(unit)
        size += len(unit)
    yield window


def main() -> None:
    """Answer lines until the server closes its end; any other output goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    model = FolderModel(sys.argv[1], **OPTIONS)
    for line in sys.stdin.buffer:
        units = msgspec.json.decode(line, type=list[str])
        answers.write(msgspec.json.encode(surprisals(model, units)) + b"\n")
        answers.flush()


if __name__ == "__main__":
    main()
