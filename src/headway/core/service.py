"""Service classes: what each is promised, its share, its limits, and which one a request is of.

Three are built in, `--slo` changes objectives by name, and `--classes FILE` replaces them or adds
others. A class file is YAML, each row a class; everything but the name may be left out:

    interactive:
      slo: ttft=1.5s,tpot=120ms
      ttft_per_token: 2ms          # for each uncached prompt token beyond free_tokens
      free_tokens: 500
      weight: 2                    # share of its users beside others
      priority: -1                 # lower goes first, under the policy priority
      price: 1.0                   # of a token, beside others
      limits: {max_output_tokens: 4096, queue_requests: 64}
    nightly: {idle_only: true, price: 0.3, keep_context: 0.5}
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from headway.core.errors import RequestError, UsageError
from headway.core.slo import (
    CLASS_NAME,
    DEFAULT_CLASS,
    OBJECTIVES,
    Slo,
    parse_classes,
    parse_duration,
    parse_slo,
)
from headway.core.terms import Terms
from headway.core.yaml_file import read_yaml

MAX_OBJECTIVE_S = 1e6
MAX_PRIORITY = 2**31
BATCH_CLASS = "batch"
"""The class of the lines of batches."""
TIERS = {"flex": "batch", "priority": "interactive"}
"""OpenAI's tiers that mean one of ours, where no class has their own name."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What each key may ask for; None is no limit. A key's own go before those of the class.

    `queue_requests` and `queue_seconds` bound what waits for its first token: of all keys
    together in a class's row, of the key alone in a key's.
    """

    requests_at_once: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    queue_requests: int | None = None
    queue_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least = 0 if name in ("queue_requests", "queue_seconds") else 1
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}")

    def over(self, other: "Limits") -> "Limits":
        """These where they say something, else `other`'s."""
        if self == UNLIMITED:
            return other
        names = self.__struct_fields__
        given = {n: v for n in names if (v := getattr(self, n)) is not None}
        return msgspec.structs.replace(other, **given) if given else other


UNLIMITED = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """A class and its objectives; a long prompt may have more time to its first token.

    TTFT grows by `ttft_per_token_s` for each uncached prompt token beyond `free_tokens`. Of a lower
    `priority` goes first; `idle_only` takes only what nobody else wants; `price` is a token's,
    beside that of other classes.
    """

    name: str
    slo: Slo
    ttft_per_token_s: float = 0.0
    free_tokens: int = 500
    weight: float = 1.0
    priority: int = 0
    idle_only: bool = False
    price: float = 1.0
    limits: Limits = Limits()
    keep_context: float | None = None
    """What its requests ask of `context` where they say nothing: the share of documents and tools'
    results that is kept."""
    best_effort: bool = False
    """Whether its requests queue beyond its objective for the first token: that of the default
    class is a target for the scheduler, which neither operator nor client has asked for."""
    why: str = "built in"
    """Where its objectives come from."""

    def objectives(self, uncached_tokens: int) -> Slo:
        """What a request with this many uncached prompt tokens must meet."""
        extra = self.ttft_per_token_s * max(0, uncached_tokens - self.free_tokens)
        if not extra or self.slo.ttft_s is None:
            return self.slo
        return replace(self.slo, ttft_s=self.slo.ttft_s + extra)

    def terms(
        self, slo: Slo | None = None, weight: float | None = None, priority: int | None = None
    ) -> Terms:
        """What a request of this class carries into the engine; its own words go first.

        A request's `slo` stands in place of all objectives. Priorities are vLLM's: lower first.
        """
        asked = self.slo if slo is None else slo
        return Terms(
            service_class=self.name,
            ttft_s=asked.ttft_s,
            tpot_s=asked.tpot_s,
            ttft_per_token_s=self.ttft_per_token_s if slo is None else 0.0,
            free_tokens=self.free_tokens,
            e2e_s=asked.e2e_s,
            weight=self.weight if weight is None else weight,
            priority=self.priority if priority is None else priority,
            idle_only=self.idle_only,
        )

    def __str__(self) -> str:
        more = f", +{self.ttft_per_token_s * 1e3:g}ms/token" if self.ttft_per_token_s else ""
        return f"{self.slo}{more}"


