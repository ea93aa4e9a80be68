"""What it takes to choose guesses: `python benchmarks/choosing.py [FOLDER]`.

A speculator as `--speculate auto` with a drafting model makes it, over a cost model as the engine
has it, answers recorded requests at `--streams` of them at once. No model runs beside: what comes
is what was recorded (chats and copies greedily, books at temperature 1), and the drafter is right
nine times in ten. So the process's CPU time in the speculator is all there is, and the same steps
are run each time. Told in µs a sequence: of the steps in which somebody is asked for guesses, and
of all steps; both with what is learned of the tokens that came. And the share of the steps' time.

    dear   from 16 rows on a row takes nearly what a token of a sequence takes: products bind
    cheap  a row takes half of that: weights are read meanwhile

Medians of `--repeats`, all cells in turns. `--calls` counts calls of functions in place of time,
which other work of the machine does not change.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common import markdown
from headway import LLM
from headway.core.embedded import model_folder
from headway.core.plan import Sample, StepResult, StepTimings
from headway.core.principal import Principal
from headway.core.request import Request, SamplingParams
from headway.core.speculation_config import SpeculationConfig
from headway.engine.cost import StepCost, work_of
from headway.engine.knots import KNOTS
from headway.engine.sequence import FINISHED, Sequence
from headway.engine.speculation.drafts import NO_DRAFTS, Drafts, num_alike
from headway.engine.speculation.rests import Look
from headway.engine.speculation.speculation import Speculation
from lanes import MAX_TOKENS, prompts_of

KINDS = ("chats", "copies", "books")
MACHINES = {
    "dear": {1: 10.5, 4: 11.3, 8: 13, 16: 22, 32: 42, 64: 84, 128: 158, 16384: 28000},
    "cheap": {1: 11.7, 5: 13, 9: 14.4, 16: 19, 32: 28, 64: 43, 128: 72, 16384: 9100},
}
"""By number of rows the milliseconds of a step, but for what sampling takes: of headway-tiny in the
0.5B shape in int4 on two cores of an AMD Zen 4, and of a Xeon with AMX tiles."""
ANY_SAMPLED_S, SAMPLED_S, CONTEXT_S = 1.4e-3, {"dear": 5.5e-4, "cheap": 2e-5}, 1e-9
CONFIG = SpeculationConfig(sources=("lookup", "suffixes", "forced", "draft"), draft_share=0.03)
RIGHT = 0.9
"""Of the drafter's guesses, those that are."""
NOISE = 0.03
"""Relative spread of the steps that the cost model learns from."""
BUDGET = 2048
CALL_S = 1e-7
"""What a call takes where these are counted."""


def cost_of(machine: str) -> StepCost:
    """A cost model that knows one of `MACHINES`."""
    cost, curve = StepCost(), MACHINES[machine]
    of_tokens = 1e-3 * np.interp(KNOTS, [*curve], [*curve.values()])
    units = [ANY_SAMPLED_S, SAMPLED_S[machine], CONTEXT_S, CONTEXT_S]
    cost.take_parts(np.concatenate([of_tokens, units]))
    return cost


class Answer(NamedTuple):
    """Token ids of one request."""

    prompt: list[int]
    answer: list[int]


@dataclass(slots=True)
class Spent:
    """What the steps of a replay took, by whether anybody was asked: sequences, and the price."""

    rows: list[int] = field(default_factory=lambda: [0, 0])
    price: list[float] = field(default_factory=lambda: [0.0, 0.0])
    steps: list[int] = field(default_factory=lambda: [0, 0])
    step_s: float = 0.0
    tokens: int = 0

    @property
    def a_look(self) -> float:
        """Of a sequence in a step in which somebody was asked."""
        return self.price[1] / max(self.rows[1], 1)

    @property
    def a_step(self) -> float:
        """Of a sequence in any step."""
        return sum(self.price) / max(sum(self.rows), 1)


