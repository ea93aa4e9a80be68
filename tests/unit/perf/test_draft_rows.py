"""What an engine that guesses learns of its machine at the start: each number of rows."""

from itertools import count

import pytest

from headway.config.speculation_config import SpeculationConfig
from headway.engine.calibration import calibrate, calibrate_drafts, run_prompts, verify_drafts
from headway.engine.speculation import AdaptiveSpeculator
from headway.perf.model import Work
from timed import Machine, timed_engine


class Stepped(Machine):
    """A machine whose kernels take 5, 6 and 7 rows as long as 8."""

    def seconds(self, work: Work) -> float:
        rows = 8 if 5 <= work.num_tokens < 8 else work.num_tokens
        return super().seconds(work._replace(num_tokens=rows))


def test_where_tokens_are_guessed_each_number_of_rows_is_known_at_the_start():
    """Its fifth row takes as long as four more: on a line from 4 to 8 it would seem to take one."""
    machine = Stepped(weights_s=0.008)
    engine, executor = timed_engine(machine=machine)
    engine.scheduler.drafts.speculator = AdaptiveSpeculator(
        SpeculationConfig(sources=("lookup",)), engine.cost
    )
    calibrate(engine, budget_s=2.0)
    begun_s = executor.clock.now_s()
    calibrate_drafts(engine, budget_s=2.0)
    assert executor.clock.now_s() - begun_s < 1.5
    for rows in range(1, 9):
        work = Work(rows, rows, rows, rows)
        assert engine.cost.seconds(work) == pytest.approx(machine.seconds(work), rel=0.06), rows
    assert isinstance(engine.scheduler.drafts.speculator, AdaptiveSpeculator)
    assert not engine.has_work
    engine.check_integrity()


class Growing(Machine):
    """A machine whose buffers grow: a step that is wider than all before takes twice as long."""

    def __init__(self, *given: object, **named: object) -> None:
        self.widest = [1]

    def seconds(self, work: Work) -> float:
        grows = work.num_tokens > max(self.widest)
        self.widest.append(work.num_tokens)
        return super().seconds(work) * (2 if grows else 1)


def test_the_first_of_the_widest_steps_is_not_learned_from():
    machine = Growing(weights_s=0.008)
    engine, _ = timed_engine(machine=machine)
    engine.scheduler.drafts.speculator = AdaptiveSpeculator(
        SpeculationConfig(sources=("lookup",)), engine.cost
    )
    with engine.kv.unlisted():
        run_prompts(engine, count(9000), 1, 1, 4)
        taught, done = engine.cost.num_observed, len(machine.widest)
        verify_drafts(engine, count(9100), 2.0)
    assert max(machine.widest) >= 8 and engine.recorder.cost is engine.cost
    assert engine.cost.num_observed - taught == len(machine.widest) - done - 1
    for rows in range(2, 9):
        work = Work(rows, rows, rows, rows)
        wanted_s = Machine.seconds(machine, work)
        assert engine.cost.seconds(work) == pytest.approx(wanted_s, rel=0.1), rows
