"""Guesses in each step: every source says what it knows, the controller takes what pays.

    lookup, suffixes   guess in each step, for that costs microseconds; what comes is compared with
                       their guesses whether those were verified or not, so a request that begins to
                       copy is seen before a single guess of it has cost anything
    forced             where a grammar leaves one token, it is known without a guess; it is guessed
                       where log-probabilities are asked for, which need logits
    lookahead          n-grams that the model itself said behind wrong guesses, of every source;
                       so each row is worth what it verifies and what it may leave
    draft, medusa …    guesses for the next step where that pays, its own time included

Of each sequence the source whose guesses promise most tokens rides. Where the drafter has guessed
too, that tells of the others: what it contradicts is seldom right, what it says as well mostly.
"""

from collections.abc import Sequence as TypingSequence

from headway.core.plan import Sample, StepResult
from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import StepCost, Work, work_of
from headway.engine.policy.policy import decode_work
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation.asking import Asking
from headway.engine.speculation.candidates import (
    EMPTY,
    NO_CANDIDATE,
    Candidate,
    Guessing,
)
from headway.engine.speculation.comparing import Comparing
from headway.engine.speculation.controller import (
    CHUNK,
    PlainStep,
    Reach,
    choose,
    row_price,
)
from headway.engine.speculation.drafts import Drafts, num_alike
from headway.engine.speculation.found import UNKNOWN, Expected, Found, became_of
from headway.engine.speculation.overrun import Overrun
from headway.engine.speculation.rests import ONCE_IN, Look
from headway.engine.speculation.sources import Forced
from headway.telemetry.records import StepRecord

FEW = 4
"""Decodes of which each is compared as a whole: that is sooner done than to say who need not be."""
LOW = 0.3
"""The same where rows take so little of a token that most guesses are worth them."""
FIRST_SHARE = 0.03
"""Of what the model takes for a prompt, what the drafter may: the first token waits for that, and
for the passes of the guesses."""
LATELY = 16
"""Steps: about as many as a token that comes now shortens the end of an answer by."""


