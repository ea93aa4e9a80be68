"""Guesses in each step: every source says what it knows, the controller takes what pays.

    lookup, suffixes   guess in each step, for that costs microseconds; what comes is compared with
                       their guesses whether those were verified or not, so a request that begins to
                       copy is seen before a single guess of it has cost anything
    forced             where a grammar leaves one text, its tokens
    draft or medusa    guesses for the next step where that pays, its own time included; where it
                       does not it is asked now and then, for what it would be worth today

Of each sequence the source whose guesses promise most tokens rides.
"""

from collections.abc import Sequence as TypingSequence
from typing import NamedTuple

from headway.core.plan import StepResult
from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import StepCost, Work, work_of
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation.acceptance import Acceptance, Own
from headway.engine.speculation.controller import Drafting, choose
from headway.engine.speculation.drafts import Drafts, fitting
from headway.engine.speculation.lookup import Guess, Lookup
from headway.engine.speculation.price import DraftPrice
from headway.engine.speculation.shadow import Shadow
from headway.engine.speculation.suffixes import TAIL, PastAnswers

LOOKUP, SUFFIXES, FORCED, MEDUSA = "lookup", "suffixes", "forced", "medusa"
TRIED = 3
"""Guesses that are tried where none seems to pay: with the decode, a knot of the cost curve."""
PROBE_SHARE = 0.01
"""Of the time, what a drafter that does not pay may take to be seen at all."""


class Candidate(NamedTuple):
    """What a source guesses of a sequence, and what it is worth: the chances of each guess."""

    source: str
    token_ids: list[int]
    match: int
    chances: list[float]


class Guessing:
    """What is known of one sequence's guesses."""

    __slots__ = ("drafted", "lookup", "own", "proposed", "shadows")

    def __init__(self, tokens: list[int] | None) -> None:
        self.lookup = None if tokens is None else Lookup(tokens)
        self.own = Own()
        self.shadows: dict[str, Shadow] = {}
        self.proposed: list[int] = []
        """What the drafter guesses of the next tokens."""
        self.drafted: list[int] = []
        """The same of the tokens that this step brings."""

    def shadow(self, source: str) -> Shadow:
        """What scores the guesses of a source that are not verified."""
        if source not in self.shadows:
            self.shadows[source] = Shadow(source)
        return self.shadows[source]


