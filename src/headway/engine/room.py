"""Room: whether a waiting sequence may start, by the blocks needed now and later.

Blocks that running sequences need for their known tokens are promised to them. A new sequence
starts when enough blocks are free besides, and when no running sequence is predicted to be
preempted for it later (`engine.growth`). Worked example, 10 free blocks:

    running    2 promised, and with the new one 5 more when most are needed
    new        4 for its prompt    2 + 4 + 5 > 10: it waits until one of them ends

It also starts where preempting it later costs less than the slot saves.

No sequence waits for ever: running ones end, and every sequence fits alone. Those that are
preemptible for the new one count as if they ended now. A refusal holds until a running sequence
ends or is preempted, or for `RETRY_STEPS`: others may compute the beginning of the new one.
"""

from collections.abc import Callable
from collections.abc import Sequence as TypingSequence

from headway.engine.growth import Growth, Profile, has_fixed_length
from headway.engine.kv import KVCache
from headway.engine.kv.prefix import Hit
from headway.engine.kv_transfers import KVTransfers
from headway.engine.sequence import Sequence
from headway.perf.model import work_of

RETRY_STEPS = 8
"""Steps after which a refused sequence is checked again, if no running one ended before."""
SPARE_SHARE = 0.05
"""Share of the blocks that stays free where all lengths are predicted (as in Past-Future)."""
PreemptibleFor = Callable[[Sequence, list[Sequence]], list[Sequence]]


