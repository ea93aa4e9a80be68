"""Claims about cost: retries, outputs that do not validate, and routing too bold or too timid.

Cost is that of the gateway's ledger, a task that fails is asked again, and what is told is the cost
of a task that succeeds.
"""

import json
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from headway.claims.caching import SPEED, lines
from headway.claims.claim import Claim, Figure, Finding, NotThereError, Promise, bootstrap
from headway.claims.subject import Subject
from headway.core.embedded import model_folder
from headway.core.errors import HeadwayError
from headway.core.request import SamplingParams
from headway.evals.questions import most_tokens
from headway.evals.skills.example import Example
from headway.evals.skills.suite import LEVELS, TEST_SEED, examples
from headway.evals.statistics import wilson
from headway.gateway.config import Price
from headway.gateway.dialects import Usage
from headway.gateway.money import dollars_of
from headway.llm import LLM

TASK = Usage(prompt=1500, output=300)
CHEAP, DEAR = Price(input=0.5, output=1.5), Price(input=0.55, output=1.65)
OFTEN, SELDOM = 0.18, 0.02
TASKS, DRAWS = 20_000, 200
QUESTIONS = 8
ROUTED = ("arithmetic", "classify", "copy", "lookup", "recall", "sort")
RATIO = 10.0
"""What the dear model's token costs over the cheap one's, where the two are priced."""


# ── retries ─────────────────────────────────────────────────────────────────────────────────


def per_success(price: Price, failing: float, draw: np.random.Generator, count: int) -> float:
    """Dollars of a task that succeeds, each try paid: tries until one succeeds are geometric."""
    tries = draw.geometric(1 - failing, count)
    return float(tries.mean()) * dollars_of(price, TASK, SPEED)


