"""Classes of traffic, their objectives, and whether one request met them.

Each request belongs to a class and may bring objectives of its own. It is judged when it ends, on
its own timestamps: it met all, it missed some, or it says nothing about the server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway.core.errors import RequestError, UsageError
from headway.core.slo import DEFAULT_CLASS, OBJECTIVES, Slo, parse_classes, parse_duration

OK, FAILED, REFUSED, LEFT, INVALID = "ok", "failed", "refused", "left", "invalid"
"""How a request ended: complete, by our fault, refused for load, its client went away, or it was
not one we can serve."""
MAX_OBJECTIVE_S = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """A class and its objectives; a long prompt may have more time to its first token.

    TTFT grows by `ttft_per_token_s` for each uncached prompt token beyond `free_tokens`.
    """

    name: str
    slo: Slo
    ttft_per_token_s: float = 0.0
    free_tokens: int = 500

    def objectives(self, uncached_tokens: int) -> Slo:
        """What a request with this many uncached prompt tokens must meet."""
        extra = self.ttft_per_token_s * max(0, uncached_tokens - self.free_tokens)
        slo = self.slo
        if not extra or slo.ttft_s is None:
            return slo
        return Slo(
            ttft_s=slo.ttft_s + extra, tpot_s=slo.tpot_s, itl_p99_s=slo.itl_p99_s, e2e_s=slo.e2e_s
        )

    def __str__(self) -> str:
        more = f", +{self.ttft_per_token_s * 1e3:g}ms/token" if self.ttft_per_token_s else ""
        return f"{self.slo}{more}"


BUILT_IN = (
    ServiceClass(name="interactive", slo=Slo(ttft_s=1.5, tpot_s=0.12), ttft_per_token_s=0.002),
    ServiceClass(name="standard", slo=Slo(ttft_s=6.0, tpot_s=0.48), ttft_per_token_s=0.008),
    ServiceClass(name="batch", slo=Slo()),
)
"""Classes that are there without `--slo`; it replaces them by name."""


def service_classes(texts: Sequence[str]) -> dict[str, ServiceClass]:
    """Name → class: the built-in ones, those of `--slo`, and the one of requests that name none.

    Without objectives of its own that one has those of `standard`.
    """
    classes = {row.name: row for row in BUILT_IN}
    for name, slo in parse_classes(texts).items():
        classes[name] = ServiceClass(name=name, slo=slo)
    if DEFAULT_CLASS not in classes:
        like = classes["standard"]
        classes[DEFAULT_CLASS] = ServiceClass(
            name=DEFAULT_CLASS, slo=like.slo, ttft_per_token_s=like.ttft_per_token_s
        )
    return classes


def choose_class(
    classes: Mapping[str, ServiceClass], service_class: str | None, service_tier: str | None
) -> ServiceClass:
    """The class a request names: `service_class`, else a `service_tier` that is a class.

    OpenAI's own tiers (auto, default, flex, priority) mean the default class unless there is one
    of that name. Raises RequestError for an unknown `service_class`.
    """
    if service_class is not None:
        if service_class not in classes:
            raise RequestError(
                f"service_class {service_class[:64]!r} is not known; there are "
                f"{', '.join(classes)}.",
                param="service_class",
                code="invalid_value",
            )
        return classes[service_class]
    return classes.get(service_tier or "", classes[DEFAULT_CLASS])


def request_slo(given: Mapping[str, Any] | None) -> Slo | None:
    """The objectives of the field `slo`: {"ttft": "500ms"} or {"ttft_ms": 500}, any subset.

    Raises RequestError that names the key.
    """
    if given is None:
        return None
    bounds: dict[str, float] = {}
    for key, value in given.items():
        name, in_ms = (key[:-3], True) if key.endswith("_ms") else (key, False)
        if name not in OBJECTIVES or f"{name}_s" in bounds:
            raise RequestError(
                f"slo.{key[:64]} is no objective; there are {', '.join(OBJECTIVES)} as "
                '"500ms", or with _ms as a number.',
                param="slo",
                code="invalid_value",
            )
        bounds[f"{name}_s"] = objective_s(key, value, in_ms)
    return Slo(**bounds)


def objective_s(key: str, value: Any, in_ms: bool) -> float:
    """One bound in seconds, between 0 and `MAX_OBJECTIVE_S`."""
    wanted = "a number of milliseconds" if in_ms else 'a duration such as "500ms"'
    seconds = 0.0
    if in_ms and isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value / 1e3
    elif not in_ms and isinstance(value, str) and len(value) <= 32:
        try:
            seconds = parse_duration(value, f"slo.{key}")
        except UsageError:
            seconds = 0.0
    if not 0 < seconds <= MAX_OBJECTIVE_S:
        raise RequestError(f"slo.{key} must be {wanted}.", param="slo", code="invalid_value")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """One request that is over: what is judged and what percentiles are made of.

    Latencies are None where the request did not get that far. `missed` is () when all objectives
    were met, names what was missed, and is None when the request is not judged.
    """

    service_class: str
    outcome: str
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    itl_p99_s: float | None = None
    e2e_s: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    missed: tuple[str, ...] | None = None

    @property
    def met(self) -> bool:
        return self.missed == ()


def judge(
    slo: Slo,
    outcome: str,
    *,
    ttft_s: float | None,
    tpot_s: float | None,
    itl_p99_s: float | None,
    e2e_s: float,
) -> tuple[str, ...] | None:
    """What the request missed. `e2e_s` is the time from arrival until it was over, however.

    A failed or refused request missed, whatever its latencies. One whose client left counts only
    when it was too late already: with TTFT 0.5 s, a client that leaves after 2 s without a token
    has seen a miss; one that leaves in the middle of a good answer says nothing.
    """
    if outcome in (FAILED, REFUSED):
        return (outcome,)
    if outcome == INVALID:
        return None
    if outcome == LEFT:
        late = slo.missed(e2e_s if ttft_s is None else ttft_s, None, None, e2e_s)
        return late or None
    return slo.missed(ttft_s, tpot_s, itl_p99_s, e2e_s)
