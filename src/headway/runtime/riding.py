"""A drafter whose keys and values ride in the model's blocks: what of them is valid, and its loop.

They lie in blocks of the same numbers as those of the model's group that it rides on, in memory of
its own: what the engine shares, finds again or copies for the model is shared, found and copied
here too. It guesses with the model's own numbers: the same parameters and the same draw for each
token, so under a seed both say the same wherever their distributions are alike.

It computes tokens when it is asked to guess, not before. `_valid[b]` says how many slots of block b
hold its keys and values of the tokens that the block stands for now:

    tokens known   t0 … t36        blocks of 16: [3, 8, 5], valid 16, 4, 0
    first pass     t20 … t36       a chunk; what follows t36 is the first guess
    then           one guess after the other, one row a sequence

What is wrong here costs time and never changes a token: guesses are verified.
"""

from abc import ABC, abstractmethod
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
from headway.runtime.draft_vocabulary import DraftVocabulary
from headway.runtime.drafter import Wanted
from headway.runtime.kernels import Kernels
from headway.runtime.native.sampling import NativeSampling
from headway.runtime.sampler import NEVER, NO_TOKEN, Sampler, edits_logits

NO_MASKS = GrammarMasks()


class Layers(Protocol):
    """What guesses: its KV memory, its output."""

    kv: list[KVLayer]
    kernels: Kernels

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits of these rows of its own, (R, vocabulary)."""
        ...

    def wipe_bad(self, hidden_TH: Tensor, batch: Batch) -> Tensor | None:
        """As `Forward.wipe_bad`."""
        ...

    @property
    def weight_bytes(self) -> int:
        """What its weights take."""
        ...

    @property
    def kv_bytes(self) -> int:
        """What its keys and values take."""
        ...


class RidingDrafter(ABC):
    """Guesses for the sequences that `state` knows, whose blocks of its group it writes along.

    A `drafter.Drafter` but for its passes, `first` computes known tokens, `further` a guess of each
    sequence, and for what it keeps of the model's states. `max_len` is what its positions reach
    to; `vocab_size` is the model's.
    """

    name = ""

    def __init__(
        self,
        layers: Layers,
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
        self._most_tokens = settings.max_num_batched_tokens
        self._valid = np.zeros(settings.cache.num_blocks[self.group], np.int64)
        self._ahead: dict[int, tuple[int, list[int]]] = {}
        """By sequence id where its last guesses begin, and those."""
        library = layers.kernels.library
        self._sampler = Sampler(None if library is None else NativeSampling(library))

    @abstractmethod
    def first(self, batch: Batch) -> Tensor:
        """Compute these known tokens; their hidden states, (T, H), valid until the next pass."""

    @abstractmethod
    def further(self, batch: Batch, hidden_RH: Tensor) -> Tensor:
        """Compute a guess of each sequence, which was made from its row of `hidden_RH`."""

    @abstractmethod
    def keep(self, batch: Batch, hidden_TH: Tensor) -> None:
        """Note what is of use of the model's states of a step."""

    def follow(self, plan: StepPlan) -> None:
        """Note what becomes of blocks, after the state has; before the model computes."""
        for sequence_id in plan.finished:
            self._ahead.pop(sequence_id, None)
        if self.vocabulary is not None:
            for sequence in plan.new:
                self.vocabulary.saw(sequence.token_ids)
        copies = [copy for copy in plan.copies if copy.group == self.group]
        if copies:
            self.copied(copies)
        for transfer in plan.transfers:
            if transfer.group == self.group and transfer.direction == "in":
                self.replaced(transfer.blocks)
        new = {sequence.sequence_id for sequence in plan.new}
        for row in plan.scheduled:
            if row.num_forced:  # what it had guessed in their place may be something else
                known = self.state.sequences[row.sequence_id]
                self._forget(known, known.num_known - row.num_forced)
            if row.new_blocks[self.group]:
                self._given(row, is_new=row.sequence_id in new)

    def _given(self, row: ScheduledSequence, is_new: bool) -> None:
        """A sequence has new blocks; of a newcomer's they are all, and what it found is kept."""
        blocks = row.new_blocks[self.group]
        whole, rest = divmod(row.start, self._block_size)
        if not is_new:
            self._valid[blocks] = 0
        elif whole < len(blocks):
            self._valid[blocks[whole]] = min(int(self._valid[blocks[whole]]), rest)
            self._valid[blocks[whole + 1 :]] = 0

    def copied(self, copies: list[BlockCopy]) -> None:
        """Blocks of its group were copied."""
        for index in range(self._num_groups):
            copy_blocks(self.layers.kv, [replace(copy, group=index) for copy in copies])
        for copy in copies:
            self._valid[copy.target] = self._valid[copy.source]

    def replaced(self, blocks: list[int]) -> None:
        """Blocks come back from elsewhere, and nothing of the drafter with them."""
        self._valid[blocks] = 0

    def propose(self, wanted: list[Wanted], hidden_RH: Tensor) -> dict[int, list[int]]:
        """What it would say itself; the model's states of the sampled rows are not asked for.

        A sequence with more to compute than fits in a step gets none, and is further next time.
        """
        if self.vocabulary is not None:
            self.vocabulary.refresh()
        rows = self._behind(wanted)
        if not rows:
            return {}
        batch = self._batch(
            [(s, s.known(begin, begin + take), begin) for s, _, begin, take in rows]
        )
        hidden_TH = self.first(batch)
        ends = np.cumsum(batch.query_lens) - 1
        going = [(row, end) for row, end in zip(rows, ends.tolist(), strict=True) if row[1]]
        guessing = [(sequence, count, list[int]()) for (sequence, count, _, _), _ in going]
        return self._guesses(guessing, hidden_TH[[end for _, end in going]])

    def _behind(self, wanted: list[Wanted]) -> list[tuple[WorkerSequence, int, int, int]]:
        """(sequence, how many guesses, the first token to compute, how many) of those that fit."""
        rows, room = [], self._most_tokens
        for sequence, count, _ in wanted:
            begin, known = self._begin(sequence), sequence.num_known
            count = min(count, self._max_len - known, self._room(sequence) - known + 1)
            take = min(known - begin, room)
            if count > 0 and take > 0:
                room -= take
                rows.append((sequence, count if begin + take == known else 0, begin, take))
        return rows

    def _guesses(
        self, guessing: list[tuple[WorkerSequence, int, list[int]]], hidden_RH: Tensor
    ) -> dict[int, list[int]]:
        """By sequence id so many guesses each, the first from these states."""
        found: dict[int, list[int]] = {}
        while guessing:
            views = [s.ahead(guesses) if guesses else s for s, _, guesses in guessing]
            token_ids = self._draw(hidden_RH, views)
            for (sequence, _, guesses), token_id in zip(guessing, token_ids, strict=True):
                if token_id != NO_TOKEN:
                    guesses.append(token_id)
                    found[sequence.new.sequence_id] = guesses
                    self._ahead[sequence.new.sequence_id] = sequence.num_known, guesses
            further = [
                row
                for row, (each, token_id) in enumerate(zip(guessing, token_ids, strict=True))
                if token_id != NO_TOKEN and len(each[2]) < each[1]
            ]
            guessing = [guessing[row] for row in further]
            if guessing:
                batch = self._batch([(s, g[-1:], s.num_known + len(g) - 1) for s, _, g in guessing])
                hidden_RH = self.further(batch, hidden_RH[further])
        return found

    @property
    def weight_bytes(self) -> int:
        """What its weights take."""
        listed = 0 if self.vocabulary is None else self.vocabulary.nbytes
        return self.layers.weight_bytes + listed

    @property
    def kv_bytes(self) -> int:
        """What its keys and values take."""
        return self.layers.kv_bytes

    def _written(self, hidden_TH: Tensor, batch: Batch) -> Tensor:
        """The same, and what was written noted; of a row that is not finite nothing is."""
        bad_T = self.layers.wipe_bad(hidden_TH, batch)
        bad = set[int]()
        if bad_T is not None:
            parts = bad_T.split(batch.query_lens)
            bad = {row for row, part in enumerate(parts) if bool(part.any())}
        size, table_SB = self._block_size, batch.block_tables_GSB[0].cpu().numpy()
        for row, (length, end) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            if row in bad:  # its guesses are wrong, and nobody else's
                continue
            first, last = (end - length) // size, (end - 1) // size
            self._valid[table_SB[row, first:last]] = size
            self._valid[table_SB[row, last]] = end - last * size
        return hidden_TH

    def _batch(self, rows: list[tuple[WorkerSequence, list[int], int]]) -> Batch:
        """(sequence, tokens, position of the first) as a forward's inputs."""
        batch = self.state.tensors_of(self.group, rows)
        batch.slots_GT *= self._num_groups
        batch.block_tables_GSB *= self._num_groups
        if batch.lens is not None:
            batch.lens.tables_GSB *= self._num_groups
        return batch

    def _draw(self, hidden_RH: Tensor, views: list[WorkerSequence]) -> list[int]:
        """A token a row, drawn as the model will draw its own."""
        by_token = any(edits_logits(view.new.sampling) for view in views)
        if self.vocabulary is None:
            logits = self._logits(hidden_RH, by_token)
        else:
            logits = self.vocabulary.logits(hidden_RH)
            if by_token:
                logits = self.vocabulary.spread(logits, self._vocab_size)
        chosen, _ = self._sampler.sample(logits, views, NO_MASKS)
        if self.vocabulary is None or by_token:
            return chosen
        return self.vocabulary.token_ids(chosen)

    def _logits(self, hidden_RH: Tensor, by_token: bool) -> Tensor:
        """Logits of the model's own vocabulary: padding on either side is never proposed.

        Fewer are as good where nobody's parameters name tokens.
        """
        logits_RV = self.layers.logits(hidden_RH)
        more = self._vocab_size - logits_RV.shape[1]
        if more > 0 and by_token:
            return functional.pad(logits_RV, (0, more), value=NEVER)
        return logits_RV if more >= 0 else logits_RV[:, : self._vocab_size].contiguous()

    def _room(self, sequence: WorkerSequence) -> int:
        """Slots in the blocks that `sequence` has."""
        return sequence.num_blocks[self.group] * self._block_size

    def _begin(self, sequence: WorkerSequence) -> int:
        """The first known token that is to be computed; the last one always is."""
        known, size = sequence.num_known, self._block_size
        table = self.state.table(self.group, sequence)[: -(-known // size)]
        valid = self._valid[table]
        partial = np.nonzero((valid < size) | (table == NULL_BLOCK))[0]
        if not len(partial):
            return known - 1
        return min(int(partial[0]) * size + int(valid[partial[0]]), known - 1)

    def cut(self, sequence: WorkerSequence) -> None:
        """What was computed for a guess is of no use where another token came.

        Called after each verification, whoever guessed what was verified. The last known token was
        sampled, so what was computed there is a guess's as well.
        """
        if self.vocabulary is not None:
            self.vocabulary.saw_answer(sequence)
        last = sequence.num_known - 1
        begin, guesses = self._ahead.pop(sequence.new.sequence_id, (last, []))
        pairs = enumerate(zip(sequence.known(begin, last), guesses), begin)
        wrong = next((at for at, (came, guess) in pairs if came != guess), last)
        self._forget(sequence, wrong)

    def _forget(self, sequence: WorkerSequence, position: int) -> None:
        """What was computed from `position` on is of no use."""
        at, rest = divmod(position, self._block_size)
        table = self.state.table(self.group, sequence)
        if at < len(table):
            self._valid[table[at]] = min(int(self._valid[table[at]]), rest)
            self._valid[table[at + 1 :]] = 0
