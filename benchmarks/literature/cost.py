"""Claims about cost: retries, outputs that do not validate, and routing too bold or too timid.

Cost is that of the gateway's ledger, a task that fails is asked again, and what is told is the cost
of a task that succeeds.
"""

import json
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from headway.core.errors import HeadwayError
from headway.core.request import SamplingParams
from headway.evals.questions import max_tokens_of
from headway.evals.skills.example import Example
from headway.evals.skills.suite import LEVELS, TEST_SEED, examples
from headway.gateway.config import UpstreamPrice
from headway.gateway.dialects import UpstreamUsage
from headway.gateway.money import dollars_of
from headway.llm import LLM
from headway.measure.plot import Plot
from headway.spec.embedded import model_folder
from literature.caching import SPEED
from literature.claim import (
    Claim,
    Figure,
    Finding,
    NotThereError,
    Promise,
    bootstrap,
    ratio_of,
    share_of,
)
from literature.pictures import lines
from literature.subject import Subject

TASK = UpstreamUsage(prompt=1500, output=300)
CHEAP, DEAR = UpstreamPrice(input=0.5, output=1.5), UpstreamPrice(input=0.55, output=1.65)
OFTEN, SELDOM = 0.18, 0.02
TASKS, DRAWS = 1000, 200
QUESTIONS = 8
TEMPERATURE = 1.5
ROUTED = ("arithmetic", "classify", "copy", "lookup", "recall", "sort")
RATIO = 10.0
"""What the dear model's token costs over the cheap one's, where the two are priced."""
CHEAP_ROUTE = UpstreamPrice(input=1.0, output=5.0)
DEAR_ROUTE = UpstreamPrice(input=RATIO, output=5.0 * RATIO)
LOST = 2.5
SHARES = range(0, 105, 5)
"""Percent of the right answers that may go."""


# ── retries ─────────────────────────────────────────────────────────────────────────────────


def per_success(
    price: UpstreamPrice, failing: float, draw: np.random.Generator, count: int
) -> float:
    """Dollars of a task that succeeds, each try paid: tries until one succeeds are geometric."""
    tries = draw.geometric(1 - failing, count)
    return float(tries.mean()) * dollars_of(price, TASK, SPEED)


def retries(subject: Subject) -> Finding:
    """18% retries at the lower price against 2% at a tenth more, then by price."""
    draw = np.random.default_rng(0)
    often, seldom = (
        [per_success(price, failing, draw, TASKS) for _ in range(DRAWS)]
        for price, failing in ((CHEAP, OFTEN), (DEAR, SELDOM))
    )
    breaks = (1 - SELDOM) / (1 - OFTEN)
    thousand = [1e3 * float(np.mean(paid)) for paid in (often, seldom)]
    return Finding(
        figures=[
            ratio_of("cost of a success, 18% retries over 2% at a tenth more", often, seldom),
            Figure(name="price at which both cost the same", value=breaks, unit="x"),
            Figure(name="$ of a thousand successes, 18% retries", value=thousand[0]),
            Figure(name="$ of a thousand successes, 2% retries", value=thousand[1]),
        ],
        promise=Promise(low=1.05),
        why=f"The reliable model wins while its tokens cost less than {breaks:.3f} times the "
        "other's: 0.98 / 0.82. Beyond that retries are the cheaper evil, as far as money goes; "
        "each of them is a user's wait as well.",
        picture=by_price(breaks),
    )


def by_price(breaks: float) -> Plot:
    """Cost of a success, 18% retries over 2%, by what the reliable model's tokens cost more."""
    more = list(range(-20, 65, 5))
    times = [breaks / (1 + each / 100) for each in more]
    rows = {"18% retries over 2%": times, "the same": [1.0] * len(more)}
    across = "% that the reliable model's tokens cost more"
    return lines(more, rows, across, "cost of a success, times")


# ── structured output ───────────────────────────────────────────────────────────────────────


def schema_in(example: Example) -> Any:
    """The schema that a question of the skill `extract` shows."""
    return json.JSONDecoder().raw_decode(example.prompt, example.prompt.index("{"))[0]


