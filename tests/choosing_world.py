"""A world whose last KV group keeps a part of each prompt, over a runtime that keeps any part."""

import logging
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from cached_world import CachedWorld, Machine
from engine_world import make_settings
from fake_model import Mirrored
from fakes import FakeExecutor, with_cache
from headway.config import kv_keep
from headway.core.plan import ScheduledSequence, StepPlan
from headway.engine.kv.eviction import POLICIES

FEWEST = 5
"""Tokens that are kept at the least here, where prompts are short."""


def kept_of(num_tokens: int, count: int) -> list[int]:
    """Which positions this runtime keeps, as they lie: by no rule that anybody else knows."""
    return sorted(sorted(range(num_tokens), key=lambda at: at * 7 % (num_tokens + 1))[:count])


@dataclass
class ChoosingExecutor(FakeExecutor):
    """The checking executor, whose last group keeps a part."""

    def _dropped(self, sequence: Mirrored, group: int) -> int:
        return sequence.dropped[group] if sequence.dropped else 0

    def _apply(self, plan: StepPlan) -> None:
        """What is kept is read before a copy is made, and written behind them."""
        found, size = [], self.block_size
        for shrink in plan.shrinks:
            count = shrink.num_tokens - (len(shrink.sources) - len(shrink.blocks)) * size
            for to, at in enumerate(kept_of(shrink.num_tokens, count)):
                cell = self.memory[shrink.group, shrink.sources[at // size], at % size]
                found.append(((shrink.group, shrink.blocks[to // size], to % size), cell))
            if (sequence := self.sequences.get(shrink.sequence_id)) is not None:
                assert sequence.tables[shrink.group] == shrink.sources
                sequence.tables[shrink.group] = list(shrink.blocks)
                sequence.dropped = [0] * len(self.num_blocks)
                sequence.dropped[shrink.group] = len(shrink.sources) - len(shrink.blocks)
        super()._apply(plan)
        self.memory |= dict(found)

    def _check_reads(self, row: ScheduledSequence) -> None:
        """Of a prompt that was chosen from the part that is kept, and all that lies behind it."""
        sequence = self.sequences[row.sequence_id]
        end, last = row.start + len(row.token_ids), len(self.num_blocks) - 1
        dropped = self._dropped(sequence, last)
        if not dropped:
            super()._check_reads(row)
            return
        num_prompt = sequence.new.num_prompt_tokens
        scored = sequence.new.sampling.prompt_logprobs is not None
        at = num_prompt // 2 if scored else num_prompt
        count = at - dropped * self.block_size
        wanted = [sequence.cell(p) for p in (*kept_of(at, count), *range(at, end))]
        slots = (divmod(place, self.block_size) for place in range(len(wanted)))
        read = [self.memory.get((last, sequence.tables[last][b], slot)) for b, slot in slots]
        assert read == wanted, f"{sequence} reads another's KV"
        assert self._read(sequence, 0, 0, end) == [sequence.cell(p) for p in range(end)]


class ChoosingMachine(Machine):
    """Admit, extend, fork, abort, fail, evict, preempt, where a part of each prompt is kept."""

    patch: pytest.MonkeyPatch | None = None

    @initialize(
        policy=st.sampled_from(["", *sorted(POLICIES)]),
        block_size=st.sampled_from([1, 2, 4, 5]),
        num_blocks=st.integers(17, 40),
        keep=st.sampled_from([0.1, 0.3, 0.6]),
        budget=st.integers(4, 24),
        max_num_seqs=st.integers(1, 4),
        host=st.sampled_from([0, 12]),
    )
    def begin(self, policy, block_size, num_blocks, keep, budget, max_num_seqs, host):
        logging.disable(logging.CRITICAL)
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(kv_keep, "FEWEST", FEWEST)
        shape = make_settings(
            block_size=block_size,
            num_blocks=(num_blocks,) * 2,
            max_model_len=min(40, (num_blocks - 1) // 2 * block_size),
            max_num_seqs=max_num_seqs,
            budget=max(budget, max_num_seqs),
            host_blocks=(host,) * 2 if host else (),
            block_bytes=(1, 1),
        )
        about = {"choosing": (1,), "keep": keep, "prefix_cache": policy, "windows": (0, 0)}
        settings = with_cache(shape, **about)
        self.world = CachedWorld(settings, ChoosingExecutor)

    def teardown(self):
        try:
            super().teardown()
        finally:
            if self.patch is not None:
                self.patch.undo()
