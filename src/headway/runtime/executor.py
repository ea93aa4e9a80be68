"""Run the plans of an engine on one device: a plan in, a forward, a result out.

It owns the model, the KV memory, the state of the sequences and the sampler. `submit` runs the
forward, `sample` chooses tokens, `collect` hands back the result; all three run in the caller's
thread.
"""

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headway.config.resolve import Settings
from headway.core.clock import SystemClock
from headway.core.plan import (
    Description,
    GrammarMasks,
    PromptLogprobs,
    Sample,
    ScheduledSequence,
    StepPlan,
    StepResult,
    StepTimings,
)
from headway.core.request import TokenLogprobs
from headway.runtime.attention.int4 import with_open_layers
from headway.runtime.batch import Batch, WorkerSequence, WorkerState
from headway.runtime.drafter import Drafter, DraftRequest
from headway.runtime.forward import Forward
from headway.runtime.kv_shrink import copy_and_shrink
from headway.runtime.parallel.vocabulary import VocabHead
from headway.runtime.probe import DeviceProbe
from headway.runtime.rope import rope_rows
from headway.runtime.sampler import NO_TOKEN, Sampler
from headway.runtime.transfers import TransferTable
from headway.spec import ModelSpec
from headway.spec.quantization import bytes_per_weight

log = logging.getLogger(__name__)

PROMPT_LOGPROB_ROWS = 64
"""Prompt rows with logits in memory at once: 39 MB in fp32 for a vocabulary of 152,000."""


