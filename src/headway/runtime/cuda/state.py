"""The state of sequences for a device: inputs are sent in one copy, and tokens may still be on it.

Where a step is planned before the tokens of the previous step are known, an input id is a
placeholder (`core.plan.sampled_in`); the device replaces it by the token that it sampled.
"""

from typing import Any

import numpy as np
from torch import Tensor

from headway.core.plan import ScheduledSequence, StepPlan
from headway.runtime.batch import INT, Batch, Lens, WorkerSequence, WorkerState
from headway.runtime.cuda.graphs import DRAW_INPUTS, GraphKey, Graphs, pad_array, pad_inputs
from headway.runtime.cuda.sampling import draw_arrays, draw_inputs, is_plain
from headway.runtime.cuda.staging import Staging
from headway.runtime.rope import RopeRows

UNKNOWN = -1
"""Stands in `generated` for a token that the host does not know yet."""


class DeviceState(WorkerState):
    """A `WorkerState` whose batches are on the device of `staging`."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks: int,
        num_groups: int,
        block_size: int,
        vocabulary: int,
        staging: Staging,
        graphs: Graphs | None = None,
        rope_rows: RopeRows | None = None,
    ) -> None:
        super().__init__(
            max_num_seqs=max_num_seqs,
            max_blocks=max_blocks,
            num_groups=num_groups,
            block_size=block_size,
            rope_rows=rope_rows,
        )
        self.staging, self.graphs = staging, graphs
        self._vocabulary, self._null_row = vocabulary, max_num_seqs
        self._is_step = False
        """Whether the batch is one of a step, not of a drafter."""
        self._sampled_now: list[WorkerSequence] = []
        self.draws = True
        """Whether graphs may sample; with a drafter the host does."""

    def batch(self, plan: StepPlan) -> Batch:
        self._is_step = True
        try:
            return super().batch(plan)
        finally:
            self._is_step = False

    def _tensors(self, *what: Any, **more: Any) -> Batch:
        self._sampled_now = what[7]  # `sampled`: a graph has their parameters among its inputs
        return super()._tensors(*what, **more)

    def _resolve(self, sequence: WorkerSequence, ids: list[int]) -> list[int]:
        """Return the ids with their placeholders, which the device replaces."""
        return ids

    def _sampled(self, sequence: WorkerSequence, scheduled: ScheduledSequence) -> WorkerSequence:
        """Return the sequence with placeholders for the tokens that are still on the device.

        With 9 known tokens and a row that computes token 9, a placeholder, 1 token is unknown, and
        the sample is token 10.
        """
        known = scheduled.start + len(scheduled.token_ids) - scheduled.num_drafts
        missing = known - sequence.num_known
        return sequence.with_drafts([UNKNOWN] * missing) if missing > 0 else sequence

    def _send(
        self,
        arrays: list[np.ndarray],
        query_lens_S: np.ndarray,
        context_lens: list[int],
        rows_T: np.ndarray,
    ) -> tuple[list[Tensor], Lens]:
        num_groups = (len(arrays) - 2) // 2
        if self.graphs is not None and self._is_step and query_lens_S.max() == 1:
            width = arrays[-1].shape[1]
            sampled = self._sampled_now
            draws = self.draws and len(sampled) == len(query_lens_S)
            draws = draws and all(map(is_plain, sampled))
            key = self.graphs.key_of(len(query_lens_S), width, draws)
            if key is not None:
                return self._send_to_graph(key, arrays, np.array(context_lens, np.int32), rows_T)
        starts_S1 = np.concatenate(([0], np.cumsum(query_lens_S))).astype(np.int32)
        tables = [table_SB.astype(np.int32) for table_SB in arrays[2 + num_groups :]]
        sent = self.staging.send(
            [*arrays, starts_S1, np.array(context_lens, np.int32), rows_T, *tables]
        )
        count = len(arrays)
        lens = Lens(
            query_starts_S1=sent[count],
            context_lens_S=sent[count + 1],
            rows_T=sent[count + 2],
            tables_GSB=sent[count + 3 :],
            longest_query=int(query_lens_S.max()),
            longest_context=max(context_lens),
            has_placeholders=bool((arrays[0] < 0).any()),
        )
        return sent[:count], lens

    def _send_to_graph(
        self,
        key: GraphKey,
        arrays: list[np.ndarray],
        context_lens_S: np.ndarray,
        rows_T: np.ndarray,
    ) -> tuple[list[Tensor], Lens]:
        """Send decodes as the first rows of a graph's inputs; return tensors of those rows only."""
        assert self.graphs is not None
        count, num_groups = len(rows_T), (len(arrays) - 2) // 2
        lens_R = pad_array(context_lens_S, (key.rows,))
        lens_R[count:] = 1
        starts_R1 = np.arange(key.rows + 1, dtype=np.int32)
        filled = pad_inputs(arrays, key.rows, key.width, num_groups)
        rows_R = np.full(key.rows, self._null_row, rows_T.dtype)
        rows_R[:count] = rows_T
        drawn = self._padded_draw_arrays(key.rows, self._sampled_now if key.draws else [])
        parts = [*filled, starts_R1, lens_R, rows_R, *(drawn[name] for name in DRAW_INPUTS)]
        sent = self.staging.send(parts, into=self.graphs.memory)
        of_draw = dict(zip(DRAW_INPUTS, sent[-len(DRAW_INPUTS) :], strict=True))
        sent = sent[: -len(DRAW_INPUTS)]
        begin = 2 + num_groups
        tables = [table_RB[:count] for table_RB in sent[begin : begin + num_groups]]
        lens = Lens(
            query_starts_S1=sent[-3][: count + 1],
            context_lens_S=sent[-2][:count],
            rows_T=sent[-1][:count],
            tables_GSB=tables,
            longest_query=1,
            longest_context=int(context_lens_S.max()),
            has_placeholders=bool((arrays[0] < 0).any()),
            graph=key,
            drawn=draw_inputs(of_draw, sent[-1]),
        )
        return [part[:count] for part in sent[:begin]] + tables, lens

    def _to_device(self, array: np.ndarray) -> Tensor:
        return self.staging.send([array])[0]

    def _padded_draw_arrays(
        self, rows: int, sequences: list[WorkerSequence]
    ) -> dict[str, np.ndarray]:
        """Return the sampling parameters of a graph's rows; padding rows are greedy."""
        draw = draw_arrays(sequences, self._vocabulary)
        neutral = {"greedy": True, "temperature": 1.0, "top_k": self._vocabulary, "top_p": 1.0}
        arrays = {}
        for name, array in draw.items():
            arrays[name] = np.full((rows, *array.shape[1:]), neutral.get(name, 0), array.dtype)
            arrays[name][: len(sequences)] = array
        return arrays

    def null_batch(self, key: GraphKey) -> Batch:
        """Return a batch of padding rows only, over which a graph is captured.

        Its contexts may be as long as its tables allow, and its ids may be placeholders.
        """
        groups = len(self._tables)
        none, table = np.zeros(key.rows, INT), np.zeros((key.rows, key.width), INT)
        arrays = [none] * (2 + groups) + [table] * groups
        null_rows, self._sampled_now = none + self._null_row, []
        sent, lens = self._send_to_graph(key, arrays, np.ones(key.rows, np.int32), null_rows)
        lens.longest_context, lens.has_placeholders = key.width * self.block_size, True
        return Batch(
            token_ids_T=sent[0],
            positions_T=sent[1],
            slots_GT=sent[2 : 2 + groups],
            block_tables_GSB=sent[2 + groups :],
            query_lens=[1] * key.rows,
            context_lens=[lens.longest_context] * key.rows,
            num_decodes=key.rows,
            sampled_rows=[],
            sampled_sequences=[],
            lens=lens,
        )
