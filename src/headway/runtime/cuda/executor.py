"""The executor of an accelerator: a step is queued whole, and `collect` waits for its results.

`submit` and `sample` copy inputs to the device and queue operations without a read-back. The
results are one copy to pinned memory behind them, and an event. Example with depth 1:

    host      plan 1 | submit, sample 1 | plan 2 | submit, sample 2 | collect 1 | plan 3 | …
    device             ▐ step 1 ─────────────────▌ step 2 ──────────────────▌ …

The last token of each sequence stays on the device, in the sequence's row of the state, so that
step 2 has the tokens of step 1 as inputs before the host knows them. A drafter needs the tokens on
the host, so with a drafter each step is sampled as on a CPU.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.config.attention_choice import LIBRARIES
from headway.config.resolve import Settings
from headway.core.errors import UsageError
from headway.core.plan import (
    Description,
    GrammarMasks,
    PromptLogprobs,
    StepPlan,
    StepResult,
    StepTimings,
)
from headway.core.request import TokenLogprobs
from headway.runtime.attention import BACKENDS, KVLayer
from headway.runtime.batch import Batch, WorkerSequence, WorkerState
from headway.runtime.cuda.graphs import (
    DeviceGraph,
    Graph,
    GraphKey,
    Graphs,
    StepOut,
    input_bytes,
    row_counts,
    widths,
)
from headway.runtime.cuda.memory import DeviceMemory
from headway.runtime.cuda.same_bits import differing_attention, format_differences
from headway.runtime.cuda.sampling import choose, row_inputs, top_logprobs
from headway.runtime.cuda.staging import Staging
from headway.runtime.cuda.state import UNKNOWN, DeviceState
from headway.runtime.executor import PROMPT_LOGPROB_ROWS, TorchExecutor, failed_sequences
from headway.runtime.rope import rope_rows
from headway.runtime.sampler import NO_TOKEN, row_masks
from headway.spec import ModelSpec


class PromptRows(NamedTuple):
    """Prompt tokens whose log-probabilities are requested, with `num_top` alternatives."""

    sequence_id: int
    start: int
    token_ids: list[int]
    num_top: int
    logprobs: tuple[Tensor, ...]


@dataclass(slots=True, kw_only=True)
class QueuedStep:
    """A step that is queued, and its results on their way to the host."""

    plan: StepPlan
    sequences: list[WorkerSequence] = field(default_factory=list)
    owners: dict[int, WorkerSequence] = field(default_factory=dict)
    """The sequences, by id, that contain tokens unknown to the host, as the state has them."""
    result: StepResult
    is_idle: bool = False
    experts_read: int | Tensor | None = None
    bad_T: Tensor | None = None
    chosen_R: Tensor | None = None
    logprobs: tuple[Tensor, ...] | None = None
    """Values, ranks and alternatives of the sampled rows, where requested."""
    prompts: list[PromptRows] = field(default_factory=list)
    copy_event: torch.cuda.Event | None = None


class CudaExecutor(TorchExecutor):
    """Runs one model on one accelerator; see `core.plan.Executor`.

    It is torch on any device: on a CPU it gives the tokens of `TorchExecutor`.
    """

    make_graph: Callable[[], Graph] = DeviceGraph

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        assert isinstance(self.state, DeviceState)
        self._staging, self.graphs = self.state.staging, self.state.graphs
        self._steps: deque[QueuedStep] = deque()
        self._last_tokens_S = torch.zeros(
            self.settings.max_num_seqs + 1, dtype=torch.int64, device=self.device
        )
        self._out: StepOut | None = None
        if self.graphs is not None:
            self.state.draws = self.drafter is None
            self._capture(self.graphs.first_keys(self.state.draws))
        name = self.settings.attention_backend
        if name in LIBRARIES:
            self.target.attention = name, self._bits_of_library(name)
        self.memory = DeviceMemory(self.device) if self.device.startswith("cuda") else None

    def _bits_of_library(self, name: str) -> str:
        """Return whether a library's attention gives a row the same bits in any batch, as text.

        It is tried with each window of the model, so that the library compiles its kernels now.
        Raises UsageError where the library does not run.
        """
        spec, dtype = self.spec, getattr(torch, self.settings.dtype)
        shape, page = (
            (spec.num_heads, spec.num_kv_heads, spec.head_dim),
            self.settings.cache.block_size,
        )
        cap = {"softcap": spec.attention_softcap} if spec.attention_softcap else {}
        sentences = dict[str, None]()
        for window in sorted({layer.window for layer in spec.layers}):
            backend: Any = BACKENDS[name]()
            attend = partial(backend.attend_paged, window=window, **cap)
            try:
                counts = differing_attention(attend, self.device, dtype, shape, page=page)
            except (RuntimeError, OSError) as error:
                reason = " ".join(str(error).split())[:300]
                raise UsageError(
                    f"--attention-backend {name} does not run here: {reason}.",
                    "Use --attention-backend triton.",
                ) from error
            sentences[format_differences(counts)] = None
        return "; ".join(sentences)

    @classmethod
    def make_graphs(cls, settings: Settings) -> Graphs | None:
        """Return the graphs, none captured yet; None where the settings turn them off."""
        cache = settings.cache
        if not settings.graphs:
            return None
        rows = row_counts(settings.max_num_seqs)
        context_widths = widths(-(-settings.max_model_len // cache.block_size), cache.block_size)
        size = input_bytes(GraphKey(rows[-1], context_widths[-1], True), len(cache.num_blocks))
        memory = torch.zeros(size, dtype=torch.uint8, device=settings.device)
        return Graphs(rows=rows, widths=context_widths, memory=memory, make=cls.make_graph)

    @torch.inference_mode()
    def _capture(self, keys: list[GraphKey]) -> None:
        """Capture graphs for these keys, while no step is in flight."""
        assert self.graphs is not None and isinstance(self.state, DeviceState)

        def prepare(key: GraphKey) -> Callable[[], StepOut]:
            assert isinstance(self.state, DeviceState)
            batch = self.state.null_batch(key)
            return lambda: self._decode_step(batch)

        self.graphs.capture(keys, prepare)

    @classmethod
    def make_state(cls, spec: ModelSpec, settings: Settings) -> WorkerState:
        return DeviceState(
            max_num_seqs=settings.max_num_seqs,
            max_blocks=-(-settings.max_model_len // settings.cache.block_size),
            num_groups=len(settings.cache.num_blocks),
            block_size=settings.cache.block_size,
            vocabulary=spec.vocab_size,
            staging=Staging(settings.device, MAX_IN_FLIGHT),
            graphs=cls.make_graphs(settings),
            rope_rows=rope_rows(settings),
        )

    def forward(self, batch: Batch) -> Tensor:
        assert batch.lens is not None
        self._out = None
        if self.graphs is not None and batch.lens.graph is not None:
            out = self.graphs.replay(batch.lens.graph)
            if out is not None:
                self._out = out.first(len(batch.query_lens))
                return self._out.hidden_RH
        return self._compute(batch)

    def _decode_step(self, batch: Batch) -> StepOut:
        """Run a whole step of decodes on the device; this is what a graph captures."""
        assert batch.lens is not None
        hidden_RH, chosen_R = self._compute(batch), None
        bad_R = wipe_flagged(self.kv, hidden_RH, batch)
        if batch.lens.graph.draws:
            rows = batch.lens.drawn
            chosen_R = choose(self.logits(hidden_RH), rows, self.kernels.choose)
            self._last_tokens_S.index_copy_(0, rows.state_R, chosen_R.clamp(min=0))
        read = self.target.experts_read
        return StepOut(hidden_RH, bad_R, chosen_R, read if isinstance(read, Tensor) else None)

    def _compute(self, batch: Batch) -> Tensor:
        """Run the model's forward, with the tokens of the device in place of placeholders."""
        assert batch.lens is not None
        if batch.lens.has_placeholders:
            last_T = self._last_tokens_S.index_select(0, batch.lens.rows_T)
            token_ids_T = torch.where(batch.token_ids_T < 0, last_T, batch.token_ids_T)
            batch = replace(batch, token_ids_T=token_ids_T, views={})
        return super().forward(batch)

    @torch.inference_mode()
    def sample(self, step: int, masks: GrammarMasks) -> None:
        """Queue the sampling of step `step` and the copy of its results."""
        if self.drafter is not None:
            super().sample(step, masks)
            assert self._result is not None
            result, self._result = self._result, None
            self._steps.append(
                QueuedStep(plan=StepPlan(step, [], [], []), result=result, is_idle=self._is_idle)
            )
            return
        assert self._pending is not None and self._pending[0].step == step
        plan, batch, hidden = self._pending
        self._pending = None
        queued = QueuedStep(plan=plan, result=StepResult(plan.step, []), is_idle=batch is None)
        if batch is not None and hidden is not None:
            self._queue(queued, batch, hidden, masks)
        self._steps.append(queued)

    def _queue(self, queued: QueuedStep, batch: Batch, hidden: Tensor, masks: GrammarMasks) -> None:
        """Queue all that follows the forward of the step."""
        started = self._clock.now_s()
        result = queued.result
        out, self._out = self._out, None
        queued.experts_read = self.target.experts_read if out is None else out.experts_read
        queued.bad_T = wipe_flagged(self.kv, hidden, batch) if out is None else out.bad_R
        queued.prompts = self._queue_prompts(queued.plan, hidden)
        if batch.sampled_rows:
            sequences = queued.sequences = batch.sampled_sequences
            queued.owners = {
                view.new.sequence_id: self.state.sequences[view.new.sequence_id]
                for view in sequences
                if view.generated[-1:] == [UNKNOWN]
            }
            drawn = None if out is None else out.chosen_R
            if drawn is not None and not row_masks(masks, sequences):
                queued.chosen_R = drawn
            else:
                self._sample(queued, batch, hidden, masks)
        self._begin_copies(queued)
        sample_s = self._clock.now_s() - started
        result.timings = StepTimings(self._prepare_s, self._forward_s, sample_s)

    def _sample(
        self, queued: QueuedStep, batch: Batch, hidden: Tensor, masks: GrammarMasks
    ) -> None:
        """Queue logits edits and sampling of rows that no graph has sampled."""
        sequences = queued.sequences
        inputs = row_inputs(
            batch.sampled_rows, sequences, masks, self.spec.vocab_size, self._staging
        )
        if len(sequences) != hidden.shape[0]:
            hidden = hidden.index_select(0, inputs.tokens_R)
        logits = self.logits(hidden)
        queued.chosen_R = choose(logits, inputs, self.kernels.choose)
        self._last_tokens_S.index_copy_(0, inputs.state_R, queued.chosen_R.clamp(min=0))
        counts = [sequence.new.sampling.logprobs for sequence in sequences]
        requested_counts = [count for count in counts if count is not None]
        if requested_counts:
            queued.logprobs = top_logprobs(logits, queued.chosen_R, max(requested_counts))

    def _queue_prompts(self, plan: StepPlan, hidden_TH: Tensor) -> list[PromptRows]:
        """Queue `TorchExecutor._prompt_logprobs`; the results stay on the device."""
        prompt_rows = []
        begin = 0
        for scheduled in plan.scheduled:
            new = self.state.sequences[scheduled.sequence_id].new
            count = new.sampling.prompt_logprobs
            length = min(len(scheduled.token_ids), new.num_prompt_tokens - 1 - scheduled.start)
            if count is not None and new.index == 0 and length > 0:
                following = new.token_ids[scheduled.start + 1 : scheduled.start + 1 + length]
                for at in range(0, length, PROMPT_LOGPROB_ROWS):
                    rows = hidden_TH[begin + at : begin + min(length, at + PROMPT_LOGPROB_ROWS)]
                    tokens = following[at : at + PROMPT_LOGPROB_ROWS]
                    (chosen_R,) = self._staging.send([np.array(tokens, np.int64)])
                    values = top_logprobs(self.logits(rows), chosen_R, count)
                    first = scheduled.start + 1 + at
                    prompt_rows.append(
                        PromptRows(scheduled.sequence_id, first, tokens, count, values)
                    )
            begin += len(scheduled.token_ids)
        return prompt_rows

    def _begin_copies(self, queued: QueuedStep) -> None:
        """Copy results to pinned memory. On a CPU clone those that the next step overwrites."""
        if not self.device.startswith("cuda"):
            queued.bad_T = None if queued.bad_T is None else queued.bad_T.clone()
            queued.chosen_R = None if queued.chosen_R is None else queued.chosen_R.clone()
            if isinstance(queued.experts_read, Tensor):
                queued.experts_read = queued.experts_read.clone()
            return
        queued.bad_T = copy_to_host(queued.bad_T)
        if isinstance(queued.experts_read, Tensor):
            queued.experts_read = copy_to_host(queued.experts_read)
        queued.chosen_R = copy_to_host(queued.chosen_R)
        if queued.logprobs is not None:
            queued.logprobs = tuple(copy_to_host(part) for part in queued.logprobs)
        queued.prompts = [
            rows._replace(logprobs=tuple(copy_to_host(part) for part in rows.logprobs))
            for rows in queued.prompts
        ]
        queued.copy_event = torch.cuda.Event()
        queued.copy_event.record()

    def collect(self) -> StepResult:
        """Wait for the oldest sampled step and return its result."""
        assert self._steps, "nothing was submitted"
        queued = self._steps.popleft()
        if queued.copy_event is not None:
            queued.copy_event.synchronize()
        if queued.bad_T is not None:
            self._fill_result(queued, queued.bad_T.tolist())
        self.transfers.report(queued.result, wait=queued.is_idle)
        return queued.result

    def _fill_result(self, queued: QueuedStep, bad_T: list[bool]) -> None:
        """Turn the numbers that came back into a result."""
        result = queued.result
        result.experts_read = int(queued.experts_read or 0)
        result.failed, self._usable = failed_sequences(queued.plan, bad_T)
        for sequence_id, start, tokens, count, values in queued.prompts:
            listed = to_token_logprobs(tokens, [count] * len(tokens), values)
            entries = [one for each in listed for one in each or []]
            same = [p for p in result.prompt_logprobs if p.sequence_id == sequence_id]
            if same:
                same[0].entries += entries
            else:
                result.prompt_logprobs.append(PromptLogprobs(sequence_id, start, entries))
        if queued.chosen_R is None:
            return
        token_ids: list[int] = queued.chosen_R.tolist()
        logprobs: list[list[TokenLogprobs] | None] = [None] * len(token_ids)
        if queued.logprobs is not None:
            counts = [sequence.new.sampling.logprobs for sequence in queued.sequences]
            logprobs = to_token_logprobs(token_ids, counts, queued.logprobs)
        self._accept_tokens(queued.plan, queued.sequences, token_ids, logprobs, result)
        for sample in result.samples if queued.owners else ():
            if sample.sequence_id in queued.owners:
                queued.owners[sample.sequence_id].generated += sample.token_ids

    def probe(self, budget_s: float) -> None:
        """Capture the graphs that steps lacked, since the engine is idle; then probe."""
        if self.graphs is not None and self.graphs.missing and not self._steps:
            self._capture(sorted(self.graphs.missing))
        super().probe(budget_s)

    def describe(self) -> Description:
        description = super().describe()
        if self.graphs is not None:
            description.kernels["graphs"] = self.graphs.summary
        if self.memory is not None:
            planned = f"{self.settings.step_bytes / 2**20:.0f} MiB are kept for it and for graphs"
            took = f"{self.memory.peak / 2**20:.0f} MiB at most"
            description.kernels["step memory"] = (took, planned)
        return description

    def abandon(self) -> None:
        """Drop the queued steps that were not collected, once the device has finished them."""
        self._pending = None
        self._steps.clear()
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)


