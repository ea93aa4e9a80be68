"""The tuner's real runs without a server: whose turn it is, what may be believed, who is chosen."""

import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from headway.advise.tune import confirm, run
from headway.advise.tune.confirm import (
    Confirmation,
    ConfirmedSetting,
    MeasuredBlock,
    fill_block,
    round_factors,
    sum_blocks,
)
from headway.advise.tune.finalists import Finalists
from headway.advise.tune.outcome import choose
from headway.advise.tune.run import MAX_RUNS, Tuning
from headway.advise.tune.search import Point
from headway.advise.tune.space import Changes, select_knobs
from headway.bench.run import prepare
from headway.config.options import BenchOptions, EngineOptions, TuneOptions
from headway.config.options.field import Seconds
from headway.core.errors import HeadwayError
from headway.core.slo import parse_slo
from headway.measure.record import Exchange
from headway.measure.server_process import DiedError
from tuned_world import landscape

SLO = ["ttft=500ms,tpot=50ms"]
LOAD = BenchOptions(rate=8, num_requests=100, input_len="200", output_len="20", slo=SLO, seed=2)
A, B, C = (("max_num_seqs", 8),), (("policy", "fcfs"),), (("block_size", 8),)
INT8, INT4 = (("quantization", "int8"),), (("quantization", "int4"),)


def block(met: list[bool], changes: Changes = (), number: int = 0) -> MeasuredBlock:
    times: list[float | None] = [0.1] * len(met)
    return MeasuredBlock(
        changes=changes, round=number, span_s=10.0, met=met, ttft_s=times, tpot_s=times,
        num_tokens=20 * len(met),
    )  # fmt: skip


# ── what a block is ─────────────────────────────────────────────────────────────────────────


def answered(number: int, ttft_s: float, tpot_s: float = 0.02, at_s: float = 0.0) -> Exchange:
    chunks = [at_s + ttft_s + tpot_s * n for n in range(5)]
    return Exchange(
        id=number, scheduled_s=at_s, asked_prompt_tokens=10, asked_output_tokens=5,
        chunk_s=chunks, chunk_tokens=[1] * 5, output_tokens=5, ended_s=chunks[-1],
    )  # fmt: skip


def test_requests_are_judged_in_the_order_in_which_they_were_scheduled():
    """Slow, quick, slow tokens, broken: however they came back."""
    broken = Exchange(
        id=3, scheduled_s=3.0, asked_prompt_tokens=10, asked_output_tokens=5, error="disconnected"
    )
    exchanges = [answered(2, 0.1, tpot_s=0.2, at_s=2.0), answered(1, 0.1, at_s=1.0), broken,
            answered(0, 2.0)]  # fmt: skip
    made = MeasuredBlock(changes=(), round=0)
    fill_block(made, prepare("http://nowhere", LOAD), exchanges, parse_slo(SLO[0]))
    assert made.met == [False, True, False, False]
    assert made.ttft_s == pytest.approx([2.0, 0.1, 0.1, None])
    assert made.num_tokens == 15 and made.span_s > 0
    bounded = replace(LOAD, num_requests=None, duration=Seconds(20))
    fill_block(
        again := MeasuredBlock(changes=A, round=0),
        prepare("http://nowhere", bounded),
        exchanges,
        None,
    )
    assert msgspec.json.decode(msgspec.json.encode(again), type=MeasuredBlock) == again, (
        "it is kept so"
    )


def test_a_setting_is_summed_over_its_blocks():
    """30 of 40 in 20 s are 1.5/s; a block that died takes nothing away but is told."""
    dead = MeasuredBlock(changes=A, round=2, died="It ended with status 3.")
    result = sum_blocks(A, [block([True] * 20, A), block([True] * 10 + [False] * 10, A, 1), dead])
    assert (result.goodput, result.in_slo, result.tokens_per_s) == (1.5, 0.75, 40.0)
    assert result.runs == 3 and result.died == dead.died and result.ttft_s == 0.1
    nothing = sum_blocks(A, [dead])
    assert nothing.goodput == 0 and nothing.ttft_s is None