class RoomFinder:
    """Blocks promised to running sequences, and refusals that still hold."""

    def __init__(self, kv: KVCache, transfers: KVTransfers) -> None:
        self.kv = kv
        self.cost, self.predict_prefill_s = transfers.cost, transfers.predict_prefill_s
        self.growth = Growth()
        self.predicts_growth = True
        """Whether growth is predicted; if not, a sequence starts when it fits now."""
        self._promised: list[int] | None = None
        self._profile: tuple[int, Profile, int] | None = None
        self._retry_step: dict[int, int] = {}
        self._max_len = 0
        ranks = kv.split.ranks if kv.split is not None else 1
        self._ranks = [0 if window else ranks for window in kv.windows]

    def invalidate_promised(self) -> None:
        """Count promised blocks again: rows were planned."""
        self._promised = None

    def on_start(self, sequence: Sequence, hit: Hit) -> None:
        """Record that `sequence` starts after `hit`, some of whose blocks others may hold too.

        A sequence whose KV is restored has blocks of its own.
        """
        size, held = self.kv.block_size, 0
        for pool, table, ranks in zip(self.kv.pools, hit.tables, self._ranks, strict=True):
            if ranks and table and not sequence.host_tables:
                whole = table[: hit.num_tokens // size]
                held = max(held, sum([pool.references[block] > 0 for block in whole]))
        sequence.num_shared = held * size
        self._profile = None

    def invalidate(self) -> None:
        """Drop what was predicted: a sequence has released blocks."""
        self._promised = self._profile = None
        self._retry_step.clear()

    def on_end(self, sequence: Sequence) -> None:
        """Learn the length of an answer that ended; its blocks are free."""
        self.growth.observe(sequence)
        self.invalidate()

    def promised_blocks(self, running: list[Sequence]) -> list[int]:
        """Return the blocks by group that running sequences need for their known tokens."""
        if self._promised is None:
            self._promised = self.kv.needed_by(running)
        return self._promised

    def find_room(
        self, sequence: Sequence, running: list[Sequence], leaving: TypingSequence[int] = ()
    ) -> Hit | None:
        """Return the prefix that `sequence` starts behind, or None without unpromised blocks.

        `leaving` blocks by group count as free.
        """
        promised = self.promised_blocks(running)
        if leaving:
            promised = [p - coming for p, coming in zip(promised, leaving, strict=True)]
        return self.kv.find_room(sequence, promised)

    def find_lasting_room(
        self,
        sequence: Sequence,
        running: list[Sequence],
        step: int,
        preemptible_for: PreemptibleFor,
    ) -> Hit | None:
        """Return as `find_room`, where only `preemptible_for` may be preempted for it."""
        if self._retry_step.get(sequence.sequence_id, -1) > step:
            return None
        if not running or not self.predicts_growth or self._fits_any_length(sequence, running):
            return self.find_room(sequence, running)
        preemptible = preemptible_for(sequence, running)
        if len(preemptible) == len(running):
            return self.find_room(sequence, running)
        grown = self._predict_growth(sequence, running, step, preemptible)
        needed = [p + g for p, g in zip(self.promised_blocks(running), grown, strict=True)]
        hit = self.kv.find_room(sequence, needed) if self.kv.has_room(needed) else None
        if hit is None and any(grown):
            if self._is_worth_recomputing(sequence, running):
                return self.find_room(sequence, running)
            self._retry_step[sequence.sequence_id] = step + RETRY_STEPS
        return hit

    def _is_worth_recomputing(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Return whether one row more saves more than computing `sequence` again costs.

        It runs until the free blocks are full. Each of its tokens takes the time of one more row
        and saves the mean time of a row. Worked example, 8 rows in 28 ms, 600 steps until the
        blocks are full, a prompt of 256: then 856 tokens are lost, at 1.6 ms each 1.4 s.

            one more row takes 3.5 ms    saves nothing: it waits
            one more row takes 0.5 ms    saves 600 * (28 / 8 - 0.5) = 1.8 s: it starts
        """
        cost, own = self.cost, len(sequence.tokens)
        free = min(
            pool.num_free * ranks
            for pool, ranks in zip(self.kv.pools, self._ranks, strict=True)
            if ranks
        )
        steps = (free * self.kv.block_size - own) // (len(running) + 1)
        if steps <= 0:
            return False
        contexts = [len(s.tokens) for s in running]
        now_s = cost.seconds(work_of(contexts, cost.windows))
        more_s = cost.seconds(work_of([*contexts, own], cost.windows)) - now_s
        saved_s = steps * (now_s / len(running) - more_s)
        return saved_s > self.predict_prefill_s(own + steps)

    def _predict_growth(
        self, sequence: Sequence, running: list[Sequence], step: int, preemptible: list[Sequence]
    ) -> list[int]:
        """Return the blocks by group beyond those of known tokens at the predicted peak, with
        `sequence` and without the `preemptible`."""
        half = self.kv.block_size // 2
        rows = self.growth.rows(sequence, half)
        if preemptible or len(rows) > 1:
            ended = [(0, self.growth.rows(s, half)[0][1]) for s in preemptible]
            staying = [s for s in running if s not in preemptible]
            profile, num_predicted = self._profile_of(staying, rows[1:] + ended)
        else:
            if self._profile is None or self._profile[0] != step:
                self._profile = step, *self._profile_of(running, [])
            _, profile, num_predicted = self._profile
        num_predicted += not has_fixed_length(sequence)
        blocks = self.kv.blocks_for(profile.peak(*rows[0]))
        spare = SPARE_SHARE * num_predicted / (len(running) + 1)
        return [
            -(-blocks // ranks) + int(spare * pool.num_blocks) if ranks else 0
            for pool, ranks in zip(self.kv.pools, self._ranks, strict=True)
        ]

    def _profile_of(
        self, running: list[Sequence], more: list[tuple[int, int]]
    ) -> tuple[Profile, int]:
        """Return the profile of `running` and `more` rows, and its number of predicted lengths."""
        half = self.kv.block_size // 2
        rows = [row for sequence in running for row in self.growth.rows(sequence, half)]
        return Profile(rows + more), sum([not has_fixed_length(sequence) for sequence in running])

    def _fits_any_length(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Return whether all fit even if each reaches the maximum length."""
        self._max_len = max(self._max_len, sequence.max_len)
        whole = self.kv.blocks_for(self._max_len)
        rows = len(running) + 1 + len(sequence.forks) + sum([len(s.forks) for s in running])
        return all(
            not ranks or whole * rows <= (pool.num_blocks - 1) * ranks
            for ranks, pool in zip(self._ranks, self.kv.pools, strict=True)
        )
