"""What becomes of the keys and values of a preempted sequence: computed again, or copied and back.

Given what a step costs and how fast blocks are copied, `is_cheaper` compares the two for a victim;
`swap_out` and `swap_in` begin the copies, `done` ends them. Worked example, 1,000 tokens of 12 KiB
each, 10 GB/s between device and host, 0.1 ms to compute a token:

    again   1,000 x 0.1 ms                     100 ms
    copied  2 x 12 MB / 10 GB/s                2.5 ms, out and in

A sequence that leaves keeps its blocks until the copy is done, and waits in the queue meanwhile;
when its turn comes it takes new ones and is `waiting for KV` until they are filled. A sequence
that is aborted on the way keeps blocks of both sides until the copy ends, which still reads and
writes them.
"""

from dataclasses import dataclass, field

from headway.core.plan import StepPlan, StepResult, Transfer
from headway.core.records import StepRecord
from headway.engine.kv import KVCache
from headway.engine.kv.host import HostBlocks
from headway.engine.kv.host_tier import HOST
from headway.engine.kv.prefix import Hit, Read
from headway.engine.sequence import FINISHED, RUNNING, WAITING_FOR_KV, Sequence
from headway.perf.model import StepModel
from headway.perf.rates import CopyRate

OUT, IN = "out", "in"
MOST_TRIES = 16
"""Steps in a row that may raise with the same transfer in them."""


@dataclass(slots=True, kw_only=True)
class InFlightTransfer:
    """The transfers of one sequence that are not done, by id; `alone` blocks come free with it."""

    sequence: Sequence
    direction: str
    alone: list[int]
    transfers: dict[int, Transfer] = field(default_factory=dict)
    untold: list[Transfer] = field(default_factory=list)
    num_tries: int = 0
    has_failed: bool = False


