"""A drafter with paged KV memory of its own, in blocks with the numbers of the model's blocks.

Each block of the KV group that the drafter follows has a counterpart in the drafter's memory. What
the engine shares, finds again or copies for the model is therefore shared, found and copied here
too. Draft tokens are drawn with the model's parameters and random numbers: under a seed, drafter
and model draw the same token wherever their distributions are alike.

Entries are computed when draft tokens are proposed, not before. `_valid[b]` is the number of slots
of block b that hold the drafter's keys and values of the tokens that the block stands for now:

    known tokens   t0 … t36        blocks of 16: [3, 8, 5], valid 16, 4, 0
    first pass     t20 … t36       one chunk; the token drawn behind t36 is the first draft token
    then           one draft token after the other, one row for each sequence

A wrong draft token costs time and never changes an output: all draft tokens are verified.
"""

import dataclasses
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional

from headway.config.resolve import Settings
from headway.core.plan import NULL_BLOCK, BlockCopy, GrammarMasks, ScheduledSequence, StepPlan
from headway.runtime.attention import KVLayer
from headway.runtime.attention.cache import copy_blocks
from headway.runtime.batch import Batch, WorkerSequence, WorkerState
from headway.runtime.checkpoint import Progress
from headway.runtime.draft_vocabulary import DraftVocabulary
from headway.runtime.drafter import DraftRequest
from headway.runtime.forward import Forward
from headway.runtime.kernels import Kernels
from headway.runtime.native.sampling import NativeSampling
from headway.runtime.sampler import NEVER, NO_TOKEN, Sampler, edits_logits
from headway.runtime.shared_weights import SharedWeights
from headway.spec import ModelSpec

NO_MASKS = GrammarMasks()


class DraftForward(Protocol):
    """Layers that draft: their KV memory and their output matrix."""

    kv: list[KVLayer]
    kernels: Kernels

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return the logits of these rows of the drafter, (R, vocabulary)."""
        ...

    def wipe_bad(self, hidden_TH: Tensor, batch: Batch) -> Tensor | None:
        """Clear what tokens that are not finite wrote; see `Forward.wipe_bad`."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        ...

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        ...


