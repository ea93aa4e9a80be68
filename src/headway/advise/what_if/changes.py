"""`--what-if NAME=VALUE`: a row for each name, and how it makes another case of a case.

Names are the server's own options, and what traffic can do: rate, prompts, answers, prefix. A value
that ends in x is a multiple of what is: `rate=2x`, `kv_memory=1.5x`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headway.advise.what_if.case import Case
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
MOST_TIMES = 1000.0
ALIASES = {"kv": "kv_cache_dtype", **{row.old: row.new for row in RENAMED_OPTIONS}}
"""Short and old names → the option's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One NAME=VALUE, checked; `value` as the option's own type, or a multiple."""

    name: str
    text: str
    value: Any
    times: float | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.text}"

    def of(self, case: Case) -> Case:
        """The case with it; UsageError where that cannot be."""
        return ROWS[self.name](case, self)


def parse_change(text: str) -> Change:
    """`rate=2x` → a change; UsageError names what is wrong."""
    name, found, value = text.partition("=")
    name = name.strip().replace("-", "_").lstrip("_")
    name = ALIASES.get(name, name)
    if not found or not value.strip():
        raise UsageError(f"--what-if {text}: write NAME=VALUE.", EXAMPLE)
    if name not in ROWS:
        raise UsageError(
            f"--what-if {text}: {name} cannot be simulated.", f"There are: {', '.join(ROWS)}."
        )
    value = value.strip()
    if value.endswith("x"):
        return Change(name=name, text=value, value=None, times=times_of(text, value))
    if name in ("rate", "prompts", "answers"):
        raise UsageError(f"--what-if {text}: say a multiple, {name}=2x.", EXAMPLE)
    if name == "prefix":
        if not value.isdigit():
            raise UsageError(f"--what-if {text}: say the tokens, prefix=1500.", EXAMPLE)
        return Change(name=name, text=value, value=int(value))
    return Change(name=name, text=value, value=option_value(name, value))


def times_of(text: str, value: str) -> float:
    """2x → 2.0."""
    try:
        times = float(value[:-1])
    except ValueError:
        times = 0.0
    if not 0 < times <= MOST_TIMES:
        raise UsageError(f"--what-if {text}: {value} is no multiple.", "Write 2x, or 0.5x.")
    return times


def option_value(name: str, text: str) -> Any:
    """The value as the option of that name reads it."""
    table, field = fields_of([EngineOptions, ServerOptions])[name]
    return parse_value(table, field, text, f"--what-if {name}")


def number(change: Change, now: float) -> float:
    """The value, or the multiple of what is."""
    return float(change.value) if change.times is None else now * change.times


# ── the traffic ─────────────────────────────────────────────────────────────────────────────


def rate(case: Case, change: Change) -> Case:
    """The same requests, faster."""
    times = change.times or 1.0
    traffic = [msgspec.structs.replace(asked, at_s=asked.at_s / times) for asked in case.traffic]
    return replace(case, traffic=tuple(traffic))


def prompts(case: Case, change: Change) -> Case:
    """Each prompt longer or shorter; what is shared of it stays shared as far as it reaches."""
    times, found = change.times or 1.0, []
    for asked in case.traffic:
        prompt = max(round(asked.prompt * times), 1)
        found.append(
            msgspec.structs.replace(asked, prompt=prompt, cached=min(asked.cached, prompt - 1))
        )
    return replace(case, traffic=tuple(found))


def answers(case: Case, change: Change) -> Case:
    """Each answer longer or shorter."""
    times, found = change.times or 1.0, []
    for asked in case.traffic:
        limit = None if asked.limit is None else max(round(asked.limit * times), 1)
        answer = max(round((asked.answer or 1) * times), 1)
        found.append(msgspec.structs.replace(asked, answer=answer, limit=limit))
    return replace(case, traffic=tuple(found))


def prefix(case: Case, change: Change) -> Case:
    """Prompts begin with the same so many tokens."""
    tokens = int(number(change, max((asked.cached for asked in case.traffic), default=0)))
    traffic = [
        msgspec.structs.replace(asked, cached=min(max(asked.cached, tokens), asked.prompt - 1))
        for asked in case.traffic
    ]
    return replace(case, traffic=tuple(traffic))


# ── the server ──────────────────────────────────────────────────────────────────────────────


def setting(name: str) -> Callable[[Case, Change], Case]:
    """A field of the settings that is an integer."""

    def of(case: Case, change: Change) -> Case:
        value = max(round(number(change, getattr(case.settings, name))), 1)
        fields: dict[str, Any] = {name: value}
        return replace(case, settings=replace(case.settings, **fields))

    return of


def scheduling(name: str) -> Callable[[Case, Change], Case]:
    """A field of the scheduler's settings."""

    def of(case: Case, change: Change) -> Case:
        value, now = change.value, getattr(case.settings.scheduler, name)
        if change.times is not None:
            if not isinstance(now, int | float):
                raise UsageError(f"--what-if {change}: {name} is no number.", EXAMPLE)
            value = type(now)(now * change.times)
        scheduler = replace(case.settings.scheduler, **{name: value})
        return replace(case, settings=replace(case.settings, scheduler=scheduler))

    return of