class Preemption:
    """Sequences whose KV leaves, is in host memory, or comes back, and the choice before that.

    `host_blocks` by KV group, () for no host memory; `block_bytes` by group; `chunk` is the most
    prompt tokens of a step.
    """

    def __init__(
        self,
        kv: KVCache,
        cost: StepModel | None = None,
        *,
        host_blocks: tuple[int, ...] = (),
        block_bytes: tuple[int, ...] = (),
        chunk: int = 1,
    ) -> None:
        self.kv = kv
        self.cost = cost or StepModel()
        self.host = HostBlocks(host_blocks)
        self.block_bytes = block_bytes
        self.chunk = chunk
        self.rate = CopyRate(self.cost.prior.copied_byte_s)
        self.preempted: list[tuple[int, int]] = []
        """(request id, tokens generated) of sequences preempted since the last record."""
        self._num_swapped = self._num_swapped_tokens = self._num_lost_tokens = 0
        self._flights: dict[int, InFlightTransfer] = {}
        self._failed, self._next_id = list[Sequence](), 0

    # ── the choice ──────────────────────────────────────────────────────────────────────────

    def is_cheaper(self, victim: Sequence) -> bool:
        """Whether to copy what `victim` has computed rather than compute it again."""
        if not self.host.num_blocks or not victim.computed:
            return False
        counts = [len(blocks) for blocks in self.kv.live_blocks(victim)]
        if not any(counts) or not self.host.has_room(counts):
            return False
        if self.copy_s(counts) < self.again_s(victim):
            return True
        self.rate.doubt()
        return False

    def copy_s(self, counts: list[int]) -> float:
        """Predicted seconds to copy so many blocks by group out and back in."""
        return 2 * self._bytes(counts) * self.rate.byte_s

    def again_s(self, victim: Sequence) -> float:
        """Return the predicted seconds to compute again what no other sequence keeps in memory.

        Its own blocks count as lost: it gives them up because others need blocks.
        """
        num_shared = self.kv.num_kept_by_others(victim)
        return self.prefill_s(victim.computed - num_shared, num_shared)

    def prefill_s(self, num_tokens: int, start: int = 0) -> float:
        """Predicted seconds to compute `num_tokens` behind `start` others, beside nothing."""
        return self.cost.prefill_s(num_tokens, start, self.chunk)

    def _bytes(self, counts: list[int]) -> int:
        return sum(n * size for n, size in zip(counts, self.block_bytes, strict=True))

    # ── out and in ──────────────────────────────────────────────────────────────────────────

    def swap_out(self, victim: Sequence) -> None:
        """Begin to copy `victim` to host memory; its blocks stay its own until that is done."""
        live = self.kv.live_blocks(victim)
        counts = [len(blocks) for blocks in live]
        tables = self.host.take(victim.sequence_id, counts)
        assert tables is not None, "there is no room in host memory"
        victim.host_tables = tables
        self._num_swapped += 1
        self._num_swapped_tokens += victim.computed
        self._fly(victim, OUT, live)

    def counts(self, sequence: Sequence) -> list[int]:
        """Host blocks of `sequence` by group."""
        return [len(blocks) for blocks in sequence.host_tables]

    def swap_in(self, sequence: Sequence) -> None:
        """Begin to copy `sequence` back, into new blocks that the caller has checked to be free."""
        blocks = self.kv.come_back(sequence, self.counts(sequence))
        sequence.state = WAITING_FOR_KV
        self._fly(sequence, IN, blocks)

    def _fly(self, sequence: Sequence, direction: str, blocks: list[list[int]]) -> None:
        alone = self.kv.num_alone(blocks)
        flight = InFlightTransfer(sequence=sequence, direction=direction, alone=alone)
        for group, (own, host) in enumerate(zip(blocks, sequence.host_tables, strict=True)):
            if own:
                transfer = Transfer(self.next_id(), group, own, direction, HOST, host)
                flight.transfers[transfer.transfer_id] = transfer
                flight.untold.append(transfer)
        self._flights[sequence.sequence_id] = flight

    def next_id(self) -> int:
        """The number of a new transfer."""
        self._next_id += 1
        return self._next_id - 1

    def restore(self, sequence: Sequence, hit: Hit) -> None:
        """Begin to read what `hit` lacks into the blocks that `sequence` has for it."""
        tiers = self.kv.tiers
        assert tiers is not None
        start = hit.num_tokens - sum(hit.restored.values())
        limit_s = tiers.limit_s(hit.reads, tiers.again_s(hit.num_tokens, start))
        flight = InFlightTransfer(sequence=sequence, direction=IN, alone=[])
        by_place: dict[tuple[int, str], list[Read]] = {}
        for read in hit.reads:
            by_place.setdefault((read.group, read.tier.name), []).append(read)
        for (group, peer), reads in by_place.items():
            blocks = [sequence.block_tables[group][read.at] for read in reads]
            keys = [read.key for read in reads]
            host = [self.host.block_of(group, key) for key in keys] if peer == HOST else []
            transfer = Transfer(
                self.next_id(), group, blocks, IN, peer, host, keys, limit_s=limit_s
            )
            flight.transfers[transfer.transfer_id] = transfer
            flight.untold.append(transfer)
        groups = range(len(self.kv.pools))
        flight.alone = [sum(read.group == group for read in hit.reads) for group in groups]
        sequence.state = WAITING_FOR_KV
        self._flights[sequence.sequence_id] = flight

    def take(self, result: StepResult) -> list[Sequence]:
        """The transfers that ended; returns the sequences whose restore came to nothing."""
        if self.kv.tiers is not None:
            self.kv.tiers.take(result.moved, result.tier)
        if not self._flights:
            return []
        failed = set(result.transfers_failed)
        for flight in self._flights.values() if failed else ():
            for transfer_id in failed & flight.transfers.keys():
                flight.has_failed = True
                transfer = flight.transfers[transfer_id]
                for key in transfer.keys if transfer.peer == HOST else ():
                    self.host.drop(transfer.group, key)
        self.done([*result.transfers_done, *result.transfers_failed], result.transfer_s)
        given_up, self._failed = self._failed, []
        return given_up

    def begin(self, plan: StepPlan) -> None:
        """Put into `plan` the transfers that begin with its step."""
        plan.transfers = self.take_untold()
        tiers = self.kv.tiers
        if tiers is not None:
            plan.transfers += tiers.spills(self.next_id, is_idle=not plan.scheduled)
            plan.forget = tiers.take_forgotten()

    def take_untold(self) -> list[Transfer]:
        """The transfers that the runtime has yet to be told of."""
        untold = []
        for flight in self._flights.values():
            untold += flight.untold
            flight.untold = []
        return untold

    def tell_again(self, transfers: list[Transfer]) -> None:
        """A step that raised was to begin these transfers: it is unknown whether it did.

        Raises RuntimeError where the runtime raises with them again and again.
        """
        ids = {transfer.transfer_id for transfer in transfers}
        for flight in self._flights.values():
            lost = [t for t in flight.transfers.values() if t.transfer_id in ids]
            if lost:
                flight.untold += lost
                flight.num_tries += 1
                if flight.num_tries > MOST_TRIES:
                    raise RuntimeError(f"The runtime does not copy blocks: {lost[0]}.")

    def done(self, transfer_ids: list[int], seconds: float) -> None:
        """These have ended, in `seconds`: what has left frees its blocks, what is back runs."""
        num_bytes, ids = 0, set(transfer_ids)
        for flight in list(self._flights.values()) if ids else ():
            for transfer_id in ids & flight.transfers.keys():
                transfer = flight.transfers.pop(transfer_id)
                if transfer.peer == HOST:
                    num_bytes += len(transfer.blocks) * self.block_bytes[transfer.group]
                    for block in transfer.host_blocks if transfer.keys else ():
                        self.host.unpin(transfer.group, block)
            flight.untold = [t for t in flight.untold if t.transfer_id in flight.transfers]
            if not flight.transfers:
                del self._flights[flight.sequence.sequence_id]
                self._land(flight)
        self.rate.observe(num_bytes, seconds)

    def _land(self, flight: InFlightTransfer) -> None:
        sequence = flight.sequence
        is_over = sequence.state == FINISHED
        if flight.direction == OUT and not is_over:
            self.kv.leave(sequence)
            return
        if sequence.host_tables:
            self._leave_host(sequence)
        if is_over:
            self.kv.release(sequence)
        elif flight.has_failed:
            self._failed.append(sequence)
        else:
            sequence.state = RUNNING

    def _leave_host(self, sequence: Sequence) -> None:
        self.host.release(sequence.sequence_id)
        sequence.host_tables = []

    def drop(self, sequence: Sequence) -> bool:
        """`sequence` is over; whether its blocks have to wait for a copy to end."""
        if sequence.sequence_id in self._flights:
            return True
        if sequence.host_tables:
            self._leave_host(sequence)
        return False

    # ── what is under way ───────────────────────────────────────────────────────────────────

    @property
    def is_busy(self) -> bool:
        """Whether any transfer is not done."""
        return bool(self._flights)

    @property
    def has_transfers(self) -> bool:
        """Whether any is not done, or blocks are due to go below."""
        return self.is_busy or bool(self.kv.tiers and self.kv.tiers.has_due)

    def is_flying(self, sequence: Sequence) -> bool:
        """Whether the KV of `sequence` is on its way."""
        return sequence.sequence_id in self._flights

    def is_worth_waiting_for(self, sequence: Sequence, victim: Sequence, num_before: int) -> bool:
        """Whether a decode of `sequence` waits for a copy to end instead of preempting `victim`.

        Blocks that are on the way out are enough for it and for the `num_before` sequences that
        wait already; or it would be its own victim, and a sequence that returns may be that
        instead.
        """
        if not self._flights or min(self.leaving()) > num_before:
            return bool(self._flights)
        comes_back = any(flight.direction == IN for flight in self._flights.values())
        return victim is sequence and comes_back

    def leaving(self) -> list[int]:
        """By group the blocks that come free when what is under way is done."""
        total = [0] * len(self.kv.pools)
        for flight in self._flights.values():
            if flight.direction == OUT or flight.sequence.state == FINISHED:
                total = [a + b for a, b in zip(total, flight.alone, strict=True)]
        return total

    @property
    def guests(self) -> list[Sequence]:
        """Those that are over and hold blocks until a copy ends."""
        flights = self._flights.values()
        return [f.sequence for f in flights if f.sequence.state == FINISHED]

    # ── what is told ────────────────────────────────────────────────────────────────────────

    def count_lost(self, sequence: Sequence, num_cached: int) -> None:
        """`sequence` runs again from the start, but for tokens that were found in memory."""
        self._num_lost_tokens += max(sequence.num_lost - num_cached, 0)
        sequence.num_lost = 0

    def tell(self, record: StepRecord) -> None:
        """Note who was preempted since the last step, and what that cost; the counts begin anew."""
        if not (self.preempted or self._num_swapped or self._num_lost_tokens):
            return
        record.preempted, self.preempted = tuple(self.preempted), []
        record.num_swapped, record.num_swapped_tokens = self._num_swapped, self._num_swapped_tokens
        record.num_lost_tokens = self._num_lost_tokens
        self._num_swapped = self._num_swapped_tokens = self._num_lost_tokens = 0

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert that every host block has one owner and every copy two ends."""
        everybody = [*sequences, *self.guests]
        self.host.check_integrity(
            {s.sequence_id: s.host_tables for s in everybody if s.host_tables}
        )
        known = {s.sequence_id: s for s in everybody}
        for sequence_id, flight in self._flights.items():
            sequence = flight.sequence
            assert known[sequence_id] is sequence and flight.transfers
            for transfer in flight.transfers.values():
                if transfer.keys:
                    table = sequence.block_tables[transfer.group]
                    assert set(transfer.blocks) <= set(table), "a block was given back on the way"
                    continue
                assert sequence.host_tables, "a copy without host blocks"
                live = self.kv.live(sequence, transfer.group)
                assert transfer.blocks == live, "a block was given back on the way"
                assert transfer.host_blocks == sequence.host_tables[transfer.group]
        for sequence in everybody:
            waits = sequence.state == WAITING_FOR_KV
            assert not waits or self._flights[sequence.sequence_id].direction == IN, sequence
