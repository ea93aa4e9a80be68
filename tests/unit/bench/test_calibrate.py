"""Calibration files: what the server tells, read again, and refused where something is wrong."""

import json
from pathlib import Path

import msgspec
import pytest

from fakes import make_settings
from headway.bench.calibrate import (
    client_costs,
    door_seconds,
    is_local,
    open_calibration,
    quiet_door_seconds,
)
from headway.bench.prompts import GeneratedPiece, IdPiece, IdWriter, TextPiece
from headway.cli.common import model_folder
from headway.core.clock import VirtualClock
from headway.core.errors import UsageError
from headway.core.plan import Description
from headway.core.records import StepRecord
from headway.engine.messages import Ready
from headway.measure.record import ClientCost, Exchange, LoadRecord, RecordedRun, ServerRecord
from headway.perf.filter import NUM_PARTS
from headway.perf.frontend import fit_line, host_cost
from headway.perf.model import StepModel
from headway.spec import read_model_spec
from headway.telemetry.calibration import MachineCalibration, acceptance, take_calibration
from headway.telemetry.live import Telemetry


def step(number: int, started_s: float, seconds: float, **more) -> StepRecord:
    fields = {"num_tokens": 4, "num_sampled": 4, "attended_tokens": 40, "kv_tokens_read": [40]}
    return StepRecord(
        number, started_s, 4, 0, kv_blocks_used=1, kv_usage=0.1, num_preemptions=0,
        execute_s=seconds, **{**fields, **more},
    )  # fmt: skip


def telemetry() -> tuple[Telemetry, VirtualClock]:
    clock = VirtualClock(100.0)
    made = Telemetry(["tiny"], read_model_spec(model_folder(None)), clock=clock, version="1.2")
    settings = make_settings()
    made.on_ready(
        Ready(
            max_model_len=settings.max_model_len,
            max_num_seqs=4,
            vocab_size=50,
            num_blocks=64,
            block_size=4,
            description=Description(device="cpu"),
            group_blocks=[64],
            settings=settings.to_stats(),
        )
    )
    return made, clock


def test_an_engine_that_loads_tells_nothing():
    assert take_calibration(Telemetry(["m"], read_model_spec(model_folder(None)))) is None


def test_steps_that_waited_for_somebody_are_left_out():
    made, _ = telemetry()
    made.on_step(step(0, 1.0, 0.01))
    made.on_step(step(1, 1.1, 0.02, gap_s=0.003, draft_s=0.001))
    made.on_step(step(2, 1.2, 0.5, mask_wait_s=0.4))
    made.on_step(step(3, 1.8, 0.5, transfer_s=0.4))
    made.on_step(step(4, 2.4, 0.01, num_tokens=0))
    result = take_calibration(made)
    assert result.steps.seconds == pytest.approx([0.01, 0.022])
    assert result.steps.read == [40, 40]
    assert take_calibration(made, since_s=1.05).steps.seconds == pytest.approx([0.022])


def test_the_file_has_what_the_engines_model_had_learned():
    made, _ = telemetry()
    assert take_calibration(made).step_model is None
    learned = StepModel().snapshot()
    made.on_step(step(0, 1.0, 0.01, model=learned))
    made.on_step(step(1, 1.1, 0.01))
    result = take_calibration(made)
    assert result.step_model == learned
    read = msgspec.json.decode(msgspec.json.encode(result), type=MachineCalibration)
    assert read.step_model == learned and read.model == "tiny"


def test_who_ran_each_step_is_told_where_there_are_several_engines():
    made, _ = telemetry()
    made.on_step(step(0, 1.0, 0.01))
    assert take_calibration(made).steps.engine == []
    made.on_step(step(0, 1.001, 0.02, engine=1))
    assert take_calibration(made).steps.engine == [0, 1]


def test_the_way_in_is_read_off_requests_that_found_nobody():
    """One arrives at 10.000 at an idle engine, whose step begins at 10.003 and ends at 10.013;
    its token leaves at 10.014."""
    made, clock = telemetry()
    clock.advance_to(10.0)
    timeline = made.begin("a", arrived_s=110.0, num_prompt=100, num_choices=1)
    made.on_step(step(0, 110.003, 0.010, idle_s=5.0))
    clock.advance_to(110.014)
    timeline.on_scheduled(110.003, 0)
    timeline.add_tokens(0, 1)
    timeline.complete()
    host = host_cost(list(made.steps), list(made.finished))
    assert (host.in_s, host.out_s) == (pytest.approx(0.003), pytest.approx(0.001))
    assert host.quiet == [(110.0, pytest.approx(0.014))]


