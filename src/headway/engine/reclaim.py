"""Slots and KV blocks that users above their share give back to users below it.

A user's share is its part of the engine, by weight among the users present. It holds its dominant
share: of slots or of KV blocks, whichever is larger (Ghodsi et al. 2011, Dominant Resource
Fairness). A waiting request of a user below its share may reclaim a slot once it has waited for a
quarter of the time that its objective leaves. Worked example, 64 slots, equal weights:

    A runs 64 streams of 1,900 tokens and holds 64 / 64; B holds 0 of its 32 / 64
    B's request waits for 0.25 x (1.5 s - 0.1 s of prefill) = 0.35 s
    then A's cheapest sequence is preempted, and B's starts in its place
    with 32 and 32 none is given back: A would hold less than B afterwards

There is no ping-pong: afterwards the giver still holds at least as much as the claimant, by weight,
so no chain of reclaims returns to where it began. The sequence that gave its slot most often is
chosen last, and not before it has a new token. Recomputing reclaimed sequences takes at most
`RECOMPUTE_SHARE` of the time.
"""

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Sequence as TypingSequence
from math import inf

from headway.admit.queue import DEFAULT_TTFT_S, RECLAIM_WAIT_SHARE
from headway.core.clock import Clock
from headway.engine.kv import KVCache
from headway.engine.kv_transfers import KVTransfers
from headway.engine.policy.policy import Policy, needs_prefill
from headway.engine.policy.users import user_of
from headway.engine.sequence import RUNNING, WAITING, Sequence

REFERENCE_PROMPT_TOKENS = 256
"""Prompt tokens over which the seconds of one are averaged."""
RECOMPUTE_SHARE, RECOMPUTE_BURST_S = 0.1, 2.0
"""Share of the time that recomputation may take, and seconds of it that may be saved up."""
HOLDINGS_MAX_AGE_S = 0.02
"""Age up to which reported holdings are reused; claimants wait for some 300 ms."""


