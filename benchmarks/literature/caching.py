"""Claims about prompts that begin alike: what a prefix cache saves, and what spoils it.

A prompt that nobody sent before and one whose beginning is known are asked in turns, so that a
change of the machine's mood falls on both. Any server can be asked: a fresh prompt begins with
words of its own, so that its cache finds nothing. Cost is that of the ledger (`gateway.money`):
input 1, cached 0.1, output 5 a token, which is Anthropic's proportion and our `--cached-price`.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass

from headway.core.clock import SystemClock
from headway.gateway.config import UpstreamPrice
from headway.gateway.dialects import UpstreamUsage
from headway.gateway.money import dollars_of
from headway.gateway.speed import Speed
from headway.measure.plot import Plot
from literature.asking import Asking, Body, TimedAnswer
from literature.claim import (
    Claim,
    Figure,
    Finding,
    NotThereError,
    Promise,
    median_of,
)
from literature.pictures import groups, lines
from literature.subject import Subject

ANTHROPIC = "Anthropic, Prompt caching with Claude (2024)"
BOOK, MANY_SHOT = 100_000, 10_000
"""Tokens of the source's prompts; here the book is as long as the context holds, at most that."""
ANSWER, QUESTION, TURNS = 16, 24, 10
PRICE = UpstreamPrice(input=1.0, cached=0.1, output=5.0)
SPEED = Speed(SystemClock())
"""Of a price by token it is not asked."""
SYSTEM = 1000
CALLS_A_DAY = 1e6
CALLS = 8
AS_IT_IS, DATE_LAST = "as it is", "date in the last line"
REORDERED, DATE_FIRST = "tools reordered", "date in the first line"
NOTHING = 5.0
"""Percent less that say nothing: prompts of a few words more or less differ by as much."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The same request where its beginning was not known, and where it was."""

    cold: TimedAnswer
    warm: TimedAnswer


def scaled(asking: Asking, tokens: int) -> int:
    """Tokens of a prompt of the source, with its book as long as this context holds."""
    room = asking.room(ANSWER) - QUESTION
    return max(64, round(tokens * min(1.0, room / BOOK)))


def pairs(asking: Asking, tokens: int, repeats: int, seed: int) -> list[Pair]:
    """For each repeat a text of its own, asked about twice."""
    found = []
    for number in range(repeats):
        text = asking.text(tokens, seed + number)
        asked = asking.all(
            [
                Body(prompt=f"{text} {asking.text(QUESTION, seed + 1000 * (number + 1) + i)}",
                     tokens=ANSWER)
                for i in range(2)
            ]
        )  # fmt: skip
        found.append(Pair(*asked))
    return found


def cost(asked: Sequence[TimedAnswer], cached: bool) -> float:
    """Dollars of these answers; not `cached`: as if nothing had been found."""
    usages = (UpstreamUsage(a.prompt, (a.cached or 0) if cached else 0, a.output) for a in asked)
    return sum(dollars_of(PRICE, usage, SPEED) for usage in usages)


def saved(pairs: Sequence[Pair], name: str) -> Figure:
    """Percent less time to the first token where the beginning was known."""
    ratios = [pair.warm.ttft_s / pair.cold.ttft_s for pair in pairs]
    return median_of(name, [100 * (1 - ratio) for ratio in ratios], "%")


def cheaper(asked: Sequence[TimedAnswer], promised: float) -> Figure:
    """Percent less cost, of what the server says it found, beside what was promised."""
    share = 1 - cost(asked, cached=True) / cost(asked, cached=False)
    return Figure(
        name=f"less cost (claimed {promised:g}%)",
        value=100 * share,
        unit="%",
        promise=Promise(low=promised, none=NOTHING),
    )


