"""A runtime without a model that holds the engine to the seam.

`FakeExecutor` keeps the state a real runtime keeps and a KV memory of (token, history) by slot:
keys and values depend on all tokens before. Each advance writes its tokens to their slots; then
every row reads positions 0 … p back through its block table and must find its own tokens, computed
behind its own. What it samples is a hash of the tokens it *read*, so a wrong block, copy,
transfers or state changes the answer. `answer` is what must come out. A transfer ends as many
steps later as `delay` says, and copies only then: both its ends must be as they were.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fake_model import Mirrored, Moving, answer, make_settings, next_token
from headway.config.resolve import Settings
from headway.core.plan import (
    Description,
    GrammarMasks,
    NewSequence,
    PromptLogprobs,
    Sample,
    ScheduledSequence,
    StepPlan,
    StepResult,
    TierNews,
    Transfer,
)
from headway.core.request import TokenLogprobs

__all__ = ["FakeExecutor", "answer", "make_settings", "next_token", "with_cache"]


def with_cache(settings: Settings, **changes) -> Settings:
    """The same but for what is said of the KV cache."""
    return replace(settings, cache=replace(settings.cache, **changes))


@dataclass
class FakeExecutor:
    """A checking executor; `fail_at` names the stage that raises once, `fail_rows` rows to fail.

    Whoever has the token `poison` in its prompt makes `poisoned_stage` raise, at each try; with
    `is_broken` everybody does.
    """

    block_size: int
    num_blocks: tuple[int, ...]
    vocab_size: int
    windows: tuple[int, ...] = ()
    sinks: tuple[int, ...] = ()
    max_num_seqs: int = 4096
    fail_at: str = ""
    fail_rows: frozenset[int] = frozenset()
    poison: int | None = None
    poisoned_stage: str = "submit"
    is_broken: bool = False
    root: Callable[[NewSequence], object] = lambda new: new.adapter
    host_blocks: tuple[int, ...] = ()
    host_keys: dict[tuple[int, int], bytes] = field(default_factory=dict)
    """(group, host block) → the key of what was kept there."""
    exports: dict[tuple[str, int, bytes], list] = field(default_factory=dict)
    """(parcel, group, key) → the cells of a block, of all engines that share this."""
    disk: dict[tuple[int, bytes], list] = field(default_factory=dict)
    """(group, key) → the cells of a block; `bring` says whether a read brings any."""
    bring: Callable[[], bool] = lambda: True
    news: TierNews | None = None
    owners: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    failed_reads: list[int] = field(default_factory=list)
    propose: Callable[[int], list[int]] = lambda count: []
    delay: Callable[[], int] = lambda: 0
    num_submits: int = 0
    had_drafts: bool = False
    """From then on a sequence may hold a block that a wrong guess was in."""
    sequences: dict[int, Mirrored] = field(default_factory=dict)
    memory: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    host: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)
    moving: dict[int, Moving] = field(default_factory=dict)
    moved: list[int] = field(default_factory=list)
    plan: StepPlan | None = None
    result: StepResult | None = None
    masks: GrammarMasks = field(default_factory=GrammarMasks)

    def submit(self, plan: StepPlan) -> None:
        assert self.plan is None or self.plan.step < plan.step
        self.plan, self.result = plan, None
        self.num_submits += 1
        self.had_drafts = self.had_drafts or any(row.num_drafts for row in plan.scheduled)
        self._apply(plan)
        self._break("submit")
        for row in plan.scheduled:
            self._write(row)
        for row in plan.scheduled:
            self._check_reads(row)

    def _apply(self, plan: StepPlan) -> None:
        """Forget, learn, copy, append: the order every runtime keeps."""
        for sequence_id in plan.finished:
            self.sequences.pop(sequence_id, None)
        for new in plan.new:
            assert new.sequence_id not in self.sequences, "introduced twice"
            tables = [[] for _ in self.num_blocks]
            self.sequences[new.sequence_id] = Mirrored(
                new, list(new.token_ids), tables, self.root(new), dropped=list(new.dropped)
            )
        assert len(self.sequences) <= self.max_num_seqs, "more sequences than rows"
        advanced = {row.sequence_id: row for row in plan.scheduled}
        assert len(advanced) == len(plan.scheduled), "a sequence advances twice"
        assert {new.sequence_id for new in plan.new} <= advanced.keys(), "new but not advanced"
        for transfer in plan.transfers:
            if transfer.is_spill:
                self._keep(transfer)
        self._forget(plan.forget)
        before = dict(self.memory)
        targets = [set[int]() for _ in self.num_blocks]
        for copy in plan.copies:
            assert copy.sequence_id in advanced, "a copy for nobody"
            assert copy.source not in targets[copy.group], "a copy of a copy"
            targets[copy.group].add(copy.target)
            table = self.sequences[copy.sequence_id].tables[copy.group]
            if table:  # a new sequence brings its whole table, copied blocks included
                assert table[copy.index] == copy.source
                table[copy.index] = copy.target
            for slot in range(self.block_size):
                cell = before.get((copy.group, copy.source, slot))
                self.memory.pop((copy.group, copy.target, slot), None)
                if cell is not None:
                    self.memory[copy.group, copy.target, slot] = cell
        for transfer in plan.transfers:
            if not transfer.is_spill:
                self._begin(transfer)
        for row in advanced.values():
            self.sequences[row.sequence_id].tokens += row.forced
            for table, blocks in zip(
                self.sequences[row.sequence_id].tables, row.new_blocks, strict=True
            ):
                table.extend(blocks)

    def _begin(self, transfer: Transfer) -> None:
        """Note what both ends hold; one that is under way or done may be told again."""
        assert transfer.direction in ("out", "in")
        assert transfer.peer in ("host", "disk") or transfer.peer.startswith("engine:")
        assert all(0 < block < self.num_blocks[transfer.group] for block in transfer.blocks)
        if transfer.peer == "host":
            self._check_host(transfer)
            places = [(transfer.group, block) for block in transfer.host_blocks]
            if transfer.direction == "out":
                for place in places:
                    self.host_keys.pop(place, None)
            elif transfer.keys and [self.host_keys.get(place) for place in places] != transfer.keys:
                self.failed_reads.append(transfer.transfer_id)
                return
        else:
            assert len(transfer.blocks) == len(transfer.keys) > 0 and transfer.limit_s > 0
        known = transfer.transfer_id in self.moving or transfer.transfer_id in self.moved
        if not known:
            moving = Moving(transfer, self.delay(), self._ends(transfer))
            self.moving[transfer.transfer_id] = moving

    def _check_host(self, transfer: Transfer) -> None:
        assert len(transfer.blocks) == len(transfer.host_blocks) > 0
        assert all(0 <= b < self.host_blocks[transfer.group] for b in transfer.host_blocks)

    def _keep(self, transfer: Transfer) -> None:
        """Blocks go below as they are; a key means the same whenever it is written."""
        slots = range(self.block_size)
        if transfer.peer == "host":
            self._check_host(transfer)
            for at, block in enumerate(transfer.blocks):
                cells = [self.memory.get((transfer.group, block, slot)) for slot in slots]
                self._check_kept(cells)
                host_block = transfer.host_blocks[at]
                self.host_keys[transfer.group, host_block] = transfer.keys[at]
                for slot, cell in enumerate(cells):
                    self.host[transfer.group, host_block, slot] = cell
            return
        owners = zip(transfer.keys, transfer.owners, strict=True)
        self.owners |= {(transfer.group, key): owner for key, owner in owners}
        for key, block in zip(transfer.keys, transfer.blocks, strict=True):
            cells = [self.memory.get((transfer.group, block, slot)) for slot in slots]
            self._check_kept(cells)
            if transfer.peer != "disk":
                parcel = transfer.peer.rpartition("#")[2]
                self.exports[parcel, transfer.group, key] = cells
                continue
            used = -(-self.block_size // 4)  # at least: what is behind may not belong to the key
            before = self.disk.get((transfer.group, key), cells)
            assert before[:used] == cells[:used], "one key, two contents"
            self.disk[transfer.group, key] = cells

    @staticmethod
    def _check_kept(cells: list) -> None:
        """A block is full, or filled from its beginning on."""
        filled = [cell is not None for cell in cells]
        assert filled[0] and filled == sorted(filled, reverse=True), "a block is kept with a gap"

    def _forget(self, names: list[bytes]) -> None:
        news = self.news or TierNews()
        for name in names:
            lost = [block for block in self.disk if self.owners[block].startswith(name)]
            for block in lost:
                del self.disk[block]
            news.lost += lost
        self.news = news

    def _read_disk(self, transfer: Transfer) -> None:
        found = [self.disk.get((transfer.group, key)) for key in transfer.keys]
        if transfer.peer != "disk":
            parcel = transfer.peer.rpartition("#")[2]
            found = [self.exports.get((parcel, transfer.group, key)) for key in transfer.keys]
        if not self.bring() or None in found:
            self.failed_reads.append(transfer.transfer_id)
            return
        self.moved.append(transfer.transfer_id)
        for block, cells in zip(transfer.blocks, found, strict=True):
            for slot, cell in enumerate(cells):
                self.memory[transfer.group, block, slot] = cell

    def _ends(self, transfer: Transfer) -> list:
        """The cells of the device's blocks and of the host's."""
        slots = range(self.block_size)
        return [
            [memory.get((transfer.group, block, slot)) for block in blocks for slot in slots]
            for memory, blocks in (
                (self.memory, transfer.blocks),
                (self.host, transfer.host_blocks),
            )
        ]

    def _move(self) -> None:
        """End the transfers whose time has come."""
        for transfer_id, moving in list(self.moving.items()):
            moving.num_steps -= 1
            if moving.num_steps >= 0:
                continue
            transfer = moving.transfer
            assert self._ends(transfer) == moving.ends, "a pinned block was written to"
            if transfer.peer != "host":
                del self.moving[transfer_id]
                self._read_disk(transfer)
                continue
            ends = [(self.memory, transfer.blocks), (self.host, transfer.host_blocks)]
            (source, froms), (target, tos) = ends if transfer.direction == "out" else ends[::-1]
            for from_block, to_block in zip(froms, tos, strict=True):
                for slot in range(self.block_size):
                    target.pop((transfer.group, to_block, slot), None)
                    cell = source.get((transfer.group, from_block, slot))
                    if cell is not None:
                        target[transfer.group, to_block, slot] = cell
            del self.moving[transfer_id]
            self.moved.append(transfer_id)

    def _slot(self, sequence: Mirrored, group: int, position: int) -> tuple[int, int, int]:
        place = position // self.block_size - self._dropped(sequence, group)
        block = sequence.tables[group][place]
        assert 0 < block < self.num_blocks[group], "not a block of this group"
        return group, block, position % self.block_size

    def _dropped(self, sequence: Mirrored, group: int) -> int:
        """How many blocks shorter a table is than its tokens."""
        return 0

    def _write(self, row: ScheduledSequence) -> None:
        sequence = self.sequences[row.sequence_id]
        end = row.start + len(row.token_ids)
        if row.num_drafts:
            assert row.sample and end - row.num_drafts == len(sequence.tokens), "drafts of a chunk"
            sequence.tokens += row.drafts
        assert sequence.tokens[row.start : end] == row.token_ids, "not what the sequence knows"
        assert row.token_ids, "an empty row"
        is_due = end == len(sequence.tokens)
        assert row.sample == is_due, "sampled where it should not, or not"
        for group in range(len(self.num_blocks)):
            held = len(sequence.tables[group]) + self._dropped(sequence, group)
            needed = -(-end // self.block_size)
            assert held >= needed, "too few blocks"
            assert held == needed or self.had_drafts, "too many blocks"
            for position in range(row.start, end):
                self.memory[self._slot(sequence, group, position)] = sequence.cell(position)

    def _check_reads(self, row: ScheduledSequence) -> None:
        sequence = self.sequences[row.sequence_id]
        end = row.start + len(row.token_ids)
        known = [sequence.cell(at) for at in range(end)]
        for group in range(len(self.num_blocks)):
            begin = self._first_seen(group, row.start)
            for first, last in ((begin, end), (0, self._end_of_sinks(group, begin))):
                read = self._read(sequence, group, first, last)
                assert read == known[first:last], f"{sequence} reads another's KV"

    def _first_seen(self, group: int, position: int) -> int:
        window = self.windows[group] if self.windows else 0
        return max(0, position - window + 1) if window else 0

    def _end_of_sinks(self, group: int, begin: int) -> int:
        return min(self.sinks[group], begin) if self.sinks else 0

    def _read(
        self, sequence: Mirrored, group: int, begin: int, end: int
    ) -> list[tuple[int, int] | None]:
        return [self.memory.get(self._slot(sequence, group, at)) for at in range(begin, end)]

    def sample(self, step: int, masks: GrammarMasks) -> None:
        assert self.plan is not None and self.plan.step == step
        self._break("sample")
        self.masks = masks
        self.result = StepResult(step, [])
        for number, row in enumerate(self.plan.scheduled):
            sequence = self.sequences[row.sequence_id]
            if number in self.fail_rows:
                self.result.failed[row.sequence_id] = "told to fail"
                self._wipe(sequence, row)
                continue
            self._tell_prompt_logprobs(sequence, row)
            if row.sample:
                self._sample(sequence, row)
        self.fail_rows = frozenset()

    def _wipe(self, sequence: Mirrored, row: ScheduledSequence) -> None:
        """What a failed row has written is gone, as it is in a real runtime."""
        for group in range(len(self.num_blocks)):
            for position in range(row.start, row.start + len(row.token_ids)):
                self.memory.pop(self._slot(sequence, group, position), None)

    def _sample(self, sequence: Mirrored, row: ScheduledSequence) -> None:
        """What follows the last known token, and behind each draft as long as they are right."""
        known = row.start + len(row.token_ids) - row.num_drafts
        mask = self.masks.by_sequence.get(row.sequence_id)
        grammar = sequence.new.sampling.grammar
        assert (mask is not None) == (grammar is not None), "a mask for another"
        kept = self._kept(sequence, row, mask)
        del sequence.tokens[known:], sequence.cells[known:]
        sequence.tokens += kept
        count = sequence.new.sampling.logprobs
        logprobs = None
        if count is not None:
            logprobs = [TokenLogprobs(t, -float(known + i), 1) for i, t in enumerate(kept)]
        proposed = self.propose(row.propose) if row.propose else []
        self.result.samples.append(Sample(row.sequence_id, kept, logprobs, proposed))

    def _kept(
        self, sequence: Mirrored, row: ScheduledSequence, mask: list[bytes] | None
    ) -> list[int]:
        """What is sampled behind the drafts of a row that are right."""
        known = row.start + len(row.token_ids) - row.num_drafts
        kept: list[int] = []
        for ahead in range(row.num_drafts + 1):
            if kept != row.drafts[:ahead] or (mask is not None and ahead >= len(mask)):
                break
            token = self._next(sequence, known + ahead, mask[ahead] if mask else None)
            if token is None and ahead:
                break
            kept.append(token)
        return kept

    def _next(self, sequence: Mirrored, end: int, mask: bytes | None) -> int | None:
        new = sequence.new
        group = min(range(len(self.num_blocks)), key=lambda g: self._first_seen(g, end - 1))
        begin = self._first_seen(group, end - 1)
        read = [cell[0] for cell in self._read(sequence, group, begin, end) if cell]
        generated = end - new.num_prompt_tokens
        banned = new.stop_ids if generated < new.sampling.min_tokens else []
        if mask is not None:
            banned = [t for t in range(self.vocab_size) if not mask[t // 8] >> t % 8 & 1]
            if len(banned) == self.vocab_size:
                return None
        return next_token(read, new.seed, new.index, banned, self.vocab_size)

    def _tell_prompt_logprobs(self, sequence: Mirrored, row: ScheduledSequence) -> None:
        new = sequence.new
        first, last = row.start + 1, row.start + len(row.token_ids)
        positions = range(first, min(last, new.num_prompt_tokens - 1) + 1)
        if new.sampling.prompt_logprobs is not None and new.index == 0 and positions:
            entries = [TokenLogprobs(new.token_ids[at], -float(at), 1) for at in positions]
            self.result.prompt_logprobs.append(PromptLogprobs(new.sequence_id, first, entries))

    def collect(self) -> StepResult:
        assert self.result is not None, "nothing was sampled"
        self._move()
        self._break("collect")
        result, self.result = self.result, None
        result.transfers_done, self.moved = self.moved, []
        result.transfers_failed, self.failed_reads = self.failed_reads, []
        result.tier, self.news = self.news, None
        return result

    def _break(self, stage: str) -> None:
        if self.is_broken:
            raise RuntimeError("broken")
        if self.fail_at == stage:
            self.fail_at = ""
            raise RuntimeError(f"told to fail in {stage}")
        if self.poison is not None and self.poisoned_stage == stage:
            assert self.plan is not None
            for row in self.plan.scheduled:
                new = self.sequences[row.sequence_id].new
                if self.poison in new.token_ids[: new.num_prompt_tokens]:
                    raise RuntimeError(f"poison in {row.sequence_id}")

    def describe(self) -> Description:
        return Description(device="fake")

    def probe(self, budget_s: float) -> None:
        pass
