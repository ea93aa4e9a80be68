"""Models whose layers keep states: what memory those take, how often one is kept for others.

A KV group of kind `state` has a block a sequence, whatever its length, and one for each checkpoint:
a copy of the state behind a full block of tokens, from which a prompt that begins alike goes on.
Worked example, Qwen3-Next: a state takes 79 MB, a token's keys and values 24 KiB, so there is a
checkpoint every 3,216 tokens, where both take the same.
"""

from headway.config.options import EngineOptions
from headway.config.reasons import Reasons
from headway.config.speculation_config import choose_method
from headway.core.errors import CapacityError, UsageError
from headway.spec import KVGroupSpec, ModelSpec
from headway.spec.kv_format import kv_format

MOST_SHARE = 0.5
"""Of the KV memory the states of running sequences take so much at most."""

FEW = ", and the layers that attend are few already"


def checkpoint_blocks(model: ModelSpec, kv_dtype: str, block_size: int) -> int:
    """After how many blocks of tokens there is a checkpoint: as many as take what it takes.

    0 for a model without states, 1 for one without keys and values.
    """
    if not model.slot_bytes:
        return 0
    block = model.kv_bytes_per_token(kv_dtype) * block_size
    return max(1, -(-model.slot_bytes // block)) if block else 1


def plan_states(
    options: EngineOptions,
    group: KVGroupSpec,
    token_bytes: int,
    every: int,
    budget: int,
    max_num_seqs: int,
    max_len: int,
    reasons: Reasons,
) -> int:
    """States that `budget` bytes hold, beside tokens of `token_bytes` with one `every` so many.

    One for each sequence, and one more while a newer is begun; what is left is shared with tokens.
    """
    size = group.slot_bytes
    running = min(max_num_seqs, int(budget * MOST_SHARE) // size - 2)
    if running < 1:
        raise CapacityError(
            f"{budget / 2**20:.0f} MiB for KV do not hold three states of {size / 2**20:.2f} MiB.",
            "Raise --kv-memory, or serve a smaller model.",
        )
    num_states = 0
    if options.prefix_cache:
        free_bytes = budget - (running + 2) * size
        most = min(free_bytes // (every * token_bytes + size), max_num_seqs * -(-max_len // every))
        num_states = max(1, most)
    short = "" if running == max_num_seqs else f", not of the {max_num_seqs} of max_num_seqs"
    why = f"of {size / 2**20:.2f} MiB in {len(group.layers)} layers: of {running} sequences{short}"
    if num_states:
        why += f", and {num_states} for prefixes, one each {every:,} tokens and at a prompt's end"
    return reasons.choose("states", (running + 1 + num_states, why))


def refuse_unread(options: EngineOptions, model: ModelSpec) -> None:
    """UsageError, by name, for what states do not do yet."""
    if model.states is None:
        return
    method = choose_method(options)
    guesses = "" if method in ("auto", "off") else method
    kv = options.kv_cache_dtype
    int4 = kv if kv != "auto" and kv_format(kv).block_size else ""
    rows = (
        ("--speculative-method", guesses, ", which do not go back behind a wrong guess yet"),
        ("--draft-model", options.draft_model, ", which do not go back behind a wrong guess yet"),
        ("--kv-disk", options.kv_disk, ", which are not written to a disk yet"),
        ("--kv-read", options.kv_read, FEW),
        ("--kv-keep", options.kv_keep, FEW),
        ("--kv-layers", options.kv_layers, FEW),
        ("--kv-cache-dtype", int4, ", beside which open blocks are not held yet"),
    )
    for name, given, why in rows:
        if given:
            why = f"{model.architecture} keeps states of sequences{why}"
            raise UsageError(f"{name} {given}: {why}.", f"Leave {name} out.")