def one_prompt(subject: Subject, tokens: int, promised: float, price: float) -> Finding:
    """A long prompt, asked about again: `promised` percent less time to the first token, `price`
    percent less cost."""
    asking = subject.server()
    length = scaled(asking, tokens)
    found = pairs(asking, length, subject.repeats, seed=tokens)
    cold_ms = median_of("first token, cold", [1e3 * p.cold.ttft_s for p in found], " ms")
    warm_ms = median_of("… warm", [1e3 * p.warm.ttft_s for p in found], " ms")
    told = any(pair.warm.cached is not None for pair in found)
    return Finding(
        figures=[
            saved(found, "less time to the first token"),
            *([cheaper([p.warm for p in found], price)] if told else []),
            Figure(name="prompt", value=found[0].warm.prompt, unit=" tokens"),
            cold_ms,
            warm_ms,
        ],
        promise=Promise(low=promised, none=NOTHING),
        unmeasured=[] if told else ["cost"],
        why=f"Scaled to a prompt of {length:,} tokens where the source has {tokens:,}: what is not "
        "saved is the fixed time of a request and its own question."
        + ("" if told else " This server does not tell cached tokens, so no cost."),
    )


def book(subject: Subject) -> Finding:
    return one_prompt(subject, BOOK, 79.0, 90.0)


def many_shot(subject: Subject) -> Finding:
    return one_prompt(subject, MANY_SHOT, 31.0, 86.0)


def conversation(asking: Asking, seed: int, known: bool) -> list[TimedAnswer]:
    """Ten turns behind a long system prompt; not `known`: each begins with words of its own."""
    system = asking.text(scaled(asking, MANY_SHOT), seed)
    said, answers = system, []
    for turn in range(TURNS):
        said += " " + asking.text(2 * QUESTION, seed + 7 * turn + 1)
        fresh = "" if known else asking.text(4, 10**6 + 31 * seed + turn) + " "
        [asked] = asking.all([Body(prompt=fresh + said, tokens=ANSWER)])
        said += asked.text
        answers.append(asked)
    return answers


