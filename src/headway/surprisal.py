"""How surprising a small model finds the units of a text: the process behind `context.keep`.

What a small model would have guessed, a larger one can do without (Selective Context, Li et al.
2023; LLMLingua, Jiang et al. 2023). A line of JSON in, the units of a text in their order; a line
out, the mean surprisal of each in nats a token. It ends with its input. `frontend.shorten.scorer`
starts it.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from headway.whole_model import FolderModel

WINDOW = 1024
"""Tokens of a text that are read at once."""
OPTIONS: dict[str, Any] = {
    **{"device": "cpu", "threads": 1, "max_num_seqs": 2},
    **{"kv_memory": "256MiB", "prefix_cache": "false"},
}
"""Of its engine: one core, beside the server's own."""


def surprisals(model: FolderModel, units: Sequence[str]) -> list[float]:
    """The mean surprisal of each unit's tokens in nats, behind the units that stand before it in
    the same window; 0 of a unit without tokens."""
    before, *rows = [
        model.tokenizer.encode(text, add_special_tokens=False) for text in ("\n", *units)
    ]
    found: list[float] = []
    for window in windows(rows, min(WINDOW, model.max_model_len - len(before) - 1)):
        [score] = model.score_ids([[*before, *(i for unit in window for i in unit)]])
        start = len(before)
        for unit in window:
            told = [-p for p in score.logprobs[start : start + len(unit)] if p is not None]
            found.append(sum(told) / len(told) if told else 0.0)
            start += len(unit)
    return found


def windows(units: Sequence[Sequence[int]], room: int) -> Iterator[list[Sequence[int]]]:
    """Units that have room together, one after the other; of a longer one the beginning."""
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
    """Answer lines until the server closes its end; what else is printed goes to stderr."""
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
