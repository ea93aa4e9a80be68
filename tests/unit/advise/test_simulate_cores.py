"""Who shares the cores of one machine: worked numbers, and a calibration without the others."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fakes import make_settings
from headway.advise.simulate.cores import SharedCores
from headway.advise.simulate.front import NO_FRONT, FrontendTimes
from headway.advise.simulate.loop import Clients, World
from headway.advise.simulate.machine import SimulatedMachine, build_machine
from headway.advise.simulate.own_time import BusyIntervals, engines_in_step, own_seconds
from headway.advise.simulate.replica import SimulatedReplica
from headway.bench.prompts import IdWriter
from headway.cli.common import model_folder
from headway.config.options import EngineOptions, SimulateOptions
from headway.core.service import service_classes
from headway.perf.model import Work
from headway.planning import plan_settings
from headway.telemetry.calibration import MachineCalibration, StepColumns
from headway.telemetry.traffic import Origin, TrafficRequest
from simulated_house import (
    Formula,
    measured,
    measured_here,
    poisson,
    served,
    talks,
    two_engines,
    world,
)

TWO = replace(NO_FRONT, num_cores=2)
BOTH = replace(TWO, token_cpu_s=1e-3, client_cpu_s=1e-3)
"""A millisecond of the server and one of the client for each token."""


# ── one machine ─────────────────────────────────────────────────────────────────────────────


def test_a_step_beside_chunks_that_are_written_and_read():
    """Two cores: 2 ms to write and 2 ms to read are done after 3 ms, 2 of the 8 of the step too."""
    cores = SharedCores(BOTH, threads=1)
    cores.begin(0, 0.0, 1e-3)
    cores.read_s(0.0, 2)
    assert (cores.server.free_s, cores.client.free_s) == pytest.approx((3e-3, 3e-3))
    assert cores.begin(0, 0.0, 8e-3) == pytest.approx(9e-3)
    assert cores.ends_s(0, 9e-3) == pytest.approx(9e-3)


def test_two_engines_have_a_core_each_while_nobody_else_computes():
    cores = SharedCores(BOTH, threads=1, engines=2)
    assert cores.begin(0, 0.0, 8e-3) == cores.begin(1, 0.0, 8e-3) == pytest.approx(8e-3)


def test_two_engines_a_server_and_a_client_have_half_a_core_each():
    """2 ms to write and 2 to read take 4; what is then left of 8 ms, 6, has a core of its own."""
    cores = SharedCores(BOTH, threads=1, engines=2)
    cores.begin(0, 0.0, 8e-3)
    cores.begin(1, 0.0, 8e-3)
    cores.read_s(0.0, 2)
    assert cores.server.free_s == pytest.approx(4e-3)
    assert cores.ends_s(0, 1e-3) == pytest.approx(10e-3)
    assert cores.ends_s(1, 5e-3) == pytest.approx(10e-3)
    assert cores.ends_s(1, 10e-3) == 10e-3, "over"


def test_a_step_that_began_before_the_chunks_came_ends_later_too():
    """5 of 8 ms are done when they come; of the last 3, 2 are done in 3 ms, 1 in one more."""
    cores = SharedCores(BOTH, threads=1)
    assert cores.begin(0, 0.0, 8e-3) == pytest.approx(8e-3)
    cores.read_s(5e-3, 2)
    assert cores.ends_s(0, 8e-3) == pytest.approx(9e-3)


def test_an_engine_that_rests_leaves_its_core_to_the_other():
    """Two of two threads on two cores: half as fast for 4 ms, then alone."""
    cores = SharedCores(TWO, threads=2, engines=2)
    cores.begin(0, 0.0, 8e-3)
    assert cores.begin(1, 0.0, 8e-3) == pytest.approx(16e-3)
    cores.end(0, 4e-3)
    assert cores.ends_s(1, 4e-3) == pytest.approx(10e-3)


def test_engines_slow_each_other_with_cores_enough():
    """A quarter: 4 of the 8 ms are done when the other begins, 4 more take 5; of its 8 it has done
    4 by then, and has the rest alone."""
    for num_cores in (0, 4):
        front = replace(NO_FRONT, num_cores=num_cores, interference=0.25)
        cores = SharedCores(front, threads=1, engines=2)
        assert cores.are_shared and not cores.are_scarce
        assert cores.begin(0, 0.0, 8e-3) == pytest.approx(8e-3)
        assert cores.begin(1, 4e-3, 8e-3) == pytest.approx(14e-3)
        assert cores.ends_s(0, 8e-3) == pytest.approx(9e-3)
        cores.end(0, 9e-3)
        assert cores.ends_s(1, 9e-3) == pytest.approx(13e-3)
    assert not SharedCores(front, threads=1).are_shared, "one engine has nobody beside it"


def test_engines_slow_each_other_and_share_cores():
    """Three on two cores are two thirds as fast, and each takes 1.5 times as long besides."""
    cores = SharedCores(replace(TWO, interference=0.25), threads=1, engines=3)
    cores.begin(0, 0.0, 4e-3)
    cores.begin(1, 0.0, 4e-3)
    assert cores.begin(2, 0.0, 4e-3) == pytest.approx(4e-3 * 1.5 * 1.5)


def test_where_nobody_computes_beside_the_engine_nothing_waits():
    """Then nothing is kept of who waits for whom, and all is read as if it were."""
    plain, shared = (
        SharedCores(FrontendTimes(), threads=1, engines=2),
        SharedCores(FrontendTimes(), threads=1, engines=2),
    )
    assert not plain.can_delay and SharedCores(BOTH, threads=1).can_delay
    shared.can_delay = True
    rng, now_s = np.random.default_rng(1), 0.0
    for _ in range(200):
        now_s += float(rng.exponential(0.001))
        count = int(rng.integers(0, 4))
        assert plain.read_s(now_s, count) == shared.read_s(now_s, count)
        assert plain.receive_time_s(now_s) == shared.receive_time_s(now_s) == now_s


def test_only_what_computes_takes_a_core():
    """The server alone has its core beside one engine; a queue of it still makes others wait."""
    cores = SharedCores(replace(BOTH, client_cpu_s=0.0), threads=1)
    assert not cores.are_scarce
    assert cores.begin(0, 0.0, 8e-3) == 8e-3
    assert cores.read_s(0.0, 3) == pytest.approx([0.0, 1e-3, 2e-3])
    assert cores.receive_time_s(1e-3) == pytest.approx(3e-3)


@pytest.mark.parametrize(
    ("cores", "threads", "engines", "client", "slower"),
    [
        (2, 1, 1, 1e-4, 1.5),  # three want two cores
        (2, 1, 1, 0.0, 1.0),  # nobody beside it but the engine
        (2, 2, 1, 1e-4, 2.0),  # two threads, server and client
        (2, 1, 2, 1e-4, 2.0),  # two engines, server and client
        (3, 1, 1, 1e-4, 1.0),
        (0, 1, 1, 1e-4, 1.0),  # nobody told
    ],
)
def test_cores_are_shared_evenly(cores, threads, engines, client, slower):
    made = SharedCores(replace(TWO, client_cpu_s=client, num_cores=cores), threads, engines)
    for number in range(engines):
        made.begin(number, 0.0, 1.0)
    assert made.slowdown() == slower


def test_server_and_client_are_not_slowed_by_an_engine_that_rests():
    made = SharedCores(BOTH, threads=1)
    assert made.slowdown() == 1.0
    made.begin(0, 0.0, 1.0)
    assert made.slowdown() == 1.5


def test_a_client_sends_when_it_has_read():
    made = SharedCores(replace(BOTH, client_request_cpu_s=2e-3), threads=1)
    made.read_s(0.0, 4)
    assert made.send_time_s(1e-3) == pytest.approx(4e-3)
    assert made.send_time_s(2e-3) == pytest.approx(6e-3)


# ── servers ─────────────────────────────────────────────────────────────────────────────────


def tpots(result) -> float:
    return float(np.mean([(x.chunk_s[-1] - x.chunk_s[0]) / (len(x.chunk_s) - 1) for x in result]))


def test_at_a_front_that_is_half_busy_newcomers_wait_as_in_a_queue():
    """5 ms a request, 100 a second: half busy, so in the mean they wait ρs / 2(1 − ρ) = 2.5 ms."""
    cores = SharedCores(replace(TWO, request_cpu_s=5e-3), threads=1)
    waits = [cores.receive_time_s(at_s) - at_s for at_s in poisson(100, 20_000, seed=3)]
    assert np.mean(waits) == pytest.approx(2.5e-3, rel=0.05)


def test_two_engines_on_two_cores_take_as_long_as_their_work():
    """20 ms a step alone, 16 rows; 0.3 ms of the server and 0.3 of the client for each token take
    9.6 ms of the 2 x 20 that two cores have: two engines have 30.4 of them, 0.76 each."""
    front = replace(TWO, token_cpu_s=3e-4, client_cpu_s=3e-4)
    rows = talks([0.0] * 16, answer=200)
    one = world(Formula(0.02), served(max_num_seqs=8), front=TWO).run(rows[:8])
    two = world(Formula(0.02), served(max_num_seqs=8), replicas=2, front=front).run(rows)
    assert tpots(one) == pytest.approx(0.02, rel=0.01)
    assert tpots(two) == pytest.approx(0.02 + 16 * 6e-4 / 2, rel=0.05)


def test_nothing_is_lost_and_nothing_is_won():
    """Whatever comes: all computed in a run fits its cores, and they idle only if nobody wants."""
    front = replace(TWO, token_cpu_s=2e-4, client_cpu_s=2e-4)
    made = world(Formula(2e-3, 1e-4), served(max_num_seqs=8), replicas=2, front=front)
    result = made.run(talks([0.0] * 64, prompt=40, answer=50))
    span_s = max(x.ended_s for x in result)
    engines_s = sum(replica.busy_s for replica in made.replicas)
    others_s = 64 * 50 * 4e-4
    assert engines_s + others_s <= 2 * span_s * 1.001
    assert engines_s + others_s >= 2 * span_s * 0.93


def test_servers_on_machines_of_their_own_share_nothing():
    front = replace(TWO, token_cpu_s=3e-4, request_cpu_s=1e-3)
    spans = []
    for count in (1, 2):
        made = [SimulatedReplica(served(max_num_seqs=8), Formula(2e-3)) for _ in range(count)]
        servers = World(made, front, IdWriter(0), Clients(), seed=1, apart=True)
        result = servers.run(talks([0.0] * 8 * count, answer=100))
        spans.append(max(x.ended_s for x in result))
    assert spans[1] == pytest.approx(spans[0], rel=0.02)


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_token_comes_once_in_order_on_cores_that_are_scarce(replicas: int):
    front = replace(TWO, token_cpu_s=3e-4, step_cpu_s=1e-4, request_cpu_s=2e-3,
                    client_cpu_s=2e-4, client_request_cpu_s=1e-3)  # fmt: skip
    made = world(Formula(2e-3), served(policy="slo"), replicas=replicas, front=front)
    result = made.run(talks(poisson(60, 150), prompt=40, answer=15))
    assert all(x.output_tokens == 15 and list(x.chunk_s) == sorted(x.chunk_s) for x in result)
    assert all(x.chunk_s[0] >= x.sent_s >= x.scheduled_s for x in result)
    made.door.admission.check_integrity()
    for replica in made.replicas:
        replica.engine.check_integrity()


def test_clients_on_other_machines_take_nothing_here():
    front = FrontendTimes(client_cpu_s=1e-4, client_request_cpu_s=1e-3, client_step_cpu_s=1e-5)
    assert front.has_client and not front.without_client().has_client
    assert replace(front, client_cpu_s=0.0, client_request_cpu_s=0.0).has_client


# ── a calibration without the others ────────────────────────────────────────────────────────


def calibration(steps: StepColumns, **more):
    return msgspec.structs.replace(measured(make_settings()), steps=steps, **more)


def columns(began: list[float], took: list[float], rows: list[int]) -> StepColumns:
    return StepColumns(
        started_s=began, seconds=took, tokens=rows, sampled=rows, attended=rows, read=rows
    )


def test_a_calibration_of_two_engines_tells_what_they_take_from_each_other(tmp_path):
    """Of one engine's nothing is known, and the simulation says so."""

    def result(made: MachineCalibration) -> SimulatedMachine:
        path = tmp_path / "here.json"
        path.write_bytes(msgspec.json.encode(made))
        simulate_options = SimulateOptions(calibration=str(path), replicas=2)
        return build_machine(model_folder(None), simulate_options, EngineOptions())

    one = measured_here(EngineOptions())
    alone = result(one)
    assert alone.front.interference == 0 and any(
        "One engine was calibrated" in n for n in alone.notes
    )
    spec, settings, _, _ = plan_settings(model_folder(None), EngineOptions())
    steps = two_engines(lambda work: 0.02 + 5e-5 * work.num_tokens, interference=0.3)
    origin = Origin(spec=spec, settings=settings, classes=service_classes(), replicas=2)
    both = result(msgspec.structs.replace(one, steps=steps, origin=origin))
    assert both.front.interference == pytest.approx(0.3, abs=0.03) and not both.notes
    assert both.fit.mean.seconds(Work(20, 20, 6000, 6000)) == pytest.approx(0.021, rel=0.05)


