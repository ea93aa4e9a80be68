"""A world whose prefix cache is on, and a machine that does anything in any order."""

import logging

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine_world import Gained, World, make_settings
from fakes import FakeExecutor, with_cache
from headway.core.principal import Principal
from headway.core.request import Request, SamplingParams
from headway.engine.kv.eviction import POLICIES


class CachedWorld(World):
    """A world of several salts and adapters, whose runtime knows whose content a slot holds."""

    def __init__(self, engine_settings, kind=FakeExecutor) -> None:
        super().__init__(engine_settings, kind=kind)
        self.expect_nothing()
        self.executor.root = self._root
        self.num_cached: dict[int, int] = {}
        self.copies = []

    def _root(self, new):
        sequence = self.engine.scheduler.by_id(new.sequence_id)
        if sequence is None:  # the engine's own trial of a runtime that failed everybody
            return None
        return (sequence.request.principal.cache_salt, sequence.request.adapter)

    def ask(self, prompt: list[int], *, salt: str = "", adapter: str = "", **sampling) -> int:
        request = Request(
            len(self.requests),
            list(prompt),
            SamplingParams(**{"max_tokens": 4, "ignore_eos": True, **sampling}),
            Principal(cache_salt=salt),
            adapter=adapter,
        )
        self.requests[request.request_id] = request
        for index in range(request.sampling.n):
            self.gained[request.request_id, index] = Gained()
        self.engine.add(request)
        self.engine.check_integrity()
        return request.request_id

    def _check_plan(self, plan, record) -> None:
        super()._check_plan(plan, record)
        self.copies += plan.copies

    def _take(self, updates) -> None:
        super()._take(updates)
        for update in updates:
            if update.first_scheduled_s is not None and update.index == 0:
                self.num_cached[update.request_id] = update.num_cached_tokens

    def answer_of(self, prompt: list[int], **how) -> tuple[list[int], int]:
        """(tokens, prompt tokens found) of a request that runs alone."""
        request_id = self.ask(prompt, **how)
        self.drain()
        return self.gained[request_id, 0].tokens, self.num_cached[request_id]


BEGINNINGS = ([1] * 6, [1] * 6 + [2] * 7, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8])
prompts = st.builds(
    lambda begin, end: begin + end,
    st.sampled_from(BEGINNINGS),
    st.lists(st.integers(0, 2), max_size=9),
)


def sinks_of(windows: tuple[int, ...], sinks: int) -> tuple[int, ...]:
    """So many for each group that has a window."""
    return tuple(sinks if window else 0 for window in windows)


class Machine(RuleBasedStateMachine):
    """Admit, extend, fork, abort, fail, evict, preempt, in any order; all invariants after each."""

    @initialize(
        policy=st.sampled_from(sorted(POLICIES)),
        block_size=st.sampled_from([1, 2, 4, 5]),
        num_blocks=st.integers(9, 24),
        windows=st.sampled_from([(0,), (0, 6), (6,), (9, 0, 1)]),
        sinks=st.sampled_from([0, 0, 3, 7]),
        budget=st.integers(4, 24),
        max_num_seqs=st.integers(1, 4),
    )
    def begin(self, policy, block_size, num_blocks, windows, sinks, budget, max_num_seqs):
        logging.disable(logging.CRITICAL)
        shape = make_settings(
            block_size=block_size,
            num_blocks=(num_blocks,) * len(windows),
            max_model_len=40,
            max_num_seqs=max_num_seqs,
            budget=max(budget, max_num_seqs),
        )
        self.world = CachedWorld(
            with_cache(shape, windows=windows, sinks=sinks_of(windows, sinks), prefix_cache=policy)
        )

    @rule(
        prompt=prompts,
        salt=st.sampled_from(["", "a"]),
        adapter=st.sampled_from(["", "", "x"]),
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 9),
        logprobs=st.sampled_from([None, None, None, 0]),
    )
    def add(self, prompt, salt, adapter, n, max_tokens, logprobs):
        prompt = prompt[: self.world.settings.max_model_len - 1]
        self.world.ask(
            prompt, salt=salt, adapter=adapter, n=n, max_tokens=max_tokens, prompt_logprobs=logprobs
        )

    @rule(number=st.integers(0, 30))
    def next_turn(self, number):
        """A finished conversation goes on: its prompt, its answer and a little more."""
        finished = [
            request
            for request in self.world.requests.values()
            if self.world.gained[request.request_id, 0].reason in ("stop", "length")
        ]
        if not finished:
            return
        request = finished[number % len(finished)]
        answer = self.world.gained[request.request_id, 0].tokens
        turn = [*request.prompt_token_ids, *answer, 1]
        if len(turn) < self.world.settings.max_model_len:
            self.world.ask(turn, salt=request.principal.cache_salt, adapter=request.adapter)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.world.step()

    @rule(number=st.integers(0, 30), index=st.sampled_from([None, 0, 1]))
    def abort(self, number, index):
        if self.world.requests:
            self.world.abort(number % len(self.world.requests), index)

    @rule()
    def preempt(self):
        running = self.world.engine.scheduler.running
        if running:
            self.world.engine.scheduler.preempt(running[-1])

    @rule(stage=st.sampled_from(["submit", "sample", "collect"]))
    def raising(self, stage):
        self.world.executor.fail_at = stage
        self.world.step()

    @rule(rows=st.frozensets(st.integers(0, 2), min_size=1))
    def failing(self, rows):
        self.world.executor.fail_rows = rows
        self.world.step()

    @rule()
    def forget(self):
        self.world.engine.kv.forget_free()

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.engine.check_integrity()

    def teardown(self):
        try:
            if hasattr(self, "world"):
                self.world.drain()
        finally:
            logging.disable(logging.NOTSET)
