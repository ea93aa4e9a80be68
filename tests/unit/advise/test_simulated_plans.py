"""One scheduler: a recorded run gives the very same plans on a virtual clock, for each policy."""

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from byte_tokenizer import EOS, write_tokenizer
from engine_world import EXAMPLES, swap_settings
from fake_model import Mirrored
from fakes import FakeExecutor, make_settings
from headway.advise.simulate.replay import Recording, RunRecorder, StepClock, replay
from headway.config.resolve import Settings
from headway.config.speculation_config import SpeculationConfig
from headway.core.clock import VirtualClock
from headway.core.grammar import Grammar
from headway.core.plan import Executor, StepResult
from headway.core.principal import Principal
from headway.core.request import Request, SamplingParams
from headway.core.terms import Terms
from headway.engine.build import build_engine
from headway.engine.engine import Engine
from headway.engine.grammar.grammars import Grammars
from headway.engine.grammar.vocabulary import VocabularySource

TOKENS, VOCAB = 320, 325
POLICIES = ("fcfs", "fair", "priority", "slo")
DIGITS = Grammar(kind="regex", text="[0-9]{4,12}", param="guided_regex")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> VocabularySource:
    folder: Path = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, TOKENS)
    return VocabularySource(str(folder), VOCAB, (EOS,))


class Uneven(FakeExecutor):
    """The checking fake, whose steps take a while that nobody can foresee.

    Where no grammar rules, an answer says its prompt again and again, so that lookups find it.
    """

    chance: random.Random

    def _next(self, sequence: Mirrored, end: int, mask: bytes | None) -> int | None:
        if mask is not None:
            return super()._next(sequence, end, mask)
        return sequence.tokens[end - sequence.new.num_prompt_tokens]

    def collect(self) -> StepResult:
        for _ in range(self.chance.randrange(2000)):
            pass
        return super().collect()


def fake(how: Settings, seed: int) -> Uneven:
    made = Uneven(
        how.cache.block_size,
        how.cache.num_blocks,
        VOCAB,
        max_num_seqs=how.max_num_seqs,
        host_blocks=how.cache.host_blocks,
    )
    made.chance = random.Random(seed)
    return made


def make(how: Settings, grammars: Grammars | None):
    """Under two policies who fits starts, so that some are preempted."""

    def engine(executor: Executor, clock: VirtualClock | StepClock) -> Engine:
        made = build_engine(
            executor,
            how,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            clock=clock,
            grammars=grammars,
        )
        made.scheduler.room.predicts_growth = how.scheduler.policy not in BLIND
        return made

    return engine


