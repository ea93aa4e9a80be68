"""The eight steps that serving literature advises, in its order, over one diagnosis.

What costs nothing comes first: measure, shorten, structure, cache, batch; then what costs quality
or machines: quantize, route, speculate (Huyen, *AI Engineering*, 2025, ch. 9; NVIDIA's and
Databricks' guides to inference agree on the order). A step is open where a rule of the doctor that
belongs to it holds; the first open one is next, and what it would bring is that rule's gain.
"""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headway.advise.diagnosis import Diagnosis, Finding
from headway.advise.reading import Reading
from headway.advise.what_if.compare import Gain
from headway.advise.words import duration, percent, plural, tokens
from headway.core.memory_plan import gib

ENOUGH = 10
"""Requests below which percentiles say little."""
WORTH = 0.03
"""Of a request's time or of the spend: a step that gives less is not next."""
DONE, NEXT, LATER, NOTHING, UNKNOWN = "done", "next", "later", "nothing to gain", "not known"


class Stage(msgspec.Struct, kw_only=True):
    """One step: the question it asks, this server's figures, and what follows.

    `share` of a mean request's time (or `of` the spend) is what it would bring, `saves_s` the same
    in seconds a request and `usd_per_hour` in dollars, where they are known.
    """

    name: str
    question: str
    state: str
    figures: list[str]
    rule: str = ""
    do: str = ""
    brings: str = ""
    share: float = 0.0
    of: str = "time"
    saves_s: float | None = None
    usd_per_hour: float | None = None
    simulated: Gain | None = None


class Playbook(msgspec.Struct, kw_only=True):
    """All steps, which is next ("" where none is open), and what disturbs the figures."""

    next: str
    stages: list[Stage]
    before: list[str]

    @property
    def said(self) -> str:
        """The next step in one line."""
        stage = next((each for each in self.stages if each.state == NEXT), None)
        return f"next: {stage.name}. {stage.do}" if stage else "nothing is left to do here"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step: the rules that open it, the figures it looks at, and what says that it is done."""

    name: str
    question: str
    rules: tuple[str, ...]
    figures: Callable[[Reading], list[str]]
    done: Callable[[Reading], str]
    """DONE where it was taken and works, NOTHING where there is nothing to gain, or UNKNOWN."""


BEFORE = ("contention", "engine-restarts", "client-bottleneck", "failures", "slow-client")
"""Rules that disturb what is measured, whatever the step."""


def walk(r: Reading, found: Diagnosis) -> Playbook:
    """The steps in their order."""
    by_rule = {each.name: each for each in found.findings}
    stages = [stage(step, r, by_rule) for step in STEPS]
    shorten(stages[1], found)
    if r.load.num_ended < ENOUGH:
        stages[0] = unmeasured(stages[0], r)
    first = next((each for each in stages if each.state == LATER), None)
    if first is not None:
        first.state = NEXT
    before = [by_rule[name].symptom for name in BEFORE if name in by_rule]
    return Playbook(next=first.name if first else "", stages=stages, before=before)


def stage(step: Step, r: Reading, by_rule: dict[str, Finding]) -> Stage:
    """One step with this server's numbers; open where one of its rules is worth it."""
    open_rules = [by_rule[name] for name in step.rules if name in by_rule]
    best = max(open_rules, key=lambda each: each.share, default=None)
    found = Stage(
        name=step.name, question=step.question, state=step.done(r), figures=step.figures(r)
    )
    if best is None or best.share < WORTH:
        return found
    found.state, found.rule, found.do, found.brings = LATER, best.name, best.do, best.expect
    found.share, found.of, found.simulated = best.share, best.of, best.simulated
    if best.of == "time":
        found.saves_s = None if r.request_s is None else best.share * r.request_s
    elif r.spend.price_per_hour is not None:
        found.usd_per_hour = best.share * r.spend.price_per_hour
    return found


def shorten(found: Stage, of: Diagnosis) -> None:
    """Waste that was seen in prompts or answers opens the second step, too."""
    seen = [each for each in of.savings if each.measured]
    best = max(seen, key=lambda each: each.share, default=None)
    if best is None or best.share < max(WORTH, found.share):
        return
    found.state, found.rule, found.do, found.brings = LATER, "waste", best.what, best.note
    found.share, found.of, found.simulated = best.share, "time", None
    found.saves_s, found.usd_per_hour = best.seconds, best.usd_per_hour


def unmeasured(found: Stage, r: Reading) -> Stage:
    """The first step where too few requests ended to go by."""
    found.state, found.share = LATER, 1.0
    found.do = "send the traffic that it is for, or watch longer (--seconds)"
    found.brings = (
        f"percentiles that can be gone by: {plural(r.load.num_ended, 'request')} ended, "
        f"{ENOUGH} or more are needed"
    )
    return found


# ── what each step looks at ─────────────────────────────────────────────────────────────────