def test_a_round_counts_as_a_mean_one():
    """The default meets 20 and 40, A 40 and 60: 60 and 100 where 80 is the mean. B meets 50 in the
    second round alone, which is 40 in a mean one: more than the default, less than A."""
    met = {((), 0): 20, (A, 0): 40, ((), 1): 40, (A, 1): 60, (B, 1): 50}
    made = scripted(0)
    for (changes, number), count in met.items():
        made.blocks.append(block([True] * count + [False] * (100 - count), changes, number))
    assert round_factors(made.blocks) == {0: 80 / 60, 1: 80 / 100}
    assert [each.mean_round_goodput for each in made.results([B])] == [4.0]
    result = {each.changes: each.mean_round_goodput for each in made.results([(), A, B])}
    assert result[()] == pytest.approx((20 * 80 / 60 + 40 * 0.8) / 20)
    assert result[()] < result[B] < result[A]
    dead = MeasuredBlock(changes=A, round=2, died="It ended with status 3.")
    assert round_factors([*made.blocks, dead]) == round_factors(made.blocks), (
        "a run that died is no round"
    )
    assert round_factors([]) == {} and round_factors([block([False] * 9)]) == {0: 1.0}


# ── whose turn it is ────────────────────────────────────────────────────────────────────────


class Scripted(Confirmation):
    """Blocks that nobody runs: what share each setting meets, and which ones die in which round."""

    shares: dict[Changes, float]
    dying: dict[Changes, int]

    def block(self, changes: Changes, number: int) -> MeasuredBlock:
        if self.dying.get(changes, 99) <= number:
            return MeasuredBlock(changes=changes, round=number, died="It ended with status 3.")
        met = round(100 * self.shares.get(changes, 0.5))
        return block([True] * met + [False] * (100 - met), changes, number)


def scripted(runs: int, shares=None, dying=None, until_s: float = float("inf")) -> Scripted:
    made = Scripted(
        folder=Path(), engine=EngineOptions(), load=LOAD, slo=None, block_s=1.0,
        remaining_runs=runs, until_s=until_s,
    )  # fmt: skip
    made.shares, made.dying = shares or {}, dying or {}
    return made


FOUR = [(), A, B, C]


@given(
    st.integers(0, 12),
    st.integers(1, 4),
    st.dictionaries(st.sampled_from(FOUR), st.integers(0, 2)),
    st.dictionaries(st.sampled_from(FOUR), st.floats(0.1, 0.9)),
)
@hypothesis_settings(max_examples=80, deadline=None)
def test_the_bound_on_runs_holds_and_the_default_is_in_each_round(runs, count, dying, shares):
    made = scripted(runs, shares, dying)
    asked = FOUR[:count]
    result = made.run(asked)
    assert len(made.blocks) + made.remaining_runs == runs
    assert [each.changes for each in result] == asked
    by_round: dict[int, list[Changes]] = {}
    for one in made.blocks:
        by_round.setdefault(one.round, []).append(one.changes)
    for number, names in by_round.items():
        assert len(set(names)) == len(names), "once in a round"
        if number and () not in dying:
            assert () in names or made.remaining_runs == 0, "beside the default or not at all"
    for changes, number in dying.items():
        mine = [each.round for each in made.blocks if each.changes == changes]
        assert all(each <= number for each in mine), "who died does not come again"


def test_the_order_turns_so_that_a_slow_minute_meets_each():
    made = scripted(8, {(): 0.5, A: 0.6})
    made.run([(), A])
    firsts = [one.changes for one in made.blocks[::2]]
    assert firsts == [(), A, (), A]
    assert Counter(one.changes for one in made.blocks) == {(): 4, A: 4}


def test_the_least_promising_leaves_when_not_all_can_come_again():
    """Seven runs of four: after the first round three are left, and the worst goes."""
    made = scripted(7, {(): 0.5, A: 0.7, B: 0.6, C: 0.3})
    made.run(FOUR)
    assert Counter(one.changes for one in made.blocks) == {(): 2, A: 2, B: 2, C: 1}


def test_what_the_first_round_makes_runs_in_the_place_of_the_least_promising():
    """Seven runs: of four in the first round the default, the best and the new one are left."""
    told: list[dict[Changes, float]] = []
    made = scripted(7, {(): 0.3, A: 0.7, B: 0.6, C: 0.2, INT8: 0.9})
    made.after = lambda scores: told.append(scores) or INT8
    result = made.run(FOUR)
    assert told == [{(): 3.0, A: 7.0, B: 6.0, C: 2.0}]
    assert Counter(one.changes for one in made.blocks) == {(): 2, A: 2, B: 1, C: 1, INT8: 1}
    assert [each.changes for each in result] == [*FOUR, INT8]
    assert choose([point(())], result, "goodput")[0] == INT8


