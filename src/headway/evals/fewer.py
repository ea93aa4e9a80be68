"""How many examples help: recorded chats, asked with all of their examples and with the first few.

It is given a server and recorded chats. Those whose examples stand before several different last
questions are asked greedily as they are, once more as they are, and with 0, 1, 2, 4 … of their
examples. It promises the same chats in every column. An answer that stays the same word for word
did not need the examples that were left out; one that changed may be as good, which only `answer`
beside a recorded chat can tell.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headway.core.errors import UsageError
from headway.core.examples import Examples, examples_of
from headway.evals.statistics import wilson

NEAR = 0.95
"""Examples beyond so many do not help where this share of what stays the same anyway still does."""
QUESTIONS = 3
"""Different last questions behind the same examples; fewer may be a conversation's own turns."""
MOST_TOKENS = 256
LEFT_OUT = ("stream", "stream_options", "n", "temperature", "top_p", "seed", "model", "logprobs")
Body = dict[str, Any]


class Asks(Protocol):
    """Who answers bodies of chats whole: a server behind a URL."""

    def whole_answers(self, bodies: Sequence[Body]) -> list[Body]: ...


class Recorded(msgspec.Struct, kw_only=True):
    """A chat as it was asked, and what a right answer says, where that is known."""

    body: Body
    answer: str | None = None


class Column(msgspec.Struct, kw_only=True):
    """Every chat with its first `examples` examples: tokens of the prompts, whether each answer is
    that to all of them, and whether it is right (None: not known)."""

    examples: int
    prompt_tokens: list[int]
    same: list[bool]
    right: list[bool | None]

    @property
    def share_same(self) -> tuple[float, float, float]:
        """The share of same answers with Wilson's 95% interval."""
        count = len(self.same)
        return (sum(self.same) / max(count, 1), *wilson(sum(self.same), count))

    @property
    def share_right(self) -> float | None:
        """Of the answers that can be judged; None without any."""
        judged = [right for right in self.right if right is not None]
        return sum(judged) / len(judged) if judged else None

    @property
    def mean_tokens(self) -> float:
        """Of a prompt."""
        return sum(self.prompt_tokens) / max(len(self.prompt_tokens), 1)


class FewerReport(msgspec.Struct, kw_only=True):
    """What was asked: chats of the file, those with examples, and the columns from all examples
    down; `again` is the share of answers that were the same when the whole was asked once more.

    `token_s` and `usd_per_million` are the server's own seconds and dollars of a prompt token.
    """

    chats: int
    with_examples: int
    most: int
    again: float
    columns: list[Column]
    token_s: float | None = None
    usd_per_million: float | None = None

    def price(self, stats: Body | None) -> None:
        """Take seconds and dollars from what `/stats` of a server of ours tells."""
        told = stats or {}
        prompts, windows = told.get("prompts") or {}, told.get("windows") or [{}]
        self.token_s = prompts.get("token_s") or None
        self.usd_per_million = (windows[-1].get("cost") or {}).get("usd_per_million_input")

    @property
    def enough(self) -> Column:
        """The fewest examples with which as many answers are right as with all; where right answers
        are not known, from which on nearly all answers stay as they are with all."""
        found = self.columns[0]
        if found.share_right is not None:
            good = [c for c in self.columns if (c.share_right or 0.0) >= found.share_right]
            return good[-1]
        for column in self.columns[1:]:
            if column.share_same[0] < NEAR * self.again:
                break
            found = column
        return found


# ── what was recorded ───────────────────────────────────────────────────────────────────────


def read(path: Path) -> list[Recorded]:
    """Chats of a JSONL file, a body a line or a batch's line with `body`; UsageError otherwise."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UsageError(f"--data {path}: {error.strerror}.", "Check the path.") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--data {path} is not UTF-8 text.", "See docs/evals.md.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = msgspec.json.decode(line, type=dict)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"--data {path.name}, line {number}: {error}", "See docs/evals.md."
            ) from error
        body = fields.get("body", fields)
        messages = body.get("messages") if isinstance(body, dict) else None
        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise UsageError(
                f"--data {path.name}, line {number} has no messages.",
                'Write chat bodies, {"messages": […]}, or a batch\'s lines.',
            )
        answer = fields.get("answer")
        kept = {k: v for k, v in body.items() if k not in (*LEFT_OUT, "answer")}
        found.append(Recorded(body=kept, answer=answer if isinstance(answer, str) else None))
    if not found:
        raise UsageError(f"--data {path} holds no chat.", "Write a chat body a line, as JSON.")
    return found


def with_examples(chats: Sequence[Recorded]) -> list[tuple[Recorded, Examples]]:
    """The chats whose examples stand before several different questions."""
    each = [(chat, found) for chat in chats if (found := examples_of(chat.body["messages"]))]
    questions: dict[tuple[str, ...], set[str]] = {}
    for _, found in each:
        questions.setdefault(tuple(found.texts), set()).add(found.question)
    return [pair for pair in each if len(questions[tuple(pair[1].texts)]) >= QUESTIONS]


def counts(most: int) -> list[int]:
    """How many examples are tried, from all down: 6 is 6, 4, 2, 1, 0."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most]
    return [most, *reversed(powers), 0]