def valid(text: str, schema: dict[str, Any]) -> bool:
    """Whether it is JSON with the fields that are required, each of its type, and no others."""
    kinds: dict[str, type] = {"string": str, "integer": int}
    try:
        found = json.loads(text)
    except ValueError:
        return False
    if not isinstance(found, dict) or set(found) != set(schema["required"]):
        return False
    return all(
        type(found[name]) is kinds[told["type"]] for name, told in schema["properties"].items()
    )


@dataclass(slots=True)
class Replies:
    """Of each question whether the reply was valid, and what tokens all of them took."""

    valid: list[bool] = field(default_factory=list)
    tokens: int = 0

    def take(self, told: dict[str, Any], schema: dict[str, Any]) -> None:
        """One answer of a server."""
        self.valid.append(valid(told["choices"][0]["message"]["content"] or "", schema))
        self.tokens += told["usage"]["completion_tokens"]

    @property
    def failed(self) -> int:
        """Replies that did not validate."""
        return self.valid.count(False)

    @property
    def each(self) -> float:
        """Tokens paid for a valid one."""
        return self.tokens / max(self.valid.count(True), 1)


def extracted(subject: Subject) -> tuple[Replies, Replies]:
    """The same questions free and by their schema, at a temperature at which answers go astray."""
    asking, free, ruled = subject.server(), Replies(), Replies()
    for level in (2, 3):
        asked = islice(examples("extract", level, TEST_SEED), 4 * max(3, subject.repeats))
        for number, example in enumerate(asked):
            schema = schema_in(example)
            body: dict[str, Any] = {
                "messages": example.messages,
                "max_tokens": max_tokens_of("extract"),
                "temperature": TEMPERATURE,
                "seed": number,
            }
            free.take(asking.chat(body), schema)
            form = {"name": "record", "schema": {**schema, "additionalProperties": False}}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
            ruled.take(asking.chat(body), schema)
    return free, ruled


def structured(subject: Subject) -> Finding:
    """Failed validations with a schema over those without."""
    free, ruled = extracted(subject)
    asked = len(free.valid)
    saved = max(0, free.failed - ruled.failed)
    return Finding(
        figures=[
            share_of("of the failed validations saved", saved, free.failed),
            share_of("fail without a schema", free.failed, asked),
            share_of("fail with it", ruled.failed, asked),
            Figure(name="output tokens of a valid record, without", value=free.each),
            Figure(name="… with it", value=ruled.each),
        ],
        promise=Promise(low=95.0, none=50.0),
        why=f"{asked} questions at temperature {TEMPERATURE:g}. What still fails with a schema was "
        "cut at the limit of tokens; that a record is valid does not say that it is right."
        if free.failed
        else "Nothing failed without a schema: there was nothing to save.",
    )


# ── routing ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Routed:
    """One question to both: right or not, tokens of the prompt, of both answers, and how sure the
    cheap one was of its answer's least likely token."""

    cheap: bool
    dear: bool
    prompt: int
    cheap_tokens: int
    dear_tokens: int
    sure: float


def answers(
    llm: LLM, asked: list[Example], limits: list[int]
) -> list[tuple[bool, int, int, float]]:
    """(right, prompt tokens, answer tokens, log-probability of the least likely) of each."""
    prompts: list[Any] = [
        {"prompt_token_ids": llm.needs_tokenizer().chat_ids(one.messages)} for one in asked
    ]
    params = [SamplingParams(temperature=0, max_tokens=most, logprobs=1) for most in limits]
    found = []
    for one, output in zip(asked, llm.generate(prompts, params, use_tqdm=False), strict=True):
        answer = output.outputs[0]
        least = min(
            (place[token].logprob for token, place in zip(answer.token_ids, answer.logprobs or [])),
            default=0.0,
        )
        count = len(output.prompt_token_ids), len(answer.token_ids)
        found.append((one.accepts(answer.text), *count, least))
    return found


