"""What a question of `--retune` is answered: simulated on the traffic of late."""

import io
from dataclasses import replace

import numpy as np
import pytest

from fakes import make_settings
from headway.advise.retune import trial
from headway.advise.retune.__main__ import main
from headway.advise.retune.candidates import LADDERS, candidates, finer
from headway.advise.retune.gain import gained, loser
from headway.advise.retune.question import (
    LENGTH_BYTES,
    Begun,
    Question,
    decode_answer,
    decode_question,
    encoded,
)
from headway.advise.retune.replay import Seen
from headway.advise.retune.trial import Trial, answer
from headway.core.errors import UsageError
from headway.core.live_settings import LIVE
from headway.core.service import service_classes
from headway.telemetry.calibration import Calibration
from headway.telemetry.traffic import Followed, Origin, Stretch
from simulated_house import SPEC, measured, poisson

RATE = 14.0
"""Four rows answer some ten requests a second, and fewer where they come in bursts."""
SHAPE = {"num_blocks": (1251,), "block_size": 16, "budget": 512, "max_model_len": 2048}


def shape(rows=32, policy="slo", **how):
    return make_settings(**{**SHAPE, "max_num_seqs": rows, "policy": policy, **how})


@pytest.fixture(autouse=True)
def little(monkeypatch):
    """A part of the traffic that a server would simulate."""
    monkeypatch.setattr(trial, "PROPOSE_CPU_S", 2.0)


def told(settings, slo="ttft=500ms,tpot=50ms") -> Calibration:
    """What a server tells of its steps: 20 ms each."""
    origin = Origin(spec=SPEC, settings=settings, classes=service_classes([slo]))
    return measured(settings, origin=origin)


def question(settings, started=None, *, rate=RATE, count=100, **how) -> Question:
    """Of prompts of 200 tokens and answers of 20, to a server that had nothing to do before."""
    requests = [Followed(float(t), 200, 0, 20) for t in poisson(rate, count)]
    return Question(
        kind="propose",
        calibration=told(settings, **how),
        stretch=Stretch(requests=requests),
        started=started or settings,
    )


def test_too_few_rows_are_raised_to_no_more_than_it_started_with():
    found = answer(question(shape(4), shape(32)))
    assert list(found.changes) == ["max_num_seqs"] and 4 < found.changes["max_num_seqs"] <= 32
    assert found.gain > 0.1 and 0 < found.gain_interval[0] < found.gain < found.gain_interval[1]
    assert found.then > found.now and found.num_simulated > 10 and found.cpu_s > 0


def test_what_was_rolled_back_is_left_alone():
    asked = question(shape(4), shape(32))
    first = answer(asked)
    asked.left_alone = [first.changes]
    assert answer(asked).changes != first.changes


def test_where_nothing_is_better_nothing_is_proposed():
    """An objective that nobody can meet, and one that everybody does."""
    for slo in ("ttft=1ms,tpot=1ms", "ttft=100s,tpot=10s"):
        found = answer(question(shape(8), rate=2.0, count=60, slo=slo))
        assert found.changes == {} and "is better" in found.why


def test_too_little_is_said_not_raised():
    asked = question(shape(4), shape(32))
    asked.stretch.requests = asked.stretch.requests[:5]
    found = answer(asked)
    assert found.changes == {} and "needs" in found.why


def test_a_change_is_judged_on_the_traffic_since():
    """In force are four rows; with the 32 of before more would be in their objectives."""
    asked = question(shape(4), shape(32))
    asked.kind, asked.changes = "judge", {"max_num_seqs": 32}
    found = answer(asked)
    own = answer(question(shape(4), shape(4))).now
    assert found.then > own + 0.1 and found.changes == {"max_num_seqs": 32}
    assert found.num_simulated == 1


def test_a_change_is_judged_from_the_state_before_it():
    """With 300 that wait from before, behind whom newcomers queue as best effort, it is worse than
    from an empty server."""
    asked = question(shape(4), shape(32))
    asked.kind, asked.changes = "judge", {"max_num_seqs": 32}
    empty = answer(asked).then
    asked.begun = [Begun(1.0, False, 200, 0, 20) for _ in range(300)]
    assert answer(asked).then < empty - 0.1


def test_as_much_of_the_traffic_as_the_cpu_allows():
    one = Trial.of(question(shape(4), shape(32), count=200))
    whole, part = one.shortened(1e9), one.shortened(5 * one.second_cpu_s())
    assert whole.from_s == one.first_s and part.seconds == pytest.approx(5.0)
    assert 5.0 - part.counted_s(1.0) == pytest.approx(0.5), "its last half second is open"
    with pytest.raises(UsageError, match="too much to simulate"):
        one.shortened(1e-9)


def test_the_machine_has_its_bad_moments_when_they_were():
    """Steps are four times as long in the third second of five: who comes then misses, whoever
    computes, and nobody else; so many seconds of the simulation are as many of the server."""
    asked = question(shape(32), rate=8.0, count=40)
    steps, requests = asked.calibration.steps, asked.stretch.requests
    slow = [2.0 <= at_s < 3.0 for at_s in steps.started_s]
    steps.seconds = [s * (4 if bad else 1) for s, bad in zip(steps.seconds, slow, strict=True)]
    steps.started_s = [0.0, *np.cumsum(steps.seconds)[:-1].tolist()]
    asked.stretch = Stretch(requests=requests, from_s=0.0, until_s=requests[-1].at_s, clock_s=0.0)
    part = Trial.of(asked).shortened(1e9)
    found = [part.see(part.begin({}, pair), 1.0) for pair in (0, 0)]
    assert list(found[0].met) == list(found[1].met)
    missed = np.array(found[0].at_s)[found[0].met == 0]
    assert len(missed) and missed.min() > 1.0 and missed.max() < 6.5