def test_what_others_took_of_a_step_is_taken_out():
    """The second took 9 ms; in its first 3 the two tokens of the first were written and read."""
    steps = columns([0.0, 4e-3, 1.0], [4e-3, 9e-3, 9e-3], [2, 2, 2])
    result = own_seconds(calibration(steps), BOTH, threads=1)
    assert result == pytest.approx([4e-3, 8e-3, 9e-3])


def test_requests_compute_too():
    """One comes 1 ms after the step began: 2 ms of the server, 2 of the client, 3 on the clock."""
    steps = columns([10.0], [9e-3], [1])
    front = replace(TWO, request_cpu_s=2e-3, client_request_cpu_s=2e-3)
    made = calibration(steps, traffic=[TrafficRequest(0.0, 5, 0, 1)], traffic_from_s=10.001)
    assert own_seconds(made, front, threads=1) == pytest.approx([8e-3])


def test_engines_of_the_same_server_are_taken_out_too():
    """Two engines of two threads in a step at once, on two cores: half of the time was theirs."""
    steps = columns([0.0, 0.0, 1.0], [8e-3, 8e-3, 8e-3], [1, 1, 1])
    assert own_seconds(calibration(steps), TWO, threads=2, engines=2) == pytest.approx(
        [4e-3, 4e-3, 8e-3]
    )
    assert list(engines_in_step(np.array([0.0, 1.0, 5.0]), np.array([3.0, 2.0, 6.0]))) == [2, 2, 1]