class Speculation(Comparing):
    """The speculator of an engine; see `drafts.Speculator`."""

    def __init__(self, config: SpeculationConfig, cost: StepCost) -> None:
        super().__init__(config, cost)
        self.jumps = Forced.name in config.sources
        self.counts: dict[str, list[int]] = {name: [0, 0] for name in config.sources}
        """By source: guesses verified, guesses kept."""
        self.found, self.busy = Found(), 0.0
        """Of the steps lately, the share with prompts beside the decodes."""
        self.drafting_s = self._drafted_s = 0.0
        """What the drafter is to take in this step, and was to take in the one before."""
        self.overrun = Overrun()
        self._least = 0, 0.0
        """Of so many decodes, what a guess was worth at most without being taken, lately."""
        self._num_idle = 0
        """Of those that got a token in this step, who was not asked since the one before."""

    @property
    def failure(self) -> str:
        """Why the drafter is not asked; "" where it is, or is none."""
        return self.asking.failure if self.asking is not None else ""

    # ── plan ────────────────────────────────────────────────────────────────────────────────

    def looks(self, num_decodes: int) -> bool:
        """Whether the step looks for guesses (`rests`)."""
        self._drafted_s, self.drafting_s = self.drafting_s, 0.0
        return self.rests.next(num_decodes) is not Look.RESTS

    def rested(self, sequences: TypingSequence[Sequence]) -> None:
        """Begin to count the steps of those that are new, for what the drafter is worth."""
        if self.asking is not None:
            for sequence in sequences:
                self._state(sequence)

    def plan(
        self,
        decodes: TypingSequence[Sequence],
        beside: Work,
        budget: int,
        most_s: float,
        *,
        prompts_wait: bool = False,
    ) -> dict[int, Drafts]:
        """By sequence id the guesses to verify beside `decodes`, and how many more to draft."""
        starts = [len(sequence.tokens) for sequence in decodes]
        alone = decode_work(decodes, self.cost.windows)
        plain = PlainStep(starts, alone, beside, budget, most_s, self.busy, prompts_wait)
        plain = plain._replace(known_worth_s=plain.worth_s(self.cost))
        least, price = 0.0, row_price(plain, self.cost)
        if self.rests.is_doubtful or (len(decodes) > FEW and price > LOW):
            reach = Reach(plain, self.cost, self.config.max_drafts)
            least = self._least_taken(reach)
            self._least = len(decodes), least
            if self._is_hopeless(reach, plain):
                self.trials.plain(plain)
                return {}
        states = [self._state(sequence) for sequence in decodes]
        best = self._candidates(decodes, states, plain, price, least if least > LOW else 0.0)
        counts = self._num_verified(best, plain)
        found = dict[int, Drafts]()
        for sequence, state, candidate, count in zip(decodes, states, best, counts, strict=True):
            state.best, state.num_unpaid = candidate, 0 if count else state.num_unpaid + 1
            if count:
                found[sequence.sequence_id] = candidate.first(count)
        if self._asks_drafter(plain):
            assert self.asking is not None
            asked = self._num_asked(self.asking, decodes, states, counts, plain, least)
            self.drafting_s = self.asking.seconds(asked)
            for sequence, count in zip(decodes, asked, strict=True):
                if count:
                    drafts = found.get(sequence.sequence_id, EMPTY)
                    found[sequence.sequence_id] = drafts._replace(propose=count)
        self.rests.asked(self.drafting_s > 0)
        return found

    def _asks_drafter(self, plain: PlainStep) -> bool:
        """Whether it is reckoned what the drafter's guesses are worth: at rest in one look of
        four, for that takes as long as all others."""
        if self.asking is None or self.rests.look is not Look.ASKS:
            return False
        if self.rests.is_resting and self._num_looks % ONCE_IN:
            return False
        return self.asking.is_able(plain)

    def _is_hopeless(self, reach: Reach, plain: PlainStep) -> bool:
        """Whether nobody is asked, for no guess could pay; but for trials, and where some did."""
        if not self.rests.is_doubtful or self.trials.is_due(plain):
            return False
        gained = reach.most_gained(self._refills) - self.overrun.share
        return not self.rests.hopes(gained, reach.num_decodes)

    def _least_taken(self, reach: Reach) -> float:
        """Guesses that are worth no more than this are looked at no further."""
        return reach.least_taken

    def _saved_s(
        self, best: list[Candidate], counts: list[int], plain: PlainStep
    ) -> tuple[float, float]:
        """(Seconds that the guesses of a step are expected to save, what they take deducted, and
        what those of them took that were drafted in the step before; seconds of the step)."""
        plain_s = self.cost.seconds(plain.work)
        if not any(counts):
            return -self._drafted_s, plain_s
        step_s = self.cost.seconds(self.cost.with_guesses(plain.work, plain.starts, counts))
        tokens = sum([sum(guess.chances[:count]) for guess, count in zip(best, counts) if count])
        taken_s = (1 + self.overrun.share) * step_s - plain_s + self._drafted_s
        return tokens * plain.worth_s(self.cost) / len(counts) - taken_s, step_s

    def planned(self, num_prompt_tokens: int, choose_s: float) -> None:
        """Whether steps have prompts beside the decodes, of late, and what choosing takes."""
        self.rests.took(choose_s)
        self.busy += (min(num_prompt_tokens / CHUNK, 1.0) - self.busy) / LATELY

    def _num_verified(self, best: list[Candidate], plain: PlainStep) -> list[int]:
        """How many guesses of each candidate are verified."""
        values = [candidate.values for candidate in best]
        counts = choose(values, plain, self.cost)
        saved_s, step_s = self._saved_s(best, counts, plain)
        if not self.rests.chose(saved_s, step_s):
            counts = [0] * len(values)
        if not any(values):
            self.trials.plain(plain)
        else:
            self.trials.vary(values, counts, plain)
        return counts

    def _num_asked(
        self,
        asking: Asking,
        decodes: TypingSequence[Sequence],
        states: list[Guessing],
        counts: list[int],
        plain: PlainStep,
        least: float,
    ) -> list[int]:
        """Of each decode how many tokens behind this step the drafter is asked for: it is worth
        what it brings beyond what will be found anyway."""
        rooms = [
            max(min(self.config.max_proposed, s.max_len - len(s.tokens) - count - 2), 0)
            for s, count in zip(decodes, counts, strict=True)
        ]
        first, drafter = self.acceptance.first, self.drafter
        if not asking.compares or max([first(drafter, 0, each.own) for each in states]) <= least:
            return asking.probe([min(room, 1) for room in rooms], plain)
        values, shares, tokens, rows = [], list[float](), 0.0, 0.0
        for sequence, state, num_riding, room in zip(decodes, states, counts, rooms, strict=True):
            values.append(self.acceptance.chances(self.drafter, 0, room, state.own))
            left, expected = self.found.beside(state.found.chances, num_riding)
            shares.append(left * (1 - state.best.chance_of_end(num_riding, sequence.stop_ids)))
            tokens, rows = tokens + expected.tokens, rows + expected.rows
        plain = plain._replace(found=Expected(tokens, rows))
        least_gain = self.rests.least_gain + self.overrun.share
        return asking.counts(values, plain, shares, least_gain)

    def first(self, sequence: Sequence, start: int) -> int:
        """How many guesses are made behind the last token of a prompt, of which this step computes
        what is behind `start`.

        Heads make them at once. A model computes the prompt first: none are made where that takes
        more than `FIRST_SHARE` of what the model itself takes for it. Nor are any where the next
        step would not verify them: it rests, or they are worth less than a row takes.
        """
        if self.asking is None or self.asking.failure or sequence.num_generated:
            return 0
        if self.rests.is_resting or self.rests.is_hopeless or not self.asking.compares:
            return 0
        if self._waits_long(sequence, start):
            return 0
        state, begin = self._state(sequence), len(sequence.tokens)
        count = min(self.config.max_proposed, sequence.max_len - begin - 2)
        chances = self.acceptance.chances(self.drafter, 0, max(count, 0), state.own)
        num_decodes, (known, least) = len(self._by_id), self._least
        if not chances or (num_decodes >= known and chances[0] <= least):
            return 0
        decodes = work_of([begin] * num_decodes, self.cost.windows)
        room = len(chances) * num_decodes
        plain = PlainStep([begin + 1] * num_decodes, decodes, decodes, room)
        return choose([chances] * num_decodes, plain, self.cost, self.asking.price.drafting)[0]

    def _waits_long(self, sequence: Sequence, start: int) -> bool:
        """Whether the drafter would be long at a prompt of which the model has found much."""
        if self.config.medusa is not None:
            return False
        length = len(sequence.tokens)
        found = start if sequence.first_scheduled_s is None else sequence.num_cached
        own_s, whole_s = (self.cost.prefill_s(length - at, at, length) for at in (found, 0))
        return self.config.draft_share * whole_s > FIRST_SHARE * own_s

    # ── learn ───────────────────────────────────────────────────────────────────────────────

    def came(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        """Compare every candidate with the tokens that came, verified or not."""
        state = self._by_id.get(sequence.sequence_id)
        if state is None:
            return
        if state.is_open or sample.drafts:
            self._learn(sequence, state, drafts, sample)
            return
        self._num_idle += 1
        if self.lookahead is not None:
            self.lookahead.came(sequence, drafts, sample)

    def _learn(self, sequence: Sequence, state: Guessing, drafts: Drafts, sample: Sample) -> None:
        """The same where somebody has guessed since the token before."""
        came, num_forced = sample.token_ids, sequence.num_forced
        forced = sequence.tokens[-num_forced:] if num_forced else []
        drafted = num_alike(state.drafted, came) if state.drafted else None
        if drafts.token_ids:
            self.counts[drafts.source][0] += len(drafts.token_ids)
            self.counts[drafts.source][1] += len(came) - 1
        if state.drafted:
            self._score_drafted(state, came + forced)  # behind a token that ends it as well
        if self.asking is not None:
            self._score_found(state, came, drafted)
        state.best = NO_CANDIDATE
        follows = sample.drafts[:num_forced] == forced  # the drafter did not know them
        state.proposed = sample.drafts[num_forced:] if follows else []
        state.is_open = bool(state.proposed) or state.became != UNKNOWN
        for each in self.sources:
            each.came(sequence, drafts, sample)

    def _score_drafted(self, state: Guessing, came: list[int]) -> None:
        """Compare what the drafter guessed with what came, as far as that goes."""
        drafted, state.drafted = state.drafted, []
        most = min(len(came), len(drafted))
        right = next((at for at in range(most) if drafted[at] != came[at]), most)
        seen = min(right + 1, most)
        self.acceptance.observe(self.drafter, 0, seen, right, state.own)

    def _score_found(self, state: Guessing, came: list[int], num_drafted: int | None) -> None:
        """Tell of what guesses that cost nothing brought, or would have; and the drafter beside."""
        found, num_paying, became = state.found, state.num_paying, state.became
        state.found, state.num_paying, state.became = NO_CANDIDATE, -1, UNKNOWN
        if num_paying >= 0:
            token_ids = found.drafts.token_ids
            num_found = num_alike(token_ids[:num_paying], came)
            self.found.saw(became, num_found, num_paying, num_drafted)
            state.became = became_of(token_ids, came)
        self.found.became(state.became)

    def hears(self, sequence: Sequence) -> bool:
        """Whether somebody has guessed of it since the last token, or its steps are to be counted
        (`rested`), or what lookahead keeps goes with the next token."""
        state = self._by_id.get(sequence.sequence_id)
        if state is None:
            return self.asking is not None
        return state.is_open or (self.lookahead is not None and self.lookahead.hears(sequence))

    def ended(self, result: StepResult, num_unheard: int) -> None:
        """What the drafter took in this step."""
        if self.asking is not None:
            self.found.passed(self._num_idle + num_unheard)
            self.asking.ended(result)
        self._num_idle = 0

    def timed(self, record: StepRecord) -> None:
        """What steps with guesses take besides what is foretold."""
        self.overrun.saw(record)

    def left(self, sequence: Sequence) -> None:
        """Forget what is kept of it; an answer that has ended may be given again."""
        state = self._by_id.pop(sequence.sequence_id, None)
        if state is not None:
            if sequence.state == FINISHED:
                self.found.ended(state.became)
            for shadow in state.shadows.values():
                shadow.close(sequence.tokens, self.acceptance, state.own)
        for source in self.sources:
            source.left(sequence)

    def forget_owner(self, owner: bytes) -> None:
        """Nothing is guessed again from what belongs to `owner` (`Principal.block_owner`)."""
        for source in self.sources:
            source.forget_owner(owner)