class Reclaim:
    """Decides which sequences may reclaim a slot and from which, and accounts for the cost."""

    def __init__(
        self, kv: KVCache, policy: Policy, transfers: KVTransfers, clock: Clock, max_num_seqs: int
    ) -> None:
        self.kv = kv
        self.policy = policy
        self.transfers = transfers
        self.clock = clock
        self.max_num_seqs = max_num_seqs
        self._credit_s = RECOMPUTE_BURST_S
        self._credited_s = clock.now_s()
        self._reclaimed_ids: set[int] = set()
        self._user_slots: dict[str, tuple[float, float]] = {}
        self._counted_s = -inf

    # ── claimants ─────────────────────────────────────────────────────────────────────────────

    @property
    def is_affordable(self) -> bool:
        """Return whether this policy reclaims, and past reclaims have not cost too much."""
        if not self.policy.reclaims:
            return False
        now_s = self.clock.now_s()
        earned_s = RECOMPUTE_SHARE * (now_s - self._credited_s)
        self._credit_s = min(self._credit_s + earned_s, RECOMPUTE_BURST_S)
        self._credited_s = now_s
        return self._credit_s > 0

    def claimants(
        self, running: list[Sequence], waiting: TypingSequence[Sequence]
    ) -> Iterator[Sequence]:
        """Yield those of `waiting` that may reclaim a slot now, by user and arrival.

        The caller starts each, or not, before it takes the next.
        """
        if self.policy.users.num_present < 2 or not self.is_affordable:
            return
        held = self.holdings(running)
        token_s = (
            self.transfers.predict_prefill_s(REFERENCE_PROMPT_TOKENS) / REFERENCE_PROMPT_TOKENS
        )
        passed: set[str] = set()
        for sequence in list(waiting):
            user = user_of(sequence)
            if user in passed:
                continue
            if not self._is_below(user, held):
                passed.add(user)
            elif self._is_due(sequence, token_s) and self.policy.may_reclaim(sequence, waiting):
                yield sequence
                held = self.holdings(running)
                if sequence.state == WAITING:
                    passed.add(user)

    def _is_below(self, user: str, held: dict[str, "Holding"]) -> bool:
        """Return whether a user holds less than its share."""
        holds = held.get(user)
        return holds is None or self.dominant_share(holds) < self.policy.users.share(user)

    def _is_due(self, sequence: Sequence, token_s: float) -> bool:
        """Return whether `sequence` has waited long enough; one that had a slot before has.

        A token of its prompt takes `token_s`.
        """
        if sequence.request.terms.idle_only or self.transfers.is_in_transfer(sequence):
            return False
        if sequence.num_generated:
            return True
        matched = self.policy.num_matched_tokens(sequence)
        objective_s = sequence.request.terms.first_token_s(sequence.num_prompt - matched)
        objective_s = min(objective_s, DEFAULT_TTFT_S)
        own_s = token_s * (len(sequence.tokens) - matched)
        waited_s = self.clock.now_s() - sequence.arrived_s
        return waited_s >= RECLAIM_WAIT_SHARE * max(objective_s - own_s, 0.0)

    # ── victims ─────────────────────────────────────────────────────────────────────────────

    def victims(
        self, claimant: Sequence, running: list[Sequence], promised: list[int]
    ) -> list[Sequence]:
        """Return the sequences to preempt for `claimant`, in order; [] when it may not have them.

        `promised` free blocks by group belong to running sequences. The user with the largest
        holding gives first: of its sequences an idle one, then the one that gave its slot least
        often, then the cheapest to compute again, then the newest.
        """
        slots, blocks = self._missing_slots_and_blocks(claimant, running, promised)
        held, users, user = self.holdings(running), self.policy.users, user_of(claimant)
        after = self._with(held.get(user) or Holding(0, [0] * len(blocks)), claimant)
        enough = self.dominant_share(after) / users.weight(user)
        candidates = [s for s in running if self._may_give(s, claimant)]
        chosen: list[Sequence] = []

        def rank(s: Sequence) -> tuple[float, bool, int, int, int]:
            level = self.dominant_share(held[user_of(s)]) / users.weight(user_of(s))
            idle = s.request.terms.idle_only
            return -level, not idle, s.num_reclaimed, s.computed, -s.sequence_id

        while slots > 0 or any(count > 0 for count in blocks):
            candidates = [s for s in candidates if self._can_spare(s, held, enough)]
            if not candidates:
                return []
            victim = min(candidates, key=rank)
            candidates.remove(victim)
            chosen.append(victim)
            held[user_of(victim)] = self._without(held[user_of(victim)], victim)
            slots -= 1
            blocks = [n - freed for n, freed in zip(blocks, self._frees(victim), strict=True)]
        return chosen

    def _missing_slots_and_blocks(
        self, claimant: Sequence, running: list[Sequence], promised: list[int]
    ) -> tuple[int, list[int]]:
        """Return the slots, and the blocks by group, that `claimant` lacks to start.

        Blocks that running sequences take in this step, before its first chunk, count too.
        """
        slots = len(running) + 1 - self.max_num_seqs
        growing = sum(s.computed % self.kv.block_size == 0 for s in running)
        hit = None if claimant.host_tables else self.kv.match_prefix(claimant, partly=False)
        leaving = self.transfers.leaving()
        return slots, [
            needed + promise + growing - coming - pool.num_free
            for needed, promise, coming, pool in zip(
                self.kv.still_needed(claimant, hit), promised, leaving, self.kv.pools, strict=True
            )
        ]

    def _may_give(self, sequence: Sequence, claimant: Sequence) -> bool:
        if sequence.state != RUNNING or user_of(sequence) == user_of(claimant):
            return False
        has_progressed = not sequence.num_reclaimed or not needs_prefill(sequence)
        return has_progressed and self.policy.may_yield(sequence, claimant)

    def _can_spare(self, sequence: Sequence, held: dict[str, "Holding"], enough: float) -> bool:
        """Return whether its user is above its share, and without it holds `enough` by weight."""
        user, users = user_of(sequence), self.policy.users
        remaining_share = self.dominant_share(self._without(held[user], sequence))
        return (
            self.dominant_share(held[user]) > users.share(user)
            and remaining_share / users.weight(user) >= enough
        )

    def choose_victim(self, victims: list[Sequence], running: list[Sequence]) -> Sequence:
        """Return which of `victims`, in the order of the policy, is preempted for a decode.

        It is the first, unless its user is within its share and the user of another is above.
        """
        chosen, users = victims[0], self.policy.users
        if len(victims) == 1 or not self.policy.reclaims or users.num_present < 2:
            return chosen
        held = self.holdings(running)
        above = {
            user for user, holds in held.items() if self.dominant_share(holds) > users.share(user)
        }
        if user_of(chosen) in above:
            return chosen
        return next((s for s in victims if self._yields_instead(s, chosen, above)), chosen)

    def _yields_instead(self, sequence: Sequence, instead_of: Sequence, above: set[str]) -> bool:
        return user_of(sequence) in above and self.policy.may_yield(sequence, instead_of)

    # ── holdings ────────────────────────────────────────────────────────────────────────────

    def holdings(self, running: list[Sequence]) -> dict[str, "Holding"]:
        """Return the slots and blocks of each user."""
        whose: dict[str, list[Sequence]] = {}
        for sequence in running:
            whose.setdefault(user_of(sequence), []).append(sequence)
        return {user: Holding(len(own), self.kv.num_live(own)) for user, own in whose.items()}

    def dominant_share(self, holds: "Holding") -> float:
        """Return the dominant share: the largest part of slots or of a group's blocks."""
        parts = [n / (p.num_blocks - 1) for n, p in zip(holds.blocks, self.kv.pools, strict=True)]
        return max(holds.slots / self.max_num_seqs, *parts)

    def user_slots(self, running: list[Sequence]) -> dict[str, tuple[float, float]]:
        """Return by user (its dominant share in slots, its weight), for the step's record.

        Counted again after `HOLDINGS_MAX_AGE_S`: it takes as long as a step of 256 sequences, 1 ms.
        """
        if not self.is_affordable:
            return {}
        now_s = self.clock.now_s()
        if now_s >= self._counted_s + HOLDINGS_MAX_AGE_S:
            weight = self.policy.users.weight
            self._counted_s = now_s
            self._user_slots = {
                user: (self.dominant_share(holds) * self.max_num_seqs, weight(user))
                for user, holds in self.holdings(running).items()
            }
        return self._user_slots

    def _without(self, holds: "Holding", sequence: Sequence) -> "Holding":
        live = self.kv.num_live([sequence])
        blocks = [n - b for n, b in zip(holds.blocks, live, strict=True)]
        return Holding(holds.slots - 1, blocks)

    def _with(self, holds: "Holding", claimant: Sequence) -> "Holding":
        needed = self.kv.still_needed(claimant)
        return Holding(holds.slots + 1, [a + b for a, b in zip(holds.blocks, needed, strict=True)])

    def _frees(self, victim: Sequence) -> list[int]:
        """Return the blocks by group that preempting it frees, promised ones included."""
        alone = self.kv.num_unshared(
            [self.kv.live(victim, group) for group in range(len(self.kv.pools))]
        )
        needed = self.kv.still_needed(victim)
        return [a + b for a, b in zip(alone, needed, strict=True)]

    # ── cost ────────────────────────────────────────────────────────────────────────────────

    def count_reclaimed(self, victim: Sequence) -> None:
        """Note that `victim` was preempted for another user."""
        victim.num_reclaimed += 1
        self._reclaimed_ids.add(victim.sequence_id)

    def charge_resumed(self, sequence: Sequence, num_cached: int) -> None:
        """Charge the recomputation, or the copy, of a reclaimed sequence that runs again."""
        if sequence.sequence_id in self._reclaimed_ids:
            self._reclaimed_ids.remove(sequence.sequence_id)
            if sequence.host_tables:
                self._credit_s -= self.transfers.copy_s(self.transfers.counts(sequence))
            else:
                lost = max(sequence.num_lost - num_cached, 0)
                self._credit_s -= self.transfers.predict_prefill_s(lost, num_cached)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended."""
        self._reclaimed_ids.discard(sequence.sequence_id)

    def check_integrity(self, waiting: TypingSequence[Sequence]) -> None:
        """Assert that reclaimed sequences wait."""
        assert self._reclaimed_ids <= {sequence.sequence_id for sequence in waiting}


class Holding:
    """Slots, and blocks by group, that one user holds."""

    __slots__ = ("blocks", "slots")

    def __init__(self, slots: int, blocks: list[int]) -> None:
        self.slots = slots
        self.blocks = blocks


def lacks_room(waiting: Collection[Sequence], running: Iterable[Sequence]) -> bool:
    """Return whether a full engine is short of slots or blocks; idle classes would be preempted."""
    return bool(waiting) and not any(s.request.terms.idle_only for s in running)