class PagedDrafter(ABC):
    """Base of drafters (`drafter.Drafter`) with a KV entry for each token of a sequence.

    A subclass computes known tokens (`compute_known`) and one draft token of each sequence
    (`compute_drafts`), and stores what it needs of the model's states (`observe`). `max_len` is the
    number of positions of the drafter, `vocab_size` that of the model's tokens.
    """

    name = ""

    def __init__(
        self,
        layers: DraftForward,
        vocabulary: DraftVocabulary | None,
        settings: Settings,
        state: WorkerState,
        max_len: int,
        vocab_size: int,
    ) -> None:
        self.group = settings.speculation.draft_group
        self.layers, self.vocabulary, self.state = layers, vocabulary, state
        self._max_len, self._vocab_size = max_len, vocab_size
        self._num_groups = 1 + max(layer.group for layer in layers.kv)
        self._block_size = settings.cache.block_size
        self._max_tokens = settings.max_num_batched_tokens
        self._valid = np.zeros(settings.cache.num_blocks[self.group], np.int64)
        self._last_drafts: dict[int, tuple[int, list[int]]] = {}
        """Sequence id → (position of the first, draft tokens) of its last proposal."""
        library = layers.kernels.library
        self._sampler = Sampler(None if library is None else NativeSampling(library))

    @abstractmethod
    def compute_known(self, batch: Batch) -> Tensor:
        """Compute known tokens; return their hidden states, (T, H), valid until the next pass."""

    @abstractmethod
    def compute_drafts(self, batch: Batch, hidden_RH: Tensor) -> Tensor:
        """Compute one draft token of each sequence, which was drawn from its row of `hidden_RH`."""

    @abstractmethod
    def observe(self, batch: Batch, hidden_TH: Tensor) -> None:
        """Store what later drafts need of the model's states of a step."""

    def apply_plan(self, plan: StepPlan) -> None:
        """Update `_valid` by the plan, after `WorkerState.apply` and before the model computes."""
        for sequence_id in plan.finished:
            self._last_drafts.pop(sequence_id, None)
        if self.vocabulary is not None:
            for sequence in plan.new:
                self.vocabulary.add(sequence.token_ids)
        copies = [copy for copy in plan.copies if copy.group == self.group]
        if copies:
            self.copy(copies)
        for transfer in plan.transfers:
            if transfer.group == self.group and transfer.direction == "in":
                self.invalidate(transfer.blocks)
        new = {sequence.sequence_id for sequence in plan.new}
        for row in plan.scheduled:
            if row.num_forced:  # the draft tokens at their positions may have been others
                known = self.state.sequences[row.sequence_id]
                self._invalidate_from(known, known.num_known - row.num_forced)
            if row.new_blocks[self.group]:
                self._add_blocks(row, is_new=row.sequence_id in new)

    def _add_blocks(self, row: ScheduledSequence, is_new: bool) -> None:
        """Reset the new blocks of a sequence, but for the computed prefix of a new sequence."""
        blocks = row.new_blocks[self.group]
        whole, rest = divmod(row.start, self._block_size)
        if not is_new:
            self._valid[blocks] = 0
        elif whole < len(blocks):
            self._valid[blocks[whole]] = min(int(self._valid[blocks[whole]]), rest)
            self._valid[blocks[whole + 1 :]] = 0

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy the drafter's part of blocks that the model copied."""
        for index in range(self._num_groups):
            copy_blocks(self.layers.kv, [replace(copy, group=index) for copy in copies])
        for copy in copies:
            self._valid[copy.target] = self._valid[copy.source]

    def invalidate(self, blocks: list[int]) -> None:
        """Reset blocks that were filled from another memory, without entries of the drafter."""
        self._valid[blocks] = 0

    def propose(self, requests: list[DraftRequest], hidden_RH: Tensor) -> dict[int, list[int]]:
        """Return draft tokens by sequence id; `hidden_RH` is not read.

        A sequence with more known tokens to compute than fit in a step gets no draft tokens, and
        continues at the next call.
        """
        if self.vocabulary is not None:
            self.vocabulary.refresh()
        rows = self._rows_to_compute(requests)
        if not rows:
            return {}
        batch = self._batch(
            [(s, s.known(begin, begin + take), begin) for s, _, begin, take in rows]
        )
        hidden_TH = self.compute_known(batch)
        ends = np.cumsum(batch.query_lens) - 1
        complete = [(row, end) for row, end in zip(rows, ends.tolist(), strict=True) if row[1]]
        active = [(sequence, count, list[int]()) for (sequence, count, _, _), _ in complete]
        return self._draft(active, hidden_TH[[end for _, end in complete]])

    def _rows_to_compute(
        self, requests: list[DraftRequest]
    ) -> list[tuple[WorkerSequence, int, int, int]]:
        """Return (sequence, draft tokens, first token to compute, count) of sequences that fit."""
        rows, budget = [], self._max_tokens
        for sequence, count, _ in requests:
            begin, known = self._first_to_compute(sequence), sequence.num_known
            count = min(count, self._max_len - known, self._num_slots(sequence) - known + 1)
            take = min(known - begin, budget)
            if count > 0 and take > 0:
                budget -= take
                rows.append((sequence, count if begin + take == known else 0, begin, take))
        return rows

    def _draft(
        self, active: list[tuple[WorkerSequence, int, list[int]]], hidden_RH: Tensor
    ) -> dict[int, list[int]]:
        """Draw draft tokens until each sequence has its count; `hidden_RH` gives the first ones."""
        by_sequence: dict[int, list[int]] = {}
        while active:
            views = [s.with_drafts(drafts) if drafts else s for s, _, drafts in active]
            token_ids = self._draw(hidden_RH, views)
            for (sequence, _, drafts), token_id in zip(active, token_ids, strict=True):
                if token_id != NO_TOKEN:
                    drafts.append(token_id)
                    by_sequence[sequence.new.sequence_id] = drafts
                    self._last_drafts[sequence.new.sequence_id] = sequence.num_known, drafts
            unfinished = [
                row
                for row, (each, token_id) in enumerate(zip(active, token_ids, strict=True))
                if token_id != NO_TOKEN and len(each[2]) < each[1]
            ]
            active = [active[row] for row in unfinished]
            if active:
                batch = self._batch([(s, d[-1:], s.num_known + len(d) - 1) for s, _, d in active])
                hidden_RH = self.compute_drafts(batch, hidden_RH[unfinished])
        return by_sequence

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        list_bytes = 0 if self.vocabulary is None else self.vocabulary.nbytes
        return self.layers.weight_bytes + list_bytes

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.layers.kv_bytes

    def _mark_valid(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        """Return `hidden_TH`, after the written slots of finite rows were marked as valid."""
        bad_T = self.layers.wipe_bad(hidden_TH, batch)
        bad = set[int]()
        if bad_T is not None:
            parts = bad_T.split(batch.query_lens)
            bad = {row for row, part in enumerate(parts) if bool(part.any())}
        size, table_SB = self._block_size, batch.block_tables_GSB[0].cpu().numpy()
        for row, (length, end) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            if row in bad:
                continue
            first, last = (end - length) // size, (end - 1) // size
            self._valid[table_SB[row, first:last]] = size
            self._valid[table_SB[row, last]] = end - last * size
        return hidden_TH

    def _batch(self, rows: list[tuple[WorkerSequence, list[int], int]]) -> Batch:
        """Return the inputs of a forward over (sequence, tokens, position of the first token)."""
        batch = self.state.draft_batch(self.group, rows)
        batch.slots_GT *= self._num_groups
        batch.block_tables_GSB *= self._num_groups
        if batch.lens is not None:
            batch.lens.tables_GSB *= self._num_groups
        return batch

    def _draw(self, hidden_RH: Tensor, views: list[WorkerSequence]) -> list[int]:
        """Draw one token for each row, as the model will draw its own."""
        by_token = any(edits_logits(view.new.sampling) for view in views)
        if self.vocabulary is None:
            logits = self._logits(hidden_RH, by_token)
        else:
            logits = self.vocabulary.logits(hidden_RH)
            if by_token:
                logits = self.vocabulary.scatter(logits, self._vocab_size)
        chosen, _ = self._sampler.sample(logits, views, NO_MASKS)
        if self.vocabulary is None or by_token:
            return chosen
        return self.vocabulary.token_ids(chosen)

    def _logits(self, hidden_RH: Tensor, by_token: bool) -> Tensor:
        """Return logits of the model's vocabulary: padding of either vocabulary is never proposed.

        Without `by_token`, no row's parameters name tokens, and fewer columns are enough.
        """
        logits_RV = self.layers.logits(hidden_RH)
        more = self._vocab_size - logits_RV.shape[1]
        if more > 0 and by_token:
            return functional.pad(logits_RV, (0, more), value=NEVER)
        return logits_RV if more >= 0 else logits_RV[:, : self._vocab_size].contiguous()

    def _num_slots(self, sequence: WorkerSequence) -> int:
        """Return the number of slots in the blocks of `sequence`."""
        return sequence.num_blocks[self.group] * self._block_size

    def _first_to_compute(self, sequence: WorkerSequence) -> int:
        """Return the first known token that has to be computed; the last one always has to."""
        known, size = sequence.num_known, self._block_size
        table = self.state.table(self.group, sequence)[: -(-known // size)]
        valid = self._valid[table]
        partial = np.nonzero((valid < size) | (table == NULL_BLOCK))[0]
        if not len(partial):
            return known - 1
        return min(int(partial[0]) * size + int(valid[partial[0]]), known - 1)

    def discard_rejected(self, sequence: WorkerSequence) -> None:
        """Invalidate entries from the first rejected draft token on.

        Called after each verification, also of the draft tokens of other proposers. The last known
        token was sampled, so an entry at its position is that of a draft token as well.
        """
        if self.vocabulary is not None:
            self.vocabulary.add_answer(sequence)
        last = sequence.num_known - 1
        begin, drafts = self._last_drafts.pop(sequence.new.sequence_id, (last, []))
        pairs = enumerate(zip(sequence.known(begin, last), drafts), begin)
        wrong = next((at for at, (token_id, draft) in pairs if token_id != draft), last)
        self._invalidate_from(sequence, wrong)

    def _invalidate_from(self, sequence: WorkerSequence, position: int) -> None:
        """Invalidate the entries of a sequence from `position` on."""
        at, rest = divmod(position, self._block_size)
        table = self.state.table(self.group, sequence)
        if at < len(table):
            self._valid[table[at]] = min(int(self._valid[table[at]]), rest)
            self._valid[table[at + 1 :]] = 0


class DraftModel(PagedDrafter):
    """A second, smaller model that drafts for the first (Leviathan et al. 2023).

    Its KV groups, one or several, all follow one group of the model. An entry depends on tokens
    alone, so entries of accepted draft tokens stay valid.
    """

    name = "the draft model"

    def __init__(
        self,
        folder: Path,
        spec: ModelSpec,
        settings: Settings,
        kernels: Kernels,
        state: WorkerState,
        vocab_size: int,
        progress: Progress | None = None,
        shared: SharedWeights | None = None,
    ) -> None:
        num_blocks = settings.cache.num_blocks[settings.speculation.draft_group]
        of_groups = (num_blocks,) * len(spec.kv_groups)
        cache = settings.cache
        if cache.open_blocks:  # blocks are rounded for the model alone
            cache = dataclasses.replace(cache, open_blocks=False, dtype=settings.dtype)
        own = dataclasses.replace(settings, cache=cache)
        self.forward = Forward(folder, spec, own, kernels, of_groups, progress, shared=shared)
        size = settings.speculation.draft_vocab_size
        vocabulary = DraftVocabulary(self.forward, size) if size else None
        super().__init__(self.forward, vocabulary, settings, state, spec.max_len, vocab_size)

    def compute_known(self, batch: Batch) -> Tensor:
        return self._mark_valid(self.forward(batch), batch)

    def compute_drafts(self, batch: Batch, hidden_RH: Tensor) -> Tensor:
        return self.compute_known(batch)

    def observe(self, batch: Batch, hidden_TH: Tensor) -> None:
        """Store nothing: the draft model computes states of its own."""
