"""The cost model of a step: what it learns, what it never does, what its answers agree with."""

import random
from itertools import pairwise
from math import exp, inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.config.speculation_config import SpeculationConfig
from headway.core.clock import VirtualClock
from headway.core.plan import Description
from headway.core.records import ModelSnapshot
from headway.core.request import Request, SamplingParams
from headway.core.service import LIKE_INTERACTIVE, service_classes
from headway.engine import messages
from headway.engine.calibration import calibrate, calibrate_drafts, unloaded_times
from headway.engine.engine import Engine
from headway.engine.speculation import AdaptiveSpeculator
from headway.perf.filter import isotonic_fit
from headway.perf.model import ERROR_STEPS, NOTHING, Prior, StepModel, Work, prior_of
from telemetry_cases import Ready, ceilings, llama, step, telemetry
from timed import Machine, timed_engine

MACHINES = st.builds(
    Machine,
    host_s=st.floats(1e-5, 1e-2),
    weights_s=st.floats(1e-3, 0.3),
    token_s=st.floats(1e-5, 1e-2),
    head_s=st.floats(0, 0.05),
    sampled_s=st.floats(0, 2e-4),
    attended_s=st.floats(0, 1e-6),
    read_s=st.floats(0, 1e-5),
)
WORKS = st.tuples(*[st.integers(0, most) for most in (5000, 256, 10**6, 10**6)]).map(
    lambda numbers: Work(*numbers)
)


def load(seed: int, count: int) -> list[Work]:
    """Steps of a mixed load: up to 24 decodes, and a chunk in every third."""
    draw, works = random.Random(seed), []
    for _ in range(count):
        rows, context = draw.randint(0, 24), draw.randint(10, 1500)
        work = Work(rows, rows, rows * context, rows * context)
        if not rows or draw.random() < 1 / 3:
            size = draw.choice([7, 16, 48, 100, 256, 500])
            work = StepModel().add_chunk(work, draw.randint(0, 2000), size)
        works.append(work)
    return works


def learned(machine: Machine, works: list[Work], seed: int = 0, noise: float = 0.05) -> StepModel:
    """A model after those steps: one in fifty took three times as long, the others jitter."""
    draw, model = random.Random(seed), StepModel()
    for work in works:
        hiccup = 3 if draw.random() < 0.02 else 1
        model.learn(work, machine.seconds(work) * hiccup * exp(draw.gauss(0, noise)))
    return model


def test_a_step_tells_what_had_been_predicted_before_it_was_learned():
    model, work = StepModel(), Work(8, 8, 800, 800)
    for seconds in (0.2, 0.1, 0.3):
        predicted_s = model.seconds(work)
        assert model.learn(work, seconds) == predicted_s != model.seconds(work)


def errors(
    model: StepModel, machine: Machine, works: list[Work], speed: float = 1.0
) -> list[float]:
    return sorted(abs(model.seconds(w) / machine.seconds(w) / speed - 1) for w in works)


# ── learning ────────────────────────────────────────────────────────────────────────────────


@settings(max_examples=40)
@given(MACHINES, st.integers(0, 1000))
def test_a_machine_is_recovered(machine, seed):
    """Any machine, hiccups and all: half of the steps within 10%, nine of ten within 30%."""
    works = load(seed, 400)
    model = learned(machine, works[:300], seed)
    model.check_integrity()
    off = errors(model, machine, works[300:])
    assert off[50] < 0.1 and off[90] < 0.3, (off[50], off[90])


@pytest.mark.parametrize("speed", [0.5, 2.0, 4.0])
def test_a_change_of_speed_is_followed_within_fifty_steps(speed):
    machine, works = Machine(), load(1, 500)
    model, draw = learned(machine, works[:300]), random.Random(2)
    for work in works[300:350]:
        model.learn(work, machine.seconds(work) * speed * exp(draw.gauss(0, 0.05)))
    off = errors(model, machine, works[350:], speed)
    assert off[75] < 0.1 and off[142] < 0.3
    model.check_integrity()


def test_a_speed_learned_from_decodes_holds_for_chunks():
    """What half a minute of decodes tells of the machine is true of the prompt after it."""
    machine = Machine()
    model = learned(machine, load(3, 300))
    decodes = [Work(8, 8, 8 * context, 8 * context) for context in range(200, 300)]
    for work in decodes:
        model.learn(work, 2 * machine.seconds(work))
    chunk = model.add_chunk(NOTHING, 0, 256)
    assert model.seconds(chunk) == pytest.approx(2 * machine.seconds(chunk), rel=0.25)


