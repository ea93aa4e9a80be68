"""Transfers of KV: of preempted sequences, which else recompute it, and of hits in lower tiers.

`is_cheaper` compares the two for a victim by the cost of a step and the rate of copies; `swap_out`
and `swap_in` start the copies, `done` ends them. Worked example, 1,000 tokens of 12 KiB each, 10
GB/s between device and host, 0.1 ms to compute a token:

    recompute   1,000 x 0.1 ms                     100 ms
    copy        2 x 12 MB / 10 GB/s                2.5 ms, out and in

A sequence that is swapped out keeps its blocks until the copy is done, and waits in the queue
meanwhile. Swapped in, it takes new blocks and is `waiting for KV` until they are filled. A sequence
that is aborted during a copy keeps its blocks on both sides until the copy ends, which still reads
and writes them.
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
MAX_TRIES = 16
"""Maximum consecutive steps that raise with the same transfer."""


@dataclass(slots=True, kw_only=True)
class InFlightTransfer:
    """Transfers of one sequence in flight, by id; `alone` counts the blocks that it will free."""

    sequence: Sequence
    direction: str
    alone: list[int]
    transfers: dict[int, Transfer] = field(default_factory=dict)
    unsent: list[Transfer] = field(default_factory=list)
    num_tries: int = 0
    has_failed: bool = False


class KVTransfers:
    """Sequences whose KV is copied between memories, and the choice of copying or recomputing it.

    `host_blocks` by KV group, () without host memory; `block_bytes` by group; `chunk` is the
    maximum number of prompt tokens of a step.
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
        self._in_flight: dict[int, InFlightTransfer] = {}
        self._failed, self._next_id = list[Sequence](), 0

    # ── choice ──────────────────────────────────────────────────────────────────────────────

    def is_cheaper(self, victim: Sequence) -> bool:
        """Return whether copying the KV of `victim` is faster than recomputing it."""
        if not self.host.num_blocks or not victim.computed:
            return False
        counts = [len(blocks) for blocks in self.kv.live_blocks(victim)]
        if not any(counts) or not self.host.has_room(counts):
            return False
        if self.copy_s(counts) < self.recompute_s(victim):
            return True
        self.rate.doubt()
        return False

    def copy_s(self, counts: list[int]) -> float:
        """Return the predicted seconds to copy blocks (by group) out and back in."""
        return 2 * self._bytes(counts) * self.rate.byte_s

    def recompute_s(self, victim: Sequence) -> float:
        """Return the predicted seconds to recompute what no other sequence keeps in memory.

        Its own blocks count as lost, because it is preempted to free blocks.
        """
        num_shared = self.kv.num_kept_by_others(victim)
        return self.predict_prefill_s(victim.computed - num_shared, num_shared)

    def predict_prefill_s(self, num_tokens: int, start: int = 0) -> float:
        """Return the predicted seconds to compute `num_tokens` after `start` others, alone."""
        return self.cost.predict_prefill_s(num_tokens, start, self.chunk)

    def _bytes(self, counts: list[int]) -> int:
        return sum(n * size for n, size in zip(counts, self.block_bytes, strict=True))

    # ── copies ──────────────────────────────────────────────────────────────────────────────

    def swap_out(self, victim: Sequence) -> None:
        """Start copying `victim` to host memory; it keeps its blocks until the copy is done."""
        live = self.kv.live_blocks(victim)
        counts = [len(blocks) for blocks in live]
        tables = self.host.take(victim.sequence_id, counts)
        assert tables is not None, "there is no room in host memory"
        victim.host_tables = tables
        self._num_swapped += 1
        self._num_swapped_tokens += victim.computed
        self._start_copy(victim, OUT, live)

    def counts(self, sequence: Sequence) -> list[int]:
        """Return the host blocks of `sequence` by group."""
        return [len(blocks) for blocks in sequence.host_tables]

    def swap_in(self, sequence: Sequence) -> None:
        """Start copying `sequence` back into new blocks, which the caller knows to be free."""
        blocks = self.kv.take_for_swap_in(sequence, self.counts(sequence))
        sequence.state = WAITING_FOR_KV
        self._start_copy(sequence, IN, blocks)

    def _start_copy(self, sequence: Sequence, direction: str, blocks: list[list[int]]) -> None:
        alone = self.kv.num_unshared(blocks)
        flight = InFlightTransfer(sequence=sequence, direction=direction, alone=alone)
        for group, (own, host) in enumerate(zip(blocks, sequence.host_tables, strict=True)):
            if own:
                transfer = Transfer(self.next_id(), group, own, direction, HOST, host)
                flight.transfers[transfer.transfer_id] = transfer
                flight.unsent.append(transfer)
        self._in_flight[sequence.sequence_id] = flight

    def next_id(self) -> int:
        """Return the id of a new transfer."""
        self._next_id += 1
        return self._next_id - 1

    def restore(self, sequence: Sequence, hit: Hit) -> None:
        """Start reading what `hit` lacks from lower tiers into the blocks of `sequence`."""
        tiers = self.kv.tiers
        assert tiers is not None
        start = hit.num_tokens - sum(hit.restored.values())
        limit_s = tiers.limit_s(hit.reads, tiers.recompute_s(hit.num_tokens, start))
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
            flight.unsent.append(transfer)
        groups = range(len(self.kv.pools))
        flight.alone = [sum(read.group == group for read in hit.reads) for group in groups]
        sequence.state = WAITING_FOR_KV
        self._in_flight[sequence.sequence_id] = flight

    def take(self, result: StepResult) -> list[Sequence]:
        """Take the transfers that ended; returns the sequences whose restore failed."""
        if self.kv.tiers is not None:
            self.kv.tiers.take(result.moved, result.tier)
        if not self._in_flight:
            return []
        failed = set(result.transfers_failed)
        for flight in self._in_flight.values() if failed else ():
            for transfer_id in failed & flight.transfers.keys():
                flight.has_failed = True
                transfer = flight.transfers[transfer_id]
                for key in transfer.keys if transfer.peer == HOST else ():
                    self.host.drop(transfer.group, key)
        self.done([*result.transfers_done, *result.transfers_failed], result.transfer_s)
        given_up, self._failed = self._failed, []
        return given_up

    def begin(self, plan: StepPlan) -> None:
        """Add to `plan` the transfers that start with its step."""
        plan.transfers = self.take_unsent()
        tiers = self.kv.tiers
        if tiers is not None:
            plan.transfers += tiers.spills(self.next_id, is_idle=not plan.scheduled)
            plan.forget = tiers.take_forgotten()

    def take_unsent(self) -> list[Transfer]:
        """Return the transfers that the runtime does not know yet."""
        unsent = []
        for flight in self._in_flight.values():
            unsent += flight.unsent
            flight.unsent = []
        return unsent

    def resend(self, transfers: list[Transfer]) -> None:
        """Submit again the transfers of a step that raised, because it is unknown whether they ran.

        Raises RuntimeError if steps with them raise again and again.
        """
        ids = {transfer.transfer_id for transfer in transfers}
        for flight in self._in_flight.values():
            lost = [t for t in flight.transfers.values() if t.transfer_id in ids]
            if lost:
                flight.unsent += lost
                flight.num_tries += 1
                if flight.num_tries > MAX_TRIES:
                    raise RuntimeError(f"The runtime does not copy blocks: {lost[0]}.")

    def done(self, transfer_ids: list[int], seconds: float) -> None:
        """End transfers, which took `seconds`: swapped-out blocks are freed, restored ones run."""
        num_bytes, ids = 0, set(transfer_ids)
        for flight in list(self._in_flight.values()) if ids else ():
            for transfer_id in ids & flight.transfers.keys():
                transfer = flight.transfers.pop(transfer_id)
                if transfer.peer == HOST:
                    num_bytes += len(transfer.blocks) * self.block_bytes[transfer.group]
                    for block in transfer.host_blocks if transfer.keys else ():
                        self.host.unpin(transfer.group, block)
            flight.unsent = [t for t in flight.unsent if t.transfer_id in flight.transfers]
            if not flight.transfers:
                del self._in_flight[flight.sequence.sequence_id]
                self._finish_copy(flight)
        self.rate.observe(num_bytes, seconds)

    def _finish_copy(self, flight: InFlightTransfer) -> None:
        sequence = flight.sequence
        is_over = sequence.state == FINISHED
        if flight.direction == OUT and not is_over:
            self.kv.leave(sequence)
            return
        if sequence.host_tables:
            self._release_host(sequence)
        if is_over:
            self.kv.release(sequence)
        elif flight.has_failed:
            self._failed.append(sequence)
        else:
            sequence.state = RUNNING

    def _release_host(self, sequence: Sequence) -> None:
        self.host.release(sequence.sequence_id)
        sequence.host_tables = []

    def drop(self, sequence: Sequence) -> bool:
        """Drop an ended `sequence`; returns whether its blocks are in use until a copy ends."""
        if sequence.sequence_id in self._in_flight:
            return True
        if sequence.host_tables:
            self._release_host(sequence)
        return False

    # ── transfers in flight ─────────────────────────────────────────────────────────────────

    @property
    def is_busy(self) -> bool:
        """Return whether any transfer is in flight."""
        return bool(self._in_flight)

    @property
    def has_transfers(self) -> bool:
        """Return whether a transfer is in flight, or blocks are due for a lower tier."""
        return self.is_busy or bool(self.kv.tiers and self.kv.tiers.has_due)

    def is_in_transfer(self, sequence: Sequence) -> bool:
        """Return whether the KV of `sequence` is being copied."""
        return sequence.sequence_id in self._in_flight

    def should_wait_for_copy(self, sequence: Sequence, victim: Sequence, num_before: int) -> bool:
        """Return whether a decode of `sequence` waits for a copy to end instead of a preemption.

        It does if blocks that are being swapped out suffice for it and for the `num_before`
        sequences that already wait; or if it would be its own `victim` while another sequence
        returns, which may be preempted instead.
        """
        if not self._in_flight or min(self.leaving()) > num_before:
            return bool(self._in_flight)
        comes_back = any(flight.direction == IN for flight in self._in_flight.values())
        return victim is sequence and comes_back

    def leaving(self) -> list[int]:
        """Return by group the blocks that transfers in flight will free."""
        total = [0] * len(self.kv.pools)
        for flight in self._in_flight.values():
            if flight.direction == OUT or flight.sequence.state == FINISHED:
                total = [a + b for a, b in zip(total, flight.alone, strict=True)]
        return total

    @property
    def release_queue(self) -> list[Sequence]:
        """Return the ended sequences whose blocks are released once a copy ends."""
        flights = self._in_flight.values()
        return [f.sequence for f in flights if f.sequence.state == FINISHED]

    # ── reporting ───────────────────────────────────────────────────────────────────────────

    def count_lost(self, sequence: Sequence, num_cached: int) -> None:
        """Count the tokens that a preempted `sequence` recomputes, all but the cached ones."""
        self._num_lost_tokens += max(sequence.num_lost - num_cached, 0)
        sequence.num_lost = 0

    def tell(self, record: StepRecord) -> None:
        """Add the preemptions since the last step, and their cost, to `record`."""
        if not (self.preempted or self._num_swapped or self._num_lost_tokens):
            return
        record.preempted, self.preempted = tuple(self.preempted), []
        record.num_swapped, record.num_swapped_tokens = self._num_swapped, self._num_swapped_tokens
        record.num_lost_tokens = self._num_lost_tokens
        self._num_swapped = self._num_swapped_tokens = self._num_lost_tokens = 0

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert that every host block has one owner and every copy two ends."""
        owners = [*sequences, *self.release_queue]
        self.host.check_integrity({s.sequence_id: s.host_tables for s in owners if s.host_tables})
        known = {s.sequence_id: s for s in owners}
        for sequence_id, flight in self._in_flight.items():
            sequence = flight.sequence
            assert known[sequence_id] is sequence and flight.transfers
            for transfer in flight.transfers.values():
                if transfer.keys:
                    table = sequence.block_tables[transfer.group]
                    assert set(transfer.blocks) <= set(table), "a block was freed during its copy"
                    continue
                assert sequence.host_tables, "a copy without host blocks"
                live = self.kv.live(sequence, transfer.group)
                assert transfer.blocks == live, "a block was freed during its copy"
                assert transfer.host_blocks == sequence.host_tables[transfer.group]
        for sequence in owners:
            waits = sequence.state == WAITING_FOR_KV
            assert not waits or self._in_flight[sequence.sequence_id].direction == IN, sequence
