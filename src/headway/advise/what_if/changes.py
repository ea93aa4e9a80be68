"""`--what-if NAME=VALUE`: a row for each name, with the function that changes a case.

Names are the server's own options, and properties of the traffic: rate, prompts, answers, prefix. A
value that ends in x is a multiple of the present one: `rate=2x`, `kv_memory=1.5x`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headway.advise.what_if.case import WhatIfCase
from headway.config.memory_plan import with_open_blocks
from headway.config.options import EngineOptions, ServerOptions
from headway.config.options.field import parse_value
from headway.config.options.read import fields_of
from headway.config.options.renamed import RENAMED_OPTIONS
from headway.config.speculation_config import SpeculationConfig
from headway.core.errors import UsageError
from headway.spec.kv_format import APART, ROUNDED, kv_format
from headway.spec.quantization import Quantization

EXAMPLE = "headway doctor URL --what-if rate=2x --what-if max_num_seqs=128"
MAX_MULTIPLE = 1000.0
ALIASES = {"kv": "kv_cache_dtype", **{row.old: row.new for row in RENAMED_OPTIONS}}
"""Short and old names → the option's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfChange:
    """One checked NAME=VALUE; `value` has the option's own type, or `times` is a multiple."""

    name: str
    text: str
    value: Any
    times: float | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.text}"

    def of(self, case: WhatIfCase) -> WhatIfCase:
        """Return the changed case; UsageError where the change is not possible."""
        return ROWS[self.name](case, self)


def parse_change(text: str) -> WhatIfChange:
    """Parse `rate=2x`; UsageError names what is wrong."""
    name, separator, value = text.partition("=")
    name = name.strip().replace("-", "_").lstrip("_")
    name = ALIASES.get(name, name)
    if not separator or not value.strip():
        raise UsageError(f"--what-if {text}: write NAME=VALUE.", EXAMPLE)
    if name not in ROWS:
        raise UsageError(
            f"--what-if {text}: {name} cannot be simulated.", f"There are: {', '.join(ROWS)}."
        )
    value = value.strip()
    if value.endswith("x"):
        return WhatIfChange(name=name, text=value, value=None, times=parse_multiple(text, value))
    if name in ("rate", "prompts", "answers"):
        raise UsageError(f"--what-if {text}: give a multiple, {name}=2x.", EXAMPLE)
    if name == "prefix":
        if not value.isdigit():
            raise UsageError(f"--what-if {text}: give the tokens, prefix=1500.", EXAMPLE)
        return WhatIfChange(name=name, text=value, value=int(value))
    return WhatIfChange(name=name, text=value, value=option_value(name, value))


def parse_multiple(text: str, value: str) -> float:
    """Parse 2x → 2.0."""
    try:
        times = float(value[:-1])
    except ValueError:
        times = 0.0
    if not 0 < times <= MAX_MULTIPLE:
        raise UsageError(f"--what-if {text}: {value} is no multiple.", "Write 2x, or 0.5x.")
    return times


def option_value(name: str, text: str) -> Any:
    """Return the value as the option of that name parses it."""
    table, field = fields_of([EngineOptions, ServerOptions])[name]
    return parse_value(table, field, text, f"--what-if {name}")


def numeric_value(change: WhatIfChange, now: float) -> float:
    """Return the value, or the multiple of `now`."""
    return float(change.value) if change.times is None else now * change.times


# ── the traffic ─────────────────────────────────────────────────────────────────────────────


