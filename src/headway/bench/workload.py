"""Workloads: conversations of one or several turns, drawn before the run.

A workload is a row of `WORKLOADS`; given the options of one class of traffic it returns the
conversations with their times. Only later turns of a conversation wait for an answer, as users do.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headway.bench.arrivals import ARRIVALS, ArrivalPace, Times
from headway.bench.lengths import parse_length
from headway.bench.prompts import GeneratedPiece, Prompt, TextPiece
from headway.bench.traces import (
    TRACES,
    prompt_of,
    read_trace,
    scale_for,
    scale_length,
    spread_quantized,
)
from headway.config.options import BenchOptions
from headway.core.errors import UsageError
from headway.core.regular_file import open_text

DEFAULT_DURATION_S = 30.0
DEFAULT_RATE = 4.0
CHAT_FIELDS = ("messages", "tools", "tool_choice", "documents", "context", "response_format")
"""Fields of a recorded chat that are sent again."""
CLOSED_LOOP_CONVERSATIONS = 10_000
"""Conversations drawn for a closed loop of a given duration; then they begin again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The new part of a turn. `system` comes first, in the first turn. `chat` has the messages and
    other fields of a recorded request; `prompt` is their text then."""

    prompt: Prompt
    output_tokens: int
    system: Prompt = ()
    think_s: float = 0.0
    chat: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns that begin at `at_s` seconds after the start."""

    at_s: float
    turns: tuple[Turn, ...]
    service_class: str = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The conversations of one class, and the time in which they are sent."""

    conversations: list[Conversation]
    span_s: float
    scale: float = 1.0
    quantum_s: float = 0.0


Build = Callable[[BenchOptions, str, np.random.Generator, str], Traffic]


def build(options: BenchOptions, name: str) -> Traffic:
    """Return the traffic of class `name`; the same options, seed and name give the same traffic."""
    kind, _, path = options.workload.partition(":")
    if kind not in WORKLOADS:
        raise UsageError(
            f"--workload: there is no workload {kind!r}.", f"There are: {', '.join(WORKLOADS)}."
        )
    if bool(path) != (kind in TRACES or kind == "prompts"):
        form = f"{kind} alone" if path else f"{kind}:FILE"
        raise UsageError(f"--workload {options.workload}: write {form}.")
    if options.arrivals == "trace" and kind not in TRACES:
        raise UsageError(
            f"--arrivals trace: {kind} has no times.", f"Use a trace: {', '.join(TRACES)}."
        )
    rng = np.random.default_rng([options.seed, *name.encode()])
    return WORKLOADS[kind](options, path, rng, name)


def drawn_times(options: BenchOptions, rng: np.random.Generator) -> tuple[Times, float]:
    """Return the times at which conversations begin, and the duration."""
    kind = "poisson" if options.arrivals == "auto" else options.arrivals
    if options.concurrency is not None:  # a closed loop asks when it can
        span_s = 0.0 if options.num_requests else options.duration or DEFAULT_DURATION_S
        return np.zeros(options.num_requests or CLOSED_LOOP_CONVERSATIONS), span_s
    pace = ArrivalPace(
        rate=rate_of(options),
        duration_s=options.duration or DEFAULT_DURATION_S,
        count=options.num_requests,
        burstiness=options.burstiness,
        ramp_from=options.ramp_from,
    )
    times = ARRIVALS[kind](pace, rng)
    if options.num_requests is not None:
        return times, float(times[-1]) + 1 / pace.rate
    return times, pace.duration_s


def is_trace(workload: str) -> bool:
    """Return whether the workload has its own arrival times."""
    return workload.partition(":")[0] in TRACES


def rate_of(options: BenchOptions) -> float:
    """Return the requests per second, where no trace gives their times."""
    return DEFAULT_RATE if options.rate is None else options.rate


def synthetic(
    options: BenchOptions, path: str, rng: np.random.Generator, name: str, shared: bool = False
) -> Traffic:
    """Return prompts and answers of drawn lengths; with `shared`, after one of a few prefixes."""
    times, span_s = drawn_times(options, rng)
    prompts = parse_length(options.input_len, "--input-len").draw(rng, len(times))
    outputs = parse_length(options.output_len, "--output-len").draw(rng, len(times))
    groups = rng.integers(options.num_prefixes, size=len(times))
    return Traffic(
        conversations=[
            Conversation(
                at_s=float(at_s),
                service_class=name,
                turns=(
                    Turn(
                        system=beginning(options, name, int(groups[i])) if shared else (),
                        prompt=(GeneratedPiece(f"{name} request {i}", int(prompts[i])),),
                        output_tokens=int(outputs[i]),
                    ),
                ),
            )
            for i, at_s in enumerate(times)
        ],
        span_s=span_s,
    )


def shared_prefix(options: BenchOptions, path: str, rng: np.random.Generator, name: str) -> Traffic:
    """Return prompts that begin with one of `num_prefixes` prefixes of `prefix_len` tokens."""
    return synthetic(options, path, rng, name, shared=True)


def chat(options: BenchOptions, path: str, rng: np.random.Generator, name: str) -> Traffic:
    """Return conversations: each turn sends all earlier turns, after a think time."""
    times, span_s = drawn_times(options, rng)
    length = parse_length(options.input_len, "--input-len")
    output = parse_length(options.output_len, "--output-len")
    counts = parse_length(options.turns, "--turns").draw(rng, len(times))
    conversations = []
    for i, (at_s, count) in enumerate(zip(times, counts, strict=True)):
        prompts, outputs = length.draw(rng, count), output.draw(rng, count)
        thinks = rng.exponential(options.think_time, count)
        group = int(rng.integers(options.num_prefixes))
        turns = tuple(
            Turn(
                system=beginning(options, name, group) if k == 0 else (),
                prompt=(GeneratedPiece(f"{name} conversation {i} turn {k}", int(prompts[k])),),
                output_tokens=int(outputs[k]),
                think_s=float(thinks[k]) if k else 0.0,
            )
            for k in range(count)
        )
        conversations.append(Conversation(at_s=float(at_s), service_class=name, turns=turns))
    return Traffic(conversations=conversations, span_s=span_s)


def beginning(options: BenchOptions, name: str, group: int) -> Prompt:
    """Return the prefix of a group's prompts."""
    return (
        (GeneratedPiece(f"{name} prefix {group}", options.prefix_len),)
        if options.prefix_len
        else ()
    )