class Meter:
    """Adds up what is done within it: process CPU seconds, or calls of functions."""

    def __init__(self, *, counts_calls: bool) -> None:
        self.counts_calls = counts_calls
        self.total = self._begun = 0.0

    def __enter__(self) -> None:
        if self.counts_calls:
            sys.setprofile(self._count)
        else:
            self._begun = time.process_time()

    def __exit__(self, *exception: object) -> None:
        if self.counts_calls:
            sys.setprofile(None)
        else:
            self.total += time.process_time() - self._begun

    def _count(self, frame: object, event: str, arg: object) -> None:
        self.total += event in ("call", "c_call")


class Replay:
    """So many streams of recorded answers, one behind the other, through a speculator.

    Where all were asked they are asked again, by another user: nobody remembers them.
    """

    def __init__(self, answers: list[Answer], streams: int, machine: str, meter: Meter) -> None:
        self.cost, self.machine, self.meter = cost_of(machine), cost_of(machine), meter
        self.speculation = Speculation(CONFIG, self.cost)
        self.streams, self._coming = streams, enumerate(cycle(answers))
        self.num_answers = len(answers)
        self.running: list[tuple[Sequence, list[int]]] = []
        self.rng = random.Random(0)
        self.spent = Spent()

    def run(self, steps: int, skipped: int) -> Spent:
        """Of so many steps behind the first ones."""
        for at in range(skipped + steps):
            if at == skipped:
                self.spent = Spent()
            self.step()
        return self.spent

    def step(self) -> None:
        """Plan, verify and learn, as the scheduler and the engine do."""
        while len(self.running) < self.streams:
            self.begin()
        meter, speculation, cost = self.meter, self.speculation, self.cost
        before = meter.total
        decodes = [sequence for sequence, _ in self.running]
        for sequence in decodes:
            sequence.computed = len(sequence.tokens) - 1
        plain = work = work_of([sequence.computed for sequence in decodes], cost.windows)
        with meter:
            found = dict[int, Drafts]()
            if speculation.looks(len(decodes)):
                found = speculation.plan(decodes, plain, BUDGET - len(decodes), inf)
        looked = speculation.rests.look is not Look.RESTS
        choose_s = (meter.total - before) * (CALL_S if meter.counts_calls else 1)
        with meter:
            speculation.planned(0, choose_s)
        samples, kept = [], []
        for sequence, following in self.running:
            drafts = found.get(sequence.sequence_id, NO_DRAFTS)
            if drafts.token_ids:
                work = cost.with_drafts(work, len(sequence.tokens), len(drafts.token_ids))
            samples.append(self.sampled(sequence, following[sequence.num_generated :], drafts))
            kept.append(drafts)
        step_s = self.machine.seconds(work)
        for sequence, sample in zip(decodes, samples):
            sequence.take(sample, 0.0)
        with meter:
            heard = [each for each in zip(decodes, kept, samples) if speculation.hears(each[0])]
            for sequence, drafts, sample in heard:
                speculation.came(sequence, drafts, sample)
        over = [s for s, following in self.running if s.num_generated >= len(following)]
        for sequence in over:
            sequence.state = FINISHED
        with meter:
            for sequence in over:
                speculation.left(sequence)
        self.running = [pair for pair in self.running if pair[0].state != FINISHED]
        asked = [drafts.propose for drafts in found.values() if drafts.propose]
        draft_s = 4e-4 + 1e-4 * max(asked) + 1e-5 * sum(asked) if asked else 0.0
        timings = StepTimings(draft_s=draft_s)
        with meter:
            speculation.ended(StepResult(0, samples, timings=timings), len(decodes) - len(heard))
        cost.learn(work, step_s * self.rng.gauss(1, NOISE))
        spent = self.spent
        spent.rows[looked] += len(decodes)
        spent.steps[looked] += 1
        spent.price[looked] += meter.total - before
        spent.step_s += step_s + draft_s
        spent.tokens += sum(len(sample.token_ids) for sample in samples)

    def begin(self) -> None:
        """The next answer, its first token."""
        number, answer = next(self._coming)
        again = Principal(cache_salt=str(number // self.num_answers))
        request = Request(number, answer.prompt, SamplingParams(temperature=0), principal=again)
        ends = frozenset[int]()
        most = len(answer.prompt) + len(answer.answer)
        sequence = Sequence(number, request, 0, num_groups=1, stop_ids=ends, max_len=most, seed=0)
        sequence.take(Sample(number, answer.answer[:1]), 0.0)
        self.running.append((sequence, answer.answer))

    def sampled(self, sequence: Sequence, following: list[int], drafts: Drafts) -> Sample:
        """What verification of `drafts` says, and what the drafter guesses behind that."""
        most = num_alike(drafts.token_ids, following[:-1])
        behind = following[most + 1 : most + 1 + drafts.propose]
        guessed = [each if self.rng.random() < RIGHT else each + 1 for each in behind]
        return Sample(sequence.sequence_id, following[: most + 1], drafts=guessed)


def record(folder: str | None, text: Path, count: int) -> dict[str, list[Answer]]:
    """By kind so many answers of the model."""
    llm = LLM(model_folder(folder), max_model_len=512, max_num_seqs=32)
    recorded = {}
    for kind in KINDS:
        prompts = [*islice(prompts_of(llm, kind, text), count)]
        sampling = [
            SamplingParams(temperature=prompt.temperature, seed=at, max_tokens=MAX_TOKENS)
            for at, prompt in enumerate(prompts)
        ]
        asked = [{"prompt_token_ids": prompt.token_ids} for prompt in prompts]
        outputs = llm.generate(asked, sampling, use_tqdm=False)
        recorded[kind] = [
            Answer(prompt.token_ids, list(output.outputs[0].token_ids))
            for prompt, output in zip(prompts, outputs, strict=True)
            if len(output.outputs[0].token_ids) > 1
        ]
    return recorded


def measure(given: argparse.Namespace, recorded: dict[str, list[Answer]]) -> Iterator[list[object]]:
    """The rows of the table."""
    cells = [(m, kind, n) for m in given.machines for kind in given.kinds for n in given.streams]
    runs: dict[tuple[str, str, int], list[Spent]] = {cell: [] for cell in cells}
    for _ in range(1 if given.calls else given.repeats):
        for machine, kind, streams in cells:
            meter = Meter(counts_calls=given.calls)
            replay = Replay(recorded[kind], streams, machine, meter)
            runs[machine, kind, streams].append(replay.run(given.steps, given.skipped))
    unit = 1 if given.calls else 1e6
    for (machine, kind, streams), spent in runs.items():
        looks, steps = (
            statistics.median(getattr(each, name) for each in spent) * unit
            for name in ("a_look", "a_step")
        )
        one = spent[0]
        share = statistics.median(sum(each.price) / each.step_s for each in spent)
        yield [
            *(machine, kind, streams, f"{one.steps[1] / sum(one.steps):.0%}"),
            *(f"{looks:.1f}", f"{steps:.2f}", "" if given.calls else f"{share:.2%}"),
            *(f"{one.tokens / sum(one.rows):.2f}", f"{one.tokens / one.step_s:.0f}"),
        ]


def main() -> None:
    """Record, replay and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = Path(__file__).resolve().parents[2] / "shared"
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--text", type=Path, default=shared / "data" / "text" / "val.txt")
    parser.add_argument("--answers", type=Path, help="recorded ones; written where it is not there")
    parser.add_argument("--requests", type=int, default=96, help="of each kind")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--machines", nargs="+", default=[*MACHINES], choices=MACHINES)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--skipped", type=int, default=64, help="steps before these")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--calls", action="store_true")
    given = parser.parse_args()
    if given.answers and given.answers.exists():
        kept = json.loads(given.answers.read_text())
        recorded = {kind: [Answer(*each) for each in answers] for kind, answers in kept.items()}
    else:
        recorded = record(given.folder, given.text, given.requests)
        if given.answers:
            given.answers.write_text(json.dumps(recorded))
    what = "calls" if given.calls else "µs"
    columns = ["rows are", "traffic", "streams", "steps that look", f"{what} a sequence then"]
    columns += [f"{what} of any step", "share of the step", "tokens a step", "tokens/s"]
    print(markdown(columns, [*measure(given, recorded)]))


if __name__ == "__main__":
    main()
