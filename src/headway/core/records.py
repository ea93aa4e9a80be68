"""Step records: counts and durations of each step, never a token.

One record per step goes to the server with the step's updates; everything that is plotted or judged
is derived from these raw values. Worked example, one full KV group: a decode row with 99 computed
tokens, and a prompt chunk of 4 tokens from position 8:

    tokens 5, of which 1 decodes and 4 prefill
    attended  100 + (9 + 10 + 11 + 12) = 142     context seen, summed over tokens: attention FLOPs
    read      100 + 12 = 112                     KV tokens read, summed over rows: bytes
"""

from typing import NamedTuple

import msgspec

from headway.core.plan import ScheduledSequence


class TierUse(msgspec.Struct, array_like=True, gc=False):
    """Bytes of KV blocks that a tier holds for later prompts."""

    tier: str
    num_bytes: int


class ModelSnapshot(msgspec.Struct, array_like=True, gc=False):
    """State of a `perf.StepModel`: seconds of each of its parts, and the number of learned steps.

    `windows` by KV group, 0 for full attention.
    """

    num_observed: int
    parts: tuple[float, ...]
    windows: tuple[int, ...]


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """Record of one step. Durations are in seconds, `started_s` is on the engine's monotonic clock.

    `num_preemptions` counts from the engine's start; all other values are of this step. Since the
    step before, `gap_s` passed with work waiting or `idle_s` without. `kv_tokens_read` and
    `group_blocks_used` are by KV group. Of `num_queried_tokens` prompt tokens scheduled for the
    first time, `num_cached_tokens` needed no computing. `prefilling` has (request id, index, tokens
    computed) of the rows that are not decodes, `preempted` (request id, generated tokens).
    `experts_read` counts the experts that were used, over all layers. Grammar masks took `mask_s`
    to compute, of which the step waited for `mask_wait_s`; `compiles_s` are the seconds of each
    grammar compiled since the step before. `predicted_s` is the cost model's prediction of this
    step and the gap before it, 0 without one. By the same model a prompt token takes
    `prefill_s_per_token` next to the step's decodes, and `alone_s_per_token` without any. `slot_s`
    is the mean time between slot releases while slots or blocks are short; otherwise 0. Of
    `num_waiting` requests, `num_deferred` wait for their grammar. Preempted sequences that resumed
    in this step recompute `num_lost_tokens`; `num_swapped` others have `num_swapped_tokens` copied
    to host memory instead. Transfers that ended in this step took `transfer_s`. While all slots are
    taken, or blocks are short, and users may reclaim their share, `user_slots` has for each user
    with a slot its holding, in slots, and its weight. Of `num_drafts` verified draft tokens,
    `num_kept_drafts` were accepted; `verified` has them by sequence: (proposer, verified,
    accepted). A grammar forced `num_forced` of the new tokens, which were not sampled; the step
    computed `num_forced_rows` of those forced before. By the cost model it took `verify_s` longer
    for draft tokens and forced tokens; the drafter made `num_proposed` for the next step in
    `draft_s`. `draft_failure` says why it is not asked, if it failed. The scheduler chose the draft
    tokens in `choose_s`. `engine` is the number of the engine, which the server fills in.
    Of the cached tokens `restored_tokens` came from lower tiers, by name; the reads that ended took
    `restore_s` by tier. `kv_tiers` has the bytes that each tier holds. Of the reads from them
    `num_bad_blocks` were damaged and `num_failed_reads` failed. `model` is the state of the cost
    model, in every 20th step.

    Thousands are kept, so they have tuples: the garbage collector untracks tuples of numbers, and
    would visit each list in every full collection.
    """

    step: int
    started_s: float
    num_running: int
    num_waiting: int
    num_tokens: int
    num_sampled: int
    kv_blocks_used: int
    kv_usage: float
    num_preemptions: int
    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0
    gap_s: float = 0.0
    idle_s: float = 0.0
    num_decode_tokens: int = 0
    attended_tokens: int = 0
    kv_tokens_read: tuple[int, ...] = ()
    group_blocks_used: tuple[int, ...] = ()
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    prefilling: tuple[tuple[int, int, int], ...] = ()
    preempted: tuple[tuple[int, int], ...] = ()
    experts_read: int = 0
    mask_s: float = 0.0
    mask_wait_s: float = 0.0
    compiles_s: tuple[float, ...] = ()
    predicted_s: float = 0.0
    prefill_s_per_token: float = 0.0
    alone_s_per_token: float = 0.0
    num_lost_tokens: int = 0
    num_swapped: int = 0
    num_swapped_tokens: int = 0
    transfer_s: float = 0.0
    slot_s: float = 0.0
    num_deferred: int = 0
    user_slots: dict[str, tuple[float, float]] = {}
    num_drafts: int = 0
    num_kept_drafts: int = 0
    num_proposed: int = 0
    draft_s: float = 0.0
    choose_s: float = 0.0
    verify_s: float = 0.0
    verified: tuple[tuple[str, int, int], ...] = ()
    num_forced: int = 0
    num_forced_rows: int = 0
    draft_failure: str = ""
    restored_tokens: dict[str, int] = {}
    restore_s: dict[str, float] = {}
    kv_tiers: tuple[TierUse, ...] = ()
    num_bad_blocks: int = 0
    num_failed_reads: int = 0
    model: ModelSnapshot | None = None
    engine: int = 0

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decode_tokens

    @property
    def has_more(self) -> bool:
        """Return whether a sequence may have got more than one token."""
        return bool(self.verified or self.draft_s or self.num_forced or self.num_forced_rows)

    @property
    def tokens_per_decode(self) -> float:
        """Return the tokens per decoding sequence; 1 without draft tokens and forced tokens."""
        decodes = self.num_decode_tokens - self.num_drafts - self.num_forced_rows
        return 1 + (self.num_kept_drafts + self.num_forced) / decodes if decodes > 0 else 1.0

    @property
    def duration_s(self) -> float:
        """Return the seconds from the start of scheduling to the end of the update."""
        return self.schedule_s + self.execute_s + self.update_s


