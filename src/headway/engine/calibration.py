"""Calibration: steps before the first request, which teach the cost model this machine.

The engine is warm and idle. It computes prompts of 1, 2, 4, … tokens and as many concurrent
decodes, as long as the next one is predicted to fit into the time budget. With speculation the time
of every number of rows matters, and the time of the drafter. The first step of a number of rows
takes up to twice as long, because buffers grow; so the widest step comes first, and is not learned:

    rows       256, then 16 8 4 12 2 6 10 14 1 3 5 7 … 15 32 24 20 28 64 128 256, twice
    drafting   1 and 8 draft tokens of one sequence, 1 and 4 of eight

It takes about the time budget and leaves no sequences or cached blocks behind.
"""

from collections.abc import Sequence as TypingSequence
from copy import deepcopy
from itertools import count

from headway.core.plan import Sample, StepResult
from headway.core.records import StepRecord
from headway.core.request import Request, SamplingParams
from headway.core.service import UnloadedTimes
from headway.engine.bisect_step import OWN_REQUEST_ID
from headway.engine.engine import Engine
from headway.engine.sequence import Sequence
from headway.engine.speculation import AdaptiveSpeculator, Drafts
from headway.perf.model import NOTHING, Work

WARM_UP_TOKENS = 32
TYPICAL_PROMPT_TOKENS, MIN_OBSERVED_STEPS = 500, 5
"""Tokens of a typical prompt, and steps after which the cost model is used."""
MAX_DECODE_ROWS = 16
"""Maximum concurrent decodes; more of them cost as much as a chunk of as many tokens."""
ROWS = (16, 8, 4, 12, 2, 6, 10, 14, *range(1, 16, 2), 32, 24, 20, 28, 64, 128, 256)
ROUNDS = 2
"""Repetitions of each number of rows with speculation. All rows belong to one sequence, because a
new sequence has additional work, which would look like the cost of a sampled row."""
WIDEST_STEP_SHARE = 0.2
"""Maximum share of the time budget for the widest step, by the prior prediction."""
DRAFTER_SHAPES = ((1, 1), (1, 8), (8, 1), (8, 4))
"""(sequences, draft tokens of each) that the drafter is asked for."""
DRAFTER_TOKENS = 4
"""Tokens per sequence for which the drafter is asked; the first also computes the prompt."""


def warm_up(engine: Engine) -> None:
    """Run one short request, so that the first user does not wait for first allocations."""
    length = min(WARM_UP_TOKENS, engine.settings.max_model_len - 1)
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add(Request(OWN_REQUEST_ID, [0] * max(length - 1, 1), sampling))
    engine.flush()
    while engine.has_work:
        engine.step()
    engine.kv.forget_free()


def calibrate(engine: Engine, budget_s: float) -> None:
    """Teach `engine.cost` for at most `budget_s`, plus one step on an uneven machine."""
    engine.cost.reset()
    clock, settings = engine.clock, engine.settings
    ends_s = clock.now_s() + budget_s
    names = count(OWN_REQUEST_ID, -1)
    most = min(settings.max_num_batched_tokens, settings.max_model_len - 1)
    rows = min(MAX_DECODE_ROWS, settings.max_num_seqs)
    with engine.kv.unlisted():
        for size in (1 << power for power in range(most.bit_length())):
            shapes = [(1, size)] if size == 1 or size > rows else [(1, size), (size, 1)]
            for num_prompts, length in shapes:
                need_s = engine.cost.seconds(engine.cost.add_chunk(NOTHING, 0, size))
                if clock.now_s() + need_s > ends_s:
                    return
                run_prompts(engine, names, num_prompts, length)


def calibrate_drafts(engine: Engine, budget_s: float) -> None:
    """Teach the cost of each number of rows, for two thirds of `budget_s`, then of the drafter.

    Without speculation it does nothing.
    """
    drafts = engine.scheduler.drafts
    speculator = drafts.speculator
    if not isinstance(speculator, AdaptiveSpeculator):
        return
    names = count(OWN_REQUEST_ID, -1)  # what is computed here belongs to no request
    with engine.kv.unlisted():
        verify_drafts(engine, names, budget_s * 2 / 3)
        drafter, cost, clock = speculator.drafter, engine.cost, engine.clock
        ends_s = clock.now_s() + budget_s / 3
        for num_sequences, depth in DRAFTER_SHAPES:
            num_rows = min(num_sequences, engine.settings.max_num_seqs)
            need_s = (DRAFTER_TOKENS + 1) * cost.seconds(
                Work(num_rows, num_rows, num_rows, num_rows)
            )
            if drafter is not None and clock.now_s() + need_s < ends_s:
                drafts.speculator = FixedDrafts(speculator, depth)
                run_prompts(engine, names, num_rows, 2, DRAFTER_TOKENS)
    drafts.speculator = speculator


def verify_drafts(engine: Engine, names: "count[int]", budget_s: float) -> None:
    """Verify draft tokens of one sequence, with each number of rows, as long as time remains."""
    settings, clock, cost = engine.settings, engine.clock, engine.cost
    ends_s = clock.now_s() + budget_s
    rows = [num_rows for num_rows in ROWS if num_rows <= settings.max_num_batched_tokens]
    name, most_tokens = next(names), settings.max_model_len - 1
    sampling = SamplingParams(temperature=0, max_tokens=most_tokens, ignore_eos=True)
    engine.scheduler.drafts.speculator = fixed = FixedDrafts()
    engine.add(Request(name, [-name % engine.vocab_size], sampling))
    engine.flush()
    engine.step()
    widest = [r for r in rows if cost.seconds(Work(r, r, r, r)) < WIDEST_STEP_SHARE * budget_s]
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


def unloaded_times(engine: Engine) -> UnloadedTimes:
    """Return the times of a request on an idle engine; zeros before the model was observed."""
    cost, settings = engine.cost, engine.settings
    if cost.num_observed < MIN_OBSERVED_STEPS:
        return UnloadedTimes()
    chunk = settings.max_num_batched_tokens
    length = max(min(TYPICAL_PROMPT_TOKENS, settings.max_model_len // 2), 1)
    prompt_s = cost.predict_prefill_s(length, 0, chunk)
    return UnloadedTimes(
        num_tokens=length,
        prompt_s=prompt_s,
        token_s=(cost.predict_prefill_s(2 * length, 0, chunk) - prompt_s) / length,
        tpot_s=cost.seconds(cost.add_chunk(NOTHING, length, 1)),
    )


def run_prompts(
    engine: Engine, names: "count[int]", num_prompts: int, length: int, num_sampled: int = 1
) -> None:
    """Run a step of `num_prompts` distinct prompts, and one step for each further token."""
    sampling = SamplingParams(temperature=0, max_tokens=num_sampled, ignore_eos=True)
    for _ in range(num_prompts):
        name = next(names)
        prompt = [(at - name) % engine.vocab_size for at in range(length)]
        engine.add(Request(name, prompt, sampling))
    engine.flush()
    while engine.has_work:
        engine.step()


class FixedDrafts:
    """Speculator for calibration.

    It verifies `num_drafts` arbitrary draft tokens of each decode in each step, and asks the
    drafter of `speculation` for `depth` tokens of each.
    """

    jumps, failure, drafting_s = False, "", 0.0

    def __init__(self, speculation: AdaptiveSpeculator | None = None, depth: int = 0) -> None:
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
