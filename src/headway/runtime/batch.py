"""Turn a plan into tensors: the runtime's state of the sequences, and the inputs of one step.

The state holds the block tables and sampled tokens of each sequence; a plan changes it by deltas. A
`Batch` has the inputs of one forward. Worked example, blocks of 4: sequence 7 at 9 tokens decodes,
and sequence 8 computes the first 3 of its prompt:

    token_ids  [t9 | p0 p1 p2]     positions  [9 | 0 1 2]     rows 0 and 1 of the block tables
    tables     7: [5 2 6], 8: [3]  slots      [6·4+1 | 12 13 14]
    query_lens [1, 3]              context_lens [10, 3]       num_decodes 1
"""

from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.config.kv_read import FEWEST
from headway.core.plan import NewSequence, ScheduledSequence, Shrink, StepPlan, sampled_in
from headway.runtime.rope import RopeRows, ScaledPrompts

INT = np.int64


class WorkerSequence:
    """The runtime's state of one sequence."""

    __slots__ = (
        "dropped",
        "generated",
        "last_step",
        "mask",
        "new",
        "num_blocks",
        "row",
    )

    def __init__(self, new: NewSequence, row: int, num_groups: int) -> None:
        self.new = new
        self.row = row
        self.num_blocks = [0] * num_groups
        self.dropped = list(new.dropped) or [0] * num_groups
        self.generated = list(new.token_ids[new.num_prompt_tokens :])
        self.last_step = -1
        self.mask = 0
        """Index of the next token's mask among those that the sequence has in this step."""

    @property
    def num_known(self) -> int:
        return self.new.num_prompt_tokens + len(self.generated)

    def known(self, begin: int, end: int) -> list[int]:
        """Return the known tokens at positions `begin` … `end` - 1."""
        prompt = self.new.num_prompt_tokens
        behind = self.generated[max(begin - prompt, 0) : max(end - prompt, 0)]
        return self.new.token_ids[begin : min(end, prompt)] + behind

    def with_drafts(self, drafts: list[int], mask: int = 0) -> "WorkerSequence":
        """Return a copy of the sequence with these draft tokens appended, to sample behind them."""
        other = copy(self)
        other.generated = self.generated + drafts
        other.mask = mask
        return other


@dataclass(slots=True, kw_only=True)
class Lens:
    """The lengths of a batch for the kernels of an accelerator: int32, on the device."""

    query_starts_S1: Tensor
    """The first token of each sequence, and T behind the last."""
    context_lens_S: Tensor
    tables_GSB: list[Tensor]
    rows_T: Tensor
    """The state's row of each token's sequence, int64."""
    longest_query: int
    longest_context: int
    has_placeholders: bool
    """Whether some input ids are placeholders of sampled tokens that only the device knows."""
    graph: Any = None
    """The key of the CUDA graph that reads these inputs, padded to the graph's size."""
    drawn: Any = None
    """The sampling inputs of all rows of that graph."""