@pytest.mark.parametrize(("met", "is_trusted"), [(True, False), (False, True)])
def test_a_simulation_that_is_far_from_what_was_seen_proposes_nothing(met, is_trusted):
    """Four rows for 14 requests a second: the simulation says that few are in time."""
    asked = question(shape(4), shape(32), count=200)
    share = answer(asked).now
    for number, each in enumerate(asked.stretch.requests):
        each.met = met or number % 10 < 10 * share
    found = answer(asked)
    assert found.now == share < 0.5 and found.is_trusted == is_trusted
    assert bool(found.changes) == is_trusted and found.num_simulated > is_trusted
    assert is_trusted or "% in SLO where 100% were seen: not trusted" in found.why


def test_the_process_answers_each_question_until_the_pipe_is_closed():
    asked = question(shape(4), shape(32), count=40)
    heard = decode_question(encoded(asked)[LENGTH_BYTES:])
    assert heard.calibration == asked.calibration and heard.started == asked.started
    out, few = io.BytesIO(), question(shape(4), shape(32), count=25)
    main(io.BytesIO(2 * encoded(few)), out)
    told_back, found = out.getvalue(), []
    while told_back:
        length = int.from_bytes(told_back[:LENGTH_BYTES], "big")
        found.append(decode_answer(told_back[LENGTH_BYTES : LENGTH_BYTES + length]))
        told_back = told_back[LENGTH_BYTES + length :]
    assert len(found) == 2 and found[0].changes == found[1].changes


def seen(met, classes=None) -> Seen:
    return Seen(
        at_s=[i * 1.0 for i in range(len(met))],
        met=np.array(met, dtype=float),
        classes=classes or ["chat"] * len(met),
        ttft_s=None,
        tpot_s=None,
    )


def test_a_gain_has_the_error_of_its_blocks():
    """Of 40 requests 20 are met, then 30: in each block a few more, or all in two of them."""
    now = seen([1, 0] * 20)
    even = seen([1, 0, 1, 0, 1, 1, 0, 1] * 5)
    burst = seen([1, 1] * 10 + [1, 0] * 10)
    for then, is_sure in ((even, True), (burst, False)):
        found = gained(now, then, [(now, then), (now, then)])
        gain, low, high = found.ratio
        assert (found.now, gain) == (0.5, pytest.approx(2 * (found.then - 0.5)))
        assert (high - low < 0.5) == is_sure
    same, low, high = gained(now, now).ratio
    assert same == low == high == 0.0
    sure = gained(now, even).error
    assert gained(now, even, [(now, even), (now, now)]).error > sure, "moments differ"


def test_no_class_may_pay_for_the_others():
    classes = ["chat"] * 20 + ["bulk"] * 20
    now = seen([1] * 20 + [0] * 20, classes)
    assert loser(now, seen([1] * 10 + [0] * 10 + [1] * 20, classes)) == "chat"
    assert loser(now, seen([1] * 40, classes)) == ""
    few = ["chat"] * 3 + ["bulk"] * 37
    assert loser(seen([1] * 40, few), seen([0] * 3 + [1] * 37, few)) == "", "three are chance"


def test_candidates_are_what_can_be_and_does_something():
    started = shape(32, num_blocks=(1251,))
    found = candidates(started, started, [], longest=100, longest_s=0.01)
    assert {name for changes in found for name in changes} == {
        "max_num_seqs",
        "max_num_batched_tokens",
        "late",
    }
    assert {"max_num_seqs": 4} in found and {"max_num_batched_tokens": 64} in found
    assert {"max_num_batched_tokens": 256} not in found, "100 tokens and 32 rows fit into it"
    rows = [changes["max_num_seqs"] for changes in found if "max_num_seqs" in changes]
    assert max(rows) < 32 and len(rows) == len(set(rows))
    long = candidates(started, started, [], longest=1500, longest_s=3.0)
    assert {"lane_share", "long_prefill"} <= {name for changes in long for name in changes}
    plain = shape(32, policy="fcfs")
    assert {n for c in candidates(plain, plain, [], 1500, 3.0) for n in c} == {
        "max_num_seqs",
        "max_num_batched_tokens",
    }
    changed = replace(started, max_num_seqs=8, max_num_batched_tokens=128)
    assert {"max_num_seqs": 32, "max_num_batched_tokens": 512} in candidates(
        changed, started, [], 100, 0.01
    )
    assert {"max_num_seqs": 32} in candidates(changed, started, [], 100, 0.01)
    assert {"max_num_seqs": 32} not in candidates(
        changed, started, [{"max_num_seqs": 32}], 100, 0.01
    )


def test_finer_steps_lie_beside_the_best():
    started = shape(32)
    assert finer({"max_num_seqs": 8}, started, started, []) == [
        {"max_num_seqs": 6},
        {"max_num_seqs": 11},
    ]
    assert finer({"late": "shed"}, started, started, []) == []
    assert finer({"max_num_seqs": 32}, replace(started, max_num_seqs=8), started, []) == [
        {"max_num_seqs": 24}
    ]


def test_each_live_setting_has_its_ladder():
    assert LADDERS.keys() == LIVE.keys()
    assert trial.LEAST_GAIN > 0