def prompt_file(options: BenchOptions, path: str, rng: np.random.Generator, name: str) -> Traffic:
    """Return the prompts of a file in random order, repeated when more are needed than it has."""
    talks = read_prompts(Path(path))
    if options.endpoint != "chat" and any(
        isinstance(turn, dict) for talk in talks for turn in talk
    ):
        raise UsageError(
            f"--workload {options.workload} holds messages.", "Send them with --endpoint chat."
        )
    times, span_s = drawn_times(options, rng)
    outputs = parse_length(options.output_len, "--output-len")
    order = np.concatenate(
        [rng.permutation(len(talks)) for _ in range(-(-len(times) // len(talks)) or 1)]
    )
    conversations = []
    for at_s, number in zip(times, order, strict=False):
        talk = talks[number]
        lengths = outputs.draw(rng, len(talk))
        thinks = rng.exponential(options.think_time, len(talk))
        turns = tuple(
            file_turn(content, int(lengths[k]), float(thinks[k]) if k else 0.0)
            for k, content in enumerate(talk)
        )
        conversations.append(Conversation(at_s=float(at_s), service_class=name, turns=turns))
    return Traffic(conversations=conversations, span_s=span_s)


def file_turn(content: str | dict[str, Any], length: int, think_s: float) -> Turn:
    """Return a turn of a file; a recorded chat may limit its answer to fewer tokens itself."""
    if isinstance(content, str):
        return Turn(prompt=(TextPiece(content),), output_tokens=length, think_s=think_s)
    chat = {name: content[name] for name in CHAT_FIELDS if name in content}
    own = content.get("max_completion_tokens") or content.get("max_tokens")
    return Turn(
        prompt=(TextPiece("\n".join(texts_of(content["messages"]))),),
        output_tokens=own if isinstance(own, int) else length,
        chat=chat,
    )


def texts_of(content: Any) -> Iterator[str]:
    """Yield all text in messages of any form."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for each in content:
            yield from texts_of(each)
    elif isinstance(content, dict):
        for name in ("content", "text", "document", "data"):
            yield from texts_of(content.get(name))


def read_prompts(path: Path) -> list[list[str | dict[str, Any]]]:
    """Return the user's turns of each prompt: JSONL with `turns`, `prompt` or `question`, or plain
    lines.

    spec-bench and mt-bench have `turns`, gsm8k `question`; a recorded chat has `messages`, itself
    or under `body` as a line of a batch.
    """
    try:
        with open_text(path) as file:
            lines = [line for line in file.read().split("\n") if line.strip()]
    except OSError as error:
        raise UsageError(
            f"--workload prompts: {path}: {error.strerror}.", "Check the path."
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--workload prompts: {path} is not UTF-8 text.", "One prompt a line."
        ) from error
    talks: list[list[str | dict[str, Any]]]
    if path.suffix != ".jsonl":
        talks = [[line] for line in lines]
    else:
        talks = [turns_of(line, f"{path.name}, line {i}") for i, line in enumerate(lines, 1)]
    if not talks:
        raise UsageError(f"--workload prompts: {path.name} holds no prompts.", "One a line.")
    return talks


def turns_of(line: str, where: str) -> list[str | dict[str, Any]]:
    """Return the turns in one JSON line; a recorded chat is one."""
    try:
        fields = msgspec.json.decode(line, type=dict)
    except msgspec.DecodeError as error:
        raise UsageError(f"{where}: {error}", "Write one JSON object a line.") from error
    recorded = fields.get("body", fields)
    if isinstance(recorded, dict) and "messages" in recorded:
        if not isinstance(recorded["messages"], list) or not recorded["messages"]:
            raise UsageError(f"{where}: messages is not a list of messages.", "See docs/bench.md.")
        return [recorded]
    content = next((fields[key] for key in ("turns", "prompt", "question") if key in fields), None)
    turns = [content] if isinstance(content, str) else content
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise UsageError(
            f"{where} has no prompt.",
            'Write {"prompt": "…"}, {"question": "…"}, {"turns": […]} or {"messages": […]}.',
        )
    return turns


def trace(options: BenchOptions, path: str, rng: np.random.Generator, name: str) -> Traffic:
    """Return a recorded trace at `speed` or at a mean of `rate`, its lengths scaled into
    `scale_length`.

    4 requests of 10 s at a rate of 2: their times are divided by 5.
    """
    rows = read_trace(options.workload.partition(":")[0], Path(path))
    scale = scale_for(rows, options.scale_length)
    rows, quantum_s = spread_quantized(rows, rng)
    times = np.array([row.at_s for row in rows])
    if options.rate is None:
        times /= options.speed
    elif times[-1] > 0:
        times *= len(times) / (options.rate * times[-1])
    span_s = float(times[-1]) + 1e-9
    if options.arrivals not in ("auto", "trace"):
        times, span_s = drawn_times(options, rng)
    elif options.duration is not None:
        span_s = min(options.duration, span_s)
    inside = times[times < span_s][: options.num_requests]
    if len(inside) < len(times) and options.num_requests is not None and len(inside):
        span_s = min(span_s, float(inside[-1]) + 1e-9)
    conversations = [
        Conversation(
            at_s=float(at_s),
            service_class=name,
            turns=(
                Turn(
                    prompt=prompt_of(rows[i % len(rows)], i, scale),
                    output_tokens=scale_length(rows[i % len(rows)].output_tokens, scale),
                ),
            ),
        )
        for i, at_s in enumerate(inside)
    ]
    return Traffic(conversations=conversations, span_s=span_s, scale=scale, quantum_s=quantum_s)


WORKLOADS: dict[str, Build] = {
    "synthetic": synthetic,
    "shared-prefix": shared_prefix,
    "chat": chat,
    "prompts": prompt_file,
    **dict.fromkeys(TRACES, trace),
}
