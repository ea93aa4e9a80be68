"""Comparison of two upstreams of one model on the same probes: whether they differ, and why.

Each upstream answers every probe twice; the first upstream compared with itself is the control:

    answers    changed between a and b but not between the two rounds of a: 14    vice versa: 1
               if a and b are the same model, both are equally likely: p = 2^-15 (1 + 15) = 0.0005
    KL         mean nats per token from a to b, minus those between the rounds of a, with its bound
    lengths    number of prompts whose token counts differ: 0 for the same model

The same model may change answers too: through another batch, another instruction set, or a server
that is not deterministic. So an answer does not count if a changes it by itself, or if the answers
part where two tokens were almost equally likely (`CLOSE_NATS`). Without log-probabilities the
number of changes must exceed what rounding causes (`ROUNDING_RATE`). The test level is p = 0.001,
and KL must exceed the effect of rounding (`ROUNDING_NATS`).
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

MAX_P = 0.001
ROUNDING_NATS = 0.002
"""Nats per token by which the same model may differ: docs/gateway.md has the measurements."""
CLOSE_NATS = 0.1
"""Nats between two tokens that rounding may swap."""
ROUNDING_RATE = 0.04
"""Maximum share of answers that rounding changes: 3% of the probes with headway-tiny."""
Z = 3.09
"""Standard errors below the mean: a one-sided bound of 99.9%."""
SAME_DISTRIBUTION_NATS = 2e-6
"""Nats per token: below it the distributions are equal and sampling differs."""
MIN_LENGTH_CHANGES = 3
OTHER_MODEL_NATS = 0.5
"""Nats per token from which on it is another model, not another precision of the same weights."""
MIN_PROBABILITY = 1e-9


class DriftProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Question for all upstreams of a model."""

    messages: list[dict[str, Any]]
    max_tokens: int = 48


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a probe: its text, its tokens, and the top alternatives at each token."""

    text: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    ended: str = ""
    tokens: list[str] = []
    top: list[dict[str, float]] = []


class ProbeAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one upstream to all probes, each asked twice."""

    upstream: str
    at: float
    fingerprint: str = ""
    first: list[ProbeAnswer]
    again: list[ProbeAnswer]