def ten_turns(subject: Subject) -> Finding:
    """Both conversations of each repeat, in turns."""
    asking = subject.server()
    talks = [
        (conversation(asking, 50 + n, known=False), conversation(asking, 50 + n, known=True))
        for n in range(max(2, subject.repeats // 2))
    ]
    less = [100 * (1 - first_tokens_s(warm) / first_tokens_s(cold)) for cold, warm in talks]
    asked = [a for _, warm in talks for a in warm]
    told = any(a.cached is not None for a in asked)
    return Finding(
        figures=[
            median_of("less time to first tokens", less, "%"),
            *([cheaper(asked, 53.0)] if told else []),
        ],
        promise=Promise(low=75.0, none=NOTHING),
        unmeasured=[] if told else ["cost"],
        why="Each turn computes its own words alone; without a cache all before it is computed "
        "again. The source also pays a quarter more for what it writes to its cache.",
        picture=by_turn(talks),
    )


def first_tokens_s(answers: Sequence[TimedAnswer]) -> float:
    """Of all turns."""
    return sum(answer.ttft_s for answer in answers)


def by_turn(talks: Sequence[tuple[list[TimedAnswer], list[TimedAnswer]]]) -> Plot:
    """The mean time to the first token of each turn, known and not."""
    rows = {
        name: [1e3 * sum(talk[kind][turn].ttft_s for talk in talks) / len(talks)
               for turn in range(TURNS)]
        for kind, name in enumerate(("nothing known", "as it is"))
    }  # fmt: skip
    return lines(range(1, TURNS + 1), rows, "turn", "ms to the first token")


def million_calls(subject: Subject) -> Finding:
    """A system prompt of 1,000 tokens: what is computed of it, and the seconds that it takes."""
    asking = subject.server()
    tokens = min(SYSTEM, asking.room(ANSWER) // 2)
    found = pairs(asking, tokens, subject.repeats, seed=2)
    known = [p.warm.cached for p in found if p.warm.cached is not None]
    if not known:
        raise NotThereError("this server does not tell cached tokens")
    share = min(1.0, sum(known) / (len(known) * tokens))
    hours = [(p.cold.ttft_s - p.warm.ttft_s) * CALLS_A_DAY / 3600 for p in found]
    return Finding(
        figures=[
            Figure(name="billions of tokens a day not computed", value=share * tokens / 1e3),
            median_of("server hours a day that are not spent", hours),
        ],
        promise=Promise(low=tokens / 1e3, none=0.0),
        why=f"Of {tokens:,} tokens whole blocks are found; the rest of the last block and the "
        "question are computed. Hours are of this machine, one request at a time.",
    )


def tools_text(draw: random.Random) -> list[str]:
    """Descriptions of eight tools as they stand in a prompt, a line each."""
    words = "city name date unit limit query page lang mode path user code".split()
    made = []
    for number in range(8):
        fields = draw.sample(words, 5)
        made.append(json.dumps({"name": f"tool_{number}", "parameters": fields}))
    return made


def rate(asking: Asking, prompts: Sequence[str]) -> float | None:
    """Of the tokens of all prompts but the first, the share that was found; None untold."""
    asked = asking.all([Body(prompt=prompt, tokens=1) for prompt in prompts])[1:]
    if any(a.cached is None for a in asked):
        return None
    return sum(a.cached or 0 for a in asked) / sum(a.prompt for a in asked)


def written(asking: Asking, way: str, number: int, length: int) -> list[str]:
    """Eight calls of one prompt, written in this way: tools, instructions, the question."""
    draw = random.Random(5 + number)
    body, tools, prompts = asking.text(length, 900 + number), tools_text(draw), []
    for call in range(CALLS):
        date = f"Now it is 2024-05-01 12:{10 + call}:{20 + 3 * call}."
        order = draw.sample(tools, len(tools)) if way == REORDERED else tools
        parts = ["\n".join(order), body, asking.text(QUESTION, 77 * number + call)]
        parts = [date, *parts] if way == DATE_FIRST else parts
        prompts.append("\n".join([*parts, date] if way == DATE_LAST else parts))
    return prompts


def first_line(subject: Subject) -> Finding:
    """Four ways to write the same prompt, eight requests each."""
    asking = subject.server()
    length, found = min(900, asking.room(1) - 600), dict[str, float]()
    for number, way in enumerate((AS_IT_IS, DATE_LAST, REORDERED, DATE_FIRST)):
        share = rate(asking, written(asking, way, number, length))
        if share is None:
            raise NotThereError("this server does not tell cached tokens")
        found[way] = 100 * share
    name, lost = "hit rate that a date in the first line takes away", found[AS_IT_IS]
    return Finding(
        figures=[
            Figure(name=name, value=lost - found[DATE_FIRST], unit=" points"),
            *(Figure(name=way, value=share, unit="%") for way, share in found.items()),
        ],
        promise=Promise(low=80.0, none=NOTHING),
        why="A block is found by all tokens before it: what changes in the first line leaves "
        "nothing, what changes among the tools leaves what stands before the change, and what "
        "stands last costs its own tokens alone.",
        picture=groups(list(found), {"found": list(found.values())}, "% of prompt tokens found"),
    )


CLAIMS = (
    Claim(
        key="cache-book",
        family="Prompt caching",
        says="A book of 100,000 tokens in the cache: 79% less latency, 90% less cost.",
        source=ANTHROPIC,
        measure=book,
        needs="server",
        how="A fresh text as long as the context holds, and a second question about it; in turns.",
    ),
    Claim(
        key="cache-many-shot",
        family="Prompt caching",
        says="Many examples, 10,000 tokens: 31% less latency, 86% less cost.",
        source=ANTHROPIC,
        measure=many_shot,
        needs="server",
        how="The same with a tenth of the book.",
    ),
    Claim(
        key="cache-turns",
        family="Prompt caching",
        says="Ten turns with a long system prompt: 75% less latency, 53% less cost.",
        source=ANTHROPIC,
        measure=ten_turns,
        needs="server",
        how="Ten turns behind a tenth of the book, beside the same turns that each begin anew.",
    ),
    Claim(
        key="cache-million",
        family="Prompt caching",
        says="A system prompt of 1,000 tokens a million times a day: a billion tokens saved.",
        source="C. Huyen, AI Engineering (2025), chapter 9",
        measure=million_calls,
        needs="server",
        how="What is found of 1,000 tokens the second time, and the time to compute them.",
    ),
    Claim(
        key="cache-date",
        family="Prompt caching",
        says="A date in the first line, or tools in another order, leave nothing to find.",
        source="common in serving literature",
        measure=first_line,
        needs="server",
        how="Eight requests each of four ways to write one prompt; tokens found by the usage.",
    ),
)