MAX_IN_FLIGHT = 2
"""Steps that may be queued at the same time."""


def copy_to_host(tensor: Tensor | None) -> Tensor:
    """Return a copy in pinned memory, complete when the stream has reached it."""
    assert tensor is not None
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def to_token_logprobs(
    token_ids: list[int], counts: Sequence[int | None], values: tuple[Tensor, ...]
) -> list[list[TokenLogprobs] | None]:
    """Return an entry for each row with a token that requests alternatives, else None."""
    logprobs, ranks, tops = (part.tolist() for part in values)
    result: list[list[TokenLogprobs] | None] = []
    for row, (token_id, count) in enumerate(zip(token_ids, counts, strict=True)):
        if count is None or token_id == NO_TOKEN:
            result.append(None)
            continue
        own, top = logprobs[row][: 1 + count], tops[row][:count]
        result.append([TokenLogprobs(token_id, own[0], ranks[row], top, own[1:])])
    return result


def wipe_flagged(layers: list[KVLayer], hidden_TH: Tensor, batch: Batch) -> Tensor:
    """Do `forward.wipe_bad` without a read-back; return which tokens are not finite, (T,).

    It is part of the step, so it comes before any later step that uses the same blocks.
    """
    bad_T = ~torch.isfinite(hidden_TH).all(-1)
    for layer in layers:
        layer.wipe_where(batch.slots_GT[layer.group], bad_T)
    return bad_T
