"""What the benchmarks of promises under load say follows from the rows they keep.

The scripts of benchmarks/ are run by hand; here their rows are made up, so that the right figure is
known.
"""

import argparse
import itertools
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import agreement
import fairness
import goodput
import judged
import long_prompts
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
    assert [panel.lines["slo"] for panel in goodput.panels(data)] == [[(2.0, 1.2)], [(2.0, 60.0)]]


def cost() -> served.ClientCost:
    return served.ClientCost(cpu_s=1.0, wall_s=10.0)


def test_a_chat_that_was_never_answered_counts_as_the_latest():
    made = [row(0, True, ttft_s=0.5), row(1, False, ttft_s=None, error="timeout")]
    labels = {"contender": "fcfs", "block": 0}
    data = {
        "clients": [served.cost_of(cost(), [[]])],
        "rows": [r | labels | {"turn": turn} for turn in long_prompts.TURNS for r in made],
    }
    assert long_prompts.ttfts_of(data, "fcfs", "beside") == [0.5, 0.5]
    data["rows"][2]["ttft_s"] = 2.0
    assert "| 2 |" in long_prompts.tables(data).splitlines()[2]  # two chats failed
    assert long_prompts.ttfts_of(data, "fcfs", "beside") == [2.0, 2.0]


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


# ── agreement with other load generators ────────────────────────────────────────────────────────


def test_no_run_is_sent_a_prompt_of_another():
    """Not even the first block of one: a prefix cache must find nothing."""
    runs = [f"{begun} {number} {tool}" for begun in "ab" for number in (0, 1) for tool in "xy"]
    found = {name: agreement.texts(name, count=50, num_words=80) for name in runs}
    firsts = [text.split()[0] for texts in found.values() for text in texts]
    assert len(set(firsts)) == len(firsts) == 50 * len(runs)
    assert all(len(text.split()) == 80 for texts in found.values() for text in texts)
    assert agreement.texts(runs[0], 50, 80) == found[runs[0]], "a run's file can be made again"


def test_each_tool_goes_first_once_a_turn():
    orders = [agreement.order(["a", "b", "c"], number) for number in range(3)]
    assert [each[0] for each in orders] == ["a", "b", "c"]
    assert all(sorted(each) == ["a", "b", "c"] for each in orders)
    assert agreement.order(["a"], 5) == ["a"]


def test_what_a_run_found_in_the_cache():
    before = {"prefix_cache_hits_total": 100.0, "prefix_cache_queries_total": 1000.0}
    after = {"prefix_cache_hits_total": 150.0, "prefix_cache_queries_total": 2000.0}
    assert agreement.cached_share(agreement.growth(before, after)) == pytest.approx(0.05)
    assert agreement.cached_share({}) is None


def test_what_a_tool_asked_before_its_timed_requests_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
):
    """`headway bench` looks first whether the server streams, each time with the same prompt."""
    found = {"prefix_cache_hits_total": 80.0, "prefix_cache_queries_total": 1000.0}
    scrapes = iter([{}, found])
    monkeypatch.setattr(agreement, "scrape", lambda url: next(scrapes))
    run = agreement.Run([agreement.Answer(0, 5, 5, 5)], {"prefix_cache_queries_total": 900.0})
    monkeypatch.setitem(agreement.TOOLS, "headway", lambda args, folder: run)
    given = argparse.Namespace(url="http://127.0.0.1")
    assert agreement.measured("headway", given, "a run").medians["e2e"] == 5


def test_of_tools_that_send_at_once_only_what_left_while_all_did_counts(
    monkeypatch: pytest.MonkeyPatch,
):
    """One begins eight seconds later; at first the other has the machine for itself."""

    def tool(begins_s: float):
        def sends(args: argparse.Namespace, folder: Path) -> agreement.Run:
            rates.append(args.rate)
            times = [begins_s + at / args.rate for at in range(args.count)]
            return agreement.Run([agreement.Answer(t, 1 + (t >= 8), 1, 1) for t in times])

        return sends

    rates: list[float] = []
    scrapes = itertools.count()
    monkeypatch.setattr(agreement, "scrape", lambda url: {"prompt_tokens_total": next(scrapes)})
    monkeypatch.setitem(agreement.TOOLS, "headway", tool(0.0))
    monkeypatch.setitem(agreement.TOOLS, "aiperf", tool(8.0))
    given = argparse.Namespace(url="", rate=4.0, count=40)
    found = agreement.measured_together(["headway", "aiperf"], given, "a round")
    assert found["headway"].means["TTFT"] == found["aiperf"].means["TTFT"] == 2
    assert sum(rates) == pytest.approx(4.0) and rates[0] != rates[1]
    with pytest.raises(SystemExit, match="--count"):
        agreement.measured_together(
            ["headway", "aiperf"], given.__class__(**{**vars(given), "count": 2}), ""
        )


def test_a_tools_clock_is_set_beside_the_servers_own():
    """The machine halves its pace from one run to the next; both clocks are 1% above the server."""
    name, slower = agreement.FIGURES["TTFT"], []
    for pace in (1.0, 2.0):
        counters = {f"{name}_sum": 4.0 * pace, f"{name}_count": 40.0}
        own = agreement.own_means(counters)
        assert own == {"TTFT": pytest.approx(100.0 * pace)}
        figures = dict.fromkeys(agreement.FIGURES, 101.0 * pace)
        slower.append(agreement.Reading(figures, figures, own=own))
    lines = agreement.table([dict(zip(("headway", "aiperf"), slower, strict=True))]).splitlines()
    assert "| TTFT | 101.00 | 202.00 (+100.0%) |" in lines
    assert lines[-1] == "| TTFT | +1.0% | +1.0% |", "a figure that the server has not is left out"


def test_tools_are_compared_within_a_round():
    """The machine has another pace in each round, and is disturbed in one of the other's turns."""
    rounds = []
    for number, pace in enumerate((1.0, 1.5, 0.8, 2.0, 1.2, 0.9, 1.1)):
        mine, its = 100.0 * pace, (101.0 if number != 3 else 180.0) * pace
        both = [dict.fromkeys(agreement.FIGURES, value) for value in (mine, its)]
        readings = [agreement.Reading(figures, figures) for figures in both]
        rounds.append(dict(zip(("headway", "aiperf"), readings, strict=True)))
    assert agreement.apart(rounds, "aiperf", "TTFT") == "+1.0%, +1.0 to +1.0%"
    assert "| TTFT | 110.00 | 111.10 (+1.0%, +1.0 to +1.0%) |" in agreement.table(rounds)
    worse = rounds[:3] + [rounds[3]] * 4
    assert agreement.apart(worse, "aiperf", "TTFT") == "+80.0%, +1.0 to +80.0%"


def test_a_server_without_counters_gives_no_second_table():
    figures = dict.fromkeys(agreement.FIGURES, 5.0)
    reading = agreement.Reading(figures, figures, own=agreement.own_means({}))
    assert "own" not in agreement.table([{"headway": reading}])