def test_who_waits_for_others_says_nothing_of_the_way_out():
    """One finds nobody and its token leaves after 1 ms; three come while a step runs, 9 ms each."""
    made, clock = telemetry()
    clock.advance_to(110.0)
    first = made.begin("a", arrived_s=110.0, num_prompt=8, num_choices=1)
    late = [made.begin(f"b{n}", arrived_s=110.008, num_prompt=8, num_choices=1) for n in range(3)]
    made.on_step(step(0, 110.003, 0.010, idle_s=5.0))
    made.on_step(step(1, 110.013, 0.010))
    for timelines, scheduled_s, remaining_s in (
        ([first], 110.003, 110.014),
        (late, 110.013, 110.032),
    ):
        clock.advance_to(remaining_s)
        for timeline in timelines:
            timeline.on_scheduled(scheduled_s, 0)
            timeline.add_tokens(0, 1)
            timeline.complete()
    steps, finished = list(made.steps), list(made.finished)
    result = host_cost(steps, finished)
    assert result.out_s == pytest.approx(0.001) and len(result.quiet) == 1
    crowded = host_cost(steps, [each for each in finished if each.arrived_s > 110.001])
    assert (crowded.in_s, crowded.quiet) == (None, [])
    assert crowded.out_s == pytest.approx(0.009), "better than nothing"


def test_longer_prompts_take_longer_to_come_in():
    seconds, more = fit_line([(100, 0.002)] * 5 + [(1100, 0.003)] * 5)
    assert seconds == pytest.approx(0.0019) and more == pytest.approx(1e-6)
    assert fit_line([]) == (None, 0.0)


def test_acceptance_by_position():
    """Of two guesses of 3 one had 1 right and one all: 2 of 2, 1 of 2, 1 of 1."""
    record = step(0, 0, 0.1, verified=[("lookup", 3, 1), ("lookup", 3, 3)])
    assert acceptance([record]) == {"lookup": [1.0, 0.5, 1.0]}


def exchange(scheduled_s: float, sent_s: float, chunk_s: list[float], tokens=None) -> Exchange:
    tokens = tokens or [1] * len(chunk_s)
    return Exchange(
        id=0, scheduled_s=scheduled_s, sent_s=sent_s, asked_prompt_tokens=5,
        asked_output_tokens=sum(tokens), chunk_s=chunk_s, chunk_tokens=tokens,
        output_tokens=sum(tokens), ended_s=chunk_s[-1],
    )  # fmt: skip


def run_of(exchanges: list[Exchange], *, started_s=0.0, counters=None, cost=None) -> RecordedRun:
    return RecordedRun(
        started_at=0,
        started_s=started_s,
        load=LoadRecord(
            loop="open", arrivals="p", workload="w", seed=0, span_s=1, from_s=0, to_s=1
        ),
        server=ServerRecord(url="", model="", endpoint="", counters=counters or {}),
        client=cost or ClientCost(cpu_s=0, wall_s=1),
        exchanges=exchanges,
    )


def test_the_door_is_what_the_client_sees_beyond_the_server():
    counters = {
        "time_to_first_token_seconds_sum": 0.25,
        "time_to_first_token_seconds_count": 1.0,
    }
    run = run_of([exchange(1.0, 1.1, [1.4])], counters=counters)
    assert door_seconds(run) == pytest.approx(0.05)


def test_the_door_is_read_off_requests_that_found_nobody():
    """Sent at 1.0, 2.0, …, read 13 ms later; there 1 ms later with a TTFT of 10 ms: 3 ms. Another,
    sent at 1.5, waited 80 ms at the door, and is not one of them."""
    sent = [1.0 + n for n in range(6)]
    result = [exchange(at_s - 0.1, at_s, [at_s + 0.013]) for at_s in sent]
    run = run_of([exchange(1.5, 1.5, [1.6]), *result], started_s=100.0)
    quiet = [(100.001 + at_s, 0.010) for at_s in sent]
    assert quiet_door_seconds(run, quiet) == pytest.approx(0.003)
    assert quiet_door_seconds(run, quiet[:4]) is None, "too few"
    elsewhere = [(at_s + 500.0, ttft_s) for at_s, ttft_s in quiet]
    assert quiet_door_seconds(run, elsewhere) is None, "another clock"