def test_where_there_are_cores_for_all_steps_are_as_they_were_measured():
    steps = columns([0.0, 4e-3], [4e-3, 9e-3], [2, 2])
    for front in (replace(BOTH, num_cores=3), replace(BOTH, num_cores=0), TWO):
        assert list(own_seconds(calibration(steps), front, threads=1)) == [4e-3, 9e-3]


def test_a_simulation_of_stripped_steps_takes_what_was_measured():
    """Stripped and simulated by the same load, steps take what they took: the mean of a run."""
    front = replace(TWO, token_cpu_s=2e-4, client_cpu_s=2e-4, step_cpu_s=1e-4)
    made = world(Formula(2e-3, 2e-4), served(max_num_seqs=16), front=front)
    began, took, rows = [], [], []
    begin, ended = made._step, made._finish_step

    def beginning(replica, now_s):
        before = replica.num_steps
        begin(replica, now_s)
        if replica.num_steps > before:
            began.append(now_s)

    def ending(replica, stepped):
        took.append(stepped.ends_s - began[len(took)])
        rows.append(len(stepped.updates))
        ended(replica, stepped)

    made._step, made._finish_step = beginning, ending
    made.run(talks([0.0] * 48, prompt=8, answer=40))
    steps = columns(began, took, rows)
    result = own_seconds(calibration(steps), front, threads=1)
    assert sum(result) == pytest.approx(made.replicas[0].busy_s, rel=0.02)
    assert sum(took) > 1.1 * sum(result)


def test_times_in_which_somebody_computed():
    """From 1 to 3 and from 5 to 6: before 2 there is 1 s of it, before 5.5 there are 2.5."""
    times = BusyIntervals(np.array([1.0, 5.0]), np.array([3.0, 6.0]))
    assert list(times.before(np.array([0.5, 2.0, 4.0, 5.5, 9.0]))) == [0.0, 1.0, 2.0, 2.5, 3.0]
    other = BusyIntervals(np.array([2.0]), np.array([5.5]))
    both = times.and_also(other)
    assert (list(both.from_s), list(both.until_s)) == ([2.0, 5.0], [3.0, 5.5])
    nobody = BusyIntervals(np.empty(0), np.empty(0))
    assert list(nobody.before(np.array([1.0]))) == [0.0]
    assert len(times.and_also(nobody).from_s) == 0