LIKE_INTERACTIVE = "as interactive"
HEADROOM = 2.0
"""What takes the machine all of its time gets twice as long: half of it is for the others."""
BUILT_IN = (
    ServiceClass(name="interactive", slo=Slo(ttft_s=1.5, tpot_s=0.12), ttft_per_token_s=0.002),
    ServiceClass(name="standard", slo=Slo(ttft_s=6.0, tpot_s=0.48), ttft_per_token_s=0.008),
    ServiceClass(name="batch", slo=Slo(), idle_only=True, price=0.5),
)
"""Classes that are there unless a file has a row of the same name."""


def service_classes(texts: Sequence[str] = (), file: Path | None = None) -> dict[str, ServiceClass]:
    """Name → class: the built-in ones, those of `file`, objectives of `--slo`, and the default.

    The default is the class of requests that name none (`default_class`). Raises UsageError.
    """
    classes = {row.name: row for row in BUILT_IN}
    classes |= read_classes(file) if file is not None else {}
    for name, slo in parse_classes(texts).items():
        like = classes.get(name) or ServiceClass(name=name, slo=slo)
        classes[name] = replace(like, slo=slo, ttft_per_token_s=0.0, why="from --slo")
    classes.setdefault(DEFAULT_CLASS, default_class(classes))
    return classes


def default_class(classes: Mapping[str, ServiceClass]) -> ServiceClass:
    """The class of requests that name none, where nobody says what it is.

    Like `standard` where somebody says what that is, else with the objectives of `interactive`:
    people read the answers, and nobody is promised what nobody notices.
    """
    standard, like = classes["standard"], classes["interactive"]
    if standard not in BUILT_IN:
        return replace(standard, name=DEFAULT_CLASS, why=f"like standard, {standard.why}")
    return replace(
        standard,
        name=DEFAULT_CLASS,
        slo=like.slo,
        ttft_per_token_s=like.ttft_per_token_s,
        free_tokens=like.free_tokens,
        best_effort=like in BUILT_IN,
        why=LIKE_INTERACTIVE if like in BUILT_IN else f"{LIKE_INTERACTIVE}, {like.why}",
    )


class Alone(msgspec.Struct, array_like=True, frozen=True):
    """What one request takes with nothing beside it, in seconds; 0 where nobody has measured it.

    `prompt_s` to the first token of a prompt of `num_tokens`, `token_s` for each further token of
    the prompt, `tpot_s` for each further token of the answer.
    """

    num_tokens: int = 0
    prompt_s: float = 0.0
    token_s: float = 0.0
    tpot_s: float = 0.0

    def at_best(self, later: "Alone") -> "Alone":
        """The shorter times of both: what only others on the machine make long is not its own.

        Of prompts of different lengths, as of two engines, the later stands.
        """
        if later.num_tokens != self.num_tokens:
            return later if later.num_tokens else self
        names = ("prompt_s", "token_s", "tpot_s")
        times = {name: min(getattr(self, name), getattr(later, name)) for name in names}
        return msgspec.structs.replace(self, **times)


def within_reach(row: ServiceClass, alone: Alone) -> ServiceClass:
    """`row` as this machine can keep it, where nobody has said what it is to be.

    An objective that one request alone cannot meet becomes `HEADROOM` times what that takes:
    with 2.1 s for 500 prompt tokens and 4 ms for each further one, ttft=1.5s + 2 ms a token
    becomes 4.2 s + 8 ms a token; 30 ms for a token of the answer leave tpot=120ms as it is.
    """
    ttft_s, tpot_s, raised = row.slo.ttft_s, row.slo.tpot_s, []
    if row.why != LIKE_INTERACTIVE or not alone.num_tokens or ttft_s is None or tpot_s is None:
        return row
    per_token_s, over = row.ttft_per_token_s, max(alone.num_tokens - row.free_tokens, 0)
    if alone.token_s > per_token_s:
        per_token_s = rounded(HEADROOM * alone.token_s)
        raised.append(f"{1e3 * alone.token_s:.3g} ms for each further one")
    if alone.prompt_s > ttft_s + per_token_s * over:
        ttft_s = rounded(HEADROOM * alone.prompt_s)
        raised.insert(0, f"{alone.prompt_s:.3g} s for {alone.num_tokens} prompt tokens")
    if alone.tpot_s > tpot_s:
        tpot_s = rounded(HEADROOM * alone.tpot_s)
        raised.append(f"{1e3 * alone.tpot_s:.3g} ms for a token of the answer")
    if not raised:
        return replace(row, why=f"{LIKE_INTERACTIVE}, which this machine can keep")
    why = f"raised: one request alone takes {', '.join(raised)}"
    slo = replace(row.slo, ttft_s=ttft_s, tpot_s=tpot_s)
    return replace(row, slo=slo, ttft_per_token_s=per_token_s, why=why)