class Speculation:
    """The speculator of an engine; see `drafts.Speculator`."""

    def __init__(self, config: SpeculationConfig, cost: StepCost) -> None:
        self.config, self.cost = config, cost
        self.acceptance = Acceptance()
        self.past = PastAnswers() if SUFFIXES in config.sources else None
        self.drafter, self.price = config.drafter, None
        if self.drafter:
            at_once = self.drafter == MEDUSA
            self.price = DraftPrice(cost, config.draft_share, at_once=at_once)
        self.counts: dict[str, list[int]] = {name: [0, 0] for name in config.sources}
        """By source: guesses verified, guesses kept."""
        self._by_id: dict[int, Guessing] = {}
        self._unasked_s = self._untried_s = 0.0
        """Seconds of steps since the drafter was asked last, and since more rows were tried."""

    # ── plan ────────────────────────────────────────────────────────────────────────────────

    def plan(
        self, decodes: TypingSequence[Sequence], beside: Work, budget: int, most_s: float
    ) -> dict[int, Drafts]:
        """By sequence id the guesses to verify beside `decodes`, and how many more to draft."""
        if not decodes:
            return {}
        states = [self._state(sequence) for sequence in decodes]
        best = [
            self._best(sequence, state) for sequence, state in zip(decodes, states, strict=True)
        ]
        starts = [sequence.computed + 1 for sequence in decodes]
        alone = work_of([sequence.computed for sequence in decodes], self.cost.windows)
        values = [candidate.chances if candidate else [] for candidate in best]
        counts = [0] * len(decodes)
        if any(values):
            counts = choose(values, starts, self.cost, alone, beside, budget=budget, most_s=most_s)
            self._try_more(values, counts, starts, beside, budget - sum(counts), most_s)
        found: dict[int, Drafts] = {}
        for sequence, candidate, count in zip(decodes, best, counts, strict=True):
            if count and candidate is not None:
                found[sequence.sequence_id] = Drafts(
                    candidate.token_ids[:count], candidate.source, candidate.match
                )
        if self.price is not None:
            self._ask(decodes, states, best, found, alone, beside, budget, most_s)
        return found

    def _try_more(
        self,
        values: list[list[float]],
        counts: list[int],
        starts: list[int],
        beside: Work,
        room: int,
        most_s: float,
    ) -> None:
        """Verify more guesses of one sequence where that takes a hundredth of the time since.

        What rows cost is learned from steps that have them: those that seemed dear, because others
        used the machine or nobody ever saw so many, would seem so for ever.
        """
        index = max(range(len(values)), key=lambda i: sum(values[i][counts[i] :]))
        count = counts[index]
        more = min(len(values[index]), max(TRIED, 2 * count + 1), count + room)
        for at, riding in zip(starts, counts, strict=True):
            beside = self.cost.with_drafts(beside, at, riding) if riding else beside
        step_s = self.cost.seconds(beside)
        self._untried_s += step_s
        tried = self.cost.with_drafts(beside, starts[index] + count, more - count)
        tried_s = self.cost.seconds(tried)
        dearer_s = tried_s - step_s
        if more > count and dearer_s <= PROBE_SHARE * self._untried_s and tried_s <= most_s:
            counts[index], self._untried_s = more, 0.0

    def _state(self, sequence: Sequence) -> Guessing:
        state = self._by_id.get(sequence.sequence_id)
        if state is None:
            tokens = sequence.tokens if LOOKUP in self.config.sources else None
            state = self._by_id[sequence.sequence_id] = Guessing(tokens)
        return state

    def _best(self, sequence: Sequence, state: Guessing) -> Candidate | None:
        """The candidate that promises most tokens; all are compared with what comes."""
        most, tokens = self.config.max_drafts, sequence.tokens
        guesses: list[tuple[str, Guess]] = []
        if state.lookup is not None:
            guesses.append((LOOKUP, state.lookup.guess(most)))
        if self.past is not None:
            salt = sequence.request.principal.cache_salt
            guesses.append((SUFFIXES, self.past.guess(salt, tokens, most)))
        if sequence.grammar is not None and FORCED in self.counts:
            guesses.append((FORCED, Guess(sequence.grammar.forced()[:most], 0)))
        for source, guess in guesses:
            if guess.token_ids:
                state.shadow(source).remember(tokens, guess)
        state.drafted, state.proposed = state.proposed, []
        guesses.append((self.drafter, Guess(state.drafted, 0)))
        best, worth = None, 0.0
        for source, (token_ids, match) in guesses:
            token_ids = fitting(sequence, token_ids, most) if token_ids else token_ids
            if token_ids:
                chances = self.acceptance.chances(source, match, len(token_ids), state.own)
                if sum(chances) > worth:
                    best, worth = Candidate(source, token_ids, match, chances), sum(chances)
        return best

    def _ask(
        self,
        decodes: TypingSequence[Sequence],
        states: list[Guessing],
        best: list[Candidate | None],
        found: dict[int, Drafts],
        alone: Work,
        beside: Work,
        budget: int,
        most_s: float,
    ) -> None:
        """Ask the drafter for the next step's guesses where it would pay then."""
        assert self.price is not None
        values = []
        for sequence, state, candidate in zip(decodes, states, best, strict=True):
            riding = found.get(sequence.sequence_id)
            num_riding = len(riding.token_ids) if riding else 0
            room = sequence.max_len - len(sequence.tokens) - num_riding - 2
            count = min(self.config.max_proposed, room)
            chances = self.acceptance.chances(self.drafter, 0, max(count, 0), state.own)
            if candidate and candidate.source != self.drafter:
                lost = 1 - candidate.chances[-1]  # else what costs nothing goes on as well
                chances = [lost * chance for chance in chances]
            values.append(chances)
        starts = [sequence.computed + 1 for sequence in decodes]
        drafting = self.price.drafting
        counts = choose(
            values,
            starts,
            self.cost,
            alone,
            beside,
            budget=budget,
            most_s=most_s,
            drafting=drafting,
        )
        if not any(counts):
            counts = self._probe(values, drafting, self.cost.seconds(beside))
        for sequence, count in zip(decodes, counts, strict=True):
            if count:
                drafts = found.get(sequence.sequence_id, Drafts([]))
                found[sequence.sequence_id] = drafts._replace(propose=count)

    def _probe(self, values: list[list[float]], drafting: Drafting, step_s: float) -> list[int]:
        """Two guesses of one sequence where that is a hundredth of the time since the last."""
        counts = [0] * len(values)
        self._unasked_s += step_s
        if 2 * (drafting.pass_s + drafting.row_s) < PROBE_SHARE * self._unasked_s:
            index = next((i for i, chances in enumerate(values) if chances), None)
            if index is not None:
                counts[index] = min(2, len(values[index]))
                self._unasked_s = 0.0
        return counts

    # ── learn ───────────────────────────────────────────────────────────────────────────────

    def came(self, sequence: Sequence, drafts: Drafts, num_kept: int, proposed: list[int]) -> None:
        """Compare every candidate with the tokens that came, verified or not."""
        state = self._by_id.get(sequence.sequence_id)
        if state is None:
            return
        if drafts.token_ids:
            counts = self.counts[drafts.source]
            counts[0] += len(drafts.token_ids)
            counts[1] += num_kept
        for shadow in state.shadows.values():
            shadow.settle(sequence.tokens, self.acceptance, state.own)
        if state.drafted:
            self._score_drafted(state, sequence.tokens[len(sequence.tokens) - num_kept - 1 :])
        state.proposed = proposed

    def _score_drafted(self, state: Guessing, came: list[int]) -> None:
        """Compare what the drafter guessed with what came, as far as that goes."""
        drafted, state.drafted = state.drafted, []
        most = min(len(came), len(drafted))
        right = next((at for at in range(most) if drafted[at] != came[at]), most)
        seen = min(right + 1, most)
        self.acceptance.observe(self.drafter, 0, seen, right, state.own)

    def ended(self, result: StepResult) -> None:
        """What the drafter took in this step."""
        if self.price is not None and result.timings.draft_s:
            self._unasked_s = 0.0
            lengths = [len(sample.drafts) for sample in result.samples if sample.drafts]
            self.price.observe(max(lengths, default=0), sum(lengths), result.timings.draft_s)

    def left(self, sequence: Sequence) -> None:
        """Forget what is kept of it; an answer that has ended may be given again."""
        state = self._by_id.pop(sequence.sequence_id, None)
        if state is not None:
            for shadow in state.shadows.values():
                shadow.close(sequence.tokens, self.acceptance, state.own)
        if self.past is not None and sequence.state == FINISHED and sequence.num_generated:
            begin = sequence.num_prompt
            tail = sequence.tokens[max(0, begin - TAIL) : begin]
            salt = sequence.request.principal.cache_salt
            self.past.add(salt, tail, sequence.tokens[begin:])
