"""Guesses in each step: every source says what it knows, the controller takes what pays.

    lookup, suffixes   guess in each step, for that costs microseconds; what comes is compared with
                       their guesses whether those were verified or not, so a request that begins to
                       copy is seen before a single guess of it has cost anything
    forced             where a grammar leaves one token, it is known without a guess; it is guessed
                       where log-probabilities are asked for, which need logits
    lookahead          n-grams that the model itself said behind wrong guesses, of every source;
                       so each row is worth what it verifies and what it may leave
    draft, medusa …    guesses for the next step where that pays, its own time included

Of each sequence the source whose guesses promise most tokens rides, and beside it another that
disagrees where that pays (`paths`). Where the drafter has guessed too, that tells of the others:
what it contradicts is seldom right, what it says as well mostly.
"""

from collections.abc import Sequence as TypingSequence

from headway.core.plan import Sample, StepResult
from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import StepCost, Work, work_of
from headway.engine.policy.policy import decode_work
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation.acceptance import BEGINS, Acceptance
from headway.engine.speculation.asking import Asking
from headway.engine.speculation.candidates import (
    EMPTY,
    NO_CANDIDATE,
    Candidate,
    Guessing,
    said_beside,
)
from headway.engine.speculation.controller import CHUNK, PlainStep, choose, least_value, row_price
from headway.engine.speculation.drafts import Drafts, fitting, num_alike, outcomes
from headway.engine.speculation.found import UNKNOWN, Expected, Found, became_of
from headway.engine.speculation.lookahead import KINDS, Lookahead
from headway.engine.speculation.paths import choose_rivals, find_rival, observe
from headway.engine.speculation.price import DraftPrice
from headway.engine.speculation.rests import Look, Rests
from headway.engine.speculation.shadow import Shadow
from headway.engine.speculation.sources import Forced, make_sources
from headway.engine.speculation.trials import Trials

LATELY = 16
"""Steps: about as many as a token that comes now shortens the end of an answer by."""


