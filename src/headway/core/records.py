"""What the engine tells of each step: counts and durations, never a token.

One record a step goes to the server with the step's updates; everything that is plotted or judged
later derives from these raw values. Worked example, one full KV group: a decode row with 99 tokens
computed and a prompt chunk of 4 tokens from position 8:

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
    """What a `perf.StepModel` has learned: seconds of each of its parts, from so many steps.

    `windows` by KV group, 0 for full attention.
    """

    num_observed: int
    parts: tuple[float, ...]
    windows: tuple[int, ...]


class StepRecord(msgspec.Struct, array_like=True, gc=False):
    """One step. Durations in seconds, `started_s` on the engine's monotonic clock.

    `num_preemptions` counts since the engine started; the rest is of this step. Since the step
    before, `gap_s` passed with work waiting or `idle_s` with none. `kv_tokens_read` and
    `group_blocks_used` are by KV group. Of `num_queried_tokens` prompt tokens that were scheduled
    for the first time, `num_cached_tokens` needed no computing. `prefilling` holds (request id,
    index, tokens computed) of the rows that are not decodes, `preempted` (request id, tokens made).
    `experts_read` counts the experts that were hit, over all layers. Grammar masks took `mask_s`
    to compute, of which the step waited for `mask_wait_s`; `compiles_s` are the seconds of each
    grammar compiled since the step before. `predicted_s` is what the cost model had predicted of
    this step and the gap before it, 0 where it predicted nothing. By the same model a prompt token
    takes `prefill_s_per_token` beside what decodes, and `alone_s_per_token` beside nothing. `row_s`
    is the mean time between slot releases while slots or blocks are short; otherwise 0. Of
    `num_waiting`, `num_deferred` wait for their grammar. Of preempted sequences, `num_lost_tokens`
    that had been computed are computed again since they came back in this step; of `num_swapped`
    the KV of `num_swapped_tokens` is copied to host memory instead. Transfers that ended in this
    step took `transfer_s`. While all slots are taken, or blocks are short, and the policy lets
    users reclaim their share, `user_slots` has for each user with a slot what it holds, as so many
    slots, and its weight. Of `num_drafts` guesses that were verified, `num_kept_drafts` were right,
    as `verified` tells by sequence: (who guessed, how many, how many of them right). A grammar
    forced `num_forced` of the tokens that came, nobody sampled them; of those that came so before,
    the step computed `num_forced_rows`. By the cost model it took `verify_s` longer for guesses and
    forced tokens; the drafter made `num_proposed` for the next step in `draft_s`. `draft_failure`
    says why it is not asked, where it has failed. The scheduler chose the guesses in `choose_s`. It
    is a step of `engine`, of several: the server fills that in.
    Of the cached tokens `restored_tokens` came from lower tiers, by their names; the reads that
    ended took `restore_s` by tier. `kv_tiers` tells what each holds, where there are any. Of what
    was asked of them `num_bad_blocks` were damaged and `num_failed_reads` came to nothing. `model`
    is what the cost model has learned so far, with every 20th step.

    Thousands are kept, so they hold tuples: the collector lets go of tuples of numbers, and would
    visit each list again in every full collection.
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
    row_s: float = 0.0
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
        """Whether more tokens may have come than were sampled one by one."""
        return bool(self.verified or self.draft_s or self.num_forced or self.num_forced_rows)

    @property
    def tokens_per_decode(self) -> float:
        """Tokens that a sequence gained that decoded; 1 where nobody guessed or was forced."""
        decodes = self.num_decode_tokens - self.num_drafts - self.num_forced_rows
        return 1 + (self.num_kept_drafts + self.num_forced) / decodes if decodes > 0 else 1.0

    @property
    def duration_s(self) -> float:
        """From the beginning of scheduling to the end of the update."""
        return self.schedule_s + self.execute_s + self.update_s


BEFORE_ANY = StepRecord(
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
"""What is shown as the last step of an engine that has run none."""


class Counted(NamedTuple):
    """What the rows of a step do, by the names of `StepRecord`."""

    num_tokens: int
    num_sampled: int
    num_decode_tokens: int
    num_drafts: int
    num_forced_rows: int
    attended_tokens: int
    kv_tokens_read: list[int]


def counted(rows: list[ScheduledSequence], windows: tuple[int, ...]) -> Counted:
    """The tokens, samples, guesses and context of `rows`; `windows` by KV group, 0 for full
    attention.

    Whole lists at once, for this runs in every step; but for the plain decodes, which are most,
    each row by itself.
    """
    starts = [row.start for row in rows]
    lengths = [len(row.token_ids) for row in rows]
    tokens = sum(lengths)
    read = sum(starts) + tokens
    reads = [
        sum([min(s, window - 1) + n for s, n in zip(starts, lengths)]) if window else read
        for window in windows
    ]
    if tokens == len(rows):  # then nobody guesses
        sampled = [row.sample for row in rows].count(True)
        return Counted(tokens, sampled, sampled, 0, 0, read, reads)
    others = [
        (row, s, n)
        for row, s, n in zip(rows, starts, lengths)
        if n > 1 or row.num_forced or not row.sample
    ]
    plain = len(rows) - len(others)
    decoding = [
        n for row, _, n in others if row.num_forced or (row.sample and n == row.num_drafts + 1)
    ]
    return Counted(
        num_tokens=tokens,
        num_sampled=plain + sum([row.sample + row.num_drafts for row, _, _ in others]),
        num_decode_tokens=plain + sum(decoding),
        num_drafts=sum([row.num_drafts for row, _, _ in others]),
        num_forced_rows=sum([row.num_forced for row, _, _ in others]),
        attended_tokens=read + sum([(n - 1) * s + n * (n - 1) // 2 for _, s, n in others]),
        kv_tokens_read=reads,
    )
