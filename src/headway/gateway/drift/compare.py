"""Two upstreams of one model on the same probes: whether they differ, by what, and the suspect.

Each upstream is asked everything twice, so the first one beside itself is the control of equals:

    answers    changed between a and b, and not between a and a again: 14    the other way round: 1
               if b is a in all but name, either is as likely: p = 2^-15 (1 + 15) = 0.0005
    KL         mean nats a token from a to b, less those from a to a again, with a lower bound
    lengths    prompts of a and b have other numbers of tokens: never so among equals

Equals need not be the same to the bit: another batch, another instruction set and a server that is
not deterministic change answers too. So an answer says nothing that a changes by itself, or that
goes another way where two tokens were as good as alike (`CLOSE`); without log-probabilities so many
must change as rounding never changes (`ROUNDED`). p is taken at 0.001, and KL has to lie above what
rounding does (`FLOOR`).
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

P = 0.001
FLOOR = 0.002
"""Nats a token that equals may differ by: docs/gateway.md has what was measured."""
CLOSE = 0.1
"""Nats between two tokens of which rounding may choose either."""
ROUNDED = 0.04
"""The share of answers that rounding changes, at most: 3% of the probes with headway-tiny."""
Z = 3.09
"""The lower bound of a mean holds in 999 of 1000."""
MOVED = 2e-6
"""Nats a token: answers that changed for less were chosen otherwise from the same distribution."""
LEAST_LENGTHS = 3
OTHER_MODEL = 0.5
"""Nats a token from which on it is no rounding of the same weights."""
LEAST = 1e-9


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """One question that all upstreams of a model are asked."""

    messages: list[dict[str, Any]]
    max_tokens: int = 48


class ProbeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer: its text, its tokens, and the likeliest alternatives at each of them."""

    text: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    ended: str = ""
    tokens: list[str] = []
    top: list[dict[str, float]] = []


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """All answers of one upstream to the probes, each asked twice."""

    upstream: str
    at: float
    fingerprint: str = ""
    first: list[ProbeAnswer]
    again: list[ProbeAnswer]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`second` compared with `first`. `kl_low` is the lower bound above the control's."""

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


def compare(a: Sheet, b: Sheet) -> Finding:
    """What speaks for b being another than a."""
    changed = differ(a.first, b.first)
    control = differ(a.first, a.again)
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
    restless = is_restless(b, control)
    above = low is not None and low > FLOOR
    finding = Finding(
        first=a.upstream,
        second=b.upstream,
        probes=len(a.first),
        changed=sum(changed),
        changed_control=sum(control),
        p=p,
        kl=kl,
        kl_low=low,
        lengths=len(lengths),
        alarm=p < P or restless or above or len(lengths) >= LEAST_LENGTHS,
        at=b.at,
    )
    if not finding.alarm:
        return finding
    suspect = suspect_of(a, b, lengths, restless, finding)
    return msgspec.structs.replace(finding, suspect=suspect)


def suspect_of(a: Sheet, b: Sheet, lengths: Sequence[int], restless: bool, finding: Finding) -> str:
    """The likeliest cause, the one that needs the fewest assumptions first."""
    if len(lengths) >= LEAST_LENGTHS:
        if len(lengths) < len(a.first) / 2 and max(lengths) < 0:
            return f"truncation: {len(lengths)} prompts are shorter, by up to {-min(lengths)}"
        return f"template: prompts have {min(lengths):+d} to {max(lengths):+d} tokens"
    if restless:
        return "sampling: it answers differently each time, although temperature is 0"
    if cut_short(a, b):
        return "truncation: its answers end earlier, at a lower limit of tokens"
    kl = finding.kl
    if kl is None:
        return "weights or template: answers differ, and it tells no log-probabilities"
    if kl >= OTHER_MODEL:
        return f"another model: {kl:.2f} nats a token"
    if finding.kl_low is not None and finding.kl_low > MOVED:
        return f"quantization: {kl:.3g} nats a token, prompts alike"
    return "sampling: log-probabilities are alike, and it chooses other tokens"


# ── answers ─────────────────────────────────────────────────────────────────────────────────