def coming(seed: int, count: int, *, ruled: bool, now_s: float) -> list[tuple[int, Request | int]]:
    """Requests that share beginnings, fork, hurry, and some whose clients leave."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(VOCAB) for _ in range(24)] for _ in range(2)]
    events: list[tuple[int, Request | int]] = []
    for number in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))]
        prompt = rng.choice(beginnings)[: rng.randrange(25)] + own
        sampling = SamplingParams(
            n=rng.choice((1, 1, 3)),
            seed=number,
            max_tokens=rng.randrange(1, 30),
            grammar=DIGITS if ruled and rng.random() < 0.3 else None,
        )
        terms = Terms(
            ttft_s=rng.choice((None, 0.001, 5.0)),
            tpot_s=rng.choice((None, 1e-5, 0.1)),
            priority=rng.randrange(3),
            idle_only=rng.random() < 0.1,
        )
        at = rng.randrange(2 * count)
        user = Principal(rng.choice(("", "ann", "bob")))
        events.append((at, Request(number, prompt, sampling, user, now_s, terms=terms)))
        if rng.random() < 0.1:
            events.append((at + rng.randrange(1, 9), number))
    return sorted(events, key=lambda event: (event[0], isinstance(event[1], int)))


def recorded(
    how: Settings, seed: int, count: int, grammars: Grammars | None, seen: list | None = None
) -> Recording:
    """A run of so many requests; `seen` gets the record of each step."""
    clock = StepClock()
    recorder = RunRecorder(fake(how, seed), clock)
    engine = make(how, grammars)(recorder, clock)
    step = engine.step

    def keep():
        updates, record = step()
        if seen is not None:
            seen.append(record)
        return updates, record

    engine.step = keep
    events = coming(seed, count, ruled=grammars is not None, now_s=clock.now_s())
    recording = recorder.run(engine, events)
    engine.check_integrity()
    assert recording.inputs and engine.num_requests == 0
    return recording


def small(policy: str, **more) -> Settings:
    """So little memory that running requests are preempted."""
    return make_settings(
        policy=policy, num_blocks=(45,), max_model_len=120, budget=24, max_num_seqs=6, **more
    )


BLIND = ("fcfs", "priority")
LOOKUP = SpeculationConfig(sources=("lookup", "forced"), num_speculative_tokens=4)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_run_gives_the_same_plans(policy: str, source: VocabularySource):
    """With all at once that makes plans hard, each of which the records must show."""
    how, seen = small(policy, speculation=LOOKUP), []
    with closing(Grammars(source)) as grammars:
        compile_first(grammars)
        recording = recorded(how, 11, 60, grammars, seen)
        pairs = replay(recording, make(how, grammars))
    assert len(pairs) == len(recording.steps) > 100
    assert all(was == now for was, now in pairs)
    assert seen[-1].num_preemptions > 0 or policy not in BLIND
    assert sum(record.num_cached_tokens for record in seen) > 0
    assert sum(record.num_kept_drafts for record in seen) > 0
    inputs = [one.request for one in recording.inputs if one.request is not None]
    assert sum(request.sampling.n > 1 for request in inputs) > 5
    assert sum(request.sampling.grammar is not None for request in inputs) > 5
    assert any(one.dropped is not None for one in recording.inputs)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_host_memory_too(policy: str):
    """What is preempted is copied out, and comes back when the recorded copy had ended."""
    how, seen = (
        swap_settings(
            policy=policy, num_blocks=(40,), max_model_len=120, budget=24, max_num_seqs=6
        ),
        [],
    )
    recording = recorded(how, 5, 40, None, seen)
    pairs = replay(recording, make(how, None))
    assert len(pairs) == len(recording.steps) > 50
    assert all(was == now for was, now in pairs)
    assert sum(record.num_swapped for record in seen) > 0 or policy not in BLIND


def compile_first(grammars: Grammars) -> None:
    """A grammar that everybody knows: when one is compiled in the background is nobody's plan."""
    grammars.compile(-1, DIGITS)
    grammars.wait()
    grammars.ready()
    assert grammars.compile(-1, DIGITS) is not None


@settings(max_examples=max(EXAMPLES // 20, 10), deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 2**20),
    blocks=st.integers(40, 120),
    budget=st.integers(7, 64),
    rows=st.integers(1, 9),
    drafts=st.booleans(),
    host=st.sampled_from((0, 16, 64)),
    ruled=st.booleans(),
)
def test_any_settings_give_the_same_plans(
    policy, seed, blocks, budget, rows, drafts, host, ruled, source
):
    make_some = swap_settings if host else make_settings
    how = make_some(
        policy=policy,
        num_blocks=(blocks,),
        max_model_len=120,
        budget=budget,
        max_num_seqs=rows,
        **({"host": (host,)} if host else {}),
    )
    if drafts:
        how = replace(how, speculation=LOOKUP)
    with closing(Grammars(source)) as grammars:
        compile_first(grammars)
        recording = recorded(how, seed, 12, grammars if ruled else None)
        pairs = replay(recording, make(how, grammars if ruled else None))
    assert all(was == now for was, now in pairs)


def test_a_plan_that_differs_is_found():
    """Another decision, by as little as one token of a budget, has another hash."""
    recording = recorded(small("slo"), 3, 20, None)
    other = replace(small("slo"), max_num_batched_tokens=23)
    pairs = replay(recording, make(other, None))
    assert pairs[-1][0] != pairs[-1][1]
    assert len(pairs) < len(recording.steps)