def test_who_died_in_the_first_round_says_nothing_of_the_second():
    told: list[dict[Changes, float]] = []
    made = scripted(7, dying={B: 0})
    made.after = lambda scores: told.append(scores)
    made.run(FOUR)
    assert [*told[0]] == [(), A, C]


def test_when_time_is_over_what_there_is_is_judged():
    """The clock stands at the end: nothing begins, and nothing is claimed."""
    made = scripted(8, until_s=time.monotonic() + 0.5)
    result = made.run(FOUR)
    assert made.blocks == [] and all(each.runs == 0 for each in result)
    assert choose([point(()), point(A)], result, "goodput")[0] == ()


def test_all_settings_of_a_round_get_the_same_arrivals_and_each_round_others():
    """And none gets those of the search, by which it was chosen."""
    made = scripted(8)
    times = [
        [talk.at_s for talk in made.traffic("http://nowhere", number).traffic.conversations]
        for number in (0, 0, 1)
    ]
    assert times[0] == times[1] != times[2]
    chosen_by = prepare("http://nowhere", LOAD).traffic.conversations
    assert times[0][:5] != [talk.at_s for talk in chosen_by][:5]
    assert max(times[0]) <= made.block_s


def test_a_request_error_is_a_result_and_a_ctrl_c_is_not(monkeypatch):
    made = Confirmation(
        folder=Path("/nowhere"), engine=EngineOptions(), load=LOAD, slo=None, block_s=1.0,
        remaining_runs=2, until_s=float("inf"),
    )  # fmt: skip
    for error in (DiedError("It ended.", "No memory."), HeadwayError("No room.", "")):
        monkeypatch.setattr(confirm, "ServerProcess", raising(error))
        result = made.block((), 0)
        assert result.died == f"{error.cause} {error.fix}".strip()
    monkeypatch.setattr(confirm, "ServerProcess", raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        made.block((), 0)


def raising(error: BaseException):
    """What is started ends so."""

    def start(*given: object) -> None:
        raise error

    return start


# ── who is chosen ───────────────────────────────────────────────────────────────────────────


def point(changes: Changes, goodput: float = 10.0) -> Point:
    return Point(changes=changes, goodput=goodput, in_slo=0.9, ttft_s=0.2, tpot_s=0.03,
                 tokens_per_s=100.0, label="calibrated")  # fmt: skip


def real(changes: Changes, gain: float = 0.0, low: float = 0.0, **more) -> ConfirmedSetting:
    fields = {"ttft_s": 0.2, "tpot_s": 0.03, "tokens_per_s": 100.0} | more
    return ConfirmedSetting(
        changes=changes, runs=2, goodput=10, mean_round_goodput=10 * (1 + gain), in_slo=0.9,
        gain=gain, gain_interval=(low, 2 * gain - low), **fields,
    )  # fmt: skip


POINTS = [point(A, 12.0), point(B, 11.0), point(())]


@pytest.mark.parametrize(
    ("gain", "low", "wins"),
    [(0.2, 0.1, True), (0.2, -0.01, False), (0.015, 0.01, False), (-0.1, -0.2, False)],
)
def test_a_gain_counts_that_is_sure_and_worth_a_line(gain: float, low: float, wins: bool):
    """Whatever the simulation promises: here it is as much as without, or not known."""
    for points in ([point(A), point(())], [point(())]):
        setting, why = choose(points, [real(()), real(A, gain, low)], "goodput")
        assert setting == (A if wins else ())
        assert ("Nothing to gain" in why) != wins and f"{gain:+.1%} goodput ({low:+.1%}" in why


@pytest.mark.parametrize(
    ("prefer", "better"),
    [("ttft", {"ttft_s": 0.1}), ("tpot", {"tpot_s": 0.02}), ("throughput", {"tokens_per_s": 120})],
)
def test_with_another_preference_a_setting_wins_by_that(prefer: str, better: dict):
    """A tenth better in it, and surely not a twentieth below in goodput."""
    better_one = real(A, 0.0, -0.03, **better)
    assert choose(POINTS, [real(()), better_one], prefer)[0] == A
    assert choose(POINTS, [real(()), better_one], "goodput")[0] == ()
    harmed = real(A, -0.06, -0.1, **better)
    assert choose(POINTS, [real(()), harmed], prefer)[0] == ()
    hardly = {name: (getattr(real(()), name) * 20 + value) / 21 for name, value in better.items()}
    assert choose(POINTS, [real(()), real(A, 0.0, -0.03, **hardly)], prefer)[0] == ()


def test_of_winners_the_one_with_the_most_wins():
    result = [real(()), real(A, 0.1, 0.05), real(B, 0.3, 0.2)]
    assert choose(POINTS, result, "goodput")[0] == B


def test_where_no_other_ran_to_its_end_nothing_is_gained():
    no_figures = {"goodput": 0, "in_slo": 0, "ttft_s": None, "tpot_s": None, "tokens_per_s": 0}
    dead = [real(()), ConfirmedSetting(changes=A, runs=1, died="no memory", **no_figures)]
    assert choose(POINTS, dead, "goodput") == ((), "Nothing to gain: no other setting ran to its "
                                               "end.")  # fmt: skip


def test_without_a_real_run_the_words_say_so():
    setting, why = choose(POINTS, [], "goodput")
    assert setting == A and "by simulation (calibrated); no real run has confirmed it" in why
    near = [point(A, 10.1), point(())]
    assert choose(near, [], "goodput")[0] == ()
    assert choose([point(()), *POINTS[:2]], [], "goodput")[0] == ()


# ── the gate ────────────────────────────────────────────────────────────────────────────────


def passed(tuning: Tuning, points: list[Point]) -> list[Changes]:
    """Its finalists, where nothing but the ranking tells them apart."""
    made = Finalists(
        search=landscape({}),
        knobs=select_knobs([], gate=True),
        passes=lambda changes: tuning.passes_gate(changes),
    )
    return made.choose(points, 3)


def gated(monkeypatch, verdicts: dict[Changes, int]) -> tuple[Tuning, list[tuple]]:
    """A tuning whose evaluations end with these statuses, and what was asked of them."""
    asked: list[tuple] = []

    def verb(name: str, *words: object) -> int:
        asked.append((name, *map(str, words)))
        given = {
            c: s for c, s in verdicts.items() if f"--quantization={c[0][1]}" in map(str, words)
        }
        return next(iter(given.values()))

    monkeypatch.setattr(run, "run_verb", verb)
    tuning = Tuning(folder=Path("m"), options=TuneOptions(gate=True, questions=4), load=LOAD,
                    engine=EngineOptions(threads=1, kv_cache_dtype="int8"))  # fmt: skip
    return tuning, asked


def test_what_answers_otherwise_is_evaluated_once_and_what_fails_is_passed_over(
    monkeypatch,
):
    """int4 is surely worse; int8 passes; another policy answers as the default does."""
    tuning, asked = gated(monkeypatch, {INT4: run.GATE_FAILED, INT8: 0})
    points = [point(INT4), point(INT8), point(A), point(()), point(B), point(C)]
    assert passed(tuning, points) == [INT8, A, B]
    assert tuning.gated == {
        "quantization=int4": "refused by the gate", "quantization=int8": "passed",
    }  # fmt: skip
    assert [each[0] for each in asked] == ["eval"] * 2
    assert all("--questions=4" in each and "--threads=1" in each for each in asked)
    judged = {"--gate", "--against=m", "--kv-cache-dtype=int8", "--against-kv-cache-dtype=int8"}
    assert all(judged <= set(each) for each in asked), "the weights alone are told apart"
    assert tuning.failed == {"quantization=int4"}


def test_an_evaluation_that_breaks_refuses_too(monkeypatch):
    tuning, _ = gated(monkeypatch, {INT8: 1})
    assert passed(tuning, [point(INT8), point(())]) == []
    assert tuning.gated == {"quantization=int8": "not evaluated (status 1): refused"}


def test_blocks_share_what_is_left_of_the_time():
    """Ten minutes and eight runs, ten seconds each beside the block: 65 s, at most what --block
    says, and never below two."""
    tuning = Tuning(
        folder=Path(), options=TuneOptions(minutes=10, block=60), load=LOAD, engine=EngineOptions()
    )
    assert tuning.block_s(MAX_RUNS) == 60
    tuning.options = TuneOptions(minutes=4, block=60)
    assert 10 < tuning.block_s(MAX_RUNS) <= 20
    tuning.options = TuneOptions(minutes=0.5, block=60)
    assert tuning.block_s(MAX_RUNS) == 2.0