def differ(a: Sequence[ProbeAnswer], b: Sequence[ProbeAnswer]) -> list[bool]:
    """Whether each answer has another text."""
    return [x.text != y.text for x, y in zip(a, b, strict=True)]


def is_close(x: ProbeAnswer, y: ProbeAnswer) -> bool:
    """Whether two answers part where the token of each was within `CLOSE` of the other's."""
    places = zip(x.tokens, y.tokens, x.top, y.top, strict=False)
    parting = next(((p, q, at_x, at_y) for p, q, at_x, at_y in places if p != q), None)
    if parting is None:
        return False
    p, q, at_x, at_y = parting
    gaps = (at_x.get(p, 0.0) - at_x.get(q, -math.inf), at_y.get(q, 0.0) - at_y.get(p, -math.inf))
    return max(gaps) <= CLOSE


def is_restless(b: Sheet, control: Sequence[bool]) -> bool:
    """Whether it changes its own answers, more often than the control does, and than rounding."""
    pairs = zip(b.first, b.again, strict=True)
    moved = [x.text != y.text and not is_close(x, y) for x, y in pairs]
    if not any(answer.top for answer in b.first) and rounding_test(sum(moved), len(moved)) >= P:
        return False
    return sign_test(moved, control) < P


def rounding_test(changed: int, count: int) -> float:
    """The chance that so many of `count` answers change where each does with `ROUNDED`.

    19 of 200: 0.0005; 18: 0.0012.
    """
    chances = [
        math.comb(count, k) * ROUNDED**k * (1 - ROUNDED) ** (count - k) for k in range(changed)
    ]
    return max(0.0, 1.0 - sum(chances))


def sign_test(changed: Sequence[bool], control: Sequence[bool]) -> float:
    """One-sided p that so many more probes changed than in the control: 10 and 0 are 2^-10."""
    more = sum(x and not y for x, y in zip(changed, control, strict=True))
    less = sum(y and not x for x, y in zip(changed, control, strict=True))
    count = more + less
    ways = sum(math.comb(count, k) for k in range(more, count + 1))
    return float(ways / 2**count)


def cut_short(a: Sheet, b: Sheet) -> bool:
    """Whether answers that changed are mostly beginnings of the others, ended by a limit."""
    pairs = [(x, y) for x, y in zip(a.first, b.first, strict=True) if x.text != y.text]
    cut = [
        y.ended in ("length", "max_tokens")
        and y.output_tokens < x.output_tokens
        and x.text.startswith(y.text)
        for x, y in pairs
    ]
    return bool(cut) and sum(cut) > len(cut) / 2


# ── log-probabilities ───────────────────────────────────────────────────────────────────────


def divergences(a: Sheet, b: Sheet) -> list[float]:
    """Of each probe: nats a token from a to b, less those from a to itself asked again."""
    nats = []
    for x, again, y in zip(a.first, a.again, b.first, strict=True):
        cross, own = divergence(x, y), divergence(x, again)
        if cross is not None:
            nats.append(cross - (own or 0.0))
    return nats


def divergence(x: ProbeAnswer, y: ProbeAnswer) -> float | None:
    """Mean KL over the tokens whose beginnings are the same; None where none are told."""
    total, count = 0.0, 0
    for place, (p, q) in enumerate(zip(x.top, y.top, strict=False)):
        if x.tokens[:place] != y.tokens[:place]:
            break
        total += lumped_kl(p, q)
        count += 1
    return total / count if count else None


def lumped_kl(p: dict[str, float], q: dict[str, float]) -> float:
    """KL(p ‖ q) in nats where all tokens that are not in both lists are one: never too much.

    p: a 0.5, b 0.3, the rest 0.2; q: a 0.4, b 0.3, the rest 0.3: 0.0305.
    """
    shared = [key for key in p if key in q]
    total = sum(math.exp(p[key]) * (p[key] - q[key]) for key in shared)
    rest_p, rest_q = (max(LEAST, 1 - sum(math.exp(x[key]) for key in shared)) for x in (p, q))
    return total + rest_p * math.log(rest_p / rest_q)


def lower_bound(values: Sequence[float]) -> float:
    """What the mean surely exceeds, by its standard error; of one value nothing is sure."""
    count = len(values)
    if count < 2:
        return -math.inf
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return mean - Z * math.sqrt(variance / count)