class DriftFinding(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of `second` with `first`. `kl_low` is the lower bound above the control's KL."""

    first: str
    second: str
    probes: int
    changed: int
    changed_control: int
    p: float
    kl: float | None = None
    kl_low: float | None = None
    lengths: int = 0
    alarm: bool = False
    suspect: str = ""
    at: float = 0.0


def compare(a: ProbeAnswers, b: ProbeAnswers) -> DriftFinding:
    """Compare the answers of b with those of a."""
    changed = changed_answers(a.first, b.first)
    control = changed_answers(a.first, a.again)
    moved = [x and not is_close(p, q) for x, p, q in zip(changed, a.first, b.first, strict=True)]
    p = sign_test(moved, control)
    if not any(answer.top for answer in a.first):
        p = max(p, rounding_test(sum(changed), len(changed)))
    kls = divergences(a, b)
    kl = sum(kls) / len(kls) if kls else None
    low = lower_bound(kls) if kls else None
    lengths = [
        y.prompt_tokens - x.prompt_tokens
        for x, y in zip(a.first, b.first, strict=True)
        if x.prompt_tokens and y.prompt_tokens and x.prompt_tokens != y.prompt_tokens
    ]
    restless = is_unstable(b, control)
    above = low is not None and low > ROUNDING_NATS
    finding = DriftFinding(
        first=a.upstream,
        second=b.upstream,
        probes=len(a.first),
        changed=sum(changed),
        changed_control=sum(control),
        p=p,
        kl=kl,
        kl_low=low,
        lengths=len(lengths),
        alarm=p < MAX_P or restless or above or len(lengths) >= MIN_LENGTH_CHANGES,
        at=b.at,
    )
    if not finding.alarm:
        return finding
    suspect = suspect_of(a, b, lengths, restless, finding)
    return msgspec.structs.replace(finding, suspect=suspect)


def suspect_of(
    a: ProbeAnswers, b: ProbeAnswers, lengths: Sequence[int], restless: bool, finding: DriftFinding
) -> str:
    """Return the likeliest cause; causes with the fewest assumptions come first."""
    if len(lengths) >= MIN_LENGTH_CHANGES:
        if len(lengths) < len(a.first) / 2 and max(lengths) < 0:
            return f"truncation: {len(lengths)} prompts are shorter, by up to {-min(lengths)}"
        return f"template: prompts have {min(lengths):+d} to {max(lengths):+d} tokens"
    if restless:
        return "sampling: it answers differently each time, although temperature is 0"
    if is_truncated(a, b):
        return "truncation: its answers end earlier, at a lower limit of tokens"
    kl = finding.kl
    if kl is None:
        return "weights or template: answers differ, and it tells no log-probabilities"
    if kl >= OTHER_MODEL_NATS:
        return f"another model: {kl:.2f} nats a token"
    if finding.kl_low is not None and finding.kl_low > SAME_DISTRIBUTION_NATS:
        return f"quantization: {kl:.3g} nats a token, prompts alike"
    return "sampling: log-probabilities are alike, and it chooses other tokens"


# ── answers ─────────────────────────────────────────────────────────────────────────────────


def changed_answers(a: Sequence[ProbeAnswer], b: Sequence[ProbeAnswer]) -> list[bool]:
    """Return for each answer whether its text differs."""
    return [x.text != y.text for x, y in zip(a, b, strict=True)]


def is_close(x: ProbeAnswer, y: ProbeAnswer) -> bool:
    """Return whether two answers part where both tokens were within `CLOSE_NATS` of each other."""
    places = zip(x.tokens, y.tokens, x.top, y.top, strict=False)
    parting = next(((p, q, at_x, at_y) for p, q, at_x, at_y in places if p != q), None)
    if parting is None:
        return False
    p, q, at_x, at_y = parting
    gaps = (at_x.get(p, 0.0) - at_x.get(q, -math.inf), at_y.get(q, 0.0) - at_y.get(p, -math.inf))
    return max(gaps) <= CLOSE_NATS


def is_unstable(b: ProbeAnswers, control: Sequence[bool]) -> bool:
    """Return whether b changes its own answers more often than the control, and than rounding."""
    pairs = zip(b.first, b.again, strict=True)
    moved = [x.text != y.text and not is_close(x, y) for x, y in pairs]
    if not any(answer.top for answer in b.first) and rounding_test(sum(moved), len(moved)) >= MAX_P:
        return False
    return sign_test(moved, control) < MAX_P


def rounding_test(changed: int, count: int) -> float:
    """Return the probability of `changed` changes among `count`, each with `ROUNDING_RATE`.

    19 of 200: 0.0005; 18: 0.0012.
    """
    chances = [
        math.comb(count, k) * ROUNDING_RATE**k * (1 - ROUNDING_RATE) ** (count - k)
        for k in range(changed)
    ]
    return max(0.0, 1.0 - sum(chances))


def sign_test(changed: Sequence[bool], control: Sequence[bool]) -> float:
    """Return the one-sided p of more changes than in the control: 10 against 0 is 2^-10."""
    more = sum(x and not y for x, y in zip(changed, control, strict=True))
    less = sum(y and not x for x, y in zip(changed, control, strict=True))
    count = more + less
    ways = sum(math.comb(count, k) for k in range(more, count + 1))
    return float(ways / 2**count)


def is_truncated(a: ProbeAnswers, b: ProbeAnswers) -> bool:
    """Return whether most changed answers are prefixes of the others, ended by a length limit."""
    pairs = [(x, y) for x, y in zip(a.first, b.first, strict=True) if x.text != y.text]
    cut = [
        y.ended in ("length", "max_tokens")
        and y.output_tokens < x.output_tokens
        and x.text.startswith(y.text)
        for x, y in pairs
    ]
    return bool(cut) and sum(cut) > len(cut) / 2


# ── log-probabilities ───────────────────────────────────────────────────────────────────────


def divergences(a: ProbeAnswers, b: ProbeAnswers) -> list[float]:
    """Return for each probe the nats per token from a to b, minus those between the rounds of a."""
    nats = []
    for x, again, y in zip(a.first, a.again, b.first, strict=True):
        cross, own = divergence(x, y), divergence(x, again)
        if cross is not None:
            nats.append(cross - (own or 0.0))
    return nats


def divergence(x: ProbeAnswer, y: ProbeAnswer) -> float | None:
    """Return the mean KL over tokens with equal prefixes; None without log-probabilities."""
    total, count = 0.0, 0
    for place, (p, q) in enumerate(zip(x.top, y.top, strict=False)):
        if x.tokens[:place] != y.tokens[:place]:
            break
        total += lumped_kl(p, q)
        count += 1
    return total / count if count else None


def lumped_kl(p: dict[str, float], q: dict[str, float]) -> float:
    """Return a lower bound of KL(p ‖ q) in nats: all tokens not in both lists count as one.

    p: a 0.5, b 0.3, the rest 0.2; q: a 0.4, b 0.3, the rest 0.3: 0.0305.
    """
    shared = [key for key in p if key in q]
    total = sum(math.exp(p[key]) * (p[key] - q[key]) for key in shared)
    rest_p, rest_q = (
        max(MIN_PROBABILITY, 1 - sum(math.exp(x[key]) for key in shared)) for x in (p, q)
    )
    return total + rest_p * math.log(rest_p / rest_q)


def lower_bound(values: Sequence[float]) -> float:
    """Return the lower bound of the mean by its standard error; -inf for a single value."""
    count = len(values)
    if count < 2:
        return -math.inf
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return mean - Z * math.sqrt(variance / count)