class Speculation:
    """The speculator of an engine; see `drafts.Speculator`."""

    def __init__(self, config: SpeculationConfig, cost: StepCost) -> None:
        self.config, self.cost = config, cost
        self.acceptance = Acceptance()
        self.sources = make_sources(config)
        self.lookahead = next((s for s in self.sources if isinstance(s, Lookahead)), None)
        self.jumps = Forced.name in config.sources
        self.drafter, self.asking = config.drafter, None
        if self.drafter:
            price = DraftPrice(cost, config.draft_share, at_once=config.medusa is not None)
            self.asking = Asking(price, cost)
        self.counts: dict[str, list[int]] = {name: [0, 0] for name in config.sources}
        """By source: guesses verified, guesses kept."""
        self._by_id: dict[int, Guessing] = {}
        self.trials, self.rests, self.found = Trials(cost), Rests(), Found()
        self.busy = 0.0
        """Of the steps lately, the share with prompts beside the decodes."""
        self.drafting_s = 0.0

    @property
    def failure(self) -> str:
        """Why the drafter is not asked; "" where it is, or is none."""
        return self.asking.failure if self.asking is not None else ""

    # ── plan ────────────────────────────────────────────────────────────────────────────────

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
        self.drafting_s = 0.0
        look = self.rests.next(len(decodes))
        if look is Look.RESTS:
            return {}
        starts = [len(sequence.tokens) for sequence in decodes]
        alone = decode_work(decodes, self.cost.windows)
        plain = PlainStep(starts, alone, beside, budget, most_s, self.busy, prompts_wait)
        plain = plain._replace(known_worth_s=plain.worth_s(self.cost))
        if self.lookahead is not None:
            least = least_value(plain, self.cost, self.config.max_drafts)
            self.lookahead.begin(self.acceptance.shares(self.lookahead.name, KINDS), least)
        states = [self._state(sequence) for sequence in decodes]
        price = row_price(plain, self.cost)
        best = [
            self._best(sequence, state, price) if state.looks else NO_CANDIDATE
            for sequence, state in zip(decodes, states, strict=True)
        ]
        counts, beside_them = self._num_verified(best, plain)
        for state, candidate, count in zip(states, best, counts, strict=True):
            state.best = candidate
            state.num_unpaid = 0 if count else state.num_unpaid + 1
        found = {
            sequence.sequence_id: candidate.first(count, more)
            for sequence, candidate, count, more in zip(
                decodes, best, counts, beside_them, strict=True
            )
            if count
        }
        if look is Look.ASKS and self.asking is not None and self.asking.is_able(plain):
            asked = self._num_asked(self.asking, decodes, states, counts, plain)
            self.drafting_s = self.asking.seconds(asked)
            for sequence, count in zip(decodes, asked, strict=True):
                if count:
                    drafts = found.get(sequence.sequence_id, EMPTY)
                    found[sequence.sequence_id] = drafts._replace(propose=count)
        self.rests.chose(self._saved_s(best, counts, plain), self.cost.seconds(plain.work))
        return found

    def _saved_s(self, best: list[Candidate], counts: list[int], plain: PlainStep) -> float:
        """Seconds that the guesses of a step are expected to save, what they take deducted."""
        if not any(counts):
            return -self.drafting_s
        work = self.cost.with_guesses(plain.work, plain.starts, counts)
        tokens = sum([sum(guess.chances[:count]) for guess, count in zip(best, counts)])
        added_s = self.cost.seconds(work) - self.cost.seconds(plain.work)
        return tokens * plain.worth_s(self.cost) / len(counts) - added_s - self.drafting_s

    def planned(self, num_prompt_tokens: int, choose_s: float) -> None:
        """Whether steps have prompts beside the decodes, of late, and what choosing takes."""
        self.rests.took(choose_s)
        self.busy += (min(num_prompt_tokens / CHUNK, 1.0) - self.busy) / LATELY

    def _state(self, sequence: Sequence) -> Guessing:
        state = self._by_id.get(sequence.sequence_id)
        if state is None:
            shadows = {source.name: Shadow(source.name) for source in self.sources}
            state = self._by_id[sequence.sequence_id] = Guessing(shadows)
        return state

    def _guesses(
        self, sequence: Sequence, state: Guessing
    ) -> tuple[list[tuple[Drafts, str]], bool]:
        """(Guesses, and what the drafter says to each; whether every source looked)."""
        most, tokens, num_looked = self.config.max_drafts, sequence.tokens, 0
        state.drafted, state.proposed = state.proposed, []
        guesses = [(Drafts(state.drafted, self.drafter), "")] if state.drafted else []
        for source in self.sources:
            shadow = state.shadows[source.name]
            if not shadow.looks():
                continue
            num_looked += 1
            guess = source.guess(sequence, most)
            shadow.settle(tokens, self.acceptance, state.own)
            if guess.token_ids:
                beside = said_beside(guess.token_ids, state.drafted)
                if not isinstance(guess.match, tuple) and guess.match > sequence.num_generated:
                    beside = BEGINS + beside
                shadow.remember(tokens, guess, beside)
                guesses.append((Drafts(guess.token_ids, source.name, guess.match), beside))
        return guesses, num_looked == len(self.sources)

    def _best(self, sequence: Sequence, state: Guessing, price: float) -> Candidate:
        """The candidate that promises most tokens beyond the `price` of its rows; all are compared
        with what comes."""
        guesses, all_looked = self._guesses(sequence, state)
        refills = self.lookahead.worth if self.lookahead is not None else 0.0
        best, worth, others = NO_CANDIDATE, 0.0, []
        found, found_worth = NO_CANDIDATE, 0.0
        for drafts, beside in guesses:
            token_ids = fitting(sequence, drafts.token_ids, self.config.max_drafts)
            if token_ids:
                drafts = drafts._replace(token_ids=token_ids)
                chances = self.acceptance.chances(
                    drafts.source, drafts.match, len(token_ids), state.own, beside
                )
                others.append(drafts)
                promised = sum([chance - price for chance in chances if chance > price])
                if promised > worth or not best.chances:
                    values = [chance + (1 - chance) * refills for chance in chances]
                    best, worth = Candidate(drafts, chances, values), promised
                if drafts.source != self.drafter and (promised > found_worth or not found.chances):
                    found, found_worth = Candidate(drafts, chances, chances), promised
        state.found, state.num_paying = found, -1
        if all_looked:
            state.num_paying = sum([chance > price for chance in found.chances])
        if len(others) > 1 and self.config.max_paths > 1:
            rival = find_rival(best.drafts, best.chances, others, self.acceptance, state.own)
            best = best._replace(rival=rival)
        for ahead in (best.drafts, best.rival.drafts) if best.rival else (best.drafts,):
            if ahead.source in state.shadows:
                state.shadows[ahead.source].num_behind = 0
        return best

    def _num_verified(self, best: list[Candidate], plain: PlainStep) -> tuple[list[int], list[int]]:
        """How many guesses of each candidate are verified, and of its rival."""
        values = [candidate.values for candidate in best]
        if not any(values):
            self.trials.plain(plain)
            return [0] * len(values), [0] * len(values)
        counts = choose(values, plain, self.cost)
        if self.trials.vary(values, counts, plain):
            return counts, [0] * len(counts)
        rivals = [candidate.rival for candidate in best]
        return counts, choose_rivals(rivals, values, counts, plain, self.cost)

    def _num_asked(
        self,
        asking: Asking,
        decodes: TypingSequence[Sequence],
        states: list[Guessing],
        counts: list[int],
        plain: PlainStep,
    ) -> list[int]:
        """Of each decode how many tokens behind this step the drafter is asked for: it is worth
        what it brings beyond what will be found anyway."""
        values, shares, tokens, rows = [], list[float](), 0.0, 0.0
        for sequence, state, num_riding in zip(decodes, states, counts, strict=True):
            room = sequence.max_len - len(sequence.tokens) - num_riding - 2
            most = max(min(self.config.max_proposed, room), 0)
            values.append(self.acceptance.chances(self.drafter, 0, most, state.own))
            left, expected = self.found.beside(state.found.chances, num_riding)
            shares.append(left * (1 - state.best.chance_of_end(num_riding, sequence.stop_ids)))
            tokens, rows = tokens + expected.tokens, rows + expected.rows
        return asking.counts(values, plain._replace(found=Expected(tokens, rows)), shares)

    def first(self, sequence: Sequence) -> int:
        """How many guesses heads make behind the last token of a prompt.

        A model makes none: it would compute the prompt first, and the first token would wait.
        """
        if self.config.medusa is None or self.asking is None or self.asking.failure:
            return 0
        if sequence.sequence_id in self._by_id:  # it decodes
            return 0
        state, begin = self._state(sequence), len(sequence.tokens)
        count = min(self.config.max_proposed, sequence.max_len - begin - 2)
        chances = self.acceptance.chances(self.drafter, 0, max(count, 0), state.own)
        num_decodes = len(self._by_id)
        decodes = work_of([begin] * num_decodes, self.cost.windows)
        room = len(chances) * num_decodes
        plain = PlainStep([begin + 1] * num_decodes, decodes, decodes, room)
        return choose([chances] * num_decodes, plain, self.cost, self.asking.price.drafting)[0]

    # ── learn ───────────────────────────────────────────────────────────────────────────────

    def came(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        """Compare every candidate with the tokens that came, verified or not."""
        state = self._by_id.get(sequence.sequence_id)
        if state is None:
            return
        came, num_forced = sample.token_ids, sequence.num_forced
        forced = sequence.tokens[-num_forced:] if num_forced else []
        drafted = num_alike(state.drafted, came) if state.drafted else None
        if drafts.token_ids or state.drafted or state.best.rival is not None:
            all_came = came + forced  # behind a token that ends it as well
            self._count(drafts, came[:-1])
            if state.best.rival is not None:
                observe(state.best.rival, state.best.drafts, all_came, self.acceptance, state.own)
            if state.drafted:
                self._score_drafted(state, all_came)
        self._score_found(state, came, drafted)
        state.best = NO_CANDIDATE
        follows = sample.drafts[:num_forced] == forced  # the drafter did not know them
        state.proposed = sample.drafts[num_forced:] if follows else []
        for each in self.sources:
            each.came(sequence, drafts.others[sample.path - 1] if sample.path else drafts, sample)

    def _count(self, drafts: Drafts, kept_ids: list[int]) -> None:
        """Of the guesses of each source, how many were verified and how many kept."""
        for source, count, kept in outcomes(drafts, kept_ids) if drafts.token_ids else ():
            self.counts[source][0] += count
            self.counts[source][1] += kept

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

    def ended(self, result: StepResult) -> None:
        """What the drafter took in this step."""
        if self.asking is not None:
            self.asking.ended(result)

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