def test_a_hiccup_moves_little():
    machine, works = Machine(), load(4, 400)
    model = learned(machine, works[:300])
    before = [model.seconds(work) for work in works[300:]]
    for work in works[300:302]:
        model.learn(work, 20 * machine.seconds(work))
    after = [model.seconds(work) for work in works[300:]]
    assert max(b / a for a, b in zip(before, after, strict=True)) < 1.25


def test_what_was_never_seen_is_the_prior_at_the_speed_that_was():
    """Decodes alone, on a machine five times slower than the prior says: so are its chunks."""
    prior = Prior(0.04, 0.004, 0.008, 2e-4, 2e-7, 3e-6)
    model, known = StepModel(prior), StepModel(prior)
    for context in range(100, 300):
        work = Work(4, 4, 4 * context, 4 * context)
        model.learn(work, 5 * known.seconds(work))
    chunk = model.add_chunk(NOTHING, 0, 1000)
    assert model.seconds(chunk) == pytest.approx(5 * known.seconds(chunk), rel=0.1)


@given(st.lists(st.tuples(WORKS, st.floats(1e-6, 1e4)), max_size=60))
def test_whatever_it_is_told_it_never_predicts_nonsense(told):
    model = StepModel()
    for work, seconds in told:
        model.learn(work, seconds)
        model.check_integrity()
    works = [Work(n, 1, 100, 100) for n in (1, 2, 3, 5, 31, 32, 33, 700, 16384, 16385, 10**6)]
    predicted = [model.seconds(work) for work in works]
    assert predicted == sorted(predicted) and predicted[0] >= 0 and predicted[-1] < inf


def test_the_first_step_sets_the_scale():
    model, work = StepModel(), Work(4, 4, 400, 400)
    model.learn(work, 1e4 * model.seconds(work))
    assert model.seconds(work) == pytest.approx(1e4 * StepModel().seconds(work))
    model.reset()
    assert model.seconds(work) == StepModel().seconds(work)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.1, 9)), min_size=1, max_size=12))
def test_rising_is_the_nearest_sequence_that_never_falls(pairs):
    values, weights = [v for v, _ in pairs], [w for _, w in pairs]
    found = isotonic_fit(values, weights)
    assert all(a <= b + 1e-12 for a, b in pairwise(found))
    kept = sum(v * w for v, w in pairs)
    assert sum(v * w for v, w in zip(found, weights, strict=True)) == pytest.approx(kept)
    if values == sorted(values):
        assert found == values


# ── the snapshot ────────────────────────────────────────────────────────────────────────────────


def test_a_snapshot_predicts_as_the_model_it_was_taken_of():
    """Over the wire and back, and the model goes on learning without it."""
    model = learned(Machine(), load(3, 200))
    model.windows = (0, 512)
    wire = msgspec.msgpack.encode(model.snapshot())
    assert len(wire) < 500
    twin = StepModel.of(msgspec.msgpack.decode(wire, type=ModelSnapshot))
    assert twin.num_observed == 200 and twin.windows == (0, 512)
    works = load(4, 50)
    before = [model.seconds(work) for work in works]
    assert [twin.seconds(work) for work in works] == pytest.approx(before)
    model.learn(works[0], 9.0)
    assert [twin.seconds(work) for work in works] == pytest.approx(before)
    twin.check_integrity()


def test_a_snapshot_of_other_parts_is_no_model():
    with pytest.raises(ValueError, match="3 parts"):
        StepModel.of(ModelSnapshot(1, (0.1, 0.2, 0.3), (0,)))


# ── answers ─────────────────────────────────────────────────────────────────────────────────

MODEL = learned(Machine(), load(5, 300))
GROUPED = StepModel(MODEL.prior, windows=(0, 512))
ROWS = st.integers(0, 64).map(lambda rows: Work(rows, rows, rows * 700, rows * 700))


