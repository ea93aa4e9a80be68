"""Service classes: objectives, share and limits of each, and the class of a request.

Three are built in, `--slo` changes objectives by name, and `--classes FILE` replaces them or adds
others. A class file is YAML, each row a class; everything but the name may be left out:

    interactive:
      slo: ttft=1.5s,tpot=120ms
      ttft_per_token: 2ms          # for each uncached prompt token beyond free_tokens
      free_tokens: 500
      weight: 2                    # share of its users relative to others
      priority: -1                 # lower goes first, under the policy priority
      price: 1.0                   # of a token, relative to others
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
"""Class of the lines of batches."""
TIERS = {"flex": "batch", "priority": "interactive"}
"""OpenAI's tiers → built-in classes, unless a class has the tier's name."""
MAX_LIMIT = 10**15
"""What a limit of a key is at most: more is a mistake, and no float has each number beyond."""


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of each key; None is no limit. A key's own row comes before that of the class.

    `queue_requests` and `queue_seconds` bound the requests that wait for their first token: of all
    keys together in a class's row, of one key in a key's row.
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
            if value is not None and not least <= value <= MAX_LIMIT:
                raise ValueError(f"{name} must be at least {least} and at most {MAX_LIMIT}")

    def over(self, other: "KeyLimits") -> "KeyLimits":
        """Return these limits, completed by `other`'s."""
        if self == UNLIMITED:
            return other
        names = self.__struct_fields__
        given = {n: v for n in names if (v := getattr(self, n)) is not None}
        return msgspec.structs.replace(other, **given) if given else other


UNLIMITED = KeyLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceClass:
    """A service class and its objectives; a long prompt may have more time to its first token.

    TTFT grows by `ttft_per_token_s` for each uncached prompt token beyond `free_tokens`. A lower
    `priority` goes first; `idle_only` takes only otherwise unused capacity; `price` is a token's,
    relative to other classes.
    """

    name: str
    slo: Slo
    ttft_per_token_s: float = 0.0
    free_tokens: int = 500
    weight: float = 1.0
    priority: int = 0
    idle_only: bool = False
    price: float = 1.0
    limits: KeyLimits = KeyLimits()
    keep_context: float | None = None
    """Default of `context` for its requests: the share of documents and tools' results to keep."""
    best_effort: bool = False
    """Whether its requests queue beyond the TTFT objective: that of the default class is a target
    for the scheduler, which neither operator nor client has set."""
    why: str = "built in"
    """Source of its objectives."""

    def objectives(self, uncached_tokens: int) -> Slo:
        """Return the objectives of a request with this many uncached prompt tokens."""
        extra = self.ttft_per_token_s * max(0, uncached_tokens - self.free_tokens)
        if not extra or self.slo.ttft_s is None:
            return self.slo
        return replace(self.slo, ttft_s=self.slo.ttft_s + extra)

    def terms(
        self, slo: Slo | None = None, weight: float | None = None, priority: int | None = None
    ) -> Terms:
        """Return the terms of a request of this class; its own values come first.

        A request's `slo` replaces all objectives. Priorities are vLLM's: lower first.
        """
        objectives = self.slo if slo is None else slo
        return Terms(
            service_class=self.name,
            ttft_s=objectives.ttft_s,
            tpot_s=objectives.tpot_s,
            ttft_per_token_s=self.ttft_per_token_s if slo is None else 0.0,
            free_tokens=self.free_tokens,
            e2e_s=objectives.e2e_s,
            weight=self.weight if weight is None else weight,
            priority=self.priority if priority is None else priority,
            idle_only=self.idle_only,
        )

    def __str__(self) -> str:
        more = f", +{self.ttft_per_token_s * 1e3:g}ms/token" if self.ttft_per_token_s else ""
        return f"{self.slo}{more}"


LIKE_INTERACTIVE = "as interactive"
HEADROOM = 2.0
"""Factor on the time that an unloaded machine takes: half of the capacity is for other requests."""
BUILT_IN = (
    ServiceClass(name="interactive", slo=Slo(ttft_s=1.5, tpot_s=0.12), ttft_per_token_s=0.002),
    ServiceClass(name="standard", slo=Slo(ttft_s=6.0, tpot_s=0.48), ttft_per_token_s=0.008),
    ServiceClass(name="batch", slo=Slo(), idle_only=True, price=0.5),
)
"""Built-in classes; a class file may replace them by name."""


def service_classes(texts: Sequence[str] = (), file: Path | None = None) -> dict[str, ServiceClass]:
    """Return name → class: the built-in ones, those of `file`, objectives of `--slo`, the default.

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
    """Return the class of requests that name none, if no operator has defined it.

    It is like `standard` if an operator has defined that, else it has the objectives of
    `interactive`, because most answers are read by people.
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


class UnloadedTimes(msgspec.Struct, array_like=True, frozen=True):
    """Seconds of one request on an idle machine; 0 if not measured.

    `prompt_s` to the first token of a prompt of `num_tokens`, `token_s` for each further token of
    the prompt, `tpot_s` for each further token of the answer.
    """

    num_tokens: int = 0
    prompt_s: float = 0.0
    token_s: float = 0.0
    tpot_s: float = 0.0

    def at_best(self, later: "UnloadedTimes") -> "UnloadedTimes":
        """Return the shorter times of both, because other load on the machine only lengthens them.

        For prompts of different lengths, as of two engines, the later times stand.
        """
        if later.num_tokens != self.num_tokens:
            return later if later.num_tokens else self
        names = ("prompt_s", "token_s", "tpot_s")
        times = {name: min(getattr(self, name), getattr(later, name)) for name in names}
        return msgspec.structs.replace(self, **times)


