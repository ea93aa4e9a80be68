"""An engine over the fake runtime, random requests and operations, and what holds after each."""

import os
import random
from dataclasses import dataclass, field

from hypothesis import strategies as st

from fakes import FakeExecutor, answer, make_settings
from guessing import Guesser
from headway.config.resolve import Settings
from headway.core.clock import VirtualClock
from headway.core.plan import Executor, StepPlan
from headway.core.principal import Principal
from headway.core.records import StepRecord
from headway.core.request import Request, SamplingParams, SequenceUpdate, TokenLogprobs
from headway.core.terms import Terms
from headway.engine.build import build_engine
from headway.engine.engine import GOLDEN_RATIO_64
from headway.engine.sequence import Sequence

EXAMPLES = int(os.environ.get("HEADWAY_EXAMPLES", "300"))
VOCAB = 40
EOS = 7
CHEAP, DEAR = 1, 10**12
"""Bytes of a block: copied in no time, or in minutes."""


def swap_settings(*, host=(64,), block_bytes=CHEAP, **how):
    """Settings with so many host blocks by group."""
    return make_settings(**how, host_blocks=host, block_bytes=(block_bytes,) * len(host))


@dataclass
class Gained:
    """What one sequence has received so far."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    dropped: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None


class World:
    """An engine over the fake, every update it ever gave, and the checks after each operation."""

    def __init__(
        self,
        engine_settings: Settings,
        guesses: random.Random | None = None,
        kind: type[FakeExecutor] = FakeExecutor,
    ) -> None:
        self.settings = engine_settings
        self.executor = kind(
            block_size=engine_settings.cache.block_size,
            num_blocks=engine_settings.cache.num_blocks,
            windows=engine_settings.cache.windows,
            sinks=engine_settings.cache.sinks,
            vocab_size=VOCAB,
            max_num_seqs=engine_settings.max_num_seqs,
            host_blocks=engine_settings.cache.host_blocks,
        )
        self.clock = VirtualClock()
        self.engine = build_engine(
            self.over(self.executor),
            engine_settings,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            clock=self.clock,
        )
        self.guesser: Guesser | None = None
        if guesses is not None:
            self.guesser = Guesser(guesses, VOCAB, self._truth)
            self.engine.scheduler.drafts.speculator = self.guesser
        self.requests: dict[int, Request] = {}
        self.gained: dict[tuple[int, int], Gained] = {}
        self.finished_at: dict[int, int] = {}
        self.num_steps = 0
        self.plan: StepPlan | None = None
        schedule = self.engine.scheduler.schedule

        def keep() -> StepPlan:
            self.plan = schedule()
            if (
                engine_settings.scheduler.policy != "fcfs"
            ):  # deadlines mean nothing where time stands
                self.clock.advance(1e-3 + 1e-4 * self.plan.num_tokens)
            return self.plan

        self.engine.scheduler.schedule = keep

    def expect_nothing(self) -> "World":
        """Let no answer be expected to grow: who fits now starts, and may be preempted."""
        self.engine.scheduler.room.predicts_growth = False
        return self

    def over(self, executor: FakeExecutor) -> Executor:
        """What the engine runs, over the executor that checks."""
        return executor

    def add(self, prompt: list[int], user="", terms=None, **sampling) -> int:
        request = Request(
            len(self.requests),
            prompt,
            SamplingParams(**sampling),
            Principal(user),
            arrived_s=self.clock.now_s(),
            terms=terms or Terms(),
        )
        self.engine.add(request)
        self.requests[request.request_id] = request
        for index in range(request.sampling.n):
            self.gained[request.request_id, index] = Gained()
        self.engine.check_integrity()
        return request.request_id

    def abort(self, request_id: int, index: int | None = None) -> None:
        before = self.engine.kv.num_used
        self.engine.abort(request_id, index)
        for (owner, number), gained in self.gained.items():
            if owner == request_id and index in (None, number) and gained.reason is None:
                gained.dropped = True
        assert self.engine.kv.num_used <= before
        self.engine.check_integrity()

    def step(self) -> tuple[list[SequenceUpdate], StepRecord]:
        oldest = self.engine.scheduler.running[0] if self.engine.scheduler.running else None
        known = len(oldest.tokens) if oldest else 0
        stage, rows = self.executor.fail_at, self.executor.fail_rows
        copies = self.engine.scheduler.transfers.is_busy
        guessed, kept = self._guessed()
        updates, record = self.engine.step()
        self.num_steps += 1
        plan = self.plan
        self._check_plan(plan, record)
        self._take(updates)
        now_guessed, now_kept = self._guessed()
        if not rows:  # drafts of a row that failed are verified for nobody
            self._check_drafts(updates, record, now_guessed - guessed, now_kept - kept)
        failed = {(u.request_id, u.index) for u in updates if u.finish_reason == "error"}
        raised = bool(stage) and not self.executor.fail_at
        poisoned = {r for r, request in self.requests.items() if self.is_poison(request)}
        assert {request_id for request_id, _ in failed} <= poisoned or rows
        if not (raised or poisoned):
            assert len(failed) == sum(1 for row in rows if row < len(plan.scheduled))
        if oldest is not None and not (plan.scheduled or plan.transfers or copies):
            raise AssertionError("there is work and nothing advances")
        steady = not (failed or raised or copies) and self.settings.scheduler.policy == "fcfs"
        if oldest is not None and len(self.engine.scheduler.running) > 1 and steady:
            assert oldest.state != "waiting", "the oldest was preempted though others run"
        assert oldest is None or len(oldest.tokens) >= known
        self.engine.check_integrity()
        return updates, record

    def _guessed(self) -> tuple[int, int]:
        return (self.guesser.num_guessed, self.guesser.num_kept) if self.guesser else (0, 0)

    def _check_drafts(
        self, updates: list[SequenceUpdate], record: StepRecord, guessed: int, kept: int
    ) -> None:
        """The record and the updates tell what the guesser heard."""
        assert sum(count for _, count, _ in record.verified) == guessed
        assert sum(right for _, _, right in record.verified) == record.num_kept_drafts == kept
        told = [(each.num_drafts, each.num_kept_drafts) for each in updates if each.num_drafts]
        assert len(told) == len(record.verified)
        assert [sum(part) for part in zip(*told)] == [
            sum(part) for part in [*zip(*record.verified)][1:]
        ]
        assert record.verify_s >= 0 and (record.verified or record.verify_s == 0)

    def is_poison(self, request: Request) -> bool:
        return self.executor.poison in request.prompt_token_ids

    def _check_plan(self, plan: StepPlan, record: StepRecord) -> None:
        assert plan.num_tokens <= self.settings.max_num_batched_tokens
        assert len(plan.scheduled) <= self.settings.max_num_seqs
        short = [len(row.token_ids) == 1 and row.sample for row in plan.scheduled]
        behind = plan.scheduled[short.index(False) :] if False in short else []
        new = {new.sequence_id for new in plan.new}  # a newcomer may find all but one token
        behind = [row for row in behind if row.sequence_id not in new]
        late = [row for row in behind if len(row.token_ids) == 1 and row.sample and row.start > 0]
        assert not late, "a decode row behind a chunk"
        assert record.num_tokens == plan.num_tokens
        assert record.num_sampled == sum(row.sample + row.num_drafts for row in plan.scheduled)
        assert record.num_running == len(self.engine.scheduler.running)
        assert 0 <= record.kv_usage <= 1

    def _take(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            gained = self.gained[update.request_id, update.index]
            sampling = self.requests[update.request_id].sampling
            assert gained.reason is None and not gained.dropped, "an update after the last one"
            if update.prompt_logprobs is not None:
                assert gained.prompt_logprobs is None and not gained.tokens, "told twice"
                gained.prompt_logprobs = update.prompt_logprobs
            if sampling.logprobs is not None and update.token_ids:
                assert [entry.token_id for entry in update.logprobs] == update.token_ids
            gained.tokens += update.token_ids
            gained.reason = update.finish_reason
            assert update.stop_token_id == (gained.tokens[-1] if gained.reason == "stop" else None)
            if all(g.reason or g.dropped for g in self.of(update.request_id)):
                self.finished_at[update.request_id] = self.num_steps

    def of(self, request_id: int) -> list[Gained]:
        return [g for (owner, _), g in self.gained.items() if owner == request_id]

    def drain(self, limit: int = 5000) -> None:
        while self.engine.has_work:
            self.step()
            limit -= 1
            assert limit > 0, "the engine does not come to an end"
        self.check_end()

    def check_end(self) -> None:
        assert self.engine.num_requests == 0
        assert self.engine.kv.num_used == 0
        assert self.engine.scheduler.transfers.host.num_used == 0
        assert self.executor.moving == {}, "the engine did not wait for a transfer"
        assert self.executor.sequences == {}, "the runtime was not told of an end"
        for (request_id, index), gained in self.gained.items():
            expected, reason = self.expected(request_id, index)
            if gained.dropped or gained.reason == "error":
                assert gained.tokens == expected[: len(gained.tokens)]
                continue
            assert (gained.tokens, gained.reason) == (expected, reason)
            self._check_prompt_logprobs(request_id, index, gained)

    def _check_prompt_logprobs(self, request_id: int, index: int, gained: Gained) -> None:
        request = self.requests[request_id]
        if index or request.sampling.prompt_logprobs is None:
            assert gained.prompt_logprobs is None
            return
        told = gained.prompt_logprobs
        assert told[0] is None
        assert [entry.token_id for entry in told[1:]] == request.prompt_token_ids[1:]
        assert [entry.logprob for entry in told[1:]] == [-float(at) for at in range(1, len(told))]

    def _truth(self, sequence: Sequence) -> list[int]:
        """What a guesser may know of a sequence."""
        return self.expected(sequence.request.request_id, sequence.index)[0]

    def expected(self, request_id: int, index: int) -> tuple[list[int], str]:
        request = self.requests[request_id]
        sampling = request.sampling
        seed = sampling.seed
        if seed is None:
            seed = self.settings.seed + (request_id + 1) * GOLDEN_RATIO_64
        return answer(
            request.prompt_token_ids,
            sampling,
            seed=seed % 2**64,
            index=index,
            stop_ids=set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {EOS}),
            max_len=self.settings.max_model_len,
            vocab_size=VOCAB,
            sight=sight(self.settings),
        )


def sight(engine_settings: Settings) -> int:
    """How far back the model sees: the widest of its windows, 0 for everything."""
    windows = engine_settings.cache.windows
    return 0 if 0 in windows else max(windows)


tokens = st.integers(0, VOCAB - 1)


shapes = st.builds(
    make_settings,
    block_size=st.integers(1, 16),
    num_blocks=st.lists(st.integers(3, 14), min_size=1, max_size=2).map(tuple),
    windows=st.lists(st.sampled_from([0, 1, 3, 8, 17]), max_size=2).map(tuple),
    max_model_len=st.integers(2, 48),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(1, 64),
    seed=st.integers(0, 3),
    policy=st.sampled_from(["fcfs", "priority", "fair", "slo"]),
    aging_tokens=st.integers(1, 200),
    lane_share=st.sampled_from([0.1, 0.5]),
)


terms = st.one_of(
    st.just(Terms()),
    st.builds(
        Terms,
        ttft_s=st.sampled_from([None, 0.001, 0.01, 0.1]),
        tpot_s=st.sampled_from([None, 0.001, 0.01]),
        weight=st.sampled_from([0.5, 1.0, 3.0]),
        priority=st.integers(-1, 1),
        idle_only=st.booleans(),
    ),
)


samplings = st.fixed_dictionaries(
    {
        "n": st.sampled_from([1, 1, 1, 2, 3, 4]),
        "max_tokens": st.one_of(st.none(), st.integers(1, 24)),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(tokens, max_size=2),
    },
    optional={
        "seed": st.integers(-5, 5),
        "logprobs": st.just(1),
        "prompt_logprobs": st.just(0),
    },
)


additions = st.tuples(
    st.just("add"),
    st.lists(tokens, min_size=1, max_size=32),
    samplings,
    st.integers(0, 4),
    st.sampled_from(["", "a", "b"]),
    terms,
)


def perform(world: World, operation: tuple) -> None:
    """Do one random operation."""
    match operation:
        case ("add", prompt, sampling, min_tokens, user, promised):
            prompt = prompt[: world.settings.max_model_len - 1]
            room = sampling["max_tokens"] or 4
            least = min(min_tokens, room)
            world.add(prompt, user=user, terms=promised, **sampling, min_tokens=least)
        case ("step", count):
            for _ in range(count):
                world.step()
        case ("abort", number, index) if world.requests:
            world.abort(number % len(world.requests), index)
        case ("raise", stage):
            world.executor.fail_at = stage
            world.step()
        case ("fail", rows):
            world.executor.fail_rows = rows
            world.step()