@given(st.floats(0, 8), ROWS, st.integers(0, 9000), st.integers(0, 4000))
def test_chunk_is_the_inverse_of_seconds(room_s, beside, start, most):
    for model in (MODEL, GROUPED):
        fits = model.chunk(room_s, beside, start, most)
        assert 0 <= fits <= most
        if fits:
            assert model.seconds(model.add_chunk(beside, start, fits)) <= room_s + 1e-9
        if fits < most:
            assert model.seconds(model.add_chunk(beside, start, fits + 1)) > room_s - 1e-9


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 2048), ROWS)
def test_prefill_is_the_sum_of_its_steps(num_tokens, start, chunk, beside):
    for model in (MODEL, GROUPED):
        steps_s, end = 0.0, start + num_tokens
        for at in range(start, end, chunk):
            work = model.add_chunk(beside, at, min(chunk, end - at))
            last = at + chunk >= end
            steps_s += model.seconds(work if last else work._replace(num_sampled=beside[1]))
        found = model.predict_prefill_s(num_tokens, start, chunk, beside)
        assert found == pytest.approx(steps_s)


def test_a_backlog_shares_its_steps():
    """Three prompts of 3 tokens in chunks of 9 are one step, which reads the weights once."""
    one = MODEL.predict_prefill_s(3, 0, 9)
    assert one < MODEL.backlog_s([(3, 0)] * 3, 9) < 1.5 * one
    assert MODEL.backlog_s([], 150) == 0


def test_a_window_reads_no_further():
    assert MODEL.add_chunk(NOTHING, 1000, 10).kv_tokens_read == 1010
    assert GROUPED.add_chunk(NOTHING, 1000, 10).kv_tokens_read == 1010 + 511 + 10


def test_the_prior_is_the_roofline_of_the_machine():
    """LLAMA of the telemetry cases at 1 GB/s and 100 GFLOP/s: 4 bytes and 2 FLOPs a weight."""
    spec = llama()
    prior = prior_of(spec, Description(device="cpu", ceilings=ceilings()), "float32")
    step_bytes = spec.step_weight_bytes("float32")
    assert prior.weights_s + prior.any_sampled_s == pytest.approx(step_bytes / 1e9)
    assert prior.token_s == pytest.approx(spec.flops(1, 0, 0) / 1e11)
    assert prior.attended_s == pytest.approx((spec.flops(1, 100) - spec.flops(1)) / 1e13)
    assert prior.read_s == pytest.approx(spec.kv_bytes_per_token("float32") / 1e9)
    unmeasured = prior_of(spec, Description(device="cuda:0"), "float32")
    assert 0 < unmeasured.weights_s < prior.weights_s


# ── in the engine ───────────────────────────────────────────────────────────────────────────


def run_load(engine: Engine, count: int = 20) -> list:
    """Requests of mixed lengths, arriving while others run; the records of all their steps."""
    draw, records = random.Random(6), []
    for number in range(1, count + 1):
        prompt = [draw.randrange(50) for _ in range(draw.randint(1, 400))]
        engine.add(Request(number, prompt, SamplingParams(max_tokens=draw.randint(1, 60))))
        for _ in range(draw.randint(1, 20)):
            if engine.has_work:
                records.append(engine.step()[1])
    while engine.has_work:
        records.append(engine.step()[1])
    return records


