"""From a plan to tensors: what the runtime knows of the sequences, and one step's inputs.

The state knows each sequence's block tables and what it sampled; a plan changes it by deltas. A
`Batch` is what one forward needs. Worked example, blocks of 4: sequence 7 at 9 tokens decodes, and
sequence 8 computes the first 3 of its prompt:

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

from headway.core.plan import NewSequence, ScheduledSequence, StepPlan, sampled_in

INT = np.int64


class WorkerSequence:
    """What the runtime remembers of one sequence."""

    __slots__ = ("generated", "last_step", "mask", "new", "num_blocks", "row")

    def __init__(self, new: NewSequence, row: int, num_groups: int) -> None:
        self.new = new
        self.row = row
        self.num_blocks = [0] * num_groups
        self.generated = list(new.token_ids[new.num_prompt_tokens :])
        self.last_step = -1
        self.mask = 0
        """Which of the sequence's masks in this step is that of the next token."""

    @property
    def num_known(self) -> int:
        return self.new.num_prompt_tokens + len(self.generated)

    def known(self, begin: int, end: int) -> list[int]:
        """The known tokens at positions `begin` … `end` - 1."""
        prompt = self.new.num_prompt_tokens
        behind = self.generated[max(begin - prompt, 0) : max(end - prompt, 0)]
        return self.new.token_ids[begin : min(end, prompt)] + behind

    def ahead(self, drafts: list[int], mask: int = 0) -> "WorkerSequence":
        """The sequence as it will be where these drafts are kept, to be sampled from."""
        other = copy(self)
        other.generated = self.generated + drafts
        other.mask = mask
        return other


@dataclass(slots=True, kw_only=True)
class Batch:
    """One forward's inputs; T tokens of S sequences, G KV groups."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_GT: list[Tensor]
    block_tables_GSB: list[Tensor]
    query_lens: list[int]
    context_lens: list[int]
    num_decodes: int
    sampled_rows: list[int]
    """Of the T tokens those that are sampled from, in order: with k drafts k + 1, of a further path
    with k drafts k."""
    sampled_sequences: list[WorkerSequence]
    views: dict[int, Any] = field(default_factory=dict)
    """What an attention backend derives from the batch once a step, by KV group."""


class WorkerState:
    """The sequences the runtime knows, with one row of every block table each."""

    def __init__(
        self, *, max_num_seqs: int, max_blocks: int, num_groups: int, block_size: int, device: str
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.sequences: dict[int, WorkerSequence] = {}
        self._tables = [np.zeros((max_num_seqs, max_blocks), INT) for _ in range(num_groups)]
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, plan: StepPlan) -> None:
        """Forget the finished, learn the new, replace copied blocks, append new ones."""
        for sequence_id in plan.finished:
            sequence = self.sequences.pop(sequence_id, None)
            if sequence is not None:  # None: the step that should have told us failed before it did
                self._free_rows.append(sequence.row)
        for new in plan.new:
            row = self._free_rows.pop()
            self.sequences[new.sequence_id] = WorkerSequence(new, row, len(self._tables))
        for block in plan.copies:
            if not block.path:
                row = self.sequences[block.sequence_id].row
                self._tables[block.group][row, block.index] = block.target
        for scheduled in plan.scheduled:
            if scheduled.path:
                continue
            sequence = self.sequences[scheduled.sequence_id]
            if scheduled.num_forced:
                sequence.generated += scheduled.forced
            for group, blocks in enumerate(scheduled.new_blocks):
                if blocks:
                    have = sequence.num_blocks[group]
                    sequence.num_blocks[group] = have + len(blocks)
                    self._tables[group][sequence.row, have : have + len(blocks)] = blocks

    def adopt(self, path: ScheduledSequence) -> None:
        """Its sequence has the blocks of this path from now on."""
        sequence, first = self.sequences[path.sequence_id], path.start // self.block_size
        for group, blocks in enumerate(path.new_blocks):
            sequence.num_blocks[group] = first + len(blocks)
            self._tables[group][sequence.row, first : first + len(blocks)] = blocks

    def batch(self, plan: StepPlan) -> Batch:
        """The inputs of `plan`'s forward, after `apply`."""
        tokens: list[int] = []
        query_lens: list[int] = []
        starts: list[int] = []
        rows: list[int] = []
        sampled_rows: list[int] = []
        sampled: list[WorkerSequence] = []
        paths: dict[int, ScheduledSequence] = {}
        num_masks: dict[int, int] = {}
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
            if scheduled.path:
                paths[index] = scheduled
            num_drafts, mask = scheduled.num_drafts, 0
            if scheduled.sample:
                sampled_rows.append(len(tokens) - num_drafts - 1)
                sampled.append(sequence)
            if num_drafts:
                mask = num_masks.get(scheduled.sequence_id, 1)
                num_masks[scheduled.sequence_id] = mask + num_drafts
            for count in range(1, num_drafts + 1):
                sampled_rows.append(len(tokens) - num_drafts - 1 + count)
                sampled.append(sequence.ahead(scheduled.drafts[:count], mask + count - 1))
        inputs = (tokens, query_lens, starts, rows)
        return self._tensors(self._tables, *inputs, num_decodes, sampled_rows, sampled, paths)

    def table(self, group: int, sequence: WorkerSequence) -> np.ndarray:
        """The ids of the blocks of `sequence` in a group."""
        return self._tables[group][sequence.row, : sequence.num_blocks[group]]

    def tensors_of(self, group: int, rows: list[tuple[WorkerSequence, list[int], int]]) -> Batch:
        """A forward over one group for these (sequence, tokens, position of the first)."""
        lens = [len(tokens) for _, tokens, _ in rows]
        return self._tensors(
            self._tables[group : group + 1],
            [token for _, tokens, _ in rows for token in tokens],
            lens,
            [start for _, _, start in rows],
            [sequence.row for sequence, _, _ in rows],
            len(lens) if max(lens) == 1 else 0,
            [],
            [],
        )

    def _resolve(self, sequence: WorkerSequence, ids: list[int]) -> list[int]:
        """Replace the placeholder of a sampled token by the token."""
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
        paths: dict[int, ScheduledSequence] | None = None,
    ) -> Batch:
        lens, begin, row_S = np.array(query_lens, INT), np.array(starts, INT), np.array(rows, INT)
        context_lens: list[int] = (begin + lens).tolist()
        at_T = np.arange(len(query_lens), dtype=INT)
        if num_decodes == len(query_lens):
            positions = begin
        else:
            first = np.cumsum(lens) - lens
            within = np.arange(len(tokens), dtype=INT) - np.repeat(first, lens)
            positions, at_T = np.repeat(begin, lens) + within, np.repeat(at_T, lens)
        block, offset = np.divmod(positions, self.block_size)
        width = -(-max(context_lens) // self.block_size)
        tables = [table[row_S, :width] for table in tables]
        for row, path in (paths or {}).items():
            own = path.start // self.block_size
            for table_SB, blocks in zip(tables, path.new_blocks, strict=True):
                table_SB[row, own : own + len(blocks)] = blocks
        return Batch(
            token_ids_T=self._to_device(np.array(tokens, INT)),
            positions_T=self._to_device(positions),
            slots_GT=[
                self._to_device(table_SB[at_T, block] * self.block_size + offset)
                for table_SB in tables
            ],
            block_tables_GSB=[self._to_device(table_SB) for table_SB in tables],
            query_lens=query_lens,
            context_lens=context_lens,
            num_decodes=num_decodes,
            sampled_rows=sampled_rows,
            sampled_sequences=sampled,
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device == "cpu" else tensor.to(self.device)