@dataclass(slots=True, kw_only=True)
class Batch:
    """The inputs of one forward; T tokens of S sequences, G KV groups."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_GT: list[Tensor]
    block_tables_GSB: list[Tensor]
    query_lens: list[int]
    context_lens: list[int]
    num_decodes: int
    sampled_rows: list[int]
    """The tokens from which tokens are sampled, in order: k + 1 with k draft tokens."""
    sampled_sequences: list[WorkerSequence]
    lens: Lens | None = None
    """Set on an accelerator only."""
    own_lens_GS: list[list[int]] | None = None
    """Context lengths by KV group, where some block tables are shorter than their tokens."""
    reads_T: Tensor | None = None
    """Blocks that each token reads of a partly read layer, 0 for all; None: all tokens read all."""
    rope_rows_T: Tensor | None = None
    """Rows of the rope tables, where they are not the positions."""
    rope_prompt: ScaledPrompts | None = None
    """Tokens that need their rows of the rope tables filled before the forward."""
    views: dict[int, Any] = field(default_factory=dict)
    """What an attention backend derives from the batch, once a step, by KV group."""

    @property
    def rope_rows(self) -> Tensor:
        """The rows of the rope tables that the tokens read."""
        return self.positions_T if self.rope_rows_T is None else self.rope_rows_T

    def contexts(self, group: int) -> list[int]:
        """Return the number of keys of a KV group that each sequence has with this step."""
        return self.context_lens if self.own_lens_GS is None else self.own_lens_GS[group]


class WorkerState:
    """The sequences that the runtime knows, each with one row of every block table."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks: int,
        num_groups: int,
        block_size: int,
        rope_rows: RopeRows | None = None,
    ) -> None:
        self.block_size, self.rope_rows = block_size, rope_rows
        self.sequences: dict[int, WorkerSequence] = {}
        self._tables = [np.zeros((max_num_seqs, max_blocks), INT) for _ in range(num_groups)]
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._has_shrunk = False
        """Whether any block table has been shorter than its tokens."""

    def apply(self, plan: StepPlan) -> None:
        """Apply the deltas of a plan: finished, shrunk and new sequences, copied and new blocks.

        A sequence that is new with this plan comes with tables that have shrunk already.
        """
        for sequence_id in plan.finished:
            sequence = self.sequences.pop(sequence_id, None)
            if sequence is not None:  # None: the step that added it failed before
                self._free_rows.append(sequence.row)
        self._has_shrunk |= bool(plan.shrinks) or any(new.dropped for new in plan.new)
        for shrink in plan.shrinks:
            if (known := self.sequences.get(shrink.sequence_id)) is not None:
                self._shrink(known, shrink)
        for new in plan.new:
            row = self._free_rows.pop()
            self.sequences[new.sequence_id] = WorkerSequence(new, row, len(self._tables))
        for block in plan.copies:
            row = self.sequences[block.sequence_id].row
            self._tables[block.group][row, block.index] = block.target
        for scheduled in plan.scheduled:
            sequence = self.sequences[scheduled.sequence_id]
            if scheduled.num_forced:
                sequence.generated += scheduled.forced
            for group, blocks in enumerate(scheduled.new_blocks):
                if blocks:
                    have = sequence.num_blocks[group]
                    sequence.num_blocks[group] = have + len(blocks)
                    self._tables[group][sequence.row, have : have + len(blocks)] = blocks

    def _shrink(self, sequence: WorkerSequence, shrink: Shrink) -> None:
        count = len(shrink.blocks)
        self._tables[shrink.group][sequence.row, :count] = shrink.blocks
        sequence.num_blocks[shrink.group] = count
        sequence.dropped[shrink.group] = len(shrink.sources) - count

    def batch(self, plan: StepPlan) -> Batch:
        """Return the inputs of the forward of `plan`, after `apply`."""
        tokens: list[int] = []
        query_lens: list[int] = []
        starts: list[int] = []
        rows: list[int] = []
        sampled_rows: list[int] = []
        sampled: list[WorkerSequence] = []
        num_decodes = 0
        for index, scheduled in enumerate(plan.scheduled):
            sequence = self.sequences[scheduled.sequence_id]
            ids = scheduled.token_ids
            tokens.extend(ids if min(ids) >= 0 else self._resolve(sequence, ids))
            query_lens.append(len(ids))
            starts.append(scheduled.start)
            rows.append(sequence.row)
            if len(ids) == 1 and num_decodes == index:
                num_decodes += 1
            num_drafts = scheduled.num_drafts
            if scheduled.sample:
                sampled_rows.append(len(tokens) - num_drafts - 1)
                sampled.append(self._sampled(sequence, scheduled))
            for count in range(1, num_drafts + 1):
                sampled_rows.append(len(tokens) - num_drafts - 1 + count)
                sampled.append(sequence.with_drafts(scheduled.drafts[:count], count))
        known = [self.sequences[row.sequence_id] for row in plan.scheduled]
        dropped = [one.dropped for one in known] if self._has_shrunk else None
        inputs = (tokens, query_lens, starts, rows)
        sampling = (num_decodes, sampled_rows, sampled)
        batch = self._tensors(self._tables, *inputs, *sampling, dropped)
        news = [one.new for one in known]
        self._put_rope_rows(batch, known, starts)
        if any(new.kv_read < 1 for new in news):
            batch.reads_T = self._reads(news, query_lens, batch.positions_T)
        return batch

    def _reads(
        self, news: list[NewSequence], query_lens: list[int], positions_T: Tensor
    ) -> Tensor | None:
        """Return `Batch.reads_T`: known prompt tokens and short contexts read all blocks."""
        lens = torch.tensor(query_lens, device=positions_T.device)
        share_T, from_T = (
            torch.tensor(column, dtype=torch.float64, device=lens.device).repeat_interleave(lens)
            for column in zip(*((new.kv_read, new.reads_from) for new in news), strict=True)
        )
        blocks_T = positions_T // self.block_size + 1
        read_T = (share_T * blocks_T).ceil().long().clamp(min=FEWEST)
        read_T[(positions_T < from_T) | (read_T >= blocks_T)] = 0
        return read_T if bool(read_T.any()) else None

    def table(self, group: int, sequence: WorkerSequence) -> np.ndarray:
        """Return the block ids of `sequence` in a group."""
        return self._tables[group][sequence.row, : sequence.num_blocks[group]]

    def draft_batch(self, group: int, rows: list[tuple[WorkerSequence, list[int], int]]) -> Batch:
        """Return the inputs of a forward over one group, of (sequence, tokens, first position)."""
        lens = [len(tokens) for _, tokens, _ in rows]
        batch = self._tensors(
            self._tables[group : group + 1],
            [token for _, tokens, _ in rows for token in tokens],
            lens,
            [start for _, _, start in rows],
            [sequence.row for sequence, _, _ in rows],
            len(lens) if max(lens) == 1 else 0,
            [],
            [],
        )
        self._put_rope_rows(batch, [one for one, _, _ in rows], [start for _, _, start in rows])
        return batch

    def _put_rope_rows(self, batch: Batch, known: list[WorkerSequence], starts: list[int]) -> None:
        """Set `Batch.rope_rows_T` and `rope_prompt`, where they depend on lengths of requests."""
        if self.rope_rows is None:
            return
        lens = np.array(batch.query_lens, INT)
        first = np.array(starts, INT) - np.cumsum(lens) + lens
        positions = np.repeat(first, lens) + np.arange(lens.sum(), dtype=INT)
        scaled_lens = np.repeat(np.array([one.new.scaled_len for one in known], INT), lens)
        rows, batch.rope_prompt = self.rope_rows.rows_for(positions, scaled_lens)
        batch.rope_rows_T = self._to_device(rows)

    def _to_device(self, array: np.ndarray) -> Tensor:
        """Return the array as a tensor on the device of batches."""
        return torch.from_numpy(array)

    def _resolve(self, sequence: WorkerSequence, ids: list[int]) -> list[int]:
        """Replace the placeholder of a sampled token by that token."""
        placeholder = sampled_in(sequence.last_step)
        assert all(i >= 0 or i == placeholder for i in ids), "an unknown placeholder"
        return [sequence.generated[-1] if i < 0 else i for i in ids]

    def _tensors(
        self,
        tables: list[np.ndarray],
        tokens: list[int],
        query_lens: list[int],
        starts: list[int],
        rows: list[int],
        num_decodes: int,
        sampled_rows: list[int],
        sampled: list[WorkerSequence],
        dropped_SG: list[list[int]] | None = None,
    ) -> Batch:
        lens, begin, row_S = np.array(query_lens, INT), np.array(starts, INT), np.array(rows, INT)
        context_lens: list[int] = (begin + lens).tolist()
        row_T = np.arange(len(query_lens), dtype=INT)
        if num_decodes == len(query_lens):
            positions = begin
        else:
            first = np.cumsum(lens) - lens
            within = np.arange(len(tokens), dtype=INT) - np.repeat(first, lens)
            positions, row_T = np.repeat(begin, lens) + within, np.repeat(row_T, lens)
        block, offset = np.divmod(positions, self.block_size)
        width = -(-max(context_lens) // self.block_size)
        own_lens, places = None, [block] * len(tables)
        if dropped_SG is not None:
            dropped_GS = np.array(dropped_SG, INT).T
            own_lens = (begin + lens - dropped_GS * self.block_size).tolist()
            places = [block - own_S[row_T] for own_S in dropped_GS]
        tables = [table[row_S, :width] for table in tables]
        slots = [
            table_SB[row_T, place] * self.block_size + offset
            for table_SB, place in zip(tables, places, strict=True)
        ]
        sent, lens_of = self._send(
            [np.array(tokens, INT), positions, *slots, *tables], lens, context_lens, row_S[row_T]
        )
        return Batch(
            token_ids_T=sent[0],
            positions_T=sent[1],
            slots_GT=sent[2 : 2 + len(tables)],
            block_tables_GSB=sent[2 + len(tables) :],
            query_lens=query_lens,
            context_lens=context_lens,
            num_decodes=num_decodes,
            sampled_rows=sampled_rows,
            sampled_sequences=sampled,
            lens=lens_of,
            own_lens_GS=own_lens,
        )

    def _send(
        self,
        arrays: list[np.ndarray],
        query_lens_S: np.ndarray,
        context_lens: list[int],
        rows_T: np.ndarray,
    ) -> tuple[list[Tensor], Lens | None]:
        """Return the arrays as tensors: ids, positions, slots and tables by group."""
        return [torch.from_numpy(array) for array in arrays], None

    def _sampled(self, sequence: WorkerSequence, scheduled: ScheduledSequence) -> WorkerSequence:
        """Return the sequence in its state after the row's last known token."""
        return sequence