def routed(subject: Subject) -> list[Routed]:
    """Held-out questions to the embedded draft and to the folder's model."""
    folder, _ = subject.model()
    asked, limits = [], []
    for skill in ROUTED:
        for level in LEVELS:
            for example in islice(examples(skill, level, TEST_SEED), QUESTIONS):
                asked.append(example)
                limits.append(max_tokens_of(skill))
    both = []
    for each, options in ((model_folder("headway-draft"), {}), (folder, subject.options)):
        subject.watch(f"{len(asked)} questions to {each.name}")
        try:
            both.append(answers(LLM(each, **options), asked, limits))
        except HeadwayError as error:
            raise NotThereError(error.cause) from error
    return [
        Routed(cheap[0], dear[0], dear[1], cheap[2], dear[2], cheap[3])
        for cheap, dear in zip(*both, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a threshold gives: right answers and dollars, of the dear route's, in percent."""

    right: float
    cost: float


def outcome(asked: list[Routed], keep: int) -> Outcome:
    """Where the `keep` first cheap answers stand and the rest is asked again of the dear one."""
    again = asked[keep:]
    right = sum(one.cheap for one in asked[:keep]) + sum(one.dear for one in again)
    paid = sum(
        dollars_of(CHEAP_ROUTE, UpstreamUsage(o.prompt, 0, o.cheap_tokens), SPEED) for o in asked
    )
    paid += dear_dollars(again)
    base = sum(one.dear for one in asked)
    return Outcome(100 * right / max(base, 1), 100 * paid / dear_dollars(asked))


def dear_dollars(asked: list[Routed]) -> float:
    """Of these questions at the dear route."""
    return sum(
        dollars_of(DEAR_ROUTE, UpstreamUsage(o.prompt, 0, o.dear_tokens), SPEED) for o in asked
    )


def by_share(asked: list[Routed]) -> list[Outcome]:
    """Of each of `SHARES` what it gives that the surest cheap answers are kept."""
    surest = sorted(asked, key=lambda one: -one.sure)
    return [outcome(surest, round(share * len(asked) / 100)) for share in SHARES]


def best_saving(asked: list[Routed]) -> float:
    """Percent of the dear route's cost that the best of these shares saves, within `LOST`."""
    good = [each.cost for each in by_share(asked) if each.right >= 100 - LOST]
    return 100 - min(good, default=100.0)


def routing(subject: Subject) -> Finding:
    """Cost of a right answer by the share of questions that the cheap model keeps."""
    asked = subject.once(routed)
    curve = by_share(asked)
    name = f"cost saved at no more than {LOST:g}% fewer right answers"
    saved = bootstrap(
        name, "%", [range(len(asked))], lambda p: best_saving([asked[int(i)] for i in p[0]]), 100
    )
    timid, bold = curve[0], curve[-1]
    return Finding(
        figures=[
            saved,
            Figure(
                name="too bold, all cheap: right, of the dear one's", value=bold.right, unit="%"
            ),
            Figure(name="… at a cost of", value=bold.cost, unit="%"),
            Figure(name="too timid, all asked twice: right", value=timid.right, unit="%"),
            Figure(name="… at a cost of", value=timid.cost, unit="%"),
        ],
        promise=Promise(low=20.0, none=0.0),
        why=f"{len(asked)} questions; the dear model is priced {RATIO:g} times the cheap one a "
        "token. Too timid pays both and gains nothing, too bold keeps wrong answers. The threshold "
        "is chosen in hindsight; headway gateway calibrate chooses one beforehand, and saves less.",
        picture=lines(
            SHARES,
            {"right": [each.right for each in curve], "cost": [each.cost for each in curve]},
            "% of the cheap answers that are kept, the surest first",
            "% of the dear route's",
        ),
    )


CLAIMS = (
    Claim(
        key="cost-retries",
        family="Cost",
        says="A model with 18% retries loses against a dearer one with 2%, by cost of a success.",
        source="common in serving literature",
        measure=retries,
        how="Tasks drawn until they succeed, priced by the gateway's ledger, at other prices.",
    ),
    Claim(
        key="cost-structured",
        family="Cost",
        says="Structured output saves nearly all failed validations.",
        source="common in serving literature (Willard and Louf, 2023)",
        measure=structured,
        needs="server",
        how="Held-out extractions at temperature 1.5, free and with the schema that they show.",
    ),
    Claim(
        key="cost-routing",
        family="Cost",
        says="Routing saves cost, and loses it again where it is too bold or too timid.",
        source="Chen et al., FrugalGPT (2023)",
        measure=routing,
        needs="folder",
        how="Held-out questions to headway-draft and to the model; the surest cheap answers are "
        "kept, the others asked again.",
    ),
)
