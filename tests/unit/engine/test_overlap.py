"""Steps that are planned while others run: the same tokens at every depth, whatever happens."""

import dataclasses
import logging
from collections.abc import Iterator

import pytest

from byte_tokenizer import EOS, write_tokenizer
from engine_world import World
from fakes import make_settings
from grammar_engine import TOKENS, VOCAB, ask, engine_of, finish
from headway.config.device_choice import choose_overlap
from headway.config.options import HALVES, EngineOptions
from headway.config.parallel import Parallel
from headway.config.speculation_config import SpeculationConfig
from headway.core import grammar as grammars
from headway.core.errors import UsageError
from headway.core.plan import sampled_in
from headway.core.terms import Terms
from headway.engine.grammar.grammars import Grammars
from headway.engine.grammar.vocabulary import VocabularySource
from headway.engine.speculation import AdaptiveSpeculator
from headway.perf.model import StepModel
from headway.spec.state import StateSpec
from late_world import LateWorld, play
from resolve_cases import model

DEPTHS = (0, 1, 2)
STAGES = (1, 2, 3)


@pytest.fixture(autouse=True)
def quiet():
    """Steps that raise are told with their traces."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def check(seed: int, stages: tuple[int, ...] = (1, 1, 1)) -> tuple[int, int, int]:
    """World `seed` at each depth: who came to an end has the same tokens; what was overlapped."""
    worlds = [play(seed, depth, count) for depth, count in zip(DEPTHS, stages, strict=True)]
    ended = [
        {
            key: (gained.tokens, gained.reason, gained.prompt_logprobs)
            for key, gained in world.gained.items()
            if not gained.dropped and gained.reason != "error"
        }
        for world in worlds
    ]
    for other in ended[1:]:
        both = ended[0].keys() & other.keys()
        assert {key: other[key] for key in both} == {key: ended[0][key] for key in both}
    assert [world.late.most_held for world in worlds[:1]] <= [1]
    assert worlds[0].late.num_placeholders == 0
    late = [world.late for world in worlds[1:]]
    return (
        sum(each.num_placeholders for each in late),
        sum(each.num_abandoned for each in late),
        sum(world.engine.scheduler.num_preemptions for world in worlds[1:]),
    )


@pytest.mark.parametrize("part", range(6))
def test_random_plans_at_each_depth(part: int):
    counts = [check(seed) for seed in range(10 * part, 10 * part + 10)]
    assert sum(placeholders for placeholders, _, _ in counts) > 0


def test_random_plans_of_stages():
    """Nobody's token is foreseen, and yet steps are in flight, of which some are given up."""
    counts = [check(seed, STAGES) for seed in range(100)]
    placeholders, abandoned, preemptions = map(sum, zip(*counts, strict=True))
    assert placeholders == 0 and abandoned > 0 and preemptions > 0


@pytest.mark.hardening
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_random_plans(part: int):
    counts = [check(seed) for seed in range(1000 + 100 * part, 1100 + 100 * part)]
    placeholders, abandoned, preemptions = map(sum, zip(*counts, strict=True))
    assert placeholders > 500 and abandoned > 5 and preemptions > 50


@pytest.mark.hardening
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_plans_of_stages(part: int):
    counts = [check(seed, STAGES) for seed in range(1000 + 100 * part, 1100 + 100 * part)]
    placeholders, abandoned, preemptions = map(sum, zip(*counts, strict=True))
    assert placeholders == 0 and abandoned > 5 and preemptions > 50


# ── what is planned ahead ───────────────────────────────────────────────────────────────────


def world_of(depth: int = 1, **shape: object) -> LateWorld:
    return LateWorld(make_settings(overlap=depth, max_num_seqs=4, budget=16, **shape))


def flying(world: LateWorld) -> list[list[tuple[int, list[int], bool]]]:
    """(start, tokens, sampled) of the rows of each step in flight."""
    steps = world.engine.scheduler.overlap.steps
    return [[(r.start, r.token_ids, r.sample) for r in step.plan.scheduled] for step in steps]