def test_what_the_load_generator_took_for_each_is_found():
    """2 ms a request, 0.1 ms a moment in which tokens came, 0.05 ms a token, and 10 ms a second."""
    exchanges, spent, total = [], [], 0.0
    for second in range(20):
        sent = 1 + second % 5
        bursts, rows = 10 + 7 * second, 1 + second % 4
        times = [second + 0.001 + n / 200 for n in range(bursts)]
        for n in range(sent):
            mine = [rows] * bursts if not n else [1]
            at = times if not n else times[:1]
            exchanges.append(exchange(second, second + 0.0005, list(at), mine))
        tokens = rows * bursts + sent - 1
        total += 0.01 + 2e-3 * sent + 1e-4 * bursts + 5e-5 * tokens
        spent.append((second + 1.0, total))
    run = run_of(exchanges, cost=ClientCost(cpu_s=total, wall_s=20, spent_s=spent))
    assert client_costs(run) == pytest.approx((2e-3, 1e-4, 5e-5), rel=0.01)


def test_of_a_short_run_all_that_the_load_generator_took_is_its_tokens():
    """3 s for 1,000 tokens of two answers: 3 ms each."""
    run = run_of([exchange(0.0, 0.0, [1.0], [500])] * 2, cost=ClientCost(cpu_s=3.0, wall_s=10))
    assert client_costs(run) == (0.0, 0.0, 3e-3)
    assert client_costs(run_of([])) == (0.0, 0.0, 0.0), "nobody was answered"


@pytest.mark.parametrize(
    ("url", "near"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("localhost:8000", True),
        ("http://[::1]:80", True),
        ("https://api.example.com", False),
        ("http://10.0.0.7:8000", False),
    ],
)
def test_a_load_generator_counts_where_it_shares_the_machine(url: str, near: bool):
    assert is_local(url) == near


def saved(path: Path, **changes) -> str:
    made, _ = telemetry()
    for number in range(60):
        made.on_step(step(number, 1.0 + number / 10, 0.01))
    content = json.loads(msgspec.json.encode(take_calibration(made)))
    for name, value in changes.items():
        place = content["steps"] if name in content["steps"] else content
        place[name] = value
    path.write_text(json.dumps(content))
    return str(path)


def test_a_calibration_is_read_again(tmp_path: Path):
    result = open_calibration(saved(tmp_path / "c.json"))
    assert result.model == "tiny" and len(result.steps) == 60 and result.headway == "1.2"
    assert result.version == 2
    assert open_calibration(saved(tmp_path / "old.json", version=1)).version == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "headway-bench"}, "is headway-bench"),
        ({"version": 9}, "version 9; headway-calibration of versions 1 to 2"),
        ({"seconds": [0.01]}, "differ in length"),
        ({"engine": [1]}, "differ in length"),
        ({"seconds": [-0.01] * 60}, "takes no time"),
        ({"tokens": [-1] * 60}, "negative count"),
        ({"steps": 7}, "is no calibration"),
        ({"step_model": [1, [0.01], [0]]}, "has 1 parts"),
        ({"step_model": [1, [-0.01] * NUM_PARTS, [0]]}, "takes no time, or more"),
        ({"step_model": [1, [1e308] * NUM_PARTS, [0]]}, "takes no time, or more"),
        ({"step_model": [1, ["slow"], [0]]}, "is no calibration"),
    ],
)
def test_a_file_that_is_wrong_is_refused(tmp_path: Path, changes, message):
    with pytest.raises(UsageError, match=message):
        open_calibration(saved(tmp_path / "c.json", **changes))


def test_a_file_that_was_cut_off_is_refused(tmp_path: Path):
    path = Path(saved(tmp_path / "c.json"))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match="is no calibration"):
        open_calibration(str(path))
    with pytest.raises(UsageError, match="No such file"):
        open_calibration(str(tmp_path / "none.json"))


def test_prompts_as_ids_are_those_that_a_server_is_sent():
    writer = IdWriter(3, 400)
    prompt = (GeneratedPiece("a", 20), IdPiece((5, 700, 3)), GeneratedPiece("b", 4))
    assert writer.ids(prompt) == json.loads(writer.json(prompt))


def test_text_becomes_ids_that_share_what_it_shares():
    writer = IdWriter(0)
    a, b = "You are a helpful assistant. What is 2?", "You are a helpful assistant. Who are you?"
    first, second = writer.ids((TextPiece(a),)), writer.ids((TextPiece(b),))
    shared = next(i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y)
    assert len(first) == TextPiece(a).tokens and 6 <= shared <= 8