def test_the_engine_predicts_its_steps_before_it_runs_them():
    engine, _ = timed_engine()
    records = run_load(engine)
    worked = [record for record in records if record.num_tokens]
    assert all(record.predicted_s > 0 for record in worked) and len(worked) > 100
    off = sorted(abs(r.predicted_s / (r.duration_s + r.gap_s) - 1) for r in worked[60:])
    assert off[len(off) // 2] < 0.03 and off[len(off) * 95 // 100] < 0.15
    told = engine.cost.errors
    assert told is not None and told[0] < 0.05
    engine.cost.check_integrity()


def test_steps_that_say_nothing_teach_nothing():
    model, telling = StepModel(), step(execute_s=1.0)
    waited, empty = step(mask_wait_s=0.5, execute_s=1.0), step(num_tokens=0)
    for record in (waited, empty):
        model.observe(record)
        assert record.predicted_s == 0
    assert model.num_observed == 0 and model.errors is None
    model.observe(telling)
    assert model.num_observed == 1 and telling.predicted_s > 0


def test_a_failed_step_teaches_nothing():
    engine, _ = timed_engine(poison=13, poisoned_stage="submit")
    engine.add(Request(1, [13, 1, 2], SamplingParams(max_tokens=4)))
    while engine.has_work:
        assert engine.step()[1].predicted_s == 0
    assert engine.cost.num_observed == 0


def test_errors_are_those_of_the_last_steps():
    model = StepModel()
    for _ in range(ERROR_STEPS + 50):
        model.observe(step(execute_s=1.0))
    median, p95 = model.errors
    assert median == pytest.approx(0, abs=1e-3) and p95 == pytest.approx(0, abs=1e-3)


def test_calibration_is_bounded_and_helps_the_first_user():
    engine, executor = timed_engine()
    calibrate(engine, budget_s=2.0)
    assert executor.clock.now_s() < 2.5
    assert not engine.has_work and engine.num_requests == 0
    assert [pool.num_cached for pool in engine.kv.pools] == [0]
    engine.check_integrity()
    for size in (1, 100, 128):
        work = engine.cost.add_chunk(NOTHING, 0, size)
        took_s = executor.machine.seconds(work)
        assert engine.cost.seconds(work) == pytest.approx(took_s, rel=0.15)


def test_a_slow_machine_is_calibrated_no_longer():
    engine, executor = timed_engine(machine=Machine(weights_s=3.0))
    calibrate(engine, budget_s=1.0)
    assert executor.clock.now_s() < 8 and engine.cost.num_observed >= 1


def test_a_busy_start_raises_the_default_only_until_the_machine_is_quiet():
    """Five times as slow while others are on its cores: at the start, and at the end once more."""
    quiet = Machine(token_s=0.0015)
    busy = Machine(*(5 * seconds for seconds in quiet))
    engine, executor = timed_engine(machine=busy)
    calibrate(engine, budget_s=5.0)
    model, asked = telemetry(VirtualClock()), service_classes()["default"]
    model.on_ready(
        Ready(Description(device="fake", ceilings=ceilings()), alone=unloaded_times(engine))
    )
    raised = model.classes["default"]
    assert raised.slo.ttft_s > 3 and raised.slo.tpot_s > 0.24 and raised.ttft_per_token_s > 0.01
    for machine in (quiet, busy):
        executor.machine = machine
        run_load(engine)
        model.on_probe(messages.ProbeResult(ceilings(), unloaded_times(engine)))
        kept = model.classes["default"]
        assert (kept.slo, kept.ttft_per_token_s) == (asked.slo, asked.ttft_per_token_s)
        assert kept.why == f"{LIKE_INTERACTIVE}, which this machine can keep"


# ── what is told of it ──────────────────────────────────────────────────────────────────────


def test_the_error_is_in_metrics_and_stats():
    """20 steps that took 10 ms: 18 were predicted at 9, one at 8, one at 5."""
    clock = VirtualClock()
    model = telemetry(clock)
    model.on_step(step(100))
    for number, predicted_ms in enumerate([9] * 18 + [8, 5]):
        model.on_step(step(number, predicted_s=predicted_ms / 1000))
    found = model.window(10).steps.cost_error
    assert found.count == 20 and found.p50 == pytest.approx(0.1)
    text = model.render().decode()
    labels = 'headway:step_cost_error_ratio{engine="0",model_name="made-up",quantile='
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(labels))
    assert float(lines[labels + '"0.5"}']) == pytest.approx(0.1)
    assert float(lines[labels + '"0.95"}']) == pytest.approx(found.p95)
    assert 0.2 <= found.p95 <= 0.5


class Tiles(Machine):
    """A machine whose kernels compute rows by sixteens."""

    def seconds(self, work: Work) -> float:
        rows = -(-work.num_tokens // 16) * 16 if work.num_tokens > 8 else work.num_tokens
        return super().seconds(work._replace(num_tokens=rows))


def test_where_tokens_are_guessed_sampling_is_told_from_computing():
    """Of up to 32 rows of newcomers, each with work of its own beside, nobody can tell."""
    machine = Tiles(weights_s=0.008, token_s=4e-4, head_s=0.005, sampled_s=6e-5)
    engine, _ = timed_engine(machine=machine, new_s=3e-4, max_num_seqs=32, budget=300)
    engine.scheduler.drafts.speculator = AdaptiveSpeculator(
        SpeculationConfig(sources=("lookup",)), engine.cost
    )
    calibrate(engine, budget_s=2.0)
    calibrate_drafts(engine, budget_s=2.0)
    for rows in (64, 128, 256):
        work = Work(rows, rows, rows, rows)
        assert engine.cost.seconds(work) == pytest.approx(machine.seconds(work), rel=0.15), rows
    assert not engine.has_work and engine.num_requests == 0
    engine.check_integrity()