def test_a_step_is_submitted_before_the_one_before_is_collected():
    """Two steps ahead: the inputs of both stand for what nobody has seen yet."""
    world = world_of(depth=2)
    world.add([1, 2, 3], max_tokens=9, ignore_eos=True)
    updates, record = world.step()
    (update,) = updates
    assert record.step == 0 and len(update.token_ids) == 1
    ahead = [[(3, [sampled_in(0)], True)], [(4, [sampled_in(1)], True)]]
    assert flying(world) == ahead
    (sequence,) = world.engine.sequences_of(0)
    assert (len(sequence.tokens), sequence.computed) == (4, 3), "what is assumed was not taken back"
    world.drain()
    assert world.late.most_held == 3


def test_nothing_is_planned_behind_the_last_token():
    world = world_of(depth=2)
    world.add([1, 2, 3], max_tokens=2, ignore_eos=True)
    world.step()
    assert flying(world) == [[(3, [sampled_in(0)], True)]]
    world.drain()
    assert world.num_steps == 3, "the runtime is told of the end in a step of its own"


@pytest.mark.parametrize(
    "sampling",
    [{"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}, {"n": 2}],
    ids=str,
)
def test_who_needs_the_token_waits_for_it(sampling: dict):
    """Penalties count tokens, and siblings share the prompt before their parent goes on."""
    world = world_of()
    world.add([1, 2, 3], max_tokens=4, ignore_eos=True, **sampling)
    world.step()
    assert flying(world) == []
    world.drain()
    penalties = "n" not in sampling
    assert (world.late.num_placeholders == 0) == penalties


def test_chunks_of_a_prompt_follow_each_other_without_waiting():
    world = world_of(depth=2, num_blocks=(40,))
    world.add([*range(40)], max_tokens=1)
    world.step()
    assert flying(world) == [
        [(16, [*range(16, 32)], False)],
        [(32, [*range(32, 40)], True)],
    ]
    world.drain()


def test_a_request_that_is_shed_leaves_the_plan_in_which_its_sibling_runs():
    """Of two sequences in one row the second waits until it is too late: both end."""
    shape = {"num_blocks": (40,), "policy": "slo", "late": "shed", "overlap": 1}
    world = LateWorld(make_settings(max_num_seqs=1, budget=16, **shape))
    terms = Terms(ttft_s=0.008)
    request = world.add([1, 2, 3], terms=terms, n=2, max_tokens=40, ignore_eos=True)
    refused = []
    while not refused:
        world.step()
        refused = world.engine.drain_refusals()
    assert [request_id for request_id, _ in refused] == [request]
    assert world.engine.num_requests == 0
    for gained in world.of(request):
        gained.dropped = True
    assert 1 < len(world.of(request)[0].tokens) < 40, "the first ran beside"
    world.add([4, 5], max_tokens=3, ignore_eos=True)
    world.drain()


def test_who_leaves_meanwhile_is_passed_over():
    """Aborted with a step in flight: its blocks are free, and what the step says is nobody's."""
    world = world_of()
    gone = world.add([1, 2, 3], max_tokens=9, ignore_eos=True)
    stays = world.add([4, 5], max_tokens=9, ignore_eos=True)
    world.step()
    (step,) = world.engine.scheduler.overlap.steps
    world.abort(gone)
    assert len(step.released_ids) == 1
    updates, _ = world.step()
    assert [update.request_id for update in updates] == [stays]
    world.drain()


def test_a_preempted_sequence_is_not_told_an_old_token():
    """It comes back under its name while the step that had it is in flight."""
    world = world_of()
    world.add([1, 2, 3], max_tokens=9, ignore_eos=True)
    world.step()
    scheduler = world.engine.scheduler
    scheduler.preempt(scheduler.running[0])
    told = len(world.gained[0, 0].tokens)
    world.step()
    assert len(world.gained[0, 0].tokens) == told
    assert scheduler.running[0].known_to_runtime, "it is in the next step already"
    world.drain()


SWAPS: dict[str, object] = {"host_blocks": (64,), "block_bytes": (1,)}


@pytest.mark.parametrize("window", [0, 3])
def test_who_lacks_a_block_of_its_window_is_computed_again(window: int):
    """The second step ahead gave back what its token does not see, and that of the first does."""
    world = world_of(depth=2, block_size=1, windows=(window,), **SWAPS)
    world.add([*range(9)], max_tokens=9, ignore_eos=True)
    world.step()
    scheduler = world.engine.scheduler
    (sequence,) = scheduler.running
    scheduler.preempt(sequence)
    assert bool(sequence.host_tables) == (window == 0)
    world.drain()


def test_a_row_that_fails_ends_who_has_left_meanwhile():
    """Its keys are on their way to host memory, and those of the failed step are not among them."""
    world = world_of(**SWAPS)
    world.add([1, 2, 3], max_tokens=9, ignore_eos=True)
    world.add([4, 5, 6], max_tokens=9, ignore_eos=True)
    world.step()
    world.engine.scheduler.preempt(world.engine.scheduler.running[0])
    world.executor.fail_rows, world.may_fail = frozenset({0}), True
    updates, _ = world.step()
    assert [(u.request_id, u.finish_reason) for u in updates] == [(0, "error"), (1, None)]
    world.drain()


@pytest.mark.parametrize("stage", ["submit", "sample", "collect"])
def test_a_step_that_raises_costs_nobody_a_token(stage: str):
    """Where others are in flight behind it all begin again, one step at a time."""
    world = world_of()
    for number in range(3):
        world.add([number, 2, 3], max_tokens=9, ignore_eos=True)
    world.step()
    world.late.fail_at = stage
    world.step()
    assert world.late.num_abandoned == (stage == "collect")
    if stage == "collect":
        assert world.engine.scheduler.num_preemptions == 3
        world.step()
        assert flying(world) == []
    world.drain()
    assert world.late.most_held == 2


def test_the_runtime_is_proved_with_nothing_in_flight():
    """The only row fails: a trial tells a bad request from a broken runtime."""
    world = world_of(depth=2)
    world.add([1, 2, 3], max_tokens=9, ignore_eos=True)
    world.step()
    world.executor.fail_rows, world.may_fail = frozenset({0}), True
    updates, _ = world.step()
    assert [update.finish_reason for update in updates] == ["error"]
    assert world.late.num_abandoned == 1
    assert world.add([4], max_tokens=2) == 1
    world.drain()


def test_a_record_begins_when_the_one_before_has_ended():
    """Seconds are told once: what is planned beside a step that runs is in that step."""
    world = world_of(policy="slo")  # there the clock goes on while a step is planned
    world.add([1, 2, 3], max_tokens=9, ignore_eos=True)
    began_s, told_s = world.clock.now_s(), 0.0
    while world.engine.has_work:
        _, record = world.step()
        told_s += record.gap_s + record.duration_s
    assert told_s == pytest.approx(world.clock.now_s() - began_s)


def test_an_executor_of_one_step_is_refused():
    with pytest.raises(TypeError, match="holds one step"):
        World(make_settings(overlap=1))


def test_stages_have_a_step_each_of_their_own_sequences():
    """Five sequences and two stages: three in one step and two in the next; a prompt's chunks are
    known, so the next follows the one that runs."""
    stages = Parallel(stages=2)
    world = LateWorld(make_settings(overlap=1, parallel=stages, max_num_seqs=5, budget=16))
    for number in range(5):
        world.add([number, 2, 3], max_tokens=9, ignore_eos=True)
    world.step()
    while any(not s.num_generated for n in range(5) for s in world.engine.sequences_of(n)):
        world.step()
    for _ in range(3):
        world.step()
        assert world.late.queue and not world.late.num_placeholders
        assert {len(plan.scheduled) for plan, _ in world.late.queue} <= {2, 3}
    world.drain()
    assert world.late.most_held == 2
    world.add([30] * 40, max_tokens=1, ignore_eos=True)
    world.step()
    assert flying(world) == [[(16, [30] * 16, False)]]
    world.drain()


def test_stages_of_a_pipeline_overlap_on_a_cpu():
    spec, two = model(), {"pipeline_parallel_size": 2}
    assert choose_overlap(EngineOptions(**two), "cpu", spec)[0] == 1
    assert choose_overlap(EngineOptions(**two, overlap=0), "cpu", spec) == (0, "given")
    four = EngineOptions(**two, tensor_parallel_size=2)
    assert [choose_overlap(four, "cpu", spec, threads)[0] for threads in (3, 4)] == [0, 1]
    assert choose_overlap(EngineOptions(tensor_parallel_size=2), "cpu", spec)[0] == 0
    assert choose_overlap(EngineOptions(pipeline_parallel_size=HALVES), "cpu", spec)[0] == 0


def test_a_cpu_takes_one_step_at_a_time():
    spec = model()
    assert choose_overlap(EngineOptions(), "cpu", spec)[0] == 0
    assert choose_overlap(EngineOptions(), "cuda", spec)[0] == 1
    assert choose_overlap(EngineOptions(overlap=2), "cuda", spec) == (2, "given")
    with pytest.raises(UsageError, match="a CPU takes one step"):
        choose_overlap(EngineOptions(overlap=1), "cpu", spec)
    with pytest.raises(UsageError, match="the null executor"):
        choose_overlap(EngineOptions(overlap=1, executor="null"), "cuda", spec)


def test_a_model_with_states_takes_one_step_at_a_time():
    """A state is what the last step left: one that was planned ahead would have moved it on."""
    states = StateSpec(rule="delta", heads=2, groups=2, key_dim=4, value_dim=4, conv=3)
    spec = dataclasses.replace(model(), states=states)
    assert choose_overlap(EngineOptions(), "cuda", spec)[0] == 0
    with pytest.raises(UsageError, match="keeps a state"):
        choose_overlap(EngineOptions(overlap=1), "cuda", spec)


# ── grammars ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grammars]:
    folder = tmp_path_factory.mktemp("bytes")
    write_tokenizer(folder, TOKENS)
    made = Grammars(VocabularySource(str(folder), VOCAB, (EOS,)))
    yield made
    made.close()


@pytest.mark.parametrize("jumps", [False, True], ids=["sampled", "forced"])
@pytest.mark.parametrize("num_blocks", [400, 24], ids=["room", "none to spare"])
def test_grammars_give_the_same_tokens(made: Grammars, num_blocks: int, jumps: bool):
    """Beside requests without one, preempted, and with tokens that the grammar forces."""
    rules = [
        grammars.regex("(ab|cd){2,9}[0-9]", "p"),
        grammars.json_schema({"type": "array", "items": {"enum": [1, "x", None]}}, "p"),
        grammars.choice(["yes", "no", "yes and no"], "p"),
        None,
        None,
    ]
    requests = [ask(rule, number, max_tokens=40, n=2) for number, rule in enumerate(rules * 2, 1)]
    answers = []
    for depth in DEPTHS:
        engine = engine_of(made, num_blocks=num_blocks, max_model_len=60, overlap=depth)
        if jumps:
            config = SpeculationConfig(sources=("forced",), num_speculative_tokens=0)
            engine.scheduler.drafts.speculator = AdaptiveSpeculator(config, StepModel())
        found = finish(engine, *requests)
        answers.append({key: (one.tokens, one.finish_reason) for key, one in found.items()})
        assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 24)
    assert answers[1] == answers[0] and answers[2] == answers[0]
