"""Draft tokens of each step: proposers propose, the controller takes what pays.

    propose    every proposer of each decode; its earlier proposal is scored by the actual tokens,
               verified or not, so a request that begins to copy is noticed at once
    compare    the best proposer of each decode: most expected tokens beyond the cost of its rows
    choose     how many of its tokens are verified (`controller`)
    draft      how many tokens the runtime's drafter makes for the next step

If nothing pays for a while, most steps skip all of it (`backoff`).
"""

from collections.abc import Sequence as TypingSequence
from math import inf
from typing import NamedTuple

from headway.config.speculation_config import SpeculationConfig
from headway.core.plan import Sample, StepResult
from headway.core.records import StepRecord
from headway.engine.policy.policy import decode_work
from headway.engine.sequence import Sequence
from headway.engine.speculation.acceptance import (
    AGREES,
    DIFFERS,
    PROMPT,
    Acceptance,
    PendingProposal,
    SequenceOdds,
)
from headway.engine.speculation.backoff import PROBE_STEPS, Backoff
from headway.engine.speculation.controller import (
    DraftChoice,
    PlainStep,
    choose,
    least_value,
    row_cost,
)
from headway.engine.speculation.drafts import Drafts, common_prefix, fitting
from headway.engine.speculation.proposers import make_free_proposers
from headway.engine.speculation.proposers.draft import DraftProposer
from headway.engine.speculation.proposers.grammar import GrammarProposer
from headway.engine.speculation.proposers.lookahead import KINDS, Lookahead
from headway.engine.speculation.proposers.proposal import Proposal, Proposer
from headway.perf.model import StepModel, Work, work_of

MIN_SPEEDUP = 1.05
"""Draft tokens predicted to raise the rate by less are neither verified nor drafted, because a
prediction is no more accurate than that."""
AVERAGED_STEPS = 8
"""Steps of the running mean of what speculation saves, and of what choosing costs."""
DOUBTFUL_SPEEDUP, PLAIN_INTERVAL = 2.0, 32
"""If draft tokens raise the rate by less than this, predicted or measured, one step in so many has
none, to learn the time of steps without."""
EXTRA_PRIOR, EXTRA_DECAY = 2.0, 1 - 1 / 64
"""Value of the drafter when other proposers propose too: the prior counts as this many tokens, all
found by the drafter only; observations decay with each such proposal."""
PROBE_TOKENS = 3
"""Draft tokens that a probe verifies at least, though they seem not to pay, to learn the cost of
rows."""
ROW_PROBE_INTERVAL, DRAFT_PROBE_INTERVAL = 256, 1024
"""Maximum steps between probes of rows, and between probes of the drafter."""
PROBE_SHARE = 0.004
"""Share of the time that probes during backoff may always take: if they take less, they come sooner
than after the backoff's interval."""
MAX_PROMPT_DRAFT_SHARE = 0.03
"""Maximum time of a draft model for a prompt, as a share of the model's, to protect TTFT."""


class DraftCandidate(NamedTuple):
    """Proposal of one proposer for a sequence: the probability that each draft token is accepted,
    and the value of its row in tokens."""

    drafts: Drafts
    probabilities: list[float]
    values: list[float]


NO_CANDIDATE = DraftCandidate(Drafts([]), [], [])


class Options(NamedTuple):
    """The best candidate of a sequence, and the best one of proposers that run no model."""

    best: DraftCandidate = NO_CANDIDATE
    free: DraftCandidate = NO_CANDIDATE


class SequenceState:
    """State of one sequence."""

    __slots__ = ("free_ids", "odds", "pending", "proposals")

    def __init__(self) -> None:
        self.odds = SequenceOdds()
        self.pending: dict[str, PendingProposal] = {}
        """Proposer → its proposal that is not scored yet."""
        self.free_ids: list[int] = []
        """Tokens worth their rows of the best proposal that ran no model."""
        self.proposals: list[tuple[str, Proposal, str]] = []
        """Of this step: (proposer, proposal, context), see `acceptance`."""


