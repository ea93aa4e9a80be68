"""Whether a waiting sequence may start: blocks for what is known now, and until answers end.

Blocks that the running ones will take for their known tokens are promised to them. A newcomer
starts where beside these there are enough for itself, and where nobody is expected to be preempted
for it later (`engine.growth`). Worked example, 10 free blocks:

    running    2 promised, and with the newcomer beside them 5 more when most are needed
    newcomer   4 for its prompt    2 + 4 + 5 > 10: it waits, until one of them ends

Or it starts all the same where that pays: a row more takes little, and so does computing it again.

Nobody waits for ever: who runs comes to an end, and where nobody runs everybody fits. Those who
would make way for the newcomer count as if they ended now. While nobody leaves a refusal holds, for
all go on as they were expected to; it is looked at again after some steps, since what others
compute meanwhile may be the beginning of the newcomer.
"""

from collections.abc import Callable
from collections.abc import Sequence as TypingSequence

from headway.engine.growth import Growth, Profile, is_fixed
from headway.engine.kv import KVCache
from headway.engine.kv.prefix import Hit
from headway.engine.preemption import Preemption
from headway.engine.sequence import Sequence
from headway.perf.model import work_of

LOOK_AGAIN = 8
"""Steps after which one that was refused is looked at again, if nobody has left before."""
SPARE = 0.05
"""This share of the blocks stays free where all lengths are guessed: as Past-Future has it."""
Weaker = Callable[[Sequence, list[Sequence]], list[Sequence]]


class Room:
    """What is promised to those that run, and who was refused since one of them left."""

    def __init__(self, kv: KVCache, preemption: Preemption) -> None:
        self.kv = kv
        self.cost, self.prefill_s = preemption.cost, preemption.prefill_s
        self.growth = Growth()
        self.expects = True
        """Whether answers are expected to grow; if not, who fits now starts."""
        self._promised: list[int] | None = None
        self._profile: tuple[int, Profile, int] | None = None
        self._refused: dict[int, int] = {}
        self._longest = 0
        ranks = kv.dealt.ranks if kv.dealt is not None else 1
        self._ranks = [0 if window else ranks for window in kv.windows]

    def changed(self) -> None:
        """Rows were planned: what is promised is to be counted anew."""
        self._promised = None

    def began(self, sequence: Sequence, hit: Hit) -> None:
        """`sequence` is to begin behind `hit`, some of which others hold too.

        One whose KV comes back from elsewhere has blocks of its own.
        """
        size, held = self.kv.block_size, 0
        for pool, table, ranks in zip(self.kv.pools, hit.tables, self._ranks, strict=True):
            if ranks and table and not sequence.host_tables:
                whole = table[: hit.num_tokens // size]
                held = max(held, sum([pool.references[block] > 0 for block in whole]))
        sequence.num_shared = held * size
        self._profile = None

    def left(self) -> None:
        """Somebody has given back blocks."""
        self._promised = self._profile = None
        self._refused.clear()

    def ended(self, sequence: Sequence) -> None:
        """An answer is as long as it becomes, and its blocks are free."""
        self.growth.ended(sequence)
        self.left()

    def promised(self, running: list[Sequence]) -> list[int]:
        """Blocks by group that the running ones will take to compute all they know."""
        if self._promised is None:
            self._promised = self.kv.needed_by(running)
        return self._promised

    def fitting(
        self, sequence: Sequence, running: list[Sequence], leaving: TypingSequence[int] = ()
    ) -> Hit | None:
        """What `sequence` may begin with, or None where it has no blocks beside those promised.

        So many blocks that are `leaving` count as free.
        """
        promised = self.promised(running)
        if leaving:
            promised = [p - coming for p, coming in zip(promised, leaving, strict=True)]
        return self.kv.find_room(sequence, promised)

    def lasting(
        self, sequence: Sequence, running: list[Sequence], step: int, weaker: Weaker
    ) -> Hit | None:
        """`fitting`, where nobody but the `weaker` is expected to be preempted for it."""
        if self._refused.get(sequence.sequence_id, -1) > step:
            return None
        if not running or not self.expects or self._is_plenty(sequence, running):
            return self.fitting(sequence, running)
        gone = weaker(sequence, running)
        if len(gone) == len(running):
            return self.fitting(sequence, running)
        grown = self._grown(sequence, running, step, gone)
        beside = [p + g for p, g in zip(self.promised(running), grown, strict=True)]
        hit = self.kv.find_room(sequence, beside) if self.kv.has_room(beside) else None
        if hit is None and any(grown):
            if self._pays(sequence, running):
                return self.fitting(sequence, running)
            self._refused[sequence.sequence_id] = step + LOOK_AGAIN
        return hit

    def _pays(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether one row more saves more than it takes to compute `sequence` again.

        It runs until the free blocks are full. A token of it takes what one more row takes, and
        saves what one takes now. Worked example, 8 rows in 28 ms, 600 steps until the blocks are
        full, behind a prompt of 256: then 856 tokens are lost, at 1.6 ms each 1.4 s.

            a row more takes 3.5 ms    saves nothing, and is not worth it
            a row more takes 0.5 ms    saves 600 * (28 / 8 - 0.5) = 1.8 s
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
        return saved_s > self.prefill_s(own + steps)

    def _grown(
        self, sequence: Sequence, running: list[Sequence], step: int, gone: list[Sequence]
    ) -> list[int]:
        """Blocks by group beyond those of known tokens, when most are needed, with `sequence` and
        without those who are as good as `gone`."""
        half = self.kv.block_size // 2
        rows = self.growth.rows(sequence, half)
        if gone or len(rows) > 1:
            ended = [(0, self.growth.rows(s, half)[0][1]) for s in gone]
            staying = [s for s in running if s not in gone]
            profile, num_guessed = self._profile_of(staying, rows[1:] + ended)
        else:
            if self._profile is None or self._profile[0] != step:
                self._profile = step, *self._profile_of(running, [])
            _, profile, num_guessed = self._profile
        num_guessed += not is_fixed(sequence)
        blocks = self.kv.blocks_for(profile.most(*rows[0]))
        spare = SPARE * num_guessed / (len(running) + 1)
        return [
            -(-blocks // ranks) + int(spare * pool.num_blocks) if ranks else 0
            for pool, ranks in zip(self.kv.pools, self._ranks, strict=True)
        ]

    def _profile_of(
        self, running: list[Sequence], more: list[tuple[int, int]]
    ) -> tuple[Profile, int]:
        """Of `running` and `more` rows, and how many of `running` have a length that is guessed."""
        half = self.kv.block_size // 2
        rows = [row for sequence in running for row in self.growth.rows(sequence, half)]
        return Profile(rows + more), sum([not is_fixed(sequence) for sequence in running])

    def _is_plenty(self, sequence: Sequence, running: list[Sequence]) -> bool:
        """Whether all could become as long as any may."""
        self._longest = max(self._longest, sequence.max_len)
        whole = self.kv.blocks_for(self._longest)
        rows = len(running) + 1 + len(sequence.forks) + sum([len(s.forks) for s in running])
        return all(
            not ranks or whole * rows <= (pool.num_blocks - 1) * ranks
            for ranks, pool in zip(self._ranks, self.kv.pools, strict=True)
        )
