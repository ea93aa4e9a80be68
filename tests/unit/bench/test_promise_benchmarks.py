"""What the benchmarks of promises under load say follows from the rows they keep.

The scripts of benchmarks/ are run by hand; here their rows are made up, so that the right figure is
known.
"""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import fairness
import goodput
import judged
import overload
import served


def row(at_s: float, met: bool, **more: object) -> dict[str, object]:
    defaults = {"scheduled_s": at_s, "met": met, "kind": "chat", "status": 200, "error": ""}
    return defaults | {"answered_s": 0.01, "ttft_s": 1.0} | more


@pytest.mark.parametrize(
    ("met", "count", "low", "high"),
    [(45, 50, 0.786, 0.957), (0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson_gives_the_textbooks_intervals(met, count, low, high):
    assert judged.wilson(met, count) == pytest.approx((low, high), abs=5e-4)


def test_the_mix_has_each_kind_in_exact_proportion_at_drawn_places():
    times = served.poisson_times(2.0, 200, seed=3)
    talks = served.conversations(served.MIX, times, seed=3)
    assert Counter(t.service_class for t in talks) == {"chat": 160, "shared": 30, "long": 10}
    assert [t.at_s for t in talks] == times == sorted(times)
    assert {t.turns[0].system for t in talks if t.service_class == "shared"} != {()}
    lengths = {t.turns[0].prompt[0].tokens for t in talks if t.service_class == "chat"}
    assert min(lengths) >= 100 and max(lengths) <= 200 and len(lengths) > 50
    assert served.conversations(served.MIX, times, seed=3) == talks
    assert served.conversations(served.MIX, times, seed=4) != talks


def test_kinds_are_scaled_in_length_and_in_time():
    long = served.MIX[2].scaled(0.25, 3.0)
    assert (long.prompt, long.output) == ("1000", "uniform:15-25")
    assert (long.slo.ttft_s, long.slo.tpot_s) == pytest.approx((30.0, 0.36))


def test_equal_lists_are_drawn_alike():
    a = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    draws = judged.ratio_of(judged.resampled(a).mean(axis=1), judged.resampled(a).mean(axis=1))
    assert judged.interval(draws) == (1.0, 1.0)


def test_goodput_is_told_by_rate_and_beside_the_others():
    data = {"given": {"slo_scale": "3"}, "clients": [served.cost_of(cost(), [[]])], "rows": []}
    for name, good in (("fcfs", 30), ("slo", 60)):
        for i in range(100):
            data["rows"].append(row(i, i < good) | {"contender": name, "rate": 2.0, "block": 0})
    text = goodput.tables(data)
    assert "| fcfs | 2 | 30% (22 to 40) | 30% (22 to 40) | 0.60 |" in text
    assert "| slo / fcfs | 2.00 (" in text and "Objectives times 3" in text
    assert "| slo | 2 | 60% (50 to 69) | 60% (50 to 69) | 1.20 |" in text


def cost() -> served.ClientCost:
    return served.ClientCost(cpu_s=1.0, wall_s=10.0)


def test_normal_is_the_first_run_of_good_requests_after_the_overload():
    phases = {
        "before": {"from_s": 0, "to_s": 10, "rate": 1},
        "overload": {"from_s": 10, "to_s": 20, "rate": 5},
        "after": {"from_s": 20, "to_s": 40, "rate": 1},
    }
    rows = [row(i, True) for i in range(10)]
    rows += [row(10 + i / 5, i % 5 == 0, status=200 if i % 5 == 0 else 503) for i in range(50)]
    rows += [row(20 + i, i not in (0, 2)) for i in range(20)]
    data = {
        "given": {"run": "3"},
        "phases": {"slo": phases},
        "ramp": [{"contender": "slo", "rate": 1.0, "goodput": 1.0, "met": [True] * 10}],
        "rows": [r | {"contender": "slo"} for r in rows],
        "clients": [served.cost_of(cost(), [[]])],
    }
    assert overload.normal_again_s(data, "slo", 3) == 3.0
    assert overload.normal_again_s(data, "slo", 18) is None
    line = overload.tables(data).splitlines()[2]
    assert "| 1.00 (5.00) | 100% (" in line and "| 80% | 10.0 / 10.0 | yes | 3.0 s | yes |" in line


def test_shares_are_set_beside_weights():
    shares = [
        {"policy": "fair", "user": f"user {i}", "weight": weight, "answered": 9, "refused": 0}
        | {"request_tokens": 10, "tokens": [100.0 * given] * 20}
        for i, (weight, given) in enumerate([(1.0, 1.0), (1.0, 1.5), (2.0, 2.0)])
    ]
    data = {"rates": {}, "shares": shares, "rows": [], "clients": [served.cost_of(cost(), [[]])]}
    lines = fairness.tables(data).splitlines()[2:5]
    assert [line.split("|")[-2].strip() for line in lines] == ["no", "no", "no"]
    assert "| 22.2% | 25.0% | 0.889 (" in lines[0]
    shares[1]["tokens"] = shares[0]["tokens"]
    assert fairness.tables(data).count("| yes |") == 3


def test_tokens_are_counted_in_the_second_in_which_they_came():
    x = served.Exchange(
        id=0,
        scheduled_s=0.0,
        asked_prompt_tokens=10,
        asked_output_tokens=3,
        chunk_s=[0.5, 1.5, 1.6],
        chunk_tokens=[1, 1, 1],
    )
    assert fairness.tokens_by_step([x], 3.0) == [11.0, 2.0, 0.0]
    assert np.isclose(sum(fairness.tokens_by_step([x], 3.0)), 13)
