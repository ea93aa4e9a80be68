"""Recorded traffic: Azure's code completions, Mooncake's conversations, ShareGPT with token ids.

Each reader returns rows of arrival, lengths and shared blocks. Mooncake's `hash_ids` name blocks of
512 tokens; equal ids become equal tokens, so its prefix reuse is real on the server.
"""

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from headway.bench.prompts import GeneratedPiece, IdPiece, Prompt
from headway.core.errors import UsageError
from headway.core.regular_file import open_regular, open_text

Line = TypeVar("Line", bound=msgspec.Struct)
BLOCK_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""
QUANTUM_S = 2.5
"""Timestamps that step by at least this much at once are quantized and get jitter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace; `at_s` counts from the trace's first request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()


def read_azure(path: Path) -> list[TraceRow]:
    """Read TIMESTAMP,ContextTokens,GeneratedTokens; the stamps have seven digits after the
    second."""
    rows = []
    with open_text(path, newline="") as file:
        for line in csv.DictReader(file):
            whole, _, fraction = line["TIMESTAMP"].partition(".")
            at_s = datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{fraction}0")
            rows.append(
                TraceRow(
                    at_s=at_s,
                    prompt_tokens=int(line["ContextTokens"]),
                    output_tokens=int(line["GeneratedTokens"]),
                )
            )
    return rows


class MooncakeLine(msgspec.Struct):
    """One line: milliseconds, lengths, and the ids of its blocks."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_mooncake(path: Path) -> list[TraceRow]:
    """Read one JSON object a line, with ⌈input_length / 512⌉ block ids each."""
    return [
        TraceRow(
            at_s=line.timestamp / 1e3,
            prompt_tokens=line.input_length,
            output_tokens=line.output_length,
            blocks=line.hash_ids,
        )
        for line in lines_of(path, MooncakeLine)
    ]


class ShareGptLine(msgspec.Struct):
    """One line: nanoseconds and the token ids of the prompt."""

    arrival_time_ns: int
    output_toks: int
    input_tok_ids: tuple[int, ...]


def read_sharegpt(path: Path) -> list[TraceRow]:
    """Read one JSON object a line, with the prompt's token ids."""
    return [
        TraceRow(
            at_s=line.arrival_time_ns / 1e9,
            prompt_tokens=len(line.input_tok_ids),
            output_tokens=line.output_toks,
            ids=line.input_tok_ids,
        )
        for line in lines_of(path, ShareGptLine)
    ]


def lines_of(path: Path, kind: type[Line]) -> Iterable[Line]:
    """Yield the lines of a JSONL file as `kind`; UsageError names the line that is not one."""
    decode = msgspec.json.Decoder(kind).decode
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            try:
                yield decode(line)
            except msgspec.DecodeError as error:
                raise UsageError(
                    f"{path.name}, line {number}: {error}", "See docs/bench.md."
                ) from error


TRACES: dict[str, Callable[[Path], list[TraceRow]]] = {
    "azure": read_azure,
    "mooncake": read_mooncake,
    "sharegpt": read_sharegpt,
}


def read_trace(kind: str, path: Path) -> list[TraceRow]:
    """Return the rows by arrival, the first at 0; UsageError when the file is not such a trace."""
    try:
        rows = TRACES[kind](path)
    except OSError as error:
        raise UsageError(
            f"--workload {kind}: {path}: {error.strerror}.", "Check the path."
        ) from error
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(
            f"--workload {kind}: {path.name} is not such a trace ({error})."
        ) from error
    if not rows:
        raise UsageError(f"--workload {kind}: {path.name} holds no requests.", "Check the path.")
    rows.sort(key=lambda row: row.at_s)
    return [replace(row, at_s=row.at_s - rows[0].at_s) for row in rows]


def spread_quantized(
    rows: list[TraceRow], rng: np.random.Generator
) -> tuple[list[TraceRow], float]:
    """Return (rows, quantum in seconds) with quantized arrivals spread evenly over their quantum.

    Mooncake stamps whole groups 0, 3.001, 6.002, … s: sent at these times they would be artificial
    bursts. Arrivals that are not quantized are returned unchanged, with 0.
    """
    stamps = sorted({row.at_s for row in rows})
    steps = np.diff(stamps)
    if len(stamps) < 3 or len(rows) < 2 * len(stamps) or steps.min() < QUANTUM_S:
        return rows, 0.0
    quantum = float(np.median(steps))
    jitter = rng.uniform(0.0, quantum, len(rows))
    moved = [replace(row, at_s=row.at_s + float(j)) for row, j in zip(rows, jitter, strict=True)]
    return sorted(moved, key=lambda row: row.at_s), quantum


def scale_for(rows: list[TraceRow], context: int | None) -> float:
    """Return the factor that makes the longest request fit into `context` tokens, at most 1."""
    if context is None:
        return 1.0
    longest = max(row.prompt_tokens + row.output_tokens for row in rows)
    return min(1.0, context / longest)


def scale_length(tokens: int, scale: float) -> int:
    """Return the scaled length, at least one token: 4808 at a scale of 0.01 → 48."""
    return max(1, int(tokens * scale))


def prompt_of(row: TraceRow, number: int, scale: float) -> Prompt:
    """Return the prompt of a row. Its blocks shrink with the scale, so that sharing is preserved.

    A scale of 1/128 makes blocks of 4 tokens: prompts that shared 10 of 512 share 10 of 4.
    """
    tokens = scale_length(row.prompt_tokens, scale)
    if row.ids:
        return (IdPiece(row.ids[:tokens]),)
    if not row.blocks:
        return (GeneratedPiece(f"request {number}", tokens),)
    size = max(1, int(BLOCK_TOKENS * scale))
    pieces: list[GeneratedPiece] = []
    for block in row.blocks:
        remaining = tokens - size * len(pieces)
        if remaining <= 0:
            break
        pieces.append(GeneratedPiece(f"block {block}", min(size, remaining)))
    if (rest := tokens - sum(piece.tokens for piece in pieces)) > 0:
        pieces.append(GeneratedPiece(f"request {number}", rest))
    return tuple(pieces)