def retries(subject: Subject) -> Finding:
    """18% retries at the lower price against 2% at a tenth more, then by price."""
    draw = np.random.default_rng(0)
    pairs = np.array(
        [
            [per_success(CHEAP, OFTEN, draw, TASKS // 20), per_success(DEAR, SELDOM, draw, 1000)]
            for _ in range(DRAWS)
        ]
    )
    breaks = (1 - SELDOM) / (1 - OFTEN)
    ratios = np.linspace(0.8, 1.6, 17)
    wins = bootstrap(
        "cost of a success, 18% retries over 2% at a tenth more", "x",
        [pairs[:, 0] / pairs[:, 1]], lambda p: float(np.mean(p[0])),
    )  # fmt: skip
    at = [breaks / ratio for ratio in ratios]
    return Finding(
        figures=[
            wins,
            Figure(name="price at which both cost the same", value=breaks, unit="x"),
            Figure(name="$ of a thousand successes, 18% retries", value=1e3 * pairs[:, 0].mean()),
            Figure(name="$ of a thousand successes, 2% retries", value=1e3 * pairs[:, 1].mean()),
        ],
        promise=Promise(low=1.05),
        why=f"The reliable model wins while its tokens cost less than {breaks:.3f} times the "
        "other's: 0.98 / 0.82. Beyond that retries are the cheaper evil, as far as money goes; "
        "each of them is a user's wait as well.",
        picture=lines(
            [round(float(100 * (ratio - 1))) for ratio in ratios],
            {"18% retries over 2%": at, "the same": [1.0] * len(at)},
            "% that the reliable model's tokens cost more",
            "cost of a success, times",
        ),
    )


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


def structured(subject: Subject) -> Finding:
    """The same questions free and with a schema, at a temperature at which answers go astray."""
    asking = subject.server()
    count = 4 * max(3, subject.repeats)
    free: list[bool] = []
    ruled: list[bool] = []
    tokens = {"free": 0, "ruled": 0}
    for level in (2, 3):
        for number, example in enumerate(islice(examples("extract", level, TEST_SEED), count)):
            schema = schema_in(example)
            body: dict[str, Any] = {
                "messages": example.messages,
                "max_tokens": most_tokens("extract"),
                "temperature": 1.0,
                "seed": number,
            }
            told = asking.chat(body)
            free.append(valid(told["choices"][0]["message"]["content"] or "", schema))
            tokens["free"] += told["usage"]["completion_tokens"]
            form = {"name": "record", "schema": {**schema, "additionalProperties": False}}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
            told = asking.chat(body)
            ruled.append(valid(told["choices"][0]["message"]["content"] or "", schema))
            tokens["ruled"] += told["usage"]["completion_tokens"]
    failed, left = free.count(False), ruled.count(False)
    low, high = wilson(failed, len(free))
    share = 100 * (1 - left / failed) if failed else 0.0
    paid = tokens["free"] / max(free.count(True), 1)
    now = tokens["ruled"] / max(ruled.count(True), 1)
    return Finding(
        figures=[
            Figure(name="of the failed validations saved", value=share, unit="%"),
            Figure(name="fail without a schema", value=100 * failed / len(free), unit="%",
                   low=100 * low, high=100 * high),
            Figure(name="fail with it", value=100 * left / len(ruled), unit="%"),
            Figure(name="output tokens of a valid record, without", value=paid),
            Figure(name="… with it", value=now),
        ],
        promise=Promise(low=95.0, none=50.0),
        why=f"{len(free)} questions at temperature 1. What still fails with a schema was cut at "
        "the limit of tokens; that a record is valid does not say that it is right."
        if failed
        else "Nothing failed without a schema: there was nothing to save.",
    )  # fmt: skip


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
                limits.append(most_tokens(skill))
    both = []
    for each in (model_folder("headway-draft"), folder):
        subject.watch(f"{len(asked)} questions to {each.name}")
        try:
            both.append(answers(LLM(each), asked, limits))
        except HeadwayError as error:
            raise NotThereError(error.cause) from error
    return [
        Routed(cheap[0], dear[0], dear[1], cheap[2], dear[2], cheap[3])
        for cheap, dear in zip(*both, strict=True)
    ]


def routing(subject: Subject) -> Finding:
    """Cost of a right answer by the share of questions that the cheap model keeps."""
    asked = sorted(subject.once(routed), key=lambda one: -one.sure)
    cheap, dear = Price(input=1.0, output=5.0), Price(input=RATIO, output=5.0 * RATIO)

    def outcome(part: list[Routed], keep: int) -> tuple[float, float]:
        """(right, dollars) where the `keep` surest cheap answers stand, the rest asked again."""
        right = sum(one.cheap for one in part[:keep]) + sum(one.dear for one in part[keep:])
        paid = sum(dollars_of(cheap, Usage(o.prompt, 0, o.cheap_tokens), SPEED) for o in part)
        paid += sum(dollars_of(dear, Usage(o.prompt, 0, o.dear_tokens), SPEED) for o in part[keep:])
        return right, paid

    kept = [round(share * len(asked) / 20) for share in range(21)]
    all_dear = sum(dollars_of(dear, Usage(o.prompt, 0, o.dear_tokens), SPEED) for o in asked)
    base = sum(one.dear for one in asked)
    curve = [outcome(asked, keep) for keep in kept]
    good = [(paid / all_dear, right) for right, paid in curve if right >= base - 0.02 * len(asked)]
    fit, _ = min(good, default=(1.0, base))
    bold_right, bold_paid = curve[-1]
    timid_right, timid_paid = curve[0]
    return Finding(
        figures=[
            Figure(name="cost saved within two points of the dear one's right answers",
                   value=100 * (1 - fit), unit="%"),
            Figure(name="too bold, all cheap: right", value=100 * bold_right / len(asked),
                   unit="%"),
            Figure(name="… cost of the dear route's", value=100 * bold_paid / all_dear, unit="%"),
            Figure(name="too timid, all asked twice: right", value=100 * timid_right / len(asked),
                   unit="%"),
            Figure(name="… cost of the dear route's", value=100 * timid_paid / all_dear, unit="%"),
        ],
        promise=Promise(low=20.0, none=0.0),
        why=f"{len(asked)} questions; the dear model is priced {RATIO:g} times the cheap one a "
        "token. Too timid pays both and gains nothing, too bold keeps wrong answers. The threshold "
        "is chosen in hindsight; headway calibrate chooses one beforehand, and saves less.",
        picture=lines(
            [5 * share for share in range(21)],
            {
                "right, % of the dear one's": [100 * right / max(base, 1) for right, _ in curve],
                "cost, % of the dear one's": [100 * paid / all_dear for _, paid in curve],
            },
            "% of the cheap answers that are kept, the surest first",
            "%",
        ),
    )  # fmt: skip


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
        how="Held-out extractions at temperature 1, free and with the schema that they show.",
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