class AdaptiveSpeculator:
    """Speculator of an engine; see `drafts.Speculator`."""

    def __init__(self, config: SpeculationConfig, cost: StepModel) -> None:
        self.config, self.cost = config, cost
        self.acceptance, self.backoff = Acceptance(), Backoff()
        self.drafter = DraftProposer(config, cost) if config.drafter else None
        self.proposers: list[Proposer] = make_free_proposers(config)
        if self.drafter is not None:
            self.proposers.insert(0, self.drafter)
        self.lookahead = next((p for p in self.proposers if isinstance(p, Lookahead)), None)
        self.jumps = GrammarProposer.name in config.sources
        self.counts: dict[str, list[int]] = {name: [0, 0] for name in config.sources}
        """Proposer → [verified draft tokens, accepted ones]."""
        self.drafting_s = 0.0
        self._states: dict[int, SequenceState] = {}
        self._row_probe = Backoff(patience=0, max_interval=ROW_PROBE_INTERVAL, probe_steps=1)
        self._draft_probe = Backoff(0, DRAFT_PROBE_INTERVAL, probe_steps=1)
        self._probes_rows = self._probes_drafter = False
        """Whether a probe is due."""
        self._num_drafter_right = self._num_drafter_extra = 0.0
        """Decayed counts of steps in which another proposer proposed too: correct tokens of the
        drafter, and those of them that no other proposer had."""
        self._num_doubtful = 0
        """Consecutive steps with draft tokens that gain little."""
        self._saved = self._choose_share = 0.0
        """Means, as shares of a step without draft tokens: saved time, and time for choosing."""

    @property
    def failure(self) -> str:
        """Return why the drafter is not asked; "" if it is, or if there is none."""
        return self.drafter.failure if self.drafter is not None else ""

    # ── plan ────────────────────────────────────────────────────────────────────────────────

    def is_due(self, num_decodes: int) -> bool:
        """Return whether the next step has draft tokens.

        During backoff only probes do, and steps that verify proposals of the drafter.
        """
        self.drafting_s = 0.0
        if not num_decodes:
            return False
        self._probes_rows |= self._row_probe.is_due()
        self._probes_drafter |= self._draft_probe.is_due()
        is_due = self.backoff.is_due(PROBE_STEPS * self._choose_share / PROBE_SHARE)
        return is_due or (self.drafter is not None and self.drafter.has_proposals)

    def plan(
        self,
        decodes: TypingSequence[Sequence],
        other_work: Work,
        budget: int,
        max_s: float,
        *,
        prompts_wait: bool = False,
    ) -> dict[int, Drafts]:
        """Return by sequence id the draft tokens to verify, and how many to draft.

        If prompts wait nothing is gained: the number of steps stays the same, and an accepted token
        saves no more than its row costs.
        """
        if prompts_wait:
            return {}
        starts = [len(sequence.tokens) for sequence in decodes]
        plain = PlainStep(
            starts, decode_work(decodes, self.cost.windows), other_work, budget, max_s
        )
        states = [self._state(sequence) for sequence in decodes]
        self._propose(decodes, states, plain)
        price = row_cost(plain, self.cost)
        options = [self._compare(*pair, price) for pair in zip(decodes, states, strict=True)]
        counts = self._choose([each.best for each in options], plain)
        by_id = dict[int, Drafts]()
        for sequence, each, count in zip(decodes, options, counts, strict=True):
            if count:
                drafts = each.best.drafts
                by_id[sequence.sequence_id] = drafts._replace(token_ids=drafts.token_ids[:count])
        draft_counts = self._num_to_draft(decodes, states, options, counts, plain, price)
        for sequence, count in zip(decodes, draft_counts):
            if count:
                drafts = by_id.get(sequence.sequence_id, NO_CANDIDATE.drafts)
                by_id[sequence.sequence_id] = drafts._replace(propose=count)
        return by_id

    def _state(self, sequence: Sequence) -> SequenceState:
        state = self._states.get(sequence.sequence_id)
        if state is None:
            state = self._states[sequence.sequence_id] = SequenceState()
        return state

    def _propose(
        self, decodes: TypingSequence[Sequence], states: list[SequenceState], plain: PlainStep
    ) -> None:
        """Score the last proposals and ask the proposers for new ones.

        All are scored before any is compared, so that rates are computed once.
        """
        if self.lookahead is not None:
            rates = self.acceptance.rates(self.lookahead.name, KINDS)
            self.lookahead.begin(
                rates, least_value(plain, self.cost, self.config.num_speculative_tokens)
            )
        for sequence, state in zip(decodes, states, strict=True):
            state.proposals, draft_ids, tokens = [], list[int](), sequence.tokens
            self._score(state, tokens)
            for proposer in self.proposers:
                proposal = proposer.propose(sequence, self.config.num_speculative_tokens)
                if not proposal.token_ids:
                    continue
                if proposer is self.drafter:
                    draft_ids, context = proposal.token_ids, ""
                else:
                    context = context_of(proposal, draft_ids, sequence.num_generated)
                pending = PendingProposal(len(tokens), proposal, context)
                state.pending[proposer.name] = pending
                state.proposals.append((proposer.name, proposal, context))

    def _score(self, state: SequenceState, tokens: list[int]) -> None:
        """Learn from the last proposals, given the actual tokens."""
        for name, pending in state.pending.items():
            num_right = self.acceptance.score(name, pending, tokens, state.odds)
            if name == self.config.drafter:
                num_free_right = common_prefix(state.free_ids, tokens[pending.start :])
                extra = max(num_right - num_free_right, 0)
                if state.free_ids:
                    self._num_drafter_right = EXTRA_DECAY * self._num_drafter_right + num_right
                    self._num_drafter_extra = EXTRA_DECAY * self._num_drafter_extra + extra
        state.pending.clear()
        state.free_ids = []

    def _compare(self, sequence: Sequence, state: SequenceState, price: float) -> Options:
        """Return the candidates with the most expected tokens beyond the `price` of their rows."""
        best = free = NO_CANDIDATE
        most = most_free = -inf
        for name, proposal, context in state.proposals:
            token_ids = fitting(sequence, proposal.token_ids, self.config.num_speculative_tokens)
            if not token_ids:
                continue
            probabilities = self.acceptance.probabilities(
                name, proposal.match, len(token_ids), state.odds, context
            )
            promised = sum([each - price for each in probabilities if each > price])
            if promised > most or (promised > most_free and name != self.config.drafter):
                values = probabilities
                if self.lookahead is not None:
                    refill = self.lookahead.expected_tokens
                    values = [each + (1 - each) * refill for each in probabilities]
                drafts = Drafts(token_ids, name, proposal.match)
                candidate = DraftCandidate(drafts, probabilities, values)
                if promised > most:
                    best, most = candidate, promised
                if promised > most_free and name != self.config.drafter:
                    free, most_free = candidate, promised
        return Options(best, free)

    def _choose(self, candidates: list[DraftCandidate], plain: PlainStep) -> list[int]:
        """Return how many draft tokens of each candidate are verified."""
        values = [candidate.values for candidate in candidates]
        choice = choose(values, plain, self.cost, min_speedup=MIN_SPEEDUP)
        counts = self._with_plain_steps(choice)
        if self._probes_rows and any(values):
            self._probe_rows(values, counts, plain)
        return counts

    def _probe_rows(self, values: list[list[float]], counts: list[int], plain: PlainStep) -> None:
        """Verify more draft tokens of the decode for which they promise most."""
        self._row_probe.record(paid=False)
        self._probes_rows = False
        index = max(range(len(values)), key=lambda i: sum(values[i][counts[i] :]))
        spare = plain.budget - sum(counts)
        more = max(PROBE_TOKENS, 2 * counts[index] + 1)
        counts[index] = min(more, counts[index] + spare, len(values[index]))

    def _with_plain_steps(self, choice: DraftChoice) -> list[int]:
        """Return the counts; none in one step of `PLAIN_INTERVAL` while they gain little."""
        speedup = min(choice.speedup, 1 + self._saved)
        is_doubtful = any(choice.counts) and speedup < DOUBTFUL_SPEEDUP
        self._num_doubtful = self._num_doubtful + 1 if is_doubtful else 0
        if self._num_doubtful < PLAIN_INTERVAL:
            return choice.counts
        self._num_doubtful = 0
        return [0] * len(choice.counts)

    def _num_to_draft(
        self,
        decodes: TypingSequence[Sequence],
        states: list[SequenceState],
        options: list[Options],
        counts: list[int],
        plain: PlainStep,
        price: float,
    ) -> list[int]:
        """Return how many tokens the drafter drafts for each decode after this step.

        Their value is what they bring beyond proposers that run no model, and zero after the end of
        an answer; the drafter's time also delays the tokens of those proposers.
        """
        drafter = self.drafter
        if drafter is None or not drafter.is_available(self.cost.seconds(plain.work)):
            return []
        values, other_tokens, other_rows = list[list[float]](), 0.0, 0.0
        extra = (self._num_drafter_extra + EXTRA_PRIOR) / (self._num_drafter_right + EXTRA_PRIOR)
        for sequence, state, each, count in zip(decodes, states, options, counts, strict=True):
            depth = sequence.max_len - len(sequence.tokens) - count - 2
            depth = max(min(self.config.max_proposed, depth), 0)
            paying = [chance for chance in each.free.probabilities if chance > price]
            state.free_ids = each.free.drafts.token_ids[: len(paying)]
            other_tokens += sum(paying)
            other_rows += len(paying)
            share = extra if paying else 1.0
            if count and each.best.drafts.token_ids[count - 1] in sequence.stop_ids:
                share *= 1 - each.best.probabilities[count - 1]
            known = self.acceptance.probabilities(drafter.name, 0, depth, state.odds)
            values.append([share * probability for probability in known])
        token_s = self.cost.seconds(plain.decodes)
        plain = plain._replace(other_tokens=other_tokens, other_s=other_rows * price * token_s)
        counts = self._choose_to_draft(values, plain)
        self.drafting_s = drafter.cost.drafting.seconds(max(counts))
        return counts

    def _choose_to_draft(self, values: list[list[float]], plain: PlainStep) -> list[int]:
        """Return how many tokens with these values are drafted; in a probe one per decode."""
        assert self.drafter is not None
        drafting = self.drafter.cost.drafting
        counts = choose(values, plain, self.cost, drafting, MIN_SPEEDUP).counts
        if any(counts):
            self._draft_probe.record(paid=True)
            self._probes_drafter = False
        elif self._probes_drafter:
            self._draft_probe.record(paid=False)
            self._probes_drafter = False
            counts = [min(len(each), 1) for each in values]
        return counts

    def num_after_prompt(self, sequence: Sequence, start: int) -> int:
        """Return how many tokens are drafted after the first sampled token of a prompt.

        This step computes the prompt from `start` on. Heads draft at once. A draft model computes
        the prompt first: it drafts none if that takes more than `MAX_PROMPT_DRAFT_SHARE` of the
        model's time.
        """
        drafter = self.drafter
        if drafter is None or drafter.failure or sequence.num_generated or self.backoff.is_active:
            return 0
        if self.config.medusa is None and self._delays_first_token(sequence, start):
            return 0
        begin, num_decodes = len(sequence.tokens), max(len(self._states), 1)
        count = min(self.config.max_proposed, sequence.max_len - begin - 2)
        odds = SequenceOdds()
        values = [self.acceptance.probabilities(drafter.name, 0, max(count, 0), odds)] * num_decodes
        work = work_of([begin] * num_decodes, self.cost.windows)
        plain = PlainStep([begin + 1] * num_decodes, work, work, num_decodes * max(count, 0))
        return choose(values, plain, self.cost, drafter.cost.drafting, MIN_SPEEDUP).counts[0]

    def _delays_first_token(self, sequence: Sequence, start: int) -> bool:
        """Return whether a draft model would delay a prompt that is mostly cached for the model."""
        length = len(sequence.tokens)
        known = start if sequence.first_scheduled_s is None else sequence.num_cached
        own_s, whole_s = (self.cost.predict_prefill_s(length - at, at, length) for at in (known, 0))
        return self.config.draft_share * whole_s > MAX_PROMPT_DRAFT_SHARE * own_s

    # ── learn ───────────────────────────────────────────────────────────────────────────────

    def observe(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        """Count accepted tokens, and let the proposers learn."""
        if drafts.token_ids:
            self.counts[drafts.source][0] += len(drafts.token_ids)
            self.counts[drafts.source][1] += len(sample.token_ids) - 1
        for proposer in self.proposers:
            proposer.observe(sequence, drafts, sample)

    def end_step(self, result: StepResult) -> None:
        """Learn the time of the drafter."""
        if self.drafter is not None:
            self.drafter.end_step(result)

    def learn(self, record: StepRecord) -> None:
        """Learn from a step with choosing whether that paid.

        It paid if its tokens, at the predicted time of a step without draft tokens, are worth its
        actual time, including choosing, drafting and verifying. Steps with prompts are ignored.
        """
        if not record.choose_s or not record.predicted_s or record.num_prefill_tokens:
            return
        num_decodes = record.num_decode_tokens - record.num_drafts - record.num_forced_rows
        plain_s = record.predicted_s - record.verify_s
        if num_decodes < 1 or plain_s <= 0:
            return
        tokens = 1 + record.num_kept_drafts / num_decodes
        saved = tokens - (record.duration_s + record.gap_s) / plain_s
        self._saved += (saved - self._saved) / AVERAGED_STEPS
        self._choose_share += (record.choose_s / plain_s - self._choose_share) / AVERAGED_STEPS
        self.backoff.record(paid=self._saved > 0)

    def forget(self, sequence: Sequence) -> None:
        """Score the last proposals of a sequence that ended or was preempted; drop its state."""
        state = self._states.pop(sequence.sequence_id, None)
        if state is not None:
            self._score(state, sequence.tokens)
        for proposer in self.proposers:
            proposer.forget(sequence)

    def forget_owner(self, owner: bytes) -> None:
        """Stop proposing tokens of `owner` (`Principal.block_owner`) to other sequences."""
        for proposer in self.proposers:
            proposer.forget_owner(owner)


def context_of(proposal: Proposal, draft_ids: list[int], num_generated: int) -> str:
    """Return the context of a proposal with a match: whether the match reaches back into the
    prompt, and whether the drafter proposes the same.

    >>> context_of(Proposal([5, 6], 3), [5, 6, 7], 9), context_of(Proposal([5, 6], 3), [5], 2)
    ('agrees', 'prompt agrees')
    >>> context_of(Proposal([5, 6], 3), [7], 9), context_of(Proposal([5, 6], 3), [], 9)
    ('differs', '')
    """
    context, (token_ids, match) = "", proposal
    if draft_ids:
        count = min(len(token_ids), len(draft_ids))
        context = AGREES if token_ids[:count] == draft_ids[:count] else DIFFERS
    if isinstance(match, int) and match > num_generated:
        return PROMPT + context
    return context
