"""A few steps before the first user comes, so that the cost model knows this machine by then.

Given an engine that is warm and idle, it computes prompts of 1, 2, 4, … tokens, and as many decodes
beside each other, as long as the model's own prediction says that the next fits into the budget.
It promises to take about the budget and to leave the engine as it found it.
"""

from itertools import count

from headway.core.request import Request, SamplingParams
from headway.core.service import Alone
from headway.engine.bisect_step import NOBODY
from headway.engine.cost import NOTHING
from headway.engine.engine import Engine

PROMPT, LEAST_OBSERVED = 500, 5
"""Tokens of a usual prompt, and steps after which the cost model is believed."""
MOST_ROWS = 16
"""Decodes beside each other; more of them cost what a chunk of as many tokens costs."""


def calibrate(engine: Engine, budget_s: float) -> None:
    """Teach `engine.cost` for at most `budget_s`, and one step more if the machine is uneven."""
    engine.cost.forget()
    clock, settings = engine.clock, engine.settings
    ends_s = clock.now_s() + budget_s
    names = count(NOBODY, -1)
    most = min(settings.max_num_batched_tokens, settings.max_model_len - 1)
    rows = min(MOST_ROWS, settings.max_num_seqs)
    for size in (1 << power for power in range(most.bit_length())):
        shapes = [(1, size)] if size == 1 or size > rows else [(1, size), (size, 1)]
        for num_prompts, length in shapes:
            need_s = engine.cost.seconds(engine.cost.beside(NOTHING, 0, size))
            if clock.now_s() + need_s > ends_s:
                return
            run_prompts(engine, names, num_prompts, length)


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


def run_prompts(engine: Engine, names: "count[int]", num_prompts: int, length: int) -> None:
    """One step of that many prompts, each with tokens of its own, one token sampled for each."""
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    for _ in range(num_prompts):
        name = next(names)
        prompt = [(at - name) % engine.vocab_size for at in range(length)]
        engine.add(Request(name, prompt, sampling))
    engine.flush()
    while engine.has_work:
        engine.step()