NO_STEP = StepRecord(
    step=0,
    started_s=0.0,
    num_running=0,
    num_waiting=0,
    num_tokens=0,
    num_sampled=0,
    kv_blocks_used=0,
    kv_usage=0.0,
    num_preemptions=0,
)
"""Last step of an engine that has run none, for display."""


class RowCounts(NamedTuple):
    """Work of the rows of a step, with the names of `StepRecord`."""

    num_tokens: int
    num_sampled: int
    num_decode_tokens: int
    num_drafts: int
    num_forced_rows: int
    attended_tokens: int
    kv_tokens_read: list[int]


def count_rows(rows: list[ScheduledSequence], windows: tuple[int, ...]) -> RowCounts:
    """Count the tokens, samples, draft tokens and context of `rows`.

    `windows` by KV group, 0 for full attention. It runs in every step, so plain decodes, which are
    most, are counted by whole lists, and only the others row by row.
    """
    starts = [row.start for row in rows]
    lengths = [len(row.token_ids) for row in rows]
    tokens = sum(lengths)
    read = sum(starts) + tokens
    reads = [
        sum([min(s, window - 1) + n for s, n in zip(starts, lengths)]) if window else read
        for window in windows
    ]
    if tokens == len(rows):  # plain decodes and single tokens only
        sampled = [row.sample for row in rows].count(True)
        return RowCounts(tokens, sampled, sampled, 0, 0, read, reads)
    others = [
        (row, s, n)
        for row, s, n in zip(rows, starts, lengths)
        if n > 1 or row.num_forced or not row.sample
    ]
    plain = len(rows) - len(others)
    decoding = [
        n for row, _, n in others if row.num_forced or (row.sample and n == row.num_drafts + 1)
    ]
    return RowCounts(
        num_tokens=tokens,
        num_sampled=plain + sum([row.sample + row.num_drafts for row, _, _ in others]),
        num_decode_tokens=plain + sum(decoding),
        num_drafts=sum([row.num_drafts for row, _, _ in others]),
        num_forced_rows=sum([row.num_forced for row, _, _ in others]),
        attended_tokens=read + sum([(n - 1) * s + n * (n - 1) // 2 for _, s, n in others]),
        kv_tokens_read=reads,
    )
