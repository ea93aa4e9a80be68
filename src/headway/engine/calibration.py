"""A few steps before the first user comes, so that the cost model knows this machine by then.

Given an engine that is warm and idle, it computes prompts of 1, 2, 4, … tokens, and as many decodes
beside each other, as long as the model's own prediction says that the next fits into the budget.
Where tokens are guessed, the price of every number of rows matters, and what the drafter takes.
The first step of so many rows takes up to twice as long, for buffers grow; so the widest comes
first, and nothing is learned from it:

    rows       256, then 16 8 4 12 2 6 10 14 1 3 5 7 … 15 32 24 20 28 64 128 256, twice
    drafting   1 and 8 guesses of one sequence, 1 and 4 of eight

It promises to take about the budget and to leave the engine as it found it.
"""

from collections.abc import Sequence as TypingSequence
from copy import deepcopy
from itertools import count

from headway.core.plan import Sample, StepResult
from headway.core.records import StepRecord
from headway.core.request import Request, SamplingParams
from headway.core.service import Alone
from headway.engine.bisect_step import OWN_REQUEST_ID
from headway.engine.engine import Engine
from headway.engine.sequence import Sequence
from headway.engine.speculation import Drafts, Speculation
from headway.perf.model import NOTHING, Work

PROMPT, LEAST_OBSERVED = 500, 5
"""Tokens of a usual prompt, and steps after which the cost model is believed."""
MOST_ROWS = 16
"""Decodes beside each other; more of them cost what a chunk of as many tokens costs."""
ROWS = (16, 8, 4, 12, 2, 6, 10, 14, *range(1, 16, 2), 32, 24, 20, 28, 64, 128, 256)
ROUNDS = 2
"""Where tokens are guessed, each number of few rows is seen so often, and some of many. One
sequence has them: newcomers have work of their own, which looked like what a sampled row takes."""
WIDEST_SHARE = 0.2
"""Of the time, what the widest step may take by what is known before."""
DRAFTER_SHAPES = ((1, 1), (1, 8), (8, 1), (8, 4))
"""Sequences and guesses of each that the drafter is asked for."""
REHEARSED = 4
"""Tokens of a sequence for which it is asked; its first also computes the prompt."""


def calibrate(engine: Engine, budget_s: float) -> None:
    """Teach `engine.cost` for at most `budget_s`, and one step more if the machine is uneven."""
    engine.cost.reset()
    clock, settings = engine.clock, engine.settings
    ends_s = clock.now_s() + budget_s
    names = count(OWN_REQUEST_ID, -1)
    most = min(settings.max_num_batched_tokens, settings.max_model_len - 1)
    rows = min(MOST_ROWS, settings.max_num_seqs)
    with engine.kv.unlisted():
        for size in (1 << power for power in range(most.bit_length())):
            shapes = [(1, size)] if size == 1 or size > rows else [(1, size), (size, 1)]
            for num_prompts, length in shapes:
                need_s = engine.cost.seconds(engine.cost.beside(NOTHING, 0, size))
                if clock.now_s() + need_s > ends_s:
                    return
                run_prompts(engine, names, num_prompts, length)


def calibrate_guesses(engine: Engine, budget_s: float) -> None:
    """Teach what each number of rows takes, for about two thirds of `budget_s`, and the drafter;
    nothing without speculation."""
    drafts = engine.scheduler.drafts
    speculator = drafts.speculator
    if not isinstance(speculator, Speculation):
        return
    names = count(OWN_REQUEST_ID, -1)  # what is computed here belongs to no request
    with engine.kv.unlisted():
        verify_guesses(engine, names, budget_s * 2 / 3)
        drafter, cost, clock = speculator.drafter, engine.cost, engine.clock
        ends_s = clock.now_s() + budget_s / 3
        for num_sequences, depth in DRAFTER_SHAPES:
            num_rows = min(num_sequences, engine.settings.max_num_seqs)
            need_s = (REHEARSED + 1) * cost.seconds(Work(num_rows, num_rows, num_rows, num_rows))
            if drafter is not None and clock.now_s() + need_s < ends_s:
                drafts.speculator = FixedDrafts(speculator, depth)
                run_prompts(engine, names, num_rows, 2, REHEARSED)
    drafts.speculator = speculator