def with_reachable_objectives(row: ServiceClass, alone: UnloadedTimes) -> ServiceClass:
    """Return `row` with objectives that this machine can meet, unless an operator has set them.

    An objective that one request on an idle machine cannot meet becomes `HEADROOM` times its time:
    with 2.1 s for 500 prompt tokens and 4 ms for each further one, ttft=1.5s + 2 ms a token becomes
    4.2 s + 8 ms a token; 30 ms for a token of the answer leave tpot=120ms as it is.
    """
    ttft_s, tpot_s, raised = row.slo.ttft_s, row.slo.tpot_s, []
    if row.why != LIKE_INTERACTIVE or not alone.num_tokens or ttft_s is None or tpot_s is None:
        return row
    per_token_s, over = row.ttft_per_token_s, max(alone.num_tokens - row.free_tokens, 0)
    if alone.token_s > per_token_s:
        per_token_s = round_to_two_digits(HEADROOM * alone.token_s)
        raised.append(f"{1e3 * alone.token_s:.3g} ms for each further one")
    if alone.prompt_s > ttft_s + per_token_s * over:
        ttft_s = round_to_two_digits(HEADROOM * alone.prompt_s)
        raised.insert(0, f"{alone.prompt_s:.3g} s for {alone.num_tokens} prompt tokens")
    if alone.tpot_s > tpot_s:
        tpot_s = round_to_two_digits(HEADROOM * alone.tpot_s)
        raised.append(f"{1e3 * alone.tpot_s:.3g} ms for a token of the answer")
    if not raised:
        return replace(row, why=f"{LIKE_INTERACTIVE}, which this machine can keep")
    why = f"raised: one request alone takes {', '.join(raised)}"
    slo = replace(row.slo, ttft_s=ttft_s, tpot_s=tpot_s)
    return replace(row, slo=slo, ttft_per_token_s=per_token_s, why=why)


def round_to_two_digits(seconds: float) -> float:
    """Round to two digits: 0.2471 → 0.25."""
    return float(f"{seconds:.2g}")


# ── the class file ──────────────────────────────────────────────────────────────────────────


class ServiceClassRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Row of the class file."""

    slo: str = ""
    ttft_per_token: str = ""
    free_tokens: int = 500
    weight: float = 1.0
    priority: int = 0
    idle_only: bool = False
    price: float = 1.0
    limits: KeyLimits = KeyLimits()
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


FIX_HINT = (
    "A row is NAME: {slo: 'ttft=1.5s,tpot=120ms', weight: 1, limits: {…}}; see docs/admission.md."
)


def read_classes(file: Path) -> dict[str, ServiceClass]:
    """Read the classes of a file; UsageError names the file, the class, the field and the fix."""
    content = read_yaml(file, "--classes", FIX_HINT)
    if content is not None and not isinstance(content, dict):
        raise UsageError(f"--classes {file} holds no classes by name.", FIX_HINT)
    return {str(name): read_class(file, str(name), row) for name, row in (content or {}).items()}


def read_class(file: Path, name: str, content: Any) -> ServiceClass:
    """Convert one row of the file."""
    where = f"--classes {file}: class {name[:64]}"
    if not CLASS_NAME.fullmatch(name):
        raise UsageError(
            f"--classes {file}: {name[:64]!r} is no name of a class.",
            "Use letters, digits, dot, dash and underscore, at most 64.",
        )
    try:
        row = msgspec.convert(content or {}, ServiceClassRow)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {str(error)[:200]}.", format_suggestion(str(error))) from error
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


def format_suggestion(error: str) -> str:
    """Return the fix for msgspec's "Object contains unknown field `wait`": the nearest name."""
    if "unknown field" not in error:
        return FIX_HINT
    given = error.partition("`")[2].partition("`")[0]
    there = KeyLimits.__struct_fields__ if "limits" in error else ServiceClassRow.__struct_fields__
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
    """Return the class that a request names: `service_class`, else a `service_tier` that is one.

    OpenAI's tier flex means `batch` and priority `interactive`; auto and others mean `default`, the
    class of the key. Raises RequestError for an unknown `service_class`.
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
    """Parse the field `slo`: {"ttft": "500ms"} or {"ttft_ms": 500}, any subset.

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
    """Return one bound in seconds, between 0 and `MAX_OBJECTIVE_S`."""
    expected = "a number of milliseconds" if in_ms else 'a duration such as "500ms"'
    seconds = 0.0
    if in_ms and isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value / 1e3
    elif not in_ms and isinstance(value, str) and len(value) <= 32:
        try:
            seconds = parse_duration(value, f"slo.{key}")
        except UsageError:
            seconds = 0.0
    if not 0 < seconds <= MAX_OBJECTIVE_S:
        raise RequestError(f"slo.{key} must be {expected}.", param="slo", code="invalid_value")
    return seconds
