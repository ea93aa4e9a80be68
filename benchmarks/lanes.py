"""Several ways to run the same requests, side by side in one engine, for `speculation_control`.

Each lane answers the same prompts, so many at once, with a speculator and a cost model of its own.
A step serves one lane: the one that has the fewest tokens so far. So all lanes are equally far at
any moment, each token was computed in the same seconds of the machine by all of them, and what the
machine does beside slows all alike. A lane's seconds are those of its own steps.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

from headway import LLM
from headway.core.records import StepRecord
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.engine.policy import Fcfs
from headway.engine.policy.policy import PrefillTurn, needs_prefill
from headway.engine.sequence import Sequence as Running
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.evals.skills.suite import LEVELS, SKILLS, TEST_SEED, examples
from headway.perf.model import StepModel

MAX_TOKENS = 120
PASSAGE = 600
"""Characters of a book before the model goes on."""
LANE = 1_000_000
"""Request ids of a lane begin at its number times this."""
FIRST, AHEAD = 999, 16
"""The number of the lane that computes prompts before the others ask them, so many at once."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked, and at which temperature it is answered."""

    kind: str
    token_ids: list[int]
    temperature: float


@dataclass(frozen=True, slots=True)
class Mark:
    """One step of a lane: its seconds, tokens, decoding sequences and guesses."""

    seconds: float
    tokens: int
    rows: int
    guessed: int
    kept: int
    draft_s: float


@dataclass(slots=True, eq=False)
class Lane:
    """One way to run the prompts, and what came of it."""

    name: str
    number: int
    cost: StepModel
    speculator: AdaptiveSpeculator | None = None
    marks: list[Mark] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    """Numbers of the prompts that it answers now."""
    tokens: int = 0
    asked: int = 0
    is_over: bool = False