def rate(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return the same requests at another rate."""
    times = change.times or 1.0
    traffic = [
        msgspec.structs.replace(request, at_s=request.at_s / times) for request in case.traffic
    ]
    return replace(case, traffic=tuple(traffic))


def prompts(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return longer or shorter prompts; a shared prefix stays shared as far as it reaches."""
    times, requests = change.times or 1.0, []
    for request in case.traffic:
        prompt = max(round(request.prompt * times), 1)
        requests.append(
            msgspec.structs.replace(request, prompt=prompt, cached=min(request.cached, prompt - 1))
        )
    return replace(case, traffic=tuple(requests))


def answers(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return longer or shorter answers."""
    times, requests = change.times or 1.0, []
    for request in case.traffic:
        limit = None if request.limit is None else max(round(request.limit * times), 1)
        answer = max(round((request.answer or 1) * times), 1)
        requests.append(msgspec.structs.replace(request, answer=answer, limit=limit))
    return replace(case, traffic=tuple(requests))


def prefix(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return prompts that begin with the same number of tokens."""
    tokens = int(
        numeric_value(change, max((request.cached for request in case.traffic), default=0))
    )
    traffic = [
        msgspec.structs.replace(
            request, cached=min(max(request.cached, tokens), request.prompt - 1)
        )
        for request in case.traffic
    ]
    return replace(case, traffic=tuple(traffic))


# ── the server ──────────────────────────────────────────────────────────────────────────────


def setting(name: str) -> Callable[[WhatIfCase, WhatIfChange], WhatIfCase]:
    """Return the change of an integer field of the settings."""

    def of(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
        value = max(round(numeric_value(change, getattr(case.settings, name))), 1)
        fields: dict[str, Any] = {name: value}
        return replace(case, settings=replace(case.settings, **fields))

    return of


def scheduling(name: str) -> Callable[[WhatIfCase, WhatIfChange], WhatIfCase]:
    """Return the change of a field of the scheduler's settings."""

    def of(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
        value, now = change.value, getattr(case.settings.scheduler, name)
        if change.times is not None:
            if not isinstance(now, int | float):
                raise UsageError(f"--what-if {change}: {name} is no number.", EXAMPLE)
            value = type(now)(now * change.times)
        scheduler = replace(case.settings.scheduler, **{name: value})
        return replace(case, settings=replace(case.settings, scheduler=scheduler))

    return of


def with_blocks(case: WhatIfCase, blocks: tuple[int, ...]) -> WhatIfCase:
    """Return the case with these numbers of KV blocks; UsageError where the longest request does
    not fit."""
    cache = replace(case.settings.cache, num_blocks=blocks)
    settings = replace(case.settings, cache=cache)
    most = (min(cache.token_blocks) - 1) * cache.block_size
    longest = max(request.prompt + (request.answer or 0) for request in case.traffic)
    if most < longest:
        raise UsageError(
            f"Of that KV a request gets {most:,} tokens; one of the traffic has {longest:,}.",
            "Ask for more.",
        )
    length = min(settings.max_model_len, most)
    return replace(case, settings=replace(settings, max_model_len=length))


def kv_memory(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return the case with more or fewer KV blocks."""
    cache = case.settings.cache
    if change.times is not None:
        times = change.times
    elif change.value < 0:
        raise UsageError(
            f"--what-if {change}: the free memory of its machine is not known.",
            "Give bytes, or a multiple: kv_memory=1.5x.",
        )
    else:
        times = change.value / max(kv_bytes(case, cache.dtype or case.settings.dtype), 1)
    return with_blocks(case, tuple(max(round((n - 1) * times), 1) + 1 for n in cache.num_blocks))


def kv_bytes(case: WhatIfCase, dtype: str) -> int:
    """Return the bytes of the case's KV blocks with KV of `dtype`."""
    cache = case.settings.cache
    groups = with_open_blocks(case.spec.kv_groups, case.spec, case.settings.dtype, dtype)
    per_block = [group.bytes_per_token(dtype) * cache.block_size for group in groups]
    return sum(n * size for n, size in zip(cache.num_blocks, per_block, strict=False))


def kv_cache_dtype(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return the case with KV of another type: the same bytes hold more or fewer tokens."""
    cache = case.settings.cache
    old, new = cache.dtype or case.settings.dtype, change.value
    new = case.settings.dtype if new == "auto" else new
    if cache.open_blocks or (new in (*ROUNDED, *APART) and kv_format(new).block_size):
        raise UsageError(
            f"--what-if {change}: KV whose open blocks wait to be rounded is not simulated.",
            "int8 is.",
        )
    share = kv_bytes(case, old) / kv_bytes(case, new)
    blocks = tuple(round((count - 1) * share) + 1 for count in cache.num_blocks)
    settings = replace(case.settings, cache=replace(cache, dtype=new))
    return with_blocks(replace(case, settings=settings), blocks)


def quantization(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return the case with weights of another format; freed memory is not given to the KV."""
    formats = fields_of([EngineOptions])["quantization"][1].metadata["tunable"]
    if change.value not in formats:
        raise UsageError(f"--what-if {change}: simulated are {', '.join(formats)}.", EXAMPLE)
    packed = case.settings.quantization.packed
    made = Quantization.of(change.value, packed=packed, checkpoint=case.spec.formats)
    return replace(case, settings=replace(case.settings, quantization=made))


def block_size(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return the case with blocks of another length in the same memory."""
    cache, size = case.settings.cache, int(numeric_value(change, case.settings.cache.block_size))
    blocks = tuple(max((n - 1) * cache.block_size // size, 1) + 1 for n in cache.num_blocks)
    settings = replace(case.settings, cache=replace(cache, block_size=size))
    return with_blocks(replace(case, settings=settings), blocks)


def prefix_cache(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return the case with the prefix cache on or off, or with another eviction policy."""
    present = case.settings.cache.prefix_cache or EngineOptions().prefix_cache_policy
    rule = change.value if change.name == "prefix_cache_policy" else present if change.value else ""
    cache = replace(case.settings.cache, prefix_cache=rule)
    return replace(case, settings=replace(case.settings, cache=cache))


def speculative_method(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return the case without speculation; gains of draft tokens that were never made are
    unknown."""
    if change.value != "off":
        raise UsageError(
            f"--what-if {change}: the gain of draft tokens is known once they are made.",
            "Start it with --speculative-method auto; speculative_method=off is simulated.",
        )
    return replace(case, settings=replace(case.settings, speculation=SpeculationConfig()))


def replicas(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return the case with this number of engines, each on a machine of its own like this one."""
    return replace(case, replicas=max(round(numeric_value(change, case.replicas)), 1), apart=True)


def max_queue(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return the case with another limit of waiting requests."""
    return replace(case, max_queue=max(round(numeric_value(change, case.max_queue or 0)), 1))


def max_queue_wait(case: WhatIfCase, change: WhatIfChange) -> WhatIfCase:
    """Return the case with another limit of the predicted waiting time."""
    return replace(case, max_queue_wait_s=numeric_value(change, case.max_queue_wait_s or 0.0))


ROWS: dict[str, Callable[[WhatIfCase, WhatIfChange], WhatIfCase]] = {
    "rate": rate,
    "prompts": prompts,
    "answers": answers,
    "prefix": prefix,
    "replicas": replicas,
    "max_num_seqs": setting("max_num_seqs"),
    "max_num_batched_tokens": setting("max_num_batched_tokens"),
    "policy": scheduling("policy"),
    "late": scheduling("late"),
    "lane_share": scheduling("lane_share"),
    "long_prefill": scheduling("long_prefill_s"),
    "aging": scheduling("aging_tokens"),
    "kv_memory": kv_memory,
    "kv_cache_dtype": kv_cache_dtype,
    "quantization": quantization,
    "block_size": block_size,
    "prefix_cache": prefix_cache,
    "prefix_cache_policy": prefix_cache,
    "speculative_method": speculative_method,
    "max_queue": max_queue,
    "max_queue_wait": max_queue_wait,
}
"""Name → the function that changes a case."""