def verify_guesses(engine: Engine, names: "count[int]", budget_s: float) -> None:
    """Steps of one sequence that verify guesses, each number of rows so often as there is time."""
    settings, clock, cost = engine.settings, engine.clock, engine.cost
    ends_s = clock.now_s() + budget_s
    rows = [num_rows for num_rows in ROWS if num_rows <= settings.max_num_batched_tokens]
    name, most_tokens = next(names), settings.max_model_len - 1
    sampling = SamplingParams(temperature=0, max_tokens=most_tokens, ignore_eos=True)
    engine.scheduler.drafts.speculator = fixed = FixedDrafts()
    engine.add(Request(name, [-name % engine.vocab_size], sampling))
    engine.flush()
    engine.step()
    widest = [r for r in rows if cost.seconds(Work(r, r, r, r)) < WIDEST_SHARE * budget_s]
    learning, engine.recorder.cost = engine.recorder.cost, deepcopy(engine.recorder.cost)
    for number, num_rows in enumerate([max(widest, default=1), *rows * ROUNDS]):
        need_s = cost.seconds(Work(num_rows, num_rows, num_rows, num_rows))
        known = sum([sequence.num_known for sequence in engine.scheduler.running])
        if known + num_rows <= most_tokens and clock.now_s() + need_s < ends_s:
            fixed.num_drafts = num_rows - 1
            engine.step()
        if not number:
            engine.recorder.cost = learning
    engine.abort(name)
    while engine.has_work:
        engine.step()


def pace_alone(engine: Engine) -> Alone:
    """What one request takes here beside nothing; nothing is said before the model was measured."""
    cost, settings = engine.cost, engine.settings
    if cost.num_observed < LEAST_OBSERVED:
        return Alone()
    chunk = settings.max_num_batched_tokens
    length = max(min(PROMPT, settings.max_model_len // 2), 1)
    prompt_s = cost.prefill_s(length, 0, chunk)
    return Alone(
        num_tokens=length,
        prompt_s=prompt_s,
        token_s=(cost.prefill_s(2 * length, 0, chunk) - prompt_s) / length,
        tpot_s=cost.seconds(cost.beside(NOTHING, length, 1)),
    )


def run_prompts(
    engine: Engine, names: "count[int]", num_prompts: int, length: int, num_sampled: int = 1
) -> None:
    """A step of that many prompts, each with tokens of its own, and one for each more token."""
    sampling = SamplingParams(temperature=0, max_tokens=num_sampled, ignore_eos=True)
    for _ in range(num_prompts):
        name = next(names)
        prompt = [(at - name) % engine.vocab_size for at in range(length)]
        engine.add(Request(name, prompt, sampling))
    engine.flush()
    while engine.has_work:
        engine.step()


class FixedDrafts:
    """A speculator that verifies `num_drafts` made-up draft tokens of each decode in each step, and
    asks the drafter of `speculation` for `depth` of each."""

    jumps, failure, drafting_s = False, "", 0.0

    def __init__(self, speculation: Speculation | None = None, depth: int = 0) -> None:
        self._speculation, self._depth, self.num_drafts = speculation, depth, 0

    def is_due(self, num_decodes: int) -> bool:
        return True

    def plan(
        self,
        decodes: TypingSequence[Sequence],
        other_work: Work,
        budget: int,
        max_s: float,
        *,
        prompts_wait: bool = False,
    ) -> dict[int, Drafts]:
        drafts = Drafts([0] * self.num_drafts, "calibration", propose=self._depth)
        return {each.sequence_id: drafts for each in decodes}

    def num_after_prompt(self, sequence: Sequence, start: int) -> int:
        return 0

    def observe(self, sequence: Sequence, drafts: Drafts, sample: Sample) -> None:
        pass

    def end_step(self, result: StepResult) -> None:
        if self._speculation is not None:
            self._speculation.end_step(result)

    def learn(self, record: StepRecord) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def forget_owner(self, owner: bytes) -> None:
        pass