class OneLane(Fcfs):
    """First come, first served, of the lane whose turn it is; the others stand still."""

    def __init__(self, windows: tuple[int, ...]) -> None:
        super().__init__(windows)
        self.number = 0

    def select_decodes(
        self, rows: list[Running], running: list[Running], waiting: Sequence[Running]
    ) -> list[Running]:
        """Those of the lane."""
        return self._own(rows)

    def prefill_turns(
        self,
        running: list[Running],
        waiting: Sequence[Running],
        decodes: list[Running],
        budget: int,
    ) -> Iterator[PrefillTurn]:
        """Those of the lane, in their order."""
        for sequence in [*filter(needs_prefill, self._own(running)), *self._own(waiting)]:
            yield PrefillTurn(sequence, budget, True)

    def _own(self, sequences: Sequence[Running]) -> list[Running]:
        return [s for s in sequences if s.request.request_id // LANE == self.number]


class Track:
    """The lanes of one engine."""

    def __init__(self, llm: LLM, coming: Iterator[Prompt]) -> None:
        self.engine: Engine = llm.engine
        self._coming = coming
        self.prompts: dict[int, Prompt] = {}
        """By number."""
        self.lanes: list[Lane] = []
        self.asking: AdaptiveSpeculator | None = None
        """Asks the drafting model while prompts are computed, so that it knows them as well."""
        self.known = deepcopy(llm.engine.cost)
        """What the engine knew of the machine when it was ready."""
        speculator = self.engine.scheduler.drafts.speculator
        drafter = speculator.drafter if isinstance(speculator, AdaptiveSpeculator) else None
        self.drafter_known = deepcopy(drafter.cost) if drafter else None
        """And of its drafter."""
        self.policy = OneLane(llm.engine.cost.windows)
        scheduler = self.engine.scheduler
        scheduler.policy = scheduler.drafts.policy = scheduler.reclaim.policy = self.policy

    def add(self, name: str, make: Callable[[StepModel], AdaptiveSpeculator] | None = None) -> Lane:
        """A lane that knows of the machine what the engine did at its start."""
        lane = Lane(name, len(self.lanes), deepcopy(self.known))
        lane.speculator = make(lane.cost) if make else None
        if lane.speculator and lane.speculator.drafter and self.drafter_known:
            lane.speculator.drafter.cost = deepcopy(self.drafter_known)
        self.lanes.append(lane)
        return lane

    def next_lane(self) -> Lane:
        """The one that is least far."""
        return min((x for x in self.lanes if not x.is_over), key=lambda lane: lane.tokens)

    def fill(self, lane: Lane, streams: int) -> None:
        """Ask the next prompts of `lane` until it answers so many at once."""
        while len(lane.begun) < streams:
            if lane.asked not in self.prompts:
                self.compute_more(lane.asked)
            prompt, number = self.prompts[lane.asked], lane.asked
            sampling = SamplingParams(
                temperature=prompt.temperature, seed=number, max_tokens=MAX_TOKENS
            )
            name = lane.number * LANE + number
            self.engine.add(Request(name, prompt.token_ids, sampling))
            lane.begun.add(number)
            lane.asked += 1

    def compute_more(self, begin: int) -> None:
        """Compute the prompts from this number on, that each lane finds them in the cache."""
        sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        self._serve(FIRST, self.known, self.asking)
        for number, prompt in enumerate(islice(self._coming, AHEAD), begin):
            self.prompts[number] = prompt
            self.engine.add(Request(FIRST * LANE + number, prompt.token_ids, sampling))
        while any(s.request.request_id // LANE == FIRST for s in self._all()):
            self.engine.step()

    def _all(self) -> list[Running]:
        scheduler = self.engine.scheduler
        return [*scheduler.running, *scheduler.waiting]

    def _serve(self, number: int, cost: StepModel, speculator: AdaptiveSpeculator | None) -> None:
        """The next steps are of the lane with this number, planned and learned by what it knows."""
        engine = self.engine
        self.policy.number = number
        engine.cost = engine.recorder.cost = cost
        engine.scheduler.drafts.speculator = speculator

    def step(self, lane: Lane) -> StepRecord:
        """One step of `lane`, counted."""
        self._serve(lane.number, lane.cost, lane.speculator)
        updates, record = self.engine.step()
        for update in updates:
            number = update.request_id % LANE
            lane.answers.setdefault(number, []).extend(update.token_ids)
            if update.finish_reason is not None:
                lane.begun.remove(number)
        tokens = sum(len(update.token_ids) for update in updates)
        rows = record.num_decode_tokens - record.num_drafts
        lane.tokens += tokens
        lane.marks.append(
            Mark(
                record.duration_s,
                tokens,
                rows,
                record.num_drafts,
                record.num_kept_drafts,
                record.draft_s,
            )
        )
        return record

    def drop(self, lane: Lane) -> None:
        """End what `lane` has begun."""
        for number in lane.begun:
            self.engine.abort(lane.number * LANE + number)
        lane.begun.clear()

    def end(self) -> None:
        """End what all lanes have begun."""
        for lane in self.lanes:
            self.drop(lane)

    def same(self) -> bool:
        """Whether all lanes gave each prompt the same tokens, as far as they are."""
        return all(
            ours[: len(theirs)] == theirs[: len(ours)]
            for number, ours in self.lanes[0].answers.items()
            for lane in self.lanes[1:]
            if (theirs := lane.answers.get(number)) is not None
        )


# ── prompts ─────────────────────────────────────────────────────────────────────────────────


def chats(llm: LLM, skills: Sequence[str], levels: Sequence[int] = LEVELS) -> Iterator[Prompt]:
    """Held-out questions of the skills in turn, to be answered greedily."""
    streams = [examples(skill, level, TEST_SEED) for level in levels for skill in skills]
    most = llm.settings.max_model_len - MAX_TOKENS
    for at in count():
        example = next(streams[at % len(streams)])
        token_ids = llm.needs_tokenizer().chat_ids(example.messages)
        if len(token_ids) < most:
            yield Prompt("copies" if skills == ("copy",) else "chats", token_ids, 0.0)


def books(llm: LLM, text: Path) -> Iterator[Prompt]:
    """Passages of a book, from which the model goes on at temperature 1."""
    whole = text.read_text(encoding="utf-8")
    for at in range(PASSAGE, len(whole) - PASSAGE, PASSAGE):
        token_ids = llm.needs_tokenizer().encode(whole[at : at + PASSAGE])
        yield Prompt("books", token_ids, 1.0)


def prompts_of(llm: LLM, kind: str, text: Path) -> Iterator[Prompt]:
    """Endless prompts of a kind."""
    if kind == "books":
        return books(llm, text)
    return chats(llm, ("copy",), (2, 3)) if kind == "copies" else chats(llm, tuple(SKILLS))