def distributions(r: Reading) -> list[str]:
    prompt, output, ttft, tpot = (
        *(r.lengths.prompt, r.lengths.output),
        *(r.latency.ttft, r.latency.tpot),
    )
    return [
        f"{plural(r.load.num_ended, 'request')} ended in {r.seconds:.0f} s",
        f"prompts p50 {tokens(prompt.p50)}, p99 {tokens(prompt.p99)} tokens",
        f"answers p50 {tokens(output.p50)}, p99 {tokens(output.p99)} tokens",
        f"TTFT p50 {duration(ttft.p50)}, p99 {duration(ttft.p99)}",
        f"TPOT p50 {duration(tpot.p50)}, p99 {duration(tpot.p99)}",
    ]


def lengths(r: Reading) -> list[str]:
    return [
        f"the prompt is {percent(r.share_of_request(r.prefill_s))} of a request's time, the answer "
        f"{percent(r.share_of_request(r.decode_s))}",
        f"a fifth less of the answer: {duration((r.decode_s or 0.0) / 5)} a request, of the "
        f"prompt: {duration((r.prefill_s or 0.0) / 5)}",
    ]


def structure(r: Reading) -> list[str]:
    failed = f"{r.faults.validation_failures} bodies or answers did not validate"
    forced = [f"grammars forced {tokens(r.drafts.forced)} tokens"] if r.drafts.forced else []
    return [failed, *forced]


def caching(r: Reading) -> list[str]:
    hits = [f"{percent(r.prefix.hit_rate)} of prompt tokens were found in the cache"]
    return hits + ([r.prefix.shared_said] if r.prefix.shared_said else [])


def batching(r: Reading) -> list[str]:
    rows, most = r.steps.rows, r.limits.max_num_seqs
    found = [f"{rows:.1f} of {most or '?'} rows in a mean step"] if rows is not None else []
    if r.load.waiting is not None:
        found.append(f"{r.load.waiting:.1f} wait")
    return found


def width(r: Reading) -> list[str]:
    if r.weights.cache_resident:
        return ["the weights stay in the CPU's cache: their bytes are not what decode waits for"]
    found = []
    if r.weights.step_bytes:
        found.append(f"a step reads {gib(r.weights.step_bytes)} of weights")
    if r.kv.bytes_per_token:
        found.append(f"{tokens(r.kv.bytes_per_token)} bytes of KV a token")
    return found


def routing(r: Reading) -> list[str]:
    arriving, leaving = r.load.arrivals_per_s, r.load.finished_per_s
    found = [f"{plural(r.faults.refused, 'request')} refused for load"]
    if arriving is not None and leaving is not None:
        found.append(f"{arriving:.2f} requests/s arrive, {leaving:.2f} end")
    if r.lengths.longest_prompt and r.lengths.short_prompt:
        times = r.lengths.longest_prompt / max(r.lengths.short_prompt, 1.0)
        found.append(f"the longest prompt is {times:.0f} times a short one")
    return found


def guessing(r: Reading) -> list[str]:
    if not r.drafts.sources:
        return ["nobody guesses"]
    speedup = "" if r.drafts.speedup is None else f", {r.drafts.speedup:.2f} times the tokens/s"
    return [f"{', '.join(r.drafts.sources)}: {percent(r.drafts.acceptance)} come{speedup}"]


# ── what says that a step is done ───────────────────────────────────────────────────────────


def known(value: object, state: str = DONE) -> str:
    return UNKNOWN if value is None else state


STEPS = (
    Step(
        name="measure",
        question="Are the distributions of lengths and latencies still unknown?",
        rules=(),
        figures=distributions,
        done=lambda r: DONE,
    ),
    Step(
        name="shorten",
        question="Are prompts or answers longer than they need to be?",
        rules=("long-prefill",),
        figures=lengths,
        done=lambda r: known(r.request_s, NOTHING),
    ),
    Step(
        name="structure",
        question="Do answers or bodies fail to validate?",
        rules=("validation",),
        figures=structure,
        done=lambda r: DONE if r.drafts.forced else NOTHING,
    ),
    Step(
        name="cache",
        question="Do prompts begin alike and are computed all the same?",
        rules=("cold-cache",),
        figures=caching,
        done=lambda r: known(r.prefix.hit_rate, DONE if r.prefix.hit_rate else NOTHING),
    ),
    Step(
        name="batch",
        question="Would more rows in a step cost next to nothing?",
        rules=("small-batch", "rows", "kv-capacity", "host-bound"),
        figures=batching,
        done=lambda r: known(r.steps.rows, DONE if (r.steps.rows or 0.0) > 1.5 else NOTHING),
    ),
    Step(
        name="quantize",
        question="Is decode the reading of weights or KV that could be narrower?",
        rules=("wide-weights", "weight-bytes", "kv-bytes"),
        figures=width,
        done=lambda r: known(r.weights.step_bytes, NOTHING if r.weights.choices else DONE),
    ),
    Step(
        name="route",
        question="Is there work that another server should have?",
        rules=("over-saturated", "queueing", "hogging", "refusals"),
        figures=routing,
        done=lambda r: known(r.load.arrivals_per_s, NOTHING),
    ),
    Step(
        name="speculate",
        question="Is arithmetic left unused, or do guesses bring nothing?",
        rules=("drafts", "drafts-in-vain"),
        figures=guessing,
        done=lambda r: DONE if (r.drafts.speedup or 0.0) > 1.0 else NOTHING,
    ),
)