def rounded(seconds: float) -> float:
    """Two digits: 0.2471 → 0.25."""
    return float(f"{seconds:.2g}")


# ── the class file ──────────────────────────────────────────────────────────────────────────


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One class as the file has it."""

    slo: str = ""
    ttft_per_token: str = ""
    free_tokens: int = 500
    weight: float = 1.0
    priority: int = 0
    idle_only: bool = False
    price: float = 1.0
    limits: Limits = Limits()
    keep_context: float | None = None

    def __post_init__(self) -> None:
        if self.keep_context is not None and not 0 < self.keep_context <= 1:
            raise ValueError("keep_context must be more than 0 and at most 1")
        for name, low, high in (
            ("free_tokens", 0, 2**31),
            ("weight", 0.001, 1000),
            ("priority", -MAX_PRIORITY, MAX_PRIORITY),
            ("price", 0, 1000),
        ):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} must be between {low} and {high}")


HOW = "A row is NAME: {slo: 'ttft=1.5s,tpot=120ms', weight: 1, limits: {…}}; see docs/admission.md."


def read_classes(file: Path) -> dict[str, ServiceClass]:
    """The classes of a file; UsageError names the file, the class, the field and the fix."""
    content = read_yaml(file, "--classes", HOW)
    if content is not None and not isinstance(content, dict):
        raise UsageError(f"--classes {file} holds no classes by name.", HOW)
    return {str(name): read_class(file, str(name), row) for name, row in (content or {}).items()}


def read_class(file: Path, name: str, content: Any) -> ServiceClass:
    """One row of the file."""
    where = f"--classes {file}: class {name[:64]}"
    if not CLASS_NAME.fullmatch(name):
        raise UsageError(
            f"--classes {file}: {name[:64]!r} is no name of a class.",
            "Use letters, digits, dot, dash and underscore, at most 64.",
        )
    try:
        row = msgspec.convert(content or {}, Row)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {str(error)[:200]}.", closest(str(error))) from error
    per_token = row.ttft_per_token
    try:
        slo = parse_slo(row.slo) if row.slo else Slo()
    except UsageError as error:
        raise UsageError(f"{where}: slo: {error.cause}", error.fix) from error
    return ServiceClass(
        name=name,
        slo=slo,
        ttft_per_token_s=parse_duration(per_token, f"{where}: ttft_per_token") if per_token else 0,
        free_tokens=row.free_tokens,
        weight=row.weight,
        priority=row.priority,
        idle_only=row.idle_only,
        price=row.price,
        limits=row.limits,
        keep_context=row.keep_context,
        why="from --classes",
    )


def closest(told: str) -> str:
    """The fix for msgspec's "Object contains unknown field `wait`": the name that was meant."""
    if "unknown field" not in told:
        return HOW
    given = told.partition("`")[2].partition("`")[0]
    there = Limits.__struct_fields__ if "limits" in told else Row.__struct_fields__
    near = difflib.get_close_matches(given, there, n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    return f"{meant}There are {', '.join(there)}."


# ── the class of a request ──────────────────────────────────────────────────────────────────


def choose_class(
    classes: Mapping[str, ServiceClass],
    service_class: str | None,
    service_tier: str | None,
    default: str | None = None,
) -> ServiceClass:
    """The class a request names: `service_class`, else a `service_tier` that is a class.

    Of OpenAI's own tiers flex means `batch` and priority `interactive`; auto and what else there
    may be mean `default`, the class of the key. Raises RequestError for an unknown `service_class`.
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
    tier = service_tier or ""
    meant = TIERS.get(tier, default or DEFAULT_CLASS)
    return classes.get(tier) or choose_class(classes, meant, None)


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
