"""What a step takes: the mean is found, the pace is kept, no part is negative."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.advise.simulate.truth import (
    CalibratedTruth,
    CalibrationFit,
    MeanStepTime,
    PaceReplay,
    RooflineTruth,
    SequentialMean,
    check_same,
    drift,
    others_in_steps,
    works_of,
)
from headway.core.errors import UsageError
from headway.perf.model import StepModel, Work
from headway.telemetry.calibration import MachineCalibration, StepColumns
from simulated_house import two_engines

STEP_S, TOKEN_S, READ_S = 0.004, 2e-4, 1e-8


def measured(count: int = 600, seed: int = 0, hiccup_s: float = 0.0) -> StepColumns:
    """Steps of a machine that is known: 4 ms and 0.2 ms a token, 5% of noise, now and then a
    stall."""
    rng = np.random.default_rng(seed)
    result = StepColumns()
    now_s = 0.0
    for _ in range(count):
        rows, chunk = int(rng.integers(1, 33)), int(rng.choice([0, 0, 64, 256]))
        tokens, read = rows + chunk, rows * int(rng.integers(50, 900))
        seconds = (STEP_S + TOKEN_S * tokens + READ_S * read) * rng.normal(1, 0.05)
        seconds += hiccup_s * (rng.random() < 0.02)
        now_s += seconds
        result.started_s.append(now_s)
        result.seconds.append(seconds)
        result.tokens.append(tokens)
        result.sampled.append(rows)
        result.attended.append(read)
        result.read.append(read)
    return result


def expected_s(work: Work) -> float:
    return STEP_S + TOKEN_S * work.num_tokens + READ_S * work.kv_tokens_read


def test_the_mean_is_found():
    """Within 5% of the formula behind the steps, at sizes that were seen."""
    fit = CalibrationFit(measured(), (0,))
    for work in (Work(1, 1, 400, 400), Work(20, 20, 9000, 9000), Work(276, 20, 9000, 9000)):
        assert fit.mean.seconds(work) == pytest.approx(expected_s(work), rel=0.05)


def test_the_belief_is_what_the_engine_had_learned():
    """Of a file with a snapshot; an older one has the steps alone."""
    model, work = StepModel(), Work(20, 20, 9000, 9000)
    for _ in range(300):
        model.learn(work, 2 * expected_s(work))
    belief = CalibrationFit(measured(), (0,), model=model.snapshot()).belief
    assert belief.seconds(work) == pytest.approx(model.seconds(work))
    fitted = CalibrationFit(measured(), (0,)).belief
    assert fitted.seconds(work) == pytest.approx(expected_s(work), rel=0.1)


@pytest.mark.parametrize("beside", [0.0, 0.3])
def test_what_engines_take_from_each_other_is_found(beside):
    """Some steps had another beside them, some not, some in part: the share is found, and the mean
    is of a step that has nobody beside it."""
    steps = two_engines(expected_s, beside)
    others = others_in_steps(steps)
    assert 0.2 < others.mean() < 0.9 and {*others.flat} == {0.0, 1.0}
    fit = CalibrationFit(steps, (0,))
    assert fit.interference == pytest.approx(beside, abs=0.03)
    for work in (Work(20, 20, 6000, 6000), Work(276, 20, 6000, 6000)):
        assert fit.mean.seconds(work) == pytest.approx(expected_s(work), rel=0.05)
    assert fit.observed_s.sum() == pytest.approx(fit.predicted_s.sum(), rel=0.02)


def test_one_engine_has_no_interference():
    assert (
        not others_in_steps(measured()).any() and CalibrationFit(measured(), (0,)).interference == 0
    )
    steps = measured(4)
    steps.engine = [0, 1, 0, 1]
    steps.started_s, steps.seconds = [0.0, 4.0, 10.0, 30.0], [10.0, 10.0, 10.0, 1.0]
    assert others_in_steps(steps).tolist() == [
        [0, 0, 1, 1, 1],  # at 1, 3, 5, 7 and 9 s; the second ran from 4 to 14 s
        [1, 1, 1, 1, 1],
        [1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0],
    ]


def test_a_row_of_many_may_take_more_than_one_of_few():
    """0.1 ms more for each row beyond 16, in steps of few rows and of 60: both are as measured, and
    a prompt of 150 tokens beside nobody takes what it took, not what it took beside 60 rows."""
    steps = StepColumns()
    rng = np.random.default_rng(1)
    for number in range(600):
        rows = int(rng.integers(1, 12)) if number < 400 else 60
        chunk = int(rng.choice([0, 60, 150, 300]))
        read = 300 * rows
        work = Work(rows + chunk, rows, read, read)
        seconds = expected_s(work) + 1e-4 * max(rows - 16, 0)
        for name, value in zip(
            ("started_s", "seconds", "tokens", "sampled", "attended", "read"),
            (0.05 * number, seconds * rng.normal(1, 0.03), *work),
            strict=True,
        ):
            getattr(steps, name).append(value)
    mean = CalibrationFit(steps, (0,)).mean
    for rows, chunk in ((1, 149), (4, 0), (10, 140), (60, 0), (60, 90)):
        work = Work(rows + chunk, rows, 300 * rows, 300 * rows)
        wanted_s = expected_s(work) + 1e-4 * max(rows - 16, 0)
        assert mean.seconds(work) == pytest.approx(wanted_s, rel=0.06), work


def test_the_worked_example_of_rows_beside_many():
    cost = StepModel(None, (0,))
    alone, beside = Work(24, 24, 0, 0), Work(25, 24, 0, 0)
    mean = MeanStepTime(cost, np.array([2e-5, 5e-5, 0.0, 0.0, 0.0, 1e-5]))
    assert mean.seconds(alone) - cost.seconds(alone) == pytest.approx(0.72e-3)
    assert mean.seconds(beside) - cost.seconds(beside) == pytest.approx(0.88e-3)


def test_the_worked_example_of_steps_behind_a_prompt():
    mean = MeanStepTime(StepModel(None, (0,)), np.zeros(6), np.array([4e-4, 1e-4]))
    prompt, decode = Work(100, 1, 0, 0), Work(1, 1, 0, 0)
    in_turn = SequentialMean(mean)
    plain_s = mean.seconds(decode)
    assert in_turn.seconds(decode) == plain_s
    in_turn.seconds(prompt)
    more_s = [in_turn.seconds(decode) - plain_s for _ in range(4)]
    assert more_s == pytest.approx([4e-4, 1e-4, 0.0, 0.0])
    assert in_turn.seconds(prompt) == mean.seconds(prompt)


@pytest.mark.parametrize("engines", [1, 2])
def test_what_a_step_behind_a_prompt_takes_longer_is_found(engines):
    """Of the engine that has computed the prompt, not of the one whose step comes next."""
    steps = measured(1200)
    steps.engine = [number % engines for number in range(len(steps))]
    works, since = works_of(steps), [9] * engines
    for number, work in enumerate(works):
        who = steps.engine[number]
        since[who] = 0 if work.num_tokens > work.num_sampled else since[who] + 1
        steps.seconds[number] += {1: 2e-3, 2: 5e-4}.get(since[who], 0.0)
    for number in range(1, len(steps)):  # one after the other: nobody runs beside
        steps.started_s[number] = steps.started_s[number - 1] + steps.seconds[number - 1]
    fit = CalibrationFit(steps, (0,))
    assert fit.mean.cold_s == pytest.approx([2e-3, 5e-4], abs=2.5e-4)
    plain = CalibrationFit(measured(1200), (0,)).mean
    assert max(plain.cold_s) < 2.5e-4
    for work in (Work(1, 1, 400, 400), Work(276, 20, 9000, 9000)):
        assert fit.mean.seconds(work) == pytest.approx(expected_s(work), rel=0.06)


def test_all_seconds_together_are_those_that_were_measured():
    """Stalls too, which a belief in the median step leaves out."""
    steps = measured(1500, hiccup_s=0.2)
    fit = CalibrationFit(steps, (0,))
    works = works_of(steps)
    total = sum(CalibratedTruth(fit, seed=1).seconds(work) for work in works * 4) / 4
    believed = sum(fit.belief.seconds(work) for work in works)
    assert believed < 0.9 * sum(steps.seconds)
    means = [
        sum(truth.seconds(work) for work in works)
        for truth in (CalibratedTruth(fit, seed=seed) for seed in range(8))
    ]
    assert np.mean([*means, total]) == pytest.approx(sum(steps.seconds), rel=0.08)


def test_a_stall_is_a_piece_of_time():
    """The worked example of the module: it hits one long step, or one of four short ones."""
    pace = PaceReplay(np.array([0.01] * 4), np.array([0.01, 0.01, 0.04, 0.01]), seed=0)
    pace._at, pace._index = 0.015, 1
    assert pace.take(0.02) == pytest.approx(0.05)
    pace._at, pace._index = 0.015, 1
    assert [pace.take(0.005) for _ in range(4)] == pytest.approx([0.005, 0.02, 0.02, 0.005])


def test_the_pace_goes_round_and_loses_nothing():
    predicted_s, observed_s = np.array([0.01, 0.03, 0.02]), np.array([0.02, 0.03, 0.04])
    pace = PaceReplay(predicted_s, observed_s, seed=3)
    pace._block_remaining_s = 1e9
    assert sum(pace.take(0.007) for _ in range(60)) == pytest.approx(0.42 * 0.09 / 0.06, rel=0.03)
    assert pace.take(0.6) == pytest.approx(0.9, rel=1e-6)


def test_one_seed_gives_one_pace():
    fit = CalibrationFit(measured(hiccup_s=0.1), (0,))
    work = Work(8, 8, 800, 800)
    first, again, other = (
        [truth.seconds(work) for _ in range(200)]
        for truth in (
            CalibratedTruth(fit, seed=4),
            CalibratedTruth(fit, seed=4),
            CalibratedTruth(fit, seed=5),
        )
    )
    assert first == again != other


def test_the_share_beyond_what_was_measured_is_told():
    fit = CalibrationFit(measured(), (0,))
    truth = CalibratedTruth(fit)
    for tokens in (10, 10, 10, 4000):
        truth.seconds(Work(tokens, 1, 100, 100))
    assert truth.reach.share == pytest.approx(0.25)


def test_a_machine_that_changes_says_so():
    steps = measured(400)
    steps.seconds[200:] = [2 * seconds for seconds in steps.seconds[200:]]
    assert CalibrationFit(steps, (0,)).half_drift > 0.5
    assert CalibrationFit(measured(400), (0,)).half_drift < 0.1
    assert drift(np.ones(100), np.ones(100)) == 0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**20), st.integers(3, 60), st.floats(1e-5, 10))
def test_no_prediction_is_negative_or_falls(seed: int, count: int, scale: float):
    steps = measured(count, seed)
    steps.seconds = [seconds * scale for seconds in steps.seconds]
    mean = CalibrationFit(steps, (0,)).mean
    mean.cost.check_integrity()
    curve = [mean.seconds(Work(tokens, 1, 10, 10)) for tokens in (1, 2, 5, 40, 500, 5000, 50_000)]
    assert curve[0] > 0 and curve == sorted(curve)


def test_a_roofline_is_the_longer_of_reading_and_computing():
    roof = RooflineTruth(0.01, 1e-6, 1e-4, 0.0, 0.0, 0.002, 0.001)
    assert roof.seconds(Work(1, 1, 0, 1000)) == pytest.approx(0.01 + 0.002 + 0.001 + 0.001)
    assert roof.seconds(Work(1000, 0, 0, 0)) == pytest.approx(0.1 + 0.001)


def calibration(**changes) -> MachineCalibration:
    from headway.core.plan import Description
    from headway.core.service import UnloadedTimes
    from headway.perf.frontend import HostCost

    fields = {
        "headway": "0",
        "model": "m",
        "fingerprint": "abc",
        "description": Description(device="cpu"),
        "settings": {"dtype": "float32", "threads": "1"},
        "max_model_len": 100,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 16,
        "group_blocks": [10],
        "vocab_size": 50,
        "alone": UnloadedTimes(),
        "steps": measured(60),
        "host": HostCost(),
    }
    return MachineCalibration(**{**fields, **changes})


def test_a_calibration_of_something_else_is_refused_by_name():
    told = {"dtype": "float32", "threads": "1"}
    check_same(calibration(), "abc", told)
    with pytest.raises(UsageError, match="another model: m"):
        check_same(calibration(), "abd", told)
    with pytest.raises(UsageError, match="threads 1; here it is 2"):
        check_same(calibration(), "abc", {**told, "threads": "2"})