# ── asking ──────────────────────────────────────────────────────────────────────────────────


def said(answer: Body) -> str:
    """What an answer says, its blanks made even, its calls behind it."""
    message = answer["choices"][0]["message"]
    calls = [call.get("function") for call in message.get("tool_calls") or ()]
    told = " ".join(str(message.get("content") or "").split())
    return f"{told} {msgspec.json.encode(calls).decode()}" if calls else told


def ask(
    model: Asks,
    chats: Sequence[Recorded],
    *,
    most_chats: int,
    seed: int,
    on_column: Callable[[Column], None] = lambda _: None,
) -> FewerReport:
    """Ask at most `most_chats` of those with examples, drawn by the seed; UsageError of none."""
    found = with_examples(chats)
    if not found:
        raise UsageError(
            f"None of {len(chats)} chats has examples that {QUESTIONS} different questions share.",
            "Examples are pairs of user and assistant before the last question, or blocks of one "
            "shape, 'Question: …' and 'Answer: …', with blank lines between.",
        )
    chosen = random.Random(seed).sample(found, min(most_chats, len(found)))
    most = max(len(examples.texts) for _, examples in chosen)
    whole = answers(model, chosen, most)
    again = answers(model, chosen, most)
    alike = [said(a) == said(b) for a, b in zip(whole, again, strict=True)]
    report = FewerReport(
        chats=len(chats),
        with_examples=len(found),
        most=most,
        again=sum(alike) / len(alike),
        columns=[],
    )
    for count in counts(most):
        told = whole if count == most else answers(model, chosen, count)
        report.columns.append(column_of(count, chosen, whole, told))
        on_column(report.columns[-1])
    return report


def answers(model: Asks, chosen: Sequence[tuple[Recorded, Examples]], count: int) -> list[Body]:
    """The answers to all chats with their first `count` examples."""
    return model.whole_answers(
        [
            {"max_tokens": MOST_TOKENS, **chat.body, "messages": examples.first(count)}
            for chat, examples in chosen
        ]
    )


def column_of(
    count: int,
    chosen: Sequence[tuple[Recorded, Examples]],
    whole: Sequence[Body],
    told: Sequence[Body],
) -> Column:
    """What so many examples came to."""
    return Column(
        examples=count,
        prompt_tokens=[int(answer["usage"]["prompt_tokens"]) for answer in told],
        same=[said(a) == said(b) for a, b in zip(whole, told, strict=True)],
        right=[
            None if chat.answer is None else " ".join(chat.answer.split()) == said(answer)
            for (chat, _), answer in zip(chosen, told, strict=True)
        ],
    )


# ── the table ───────────────────────────────────────────────────────────────────────────────


def table(report: FewerReport) -> str:
    """A Markdown table, from all examples down, and what fewer would save."""
    whole, enough = report.columns[0], report.columns.index(report.enough)
    judged = whole.share_right is not None
    lines = [
        f"{report.with_examples} of {report.chats} chats have examples; {len(whole.same)} asked. "
        f"Asked again as they are, {report.again:.0%} of the answers are the same.",
        "",
        f"| examples | tokens a prompt | saved | same answers | {'right | ' if judged else ''}"
        "prefill saved | $ of 1,000 prompts |",
        "| ---: " * (6 + judged) + "|",
    ]
    for column in report.columns:
        saved = whole.mean_tokens - column.mean_tokens
        share, low, high = column.share_same
        right = f"{column.share_right or 0:.0%} | " if judged else ""
        seconds = "–" if report.token_s is None else f"{1e3 * saved * report.token_s:.1f} ms"
        price = report.usd_per_million
        usd = "–" if price is None else f"{saved * price / 1e3:.2g}"
        lines.append(
            f"| {column.examples} | {column.mean_tokens:.0f} "
            f"| {saved / max(whole.mean_tokens, 1):.0%} "
            f"| {share:.0%} ({100 * low:.0f} to {100 * high:.0f}) | {right}{seconds} | {usd} |"
        )
    return "\n".join([*lines, "", verdict(report, report.columns[enough])])


def verdict(report: FewerReport, enough: Column) -> str:
    """What follows, in a sentence or two."""
    whole = report.columns[0]
    if whole.share_right is not None:
        return (
            f"With {enough.examples} of {report.most} examples {enough.share_right:.0%} of the "
            f"answers are right, and {whole.share_right:.0%} with all."
        )
    if enough.examples == report.most:
        return f"With fewer than {report.most} examples more than a twentieth of answers change."
    changed = len(enough.same) - sum(enough.same)
    return (
        f"Examples beyond {enough.examples} of {report.most} change {changed} of "
        f"{len(enough.same)} answers. Lines with `answer` would tell whether these are worse."
    )
