"""An executor that computes nothing: it moves a virtual clock by the predicted time of each step.

Time moves in `collect` alone, so the time of planning on the simulating machine does not count. It
samples scripted tokens: ordinary ids that follow from a request's seed and the position, the end
token where a recorded answer ended, an allowed token where a grammar applies, and it accepts draft
tokens at the acceptance rate that was measured at their position.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headway.core.clock import VirtualClock
from headway.core.parcel import ENGINE
from headway.core.plan import (
    Description,
    GrammarMasks,
    NewSequence,
    Sample,
    ScheduledSequence,
    StepPlan,
    StepResult,
    Transfer,
)
from headway.core.records import RowCounts, count_rows
from headway.perf.model import Work, work_done

GOLDEN, STRIDE, SHIFT = 0x9E3779B1, 40503, 7
LOWEST_ID = 32
"""Ids below are special tokens in some vocabularies."""


class Timing(Protocol):
    """The part of `Truth` that the executor uses."""

    def seconds(self, work: Work) -> float: ...


@dataclass(slots=True)
class AnswerScript:
    """The scripted answers. `lengths` maps a request's seed to its number of tokens, the last the
    end token.

    A request without a length is answered until its limit. `acceptance` is the acceptance rate of
    the draft token at each position, given that those before it were accepted.
    """

    vocab_size: int
    end_ids: tuple[int, ...] = ()
    lengths: Mapping[int, int] = field(default_factory=dict)
    acceptance: tuple[float, ...] = ()
    low: int = field(init=False)
    """The lowest id that is sampled."""
    num_ids: int = field(init=False)
    """The number of ids that are sampled."""

    def __post_init__(self) -> None:
        self.low = LOWEST_ID if self.vocab_size > LOWEST_ID else self.vocab_size - 1
        self.num_ids = self.vocab_size - self.low

    def answer(self, seed: int, num_prompt: int) -> "ScriptedAnswer":
        """Return the answer to a prompt of `num_prompt` tokens."""
        length = self.lengths.get(seed) if self.end_ids else None
        last = -1 if length is None else num_prompt + length - 1
        origin = (seed + 1) * GOLDEN - num_prompt * STRIDE
        return ScriptedAnswer(origin % (self.num_ids << SHIFT), last)

    def token(self, answer: "ScriptedAnswer", at: int) -> int:
        """Return the token at a position, counted from the prompt's start; the end token only at
        the end."""
        if at == answer.last:
            return self.end_ids[0]
        token = self.low + (answer.origin + at * STRIDE >> SHIFT) % self.num_ids
        while token in self.end_ids:
            token = self.low + (token + 1 - self.low) % self.num_ids
        return token


@dataclass(slots=True)
class ScriptedAnswer:
    """The answer of one sequence: a number from which its tokens follow, and the end token's
    position."""

    origin: int
    last: int


class SimulatedExecutor:
    """An `Executor` over a truth and a script."""

    def __init__(
        self,
        clock: VirtualClock,
        truth: Timing,
        script: AnswerScript,
        *,
        windows: tuple[int, ...] = (0,),
        description: Description | None = None,
        block_bytes: tuple[int, ...] = (),
        copied_byte_s: float = 0.0,
        handover_byte_s: float = 0.0,
        num_experts: tuple[int, int, int] = (0, 0, 0),
        seed: int = 0,
    ) -> None:
        self._clock, self._truth, self._script, self._windows = clock, truth, script, windows
        self._description = description or Description(device="simulated")
        self._block_bytes, self._copied_byte_s = block_bytes, copied_byte_s
        self.handover_byte_s = handover_byte_s
        """Seconds for a byte from another engine; each pair of engines has a link of its own."""
        self._experts = num_experts
        self._random = random.Random(seed)
        self._answers: dict[int, ScriptedAnswer] = {}
        self._in_flight: dict[int, tuple[float, float]] = {}
        """Transfer → its end, and its seconds."""
        self._copies_end_s = 0.0
        self._plan: StepPlan | None = None
        self._masks = GrammarMasks()
        self._counted: tuple[list[ScheduledSequence], tuple[int, ...], RowCounts] | None = None
        """The rows that were counted last, in these windows, and their work."""

    def submit(self, plan: StepPlan) -> None:
        for sequence_id in plan.finished:
            self._answers.pop(sequence_id, None)
        for new in plan.new:
            self._add_answer(new)
        self._plan = plan

    def _add_answer(self, new: NewSequence) -> None:
        answer = self._script.answer(new.seed + new.index, new.num_prompt_tokens)
        self._answers[new.sequence_id] = answer

    def sample(self, step: int, masks: GrammarMasks) -> None:
        self._masks = masks

    def collect(self) -> StepResult:
        plan, self._plan = self._plan, None
        assert plan is not None, "collect without submit"
        work = self.count(plan.scheduled, self._windows)
        copied_s = sum([self._bytes_s(copy.group, 1) for copy in plan.copies])
        self._clock.advance(self._truth.seconds(work_done(work)) + copied_s)
        for transfer in plan.transfers:
            self._begin(transfer)
        if not plan.scheduled and self._in_flight:  # no sequence advances before a copy ends
            self._clock.advance_to(min(end_s for end_s, _ in self._in_flight.values()))
        done, transfer_s = self._finish_transfers()
        return StepResult(
            plan.step,
            self._samples(plan.scheduled),
            transfers_done=done,
            transfer_s=transfer_s,
            experts_read=self._experts_read(work.num_tokens),
        )

    def count(self, rows: list[ScheduledSequence], windows: tuple[int, ...]) -> RowCounts:
        """Return the work of a step's rows, counted once for the executor and the step's record."""
        known = self._counted
        if known is None or known[0] is not rows or known[1] != windows:
            known = self._counted = rows, windows, count_rows(rows, windows)
        return known[2]

    def _bytes_s(self, group: int, num_blocks: int) -> float:
        size = self._block_bytes[group] if group < len(self._block_bytes) else 0
        return size * num_blocks * self._copied_byte_s

    def _begin(self, transfer: Transfer) -> None:
        """Start a transfer; copies run one after the other, in parallel to the steps."""
        if transfer.peer.startswith(ENGINE):
            if not transfer.is_spill:
                size = self._block_bytes[transfer.group] * len(transfer.blocks)
                seconds = size * self.handover_byte_s
                self._in_flight[transfer.transfer_id] = self._clock.now_s() + seconds, seconds
            return
        seconds = self._bytes_s(transfer.group, len(transfer.blocks))
        self._copies_end_s = max(self._copies_end_s, self._clock.now_s()) + seconds
        if transfer.is_spill:
            return
        self._in_flight[transfer.transfer_id] = self._copies_end_s, seconds

    def _finish_transfers(self) -> tuple[list[int], float]:
        """Return (transfers that have ended, their seconds)."""
        if not self._in_flight:
            return [], 0.0
        now_s = self._clock.now_s()
        done = [number for number, (end_s, _) in self._in_flight.items() if end_s <= now_s]
        return done, sum([self._in_flight.pop(number)[1] for number in done])

    def _experts_read(self, num_tokens: int) -> int:
        """Return the experts that this number of tokens reads in all layers, each token choosing at
        random."""
        layers, count, each = self._experts
        if not count:
            return 0
        return round(layers * count * (1 - (1 - each / count) ** num_tokens))

    def _samples(self, rows: list[ScheduledSequence]) -> list[Sample]:
        """What follows the known tokens of each row that is sampled from."""
        samples, is_ruled, answers = [], bool(self._masks.by_sequence), self._answers
        token, low, num_ids = self._script.token, self._script.low, self._script.num_ids
        ends = self._script.end_ids
        for row in rows:
            if not row.sample:
                continue
            if is_ruled or row.num_drafts or row.propose:
                samples.append(self._verify_drafts(row))
                continue
            sequence_id, at = row.sequence_id, row.start + len(row.token_ids)
            answer = answers[sequence_id]
            sampled = (
                low + (answer.origin + at * STRIDE >> SHIFT) % num_ids
            )  # mostly `Script.token`
            if at == answer.last or sampled in ends:
                sampled = token(answer, at)
            samples.append(Sample(sequence_id, [sampled]))
        return samples

    def _verify_drafts(self, row: ScheduledSequence) -> Sample:
        """Return the accepted draft tokens and one token more, as far as the masks allow, and new
        drafts."""
        answer, token = self._answers[row.sequence_id], self._script.token
        position = row.start + len(row.token_ids) - row.num_drafts
        tokens: list[int] = []
        for at, draft in enumerate(row.drafts if row.num_drafts else ()):
            if not self._is_accepted(at):
                break
            tokens.append(draft)
        tokens.append(token(answer, position + len(tokens)))
        masks = self._masks.by_sequence.get(row.sequence_id)
        if masks is not None:
            tokens = apply_masks(tokens, masks)
        drafts = [token(answer, position + 1 + at) for at in range(row.propose)]
        return Sample(row.sequence_id, tokens, drafts=drafts)

    def _is_accepted(self, position: int) -> bool:
        shares = self._script.acceptance
        return position < len(shares) and self._random.random() < shares[position]

    def describe(self) -> Description:
        return self._description

    def probe(self, budget_s: float) -> None:
        """There is nothing to measure."""


def apply_masks(tokens: list[int], masks: list[bytes]) -> list[int]:
    """Return `tokens` up to the first that its mask forbids, and the first allowed token in its
    place."""
    allowed: list[int] = []
    for token, mask in zip(tokens, masks, strict=False):
        if token < 8 * len(mask) and mask[token // 8] >> token % 8 & 1:
            allowed.append(token)
            continue
        first = next((at for at, byte in enumerate(mask) if byte), None)
        if first is not None:
            allowed.append(first * 8 + (mask[first] & -mask[first]).bit_length() - 1)
        break
    return allowed
