"""KV cache: the block tables of each sequence, one per KV group.

`extend` makes room for a number of tokens in every group or in none. A block that several sequences
refer to is immutable: the first one to write into it gets a copy. Worked example, blocks of 4, a
prompt of 6 tokens sampled twice (n = 2):

    parent   [a b]         6 tokens computed, its first answer token goes to slot 2 of b
    child    [a b]         fork at 5: shares both, and computes token 5 again for its own sample
    child writes slot 1 of b  → copy b to c: child [a c], parent [a b]

A window group releases blocks outside its window before it takes more. With a window of 6 and 14
tokens computed, token 14 sees 9 … 14: blocks 0 and 1 are free, their entries the null block.

    full     [a b c d]
    window   [0 0 e f]     first_live 2
    … 4 sinks [g 0 e f]    the same, and the blocks of the first tokens stay

A group of states (`engine.kv.states`) has one block per sequence, which moves with its newest
token, and blocks that keep the state after a full block for other sequences.

With a prefix cache, computed full blocks stay findable after their release, until they are evicted
(`engine.kv.prefix`): `find_room` looks up the longest prefix of a new sequence that all groups
hold, `reuse` starts the sequence after it; `engine.kv.listing` lists computed blocks.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as TypingSequence
from contextlib import contextmanager

from headway.config.cache_config import CacheConfig
from headway.core.plan import NULL_BLOCK, BlockCopy, BlocksByGroup
from headway.engine.chain import Chain
from headway.engine.kv import rank_split
from headway.engine.kv.choosing import Choosing, unshare_block
from headway.engine.kv.pool import BlockPool
from headway.engine.kv.prefix import (
    Hit,
    PrefixIndex,
    blocks_held,
    find_partial_block,
    first_visible,
    live_of,
    with_gap,
)
from headway.engine.kv.states import States
from headway.engine.kv.tiers import OPEN_WINDOW, Tiers
from headway.engine.sequence import Sequence
from headway.spec.kv_format import LEAST_OPEN


class KVCache:
    """Block pools by group, and the operations on a sequence's block tables.

    `max_chunk` is the maximum number of tokens of one sequence in a step; `config.prefix_cache` is
    a row of `eviction.POLICIES`.
    """

    def __init__(self, config: CacheConfig, max_chunk: int) -> None:
        self.block_size = config.block_size
        self.windows = config.windows + (OPEN_WINDOW,) * config.open_blocks
        self.sink_blocks = config.sink_blocks + (0,) * config.open_blocks
        self._slides = any(self.windows)
        self.has_open = config.open_blocks
        self.max_chunk = max_chunk
        self.attention_cost = config.attention_cost
        self.nothing_new: BlocksByGroup = ((),) * len(self.windows)
        self.pools = [
            BlockPool(count, config.prefix_cache, chained=not window)
            for count, window in zip(config.num_blocks, self.windows, strict=True)
        ]
        self.states = States.of(config, len(self.pools))
        self.choosing = Choosing.of(config)
        self.split = config.context_shards
        self._is_plain = not (self._slides or self.choosing or self.split or self.states)
        self.is_one_table = self._is_plain and len(self.pools) == 1  # which only grows
        self.indexes = [pool.index for pool in self.pools if pool.index is not None]
        self.tiers: Tiers | None = None

    @property
    def num_used(self) -> int:
        """Return the blocks in use over all groups."""
        return sum(pool.num_used for pool in self.pools)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold `num_tokens`: 17 tokens in blocks of 16 → 2."""
        return -(-num_tokens // self.block_size)

    def still_needed(self, sequence: Sequence, hit: Hit | None = None) -> list[int]:
        """Return the maximum of blocks by group that `sequence` still takes for its known tokens.

        A window group holds at most the window and one chunk: blocks of 4, a window of 6, chunks
        of 8 → (5 + 8) / 4, rounded up, and one for the offset: 5. With `hit` a new sequence starts
        after it: free blocks of the hit count, because they are no longer free, and a partial block
        is copied. A sequence in host memory starts after its computed tokens. Of open blocks a
        decode takes the one of its token, and two where forced tokens cross its end.
        """
        tables, first_live = sequence.block_tables, sequence.first_live
        computed, copied = sequence.computed, False
        if sequence.host_tables or (self._is_plain and hit is not None and not hit.num_tokens):
            hit = None
        whole = self.blocks_for(len(sequence.tokens))
        if self.split is not None:
            return rank_split.still_needed(self.split, self.pools, sequence, hit, whole)
        everything = [whole] * len(tables)
        if self.choosing is not None:
            everything = self.choosing.most_blocks(sequence, whole)
        if hit is None and not self._slides:
            return [
                max(most - len(table), 0) for most, table in zip(everything, tables, strict=True)
            ]
        if hit is not None:
            tables, first_live = hit.tables, hit.first_live
            computed, copied = hit.num_tokens, hit.is_partial
        needed, chunk = [], min(len(sequence.tokens) - computed, self.max_chunk)
        for group, window in enumerate(self.windows):
            most = everything[group]
            first = first_live[group]
            if window == OPEN_WINDOW:
                first = computed // self.block_size
                most = min(whole - first, LEAST_OPEN) + sequence.shares_blocks
            elif window:
                most = self.blocks_for(window - 1 + chunk) + 1 + self.sink_blocks[group]
                most = min(everything[group], most)
            live = live_of(tables[group], first, self.sink_blocks[group])
            if self.states is not None and group == self.states.group:
                live = [block for block in live if block != NULL_BLOCK]
                most = 1 + bool(hit is not None and computed)  # the cached one, and its own
            count = max(most - len(live), 0)
            if hit is not None:
                references = self.pools[group].references
                count += copied + sum([references[block] == 0 for block in live])
                count += sum([read.group == group for read in hit.reads])
            needed.append(count)
        return needed

    def needed_by(self, sequences: list[Sequence]) -> list[int]:
        """Return the sum of `still_needed` over these sequences, by group."""
        groups, size = range(len(self.pools)), self.block_size
        if not self._is_plain:
            each = [self.still_needed(sequence) for sequence in sequences]
            return [sum([needed[group] for needed in each]) for group in groups]
        lacking = [s for s in sequences if s.capacity < len(s.tokens)]
        wholes = [(-(-len(s.tokens) // size), s.block_tables) for s in lacking]
        return [sum([max(n - len(tables[g]), 0) for n, tables in wholes]) for g in groups]

    def has_room(self, needed: list[int]) -> bool:
        """Return whether every group has this many free blocks."""
        return all(pool.num_free >= count for pool, count in zip(self.pools, needed, strict=True))

    def extend(
        self, sequence: Sequence, num_tokens: int
    ) -> tuple[BlocksByGroup, list[BlockCopy]] | None:
        """Make room for the first `num_tokens` of `sequence`; return new blocks and copies to make.

        None, with nothing taken, if a group has no room. Not needed up to `sequence.capacity`.
        """
        tables = sequence.block_tables
        if self._is_plain and not sequence.shares_blocks:
            return self._grow(sequence, num_tokens)
        if self._slides:
            self.drop_unseen(sequence)
        held = len(tables[0]) + sequence.dropped[0]
        due = self.choosing is not None and self.choosing.num_due(sequence)
        if num_tokens <= held * self.block_size and not sequence.shares_blocks and not due:
            if self._is_plain:
                sequence.capacity = held * self.block_size
            return self.nothing_new, []
        if self.choosing is not None and (due or any(sequence.dropped)):
            return self.choosing.extend(self.pools, sequence, num_tokens)
        needed = max(self.blocks_for(num_tokens) - len(tables[0]), 0)
        first_written = sequence.computed // self.block_size
        copies_needed = False
        if sequence.shares_blocks and first_written < len(tables[0]):
            copies_needed = any(
                pool.is_immutable(table[first_written])
                for pool, table in zip(self.pools, tables, strict=True)
            )
            sequence.shares_blocks = copies_needed
        counts, begin = [needed + copies_needed] * len(self.pools), len(tables[0])
        if self.split is not None:
            counts = rank_split.counts(self.split, begin, needed, copies_needed, first_written)
        if self.states is not None:
            counts[-1] = self.states.num_new(sequence, self.pools[-1], needed, copies_needed)
        if not self.has_room(counts):
            return None
        copies = unshare_block(sequence, first_written, self.pools) if copies_needed else []
        new: list[list[int]] = []
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            if self.states is not None and group == self.states.group:
                new.append(self.states.extend(sequence, pool, needed))
                continue
            blocks = rank_split.take(self.split, pool, group, begin, needed)
            table.extend(blocks)
            new.append(blocks)
        if self._is_plain and not sequence.shares_blocks:
            sequence.capacity = len(tables[0]) * self.block_size
        return new, copies

    def _grow(
        self, sequence: Sequence, num_tokens: int
    ) -> tuple[BlocksByGroup, list[BlockCopy]] | None:
        """Extend tables that only grow and whose last block is not shared."""
        tables, size = sequence.block_tables, self.block_size
        needed = -(-num_tokens // size) - len(tables[0])
        new = self.nothing_new
        if needed > 0:
            for pool in self.pools:
                if pool.num_free < needed:
                    return None
            new = [pool.take_some(needed) for pool in self.pools]
            for table, blocks in zip(tables, new, strict=True):
                table.extend(blocks)
        sequence.capacity = len(tables[0]) * size
        return new, []

    def drop_unseen(self, sequence: Sequence) -> None:
        """Release the blocks of window groups that no later token will see."""
        for group, window in enumerate(self.windows):
            if window:
                table, pool = sequence.block_tables[group], self.pools[group]
                first_live = first_visible(sequence.computed, window) // self.block_size
                begin = max(sequence.first_live[group], self.sink_blocks[group])
                for index in range(begin, first_live):
                    if table[index] != NULL_BLOCK:
                        pool.release(table[index])
                        table[index] = NULL_BLOCK
                sequence.first_live[group] = first_live

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """Let `child` share the blocks that hold the first `num_tokens` of `parent`."""
        assert num_tokens <= parent.computed and not any(child.block_tables)
        count = self.blocks_for(num_tokens)
        for group, pool in enumerate(self.pools):
            first_live = parent.first_live[group]
            source = parent.block_tables[group][: count - parent.dropped[group]]
            for block in live_of(source, first_live, self.sink_blocks[group]):
                if block != NULL_BLOCK:
                    pool.share(block)
            child.block_tables[group].extend(source)
            child.first_live[group], child.dropped[group] = first_live, parent.dropped[group]
        child.computed = num_tokens
        child.num_listed = min(parent.num_listed, num_tokens // self.block_size)
        child.num_shared = parent.num_shared = num_tokens // self.block_size * self.block_size
        child.shares_blocks = parent.shares_blocks = count > 0
        parent.capacity = 0

    # ── the end ─────────────────────────────────────────────────────────────────────────────

    def release(self, sequence: Sequence) -> None:
        """Release all blocks of `sequence`; none of its tokens is computed any more.

        The order is the order of eviction: of a full context its end first, of a window its
        beginning, because a window without its end is useless; its sinks come last.
        """
        for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            table, live = sequence.block_tables[group], self.live(sequence, group)
            num_sinks = min(self.sink_blocks[group], len(live))
            pool.release_all(live[num_sinks:] + live[:num_sinks] if window else live[::-1])
            table.clear()
            sequence.first_live[group] = sequence.dropped[group] = 0
        sequence.computed = sequence.num_listed = 0
        sequence.capacity = 0
        sequence.shares_blocks = False

    # ── swapped-out sequences ───────────────────────────────────────────────────────────────

    def live_blocks(self, sequence: Sequence) -> list[list[int]]:
        """Release the blocks of `sequence` that no later token sees, and return the others."""
        self.drop_unseen(sequence)
        sequence.capacity = 0
        end = self.blocks_for(sequence.computed)
        live = []
        for group, (pool, table) in enumerate(zip(self.pools, sequence.block_tables, strict=True)):
            while len(table) > end - sequence.dropped[group]:
                block = table.pop()
                if block != NULL_BLOCK:
                    pool.release(block)
            live.append(self.live(sequence, group))
        return live

    def live(self, sequence: Sequence, group: int) -> list[int]:
        """Return the blocks that `sequence` refers to in a group."""
        table, first_live = sequence.block_tables[group], sequence.first_live[group]
        live = live_of(table, first_live, self.sink_blocks[group])
        is_sparse = self.states is not None and group == self.states.group
        if is_sparse or self.split is not None:
            return [block for block in live if block != NULL_BLOCK]
        return live

    def num_live(self, sequences: list[Sequence]) -> list[int]:
        """Return the number of blocks that these sequences refer to, by group."""
        groups = range(len(self.pools))
        if self._is_plain:
            return [sum([len(s.block_tables[group]) for s in sequences]) for group in groups]
        return [sum([len(self.live(s, group)) for s in sequences]) for group in groups]

    def leave(self, sequence: Sequence) -> None:
        """Release the blocks of `sequence`; its tokens count as computed, their KV is elsewhere."""
        computed, first_live, dropped = sequence.computed, sequence.first_live, sequence.dropped
        sequence.first_live, sequence.dropped = list(first_live), list(dropped)
        self.release(sequence)
        sequence.computed, sequence.first_live, sequence.dropped = computed, first_live, dropped

    def take_for_swap_in(self, sequence: Sequence, counts: list[int]) -> list[list[int]]:
        """Return new blocks by group for a sequence that returns; the caller has checked room."""
        new_blocks = []
        for group, (pool, count) in enumerate(zip(self.pools, counts, strict=True)):
            blocks = [pool.take() for _ in range(count)]
            first_live, num_sinks = sequence.first_live[group], self.sink_blocks[group]
            sequence.block_tables[group].extend(with_gap(blocks, first_live, num_sinks))
            new_blocks.append(blocks)
        return new_blocks

    def num_unshared(self, blocks: list[list[int]]) -> list[int]:
        """Return by group how many of `blocks` have exactly one reference."""
        return [
            sum([pool.references[block] == 1 for block in own])
            for pool, own in zip(self.pools, blocks, strict=True)
        ]

    def num_kept_by_others(self, sequence: Sequence) -> int:
        """Return the tokens of the longest prefix of `sequence` that other running ones hold."""
        if not self.indexes or not sequence.takes_hits:
            return 0
        count = 0
        for blocks in zip(*sequence.block_tables, strict=True):
            if not all(map(BlockPool.is_kept_by_others, self.pools, blocks)):
                break
            count += 1
        return min(count, sequence.computed // self.block_size) * self.block_size

    # ── prefix cache ────────────────────────────────────────────────────────────────────────

    def match_prefix(self, sequence: Sequence, *, partly: bool = True) -> Hit:
        """Return the longest cached prefix in all groups; with `partly` it may end in a block."""
        size = self.block_size
        if not self.indexes or not sequence.takes_hits or sequence.host_tables:
            return Hit.none(len(self.pools))
        chain, most = sequence.keys(size), sequence.max_cached
        if self.tiers is not None or self.states is not None or self.split is not None:
            return self._match(sequence, chain, most, partly=partly)
        lookup = len(sequence.tokens), most, partly, [index.num_changes for index in self.indexes]
        cached = chain.cached_hit
        if cached is None or cached[0] != lookup:
            chain.cached_hit = cached = lookup, self._match(sequence, chain, most, partly=partly)
        hit: Hit = cached[1]
        return hit

    def _match(self, sequence: Sequence, chain: Chain, most: int, *, partly: bool) -> Hit:
        """Return as `match_prefix`, of the first `most` tokens."""
        size = self.block_size
        here, indexes = rank_split.listed_keys(self.split, self.indexes), self.indexes
        count = blocks_held(chain, most // size, here, size, self.windows, self.sink_blocks)
        if self.states is not None:
            partly = False
            self.states.set_divergence(sequence, chain, count, most // size, here)
        if self.split is not None:
            indexes = [indexes[self.split.owner(count)]]
        keys, num_tokens = [chain.key(index) for index in range(count)], count * size
        begun = (
            find_partial_block(indexes, sequence.tokens, most, chain, count, size)
            if partly
            else None
        )
        if begun is not None:
            keys.append(begun[0])
            num_tokens += begun[1]
        if self.tiers is not None and sequence.takes_restores:
            how = self.windows, self.sink_blocks, sequence.source
            below = self.tiers.find(chain, num_tokens, most, self.indexes, *how, partly=partly)
            if below is not None:
                return below
        if not keys:
            return Hit.none(len(self.pools))
        firsts = [first_visible(num_tokens, window) // size for window in self.windows]
        tables = [
            with_gap(
                rank_split.blocks_of(self.split, index, live_of(keys, first, num_sinks)),
                first,
                num_sinks,
            )
            for index, first, num_sinks in zip(self.indexes, firsts, self.sink_blocks, strict=True)
        ]
        return Hit(num_tokens=num_tokens, tables=tables, first_live=firsts, is_partial=bool(begun))

    def find_room(self, sequence: Sequence, promised: list[int]) -> Hit | None:
        """Return the prefix of `sequence` if there is room for the rest and for `promised` blocks.

        A partial block is left out if only its copy has no room; None means: wait.
        """
        hit = self.match_prefix(sequence)
        while True:
            needed = self.still_needed(sequence, hit)
            if self.has_room([a + b for a, b in zip(promised, needed, strict=True)]):
                return hit
            if not hit.is_partial:
                return None
            hit = self.match_prefix(sequence, partly=False)

    def reuse(self, sequence: Sequence, hit: Hit) -> None:
        """Start a new sequence after `hit`, which must be the result of the last lookup."""
        assert not any(sequence.block_tables)
        if self.tiers is not None:
            self.tiers.reuse(hit)
        for group, pool in enumerate(self.pools):
            table, first_live = hit.tables[group], hit.first_live[group]
            for block in live_of(table, first_live, self.sink_blocks[group]):
                if block != NULL_BLOCK:
                    pool.reuse(block)
            sequence.block_tables[group].extend(hit.tables[group])
        for read in hit.reads:
            sequence.block_tables[read.group][read.at] = self.pools[read.group].take()
        sequence.first_live[:], sequence.computed = hit.first_live, hit.num_tokens
        sequence.num_listed = hit.num_whole(self.block_size)
        sequence.restored = hit.restored
        sequence.shares_blocks = hit.is_partial

    def invalidate(self, sequence: Sequence) -> None:
        """Unlist the blocks of `sequence`, also those that it took from the cache."""
        sequence.is_forgotten = True
        for group, pool in enumerate(self.pools):
            for block in self.live(sequence, group):
                pool.forget(block)

    def forget_free(self) -> None:
        """Unlist the free blocks."""
        for pool in self.pools:
            pool.forget_free()

    @contextmanager
    def unlisted(self) -> Iterator[None]:
        """Return a context in which nothing is looked up, listed or kept in a lower tier."""
        indexes, self.indexes = self.indexes, []
        try:
            yield
        finally:
            self.indexes = indexes

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert that pools and tables agree."""
        size = self.block_size
        for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            check_tables(sequences, group, window, size, self.sink_blocks[group])
            live = [self.live(sequence, group) for sequence in sequences]
            pool.check_integrity(live)
        for sequence in sequences if self.indexes else ():
            check_listed(sequence, sequence.keys(size), self.indexes, size)


# ── assertions between steps ────────────────────────────────────────────────────────────────


def check_tables(
    sequences: Iterable[Sequence], group: int, window: int, block_size: int, num_sinks: int
) -> None:
    """Assert that tables of `group` hold the computed tokens that are still visible.

    Before these they hold only the `num_sinks` first blocks.
    """
    for sequence in sequences:
        table, first_live = sequence.block_tables[group], sequence.first_live[group]
        assert not any(table[num_sinks:first_live]), "a released block is still in the table"
        if table or not sequence.host_tables:
            held = -(-sequence.computed // block_size) - sequence.dropped[group]
            assert len(table) >= held, "computed without a block"
        assert sequence.capacity <= len(table) * block_size, "capacity without a block"
        assert not (sequence.capacity and sequence.shares_blocks), "capacity in a shared block"
        first_visible_block = first_visible(sequence.computed, window) // block_size
        assert first_live <= first_visible_block, "a visible block was released"


def check_listed(
    sequence: Sequence, chain: Chain, indexes: TypingSequence[PrefixIndex], block_size: int
) -> None:
    """Assert that the blocks of `sequence` are listed under its own tokens, or not at all.

    A table with a kept part of the prompt is not listed.
    """
    assert sequence.num_listed <= sequence.computed // block_size
    full = sequence.computed // block_size
    tables = zip(indexes, sequence.block_tables, sequence.dropped, strict=True)
    for index, table, dropped in tables:
        if dropped:
            assert not any(index.cached[block] for block in table), "a kept part is listed"
            continue
        index.check_table(table, chain, full, shared=sequence.shares_blocks)