class TorchExecutor:
    """Runs one model on one device, or a rank's part of one; see `core.plan.Executor`."""

    def __init__(
        self,
        spec: ModelSpec,
        settings: Settings,
        target: Forward,
        state: WorkerState,
        *,
        transfers: TransferTable,
        sampler: Sampler,
        drafter: Drafter | None,
        probe: DeviceProbe,
    ) -> None:
        """`runtime.build.build_executor` makes the parts."""
        self.spec, self.settings = spec, settings
        self.device, self.kernels = settings.device, target.kernels
        self.target, self.model, self.kv = target, target.model, with_open_layers(target.kv)
        self.state, self.transfers = state, transfers
        self.sampler, self.drafter = sampler, drafter
        self._probe = probe
        self._clock = SystemClock()
        self._pending: tuple[StepPlan, Batch | None, Tensor | None] | None = None
        self._result: StepResult | None = None
        self._prepare_s = self._forward_s = 0.0
        self._usable: dict[int, int] = {}
        self._is_idle = False
        """Whether the last step had no rows, so that `collect` may wait for a transfer."""

    @classmethod
    def make_state(cls, spec: ModelSpec, settings: Settings) -> WorkerState:
        """Return an empty state of the sequences."""
        return WorkerState(
            max_num_seqs=settings.max_num_seqs,
            max_blocks=-(-settings.max_model_len // settings.cache.block_size),
            num_groups=len(settings.cache.num_blocks),
            block_size=settings.cache.block_size,
            rope_rows=rope_rows(settings),
        )

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Apply the deltas and run the forward."""
        self._pending = None  # drops a step that failed half-way
        started = self._clock.now_s()
        self.state.apply(plan)
        if self.drafter is not None:
            self.drafter.apply_plan(plan)
        self.transfers.keep(plan)
        copy_and_shrink(self.kv, plan, self.state)
        if plan.transfers:
            self.transfers.begin(plan.transfers)
        if not plan.scheduled:
            self._pending = (plan, None, None)
            return
        batch = self.state.batch(plan)
        prepared = self._clock.now_s()
        self._pending = (plan, batch, None)
        hidden = self.forward(batch)
        if self.drafter is not None:
            self.drafter.observe(batch, hidden)
        self._pending = (plan, batch, hidden)
        self._prepare_s, self._forward_s = prepared - started, self._clock.now_s() - prepared

    def forward(self, batch: Batch) -> Tensor:
        """Return the hidden states of all tokens, (T, H); valid until the next forward."""
        return self.target(batch)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Return `Decoder.logits` of these rows, dense in memory; valid until the next call."""
        return self.target.logits(hidden_RH)

    @torch.inference_mode()
    def sample(self, step: int, masks: GrammarMasks) -> None:
        """Sample the rows of step `step` that are due."""
        assert self._pending is not None and self._pending[0].step == step
        plan, batch, hidden = self._pending
        self._pending, self._is_idle = None, batch is None
        result = StepResult(plan.step, [])
        self._result = result
        if batch is None or hidden is None:
            return
        started = self._clock.now_s()
        result.experts_read = int(self.target.experts_read)
        result.failed, self._usable = self._quarantine(plan, batch, hidden)
        result.prompt_logprobs = self._prompt_logprobs(plan, hidden)
        last_rows: list[int] = []
        if batch.sampled_rows:
            if len(batch.sampled_rows) != hidden.shape[0]:
                hidden = hidden[batch.sampled_rows]
            logits, sequences = self.logits(hidden), batch.sampled_sequences
            token_ids, logprobs = self.sampler.sample(logits, sequences, masks)
            last_rows = self._accept_tokens(plan, sequences, token_ids, logprobs, result)
        sampled, draft_s = self._clock.now_s(), 0.0
        if self.drafter is not None:
            draft_s = self._propose(plan, result, hidden, last_rows)
        result.timings = StepTimings(self._prepare_s, self._forward_s, sampled - started, draft_s)

    @torch.inference_mode()
    def follow(self, plan: StepPlan) -> None:
        """Run a step on a rank that draws no tokens: `submit`, and `sample` without a draw."""
        self.submit(plan)
        assert self._pending is not None
        _, batch, hidden = self._pending
        self._pending = None
        if batch is not None and hidden is not None:
            self._quarantine(plan, batch, hidden)

    @torch.inference_mode()
    def answer(self, count: int) -> None:
        """Send this rank's part of `count` rows of logits to rank 0, which draws."""
        head = self.model.head
        assert isinstance(head, VocabHead)
        head.answer(count)

    def _accept_tokens(
        self,
        plan: StepPlan,
        sequences: list[WorkerSequence],
        token_ids: list[int],
        logprobs: Sequence[list[TokenLogprobs] | None],
        result: StepResult,
    ) -> list[int]:
        """Append the accepted tokens of each sampled sequence to the state and to `result`.

        Returns for each sample the row from which its last token was drawn.
        """
        last_rows: list[int] = []
        begin = 0
        for scheduled in plan.scheduled:
            if not scheduled.sample:
                continue
            num_drafts, sequence_id = scheduled.num_drafts, scheduled.sequence_id
            rows = range(begin, begin + 1 + num_drafts)
            sequence, entries, behind = sequences[begin], logprobs[begin], list[int]()
            begin += len(rows)
            if token_ids[rows[0]] == NO_TOKEN:
                result.failed[sequence_id] = "its parameters and masks forbid every token"
            elif sequence_id not in result.failed:
                if num_drafts:
                    rows, rest = self._accepted(scheduled, rows, token_ids)
                    behind = before_no_token([token_ids[row] for row in rest])
                    if entries is not None:
                        entries = [one for row in rows for one in logprobs[row] or []]
                tokens = [token_ids[row] for row in rows]
                sequence.generated += tokens
                sequence.last_step = result.step
                result.samples.append(Sample(sequence_id, tokens, entries, behind=behind))
                last_rows.append(rows[-1])
        return last_rows

    def _accepted(
        self, scheduled: ScheduledSequence, rows: range, token_ids: list[int]
    ) -> tuple[range, range]:
        """Return (accepted rows, usable rows behind them) of a sequence with draft tokens."""
        usable = self._usable.get(scheduled.sequence_id, len(rows))
        sampled = [token_ids[row] for row in rows[:usable]]
        count = num_accepted(sampled, scheduled.drafts)
        return rows[:count], rows[count:usable]

    def _propose(
        self, plan: StepPlan, result: StepResult, hidden_RH: Tensor, last_rows: list[int]
    ) -> float:
        """Add draft tokens for the next step where the plan asks for them; return the seconds.

        Where the drafter fails, the result says why, and requests continue without it.
        """
        assert self.drafter is not None
        started = self._clock.now_s()
        proposing = {row.sequence_id: row.propose for row in plan.scheduled if row.propose}
        requests = []
        for sample, last_row in zip(result.samples, last_rows, strict=True):
            sequence = self.state.sequences[sample.sequence_id]
            self.drafter.discard_rejected(sequence)
            if sample.sequence_id in proposing:
                requests.append(DraftRequest(sequence, proposing[sample.sequence_id], last_row))
        if not requests:
            return 0.0
        try:
            drafts = self.drafter.propose(requests, hidden_RH)
        except Exception as error:
            log.exception("%s failed; requests go on without it", self.drafter.name)
            result.draft_failure = f"{type(error).__name__}: {error}"
            return self._clock.now_s() - started
        for sample in result.samples:
            sample.drafts = valid_drafts(drafts.get(sample.sequence_id, []), self.spec.vocab_size)
        return self._clock.now_s() - started

    def _quarantine(
        self, plan: StepPlan, batch: Batch, hidden_TH: Tensor
    ) -> tuple[dict[int, str], dict[int, int]]:
        """Fail sequences with numbers that are not finite, and clear their KV of this step."""
        bad_T = self.target.wipe_bad(hidden_TH, batch)
        return ({}, {}) if bad_T is None else failed_sequences(plan, bad_T.tolist())

    def _prompt_logprobs(self, plan: StepPlan, hidden_TH: Tensor) -> list[PromptLogprobs]:
        """Return the requested log-probabilities of the next prompt tokens of this chunk."""
        results = []
        begin = 0
        for scheduled in plan.scheduled:
            new = self.state.sequences[scheduled.sequence_id].new
            count = new.sampling.prompt_logprobs
            length = min(len(scheduled.token_ids), new.num_prompt_tokens - 1 - scheduled.start)
            if count is not None and new.index == 0 and length > 0:
                following = new.token_ids[scheduled.start + 1 : scheduled.start + 1 + length]
                entries = []
                for at in range(0, length, PROMPT_LOGPROB_ROWS):
                    rows = hidden_TH[begin + at : begin + min(length, at + PROMPT_LOGPROB_ROWS)]
                    token_ids = following[at : at + PROMPT_LOGPROB_ROWS]
                    entries += self.sampler.logprobs(self.logits(rows), token_ids, count)
                results.append(PromptLogprobs(scheduled.sequence_id, scheduled.start + 1, entries))
            begin += len(scheduled.token_ids)
        return results

    @torch.inference_mode()
    def distributions(self) -> list[np.ndarray]:
        """Return the distribution after each token of the step that was submitted, not yet sampled.

        There is one array for each row of its plan: fp32 log-probabilities, (tokens of the row,
        vocabulary).
        """
        assert self._pending is not None, "nothing was submitted"
        _, batch, hidden = self._pending
        if batch is None or hidden is None:
            return []
        rows = [
            self.logits(part).log_softmax(-1).cpu() for part in hidden.split(PROMPT_LOGPROB_ROWS)
        ]
        return np.split(torch.cat(rows).numpy(), np.cumsum(batch.query_lens)[:-1])

    def collect(self) -> StepResult:
        """Return the result of the step that was sampled last."""
        assert self._result is not None, "nothing was submitted"
        result, self._result = self._result, None
        self.transfers.report(result, wait=self._is_idle)
        return result

    def describe(self) -> Description:
        """Return the device, the kernels and the bytes in use."""
        settings, kernels = self.settings, dict(self.kernels.reasons)
        kernels["attention"] = self.target.attention
        kernels["step"] = ("native" if self.target.program else "torch", self.target.lowered)
        parts: list[Forward | Drafter] = [self.target]
        parts += [] if self.drafter is None else [self.drafter]
        return Description(
            device=self.device,
            kernels=kernels,
            weight_bytes=sum(part.weight_bytes for part in parts),
            bytes_per_weight=bytes_per_weight(settings.quantization, self.spec, settings.dtype),
            kv_bytes=sum(part.kv_bytes for part in parts),
            name=self._probe.name,
            ceilings=self._probe.ceilings,
        )

    @torch.inference_mode()
    def probe(self, budget_s: float) -> None:
        """Read memory and multiply for about `budget_s`; `describe` has the best of all times."""
        self._probe.run(budget_s)


def failed_sequences(plan: StepPlan, bad_T: list[bool]) -> tuple[dict[int, str], dict[int, int]]:
    """Return (reasons of failed sequences, usable sampled rows of others) by the bad tokens.

    `bad_T` marks tokens with numbers that are not finite. Where only draft tokens are bad, the
    sequence does not fail, and the second result is the count of its usable sampled rows. Raises
    FloatingPointError where a known token with draft tokens behind it is bad: in a sum over the
    whole block 0 · inf of a draft token may reach it. The engine then runs the step again without
    draft tokens.
    """
    failed: dict[int, str] = {}
    usable: dict[int, int] = {}
    end = 0
    for row in plan.scheduled:
        begin, end = end, end + len(row.token_ids)
        if True not in bad_T[begin:end]:
            continue
        first = bad_T.index(True, begin) - begin
        num_drafts_before = first - (len(row.token_ids) - row.num_drafts)
        if num_drafts_before < 0 and row.num_drafts:
            raise FloatingPointError("a draft token may have spoilt the known token before it")
        if num_drafts_before < 0:
            failed[row.sequence_id] = "the model's numbers are not finite (an overflow?)"
        else:
            usable[row.sequence_id] = num_drafts_before + 1
    return failed, usable


def num_accepted(sampled: list[int], drafts: list[int]) -> int:
    """Return how many of `sampled` are accepted: one, and one more for each matching draft token.

    >>> num_accepted([5, 6, 9, 4], drafts=[5, 6, 7])
    3
    """
    count = 1
    while count < len(sampled) and sampled[count - 1] == drafts[count - 1]:
        count += 1
    return count if sampled[count - 1] != NO_TOKEN else count - 1


def before_no_token(sampled: list[int]) -> list[int]:
    """Return the tokens before the first NO_TOKEN."""
    return sampled[: sampled.index(NO_TOKEN)] if NO_TOKEN in sampled else sampled


def valid_drafts(guesses: list[int], vocab_size: int) -> list[int]:
    """Return the draft tokens before the first id outside the vocabulary.

    >>> valid_drafts([5, 6, -1, 7], 100), valid_drafts([5, 100], 100)
    ([5, 6], [5])
    """
    end = (at for at, token_id in enumerate(guesses) if not 0 <= token_id < vocab_size)
    return guesses[: next(end, len(guesses))]