def with_blocks(case: Case, blocks: tuple[int, ...]) -> Case:
    """The same with so many KV blocks; UsageError where the longest request no longer fits."""
    cache = replace(case.settings.cache, num_blocks=blocks)
    settings = replace(case.settings, cache=cache)
    most = (min(cache.token_blocks) - 1) * cache.block_size
    longest = max(asked.prompt + (asked.answer or 0) for asked in case.traffic)
    if most < longest:
        raise UsageError(
            f"Of that KV a request gets {most:,} tokens; one of the traffic has {longest:,}.",
            "Ask for more.",
        )
    length = min(settings.max_model_len, most)
    return replace(case, settings=replace(settings, max_model_len=length))


def kv_memory(case: Case, change: Change) -> Case:
    """More or fewer KV blocks."""
    cache = case.settings.cache
    if change.times is not None:
        times = change.times
    elif change.value < 0:
        raise UsageError(
            f"--what-if {change}: how much is free there is not known from here.",
            "Give bytes, or a multiple: kv_memory=1.5x.",
        )
    else:
        times = change.value / max(kv_bytes(case, cache.dtype or case.settings.dtype), 1)
    return with_blocks(case, tuple(max(round((n - 1) * times), 1) + 1 for n in cache.num_blocks))


def kv_bytes(case: Case, dtype: str) -> int:
    """Bytes of the case's KV blocks if they held that type."""
    cache = case.settings.cache
    groups = with_open_blocks(case.spec.kv_groups, case.spec, case.settings.dtype, dtype)
    per_block = [group.bytes_per_token(dtype) * cache.block_size for group in groups]
    return sum(n * size for n, size in zip(cache.num_blocks, per_block, strict=False))


def kv_cache_dtype(case: Case, change: Change) -> Case:
    """KV of another type: as many bytes hold more or fewer tokens."""
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


def quantization(case: Case, change: Change) -> Case:
    """Weights of another format; the memory that becomes free is not given to the KV."""
    formats = fields_of([EngineOptions])["quantization"][1].metadata["tunable"]
    if change.value not in formats:
        raise UsageError(f"--what-if {change}: simulated are {', '.join(formats)}.", EXAMPLE)
    packed = case.settings.quantization.packed
    made = Quantization.of(change.value, packed=packed, checkpoint=case.spec.formats)
    return replace(case, settings=replace(case.settings, quantization=made))


def block_size(case: Case, change: Change) -> Case:
    """Blocks of another length in the same memory."""
    cache, size = case.settings.cache, int(number(change, case.settings.cache.block_size))
    blocks = tuple(max((n - 1) * cache.block_size // size, 1) + 1 for n in cache.num_blocks)
    settings = replace(case.settings, cache=replace(cache, block_size=size))
    return with_blocks(replace(case, settings=settings), blocks)


def prefix_cache(case: Case, change: Change) -> Case:
    """Whether what was computed is kept, and by which rule."""
    kept = case.settings.cache.prefix_cache or EngineOptions().prefix_cache_policy
    rule = change.value if change.name == "prefix_cache_policy" else kept if change.value else ""
    cache = replace(case.settings.cache, prefix_cache=rule)
    return replace(case, settings=replace(case.settings, cache=cache))


def speculative_method(case: Case, change: Change) -> Case:
    """Without guesses; what guesses would bring is not known before they were made."""
    if change.value != "off":
        raise UsageError(
            f"--what-if {change}: what guesses bring here is known once they are made.",
            "Start it with --speculative-method auto; speculative_method=off is simulated.",
        )
    return replace(case, settings=replace(case.settings, speculation=SpeculationConfig()))


def replicas(case: Case, change: Change) -> Case:
    """So many engines, each with a machine of its own as this one."""
    return replace(case, replicas=max(round(number(change, case.replicas)), 1), apart=True)


def max_queue(case: Case, change: Change) -> Case:
    """How many may wait."""
    return replace(case, max_queue=max(round(number(change, case.max_queue or 0)), 1))


def max_queue_wait(case: Case, change: Change) -> Case:
    """How long somebody may be predicted to wait."""
    return replace(case, max_queue_wait_s=number(change, case.max_queue_wait_s or 0.0))


ROWS: dict[str, Callable[[Case, Change], Case]] = {
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
"""Name → what it changes."""
