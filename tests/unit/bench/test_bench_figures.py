"""What a run means: latencies, rates, goodput, checks, verdicts, comparisons, pages."""

import asyncio
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench_runs import exchange, run_of, steady
from headway.bench import comparison, export, page, progress, scrape, table
from headway.bench.latency import latency
from headway.bench.names import also_called, check_words, per_token_with_ttft
from headway.bench.percentiles import distribution, slope
from headway.bench.report import BenchReport, GoodputPoint, GoodputSearch, build_report
from headway.bench.search import bounds, search_rate
from headway.bench.timeline import percentile
from headway.core.errors import UsageError
from headway.measure.saved import write
from headway.telemetry.prefixes import find_shared_prefixes


def report(exchanges, span_s=10.0, **load) -> BenchReport:
    return build_report(run_of(exchanges, span_s, **load), "0")


def check(result: BenchReport, word: str) -> bool | None:
    (one,) = [c.passed for c in result.checks if word in c.name]
    return one


def test_latencies_of_the_worked_example():
    timed = latency(exchange(0, 0.0, [2.0, 3.0, 5.0], [1, 1, 2]))
    assert timed is not None
    assert (timed.ttft_s, timed.e2e_s, timed.tpot_s) == (2.0, 5.0, 1.0)
    assert timed.gaps_s == [1.0, 2.0, 0.0]


def test_several_tokens_in_the_first_chunk_have_their_own_gaps():
    timed = latency(exchange(0, 1.0, [2.0, 4.0], [3, 2]))
    assert timed is not None
    assert (timed.ttft_s, timed.gaps_s, timed.tpot_s) == (1.0, [0.0, 0.0, 2.0, 0.0], 0.5)


def test_an_answer_of_one_token_has_no_tpot():
    timed = latency(exchange(0, 0.0, [2.0]))
    assert timed is not None
    assert (timed.tpot_s, timed.gaps_s, timed.gap_p99_s) == (None, [], None)


def test_where_nobody_counts_gaps_are_of_chunks():
    x = exchange(0, 0.0, [2.0, 3.0, 5.0], chunk_tokens=None, output_tokens=7)
    timed = latency(x)
    assert timed is not None and not timed.exact
    assert (timed.tpot_s, timed.gaps_s) == (0.5, [1.0, 2.0])
    result = report([x])
    assert result.figures.itl_s is None and result.figures.chunk_gap_s is not None
    assert check(result, "sum of ITLs") is None and check(result, "tokens in chunks") is None


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(1, 9)), min_size=1, max_size=30),
    st.floats(0, 100),
)
def test_gaps_add_up_to_e2e_less_ttft(chunks, at_s):
    chunk_s = (at_s + np.cumsum([gap for gap, _ in chunks])).tolist()
    x = exchange(0, at_s, chunk_s, [n for _, n in chunks])
    timed = latency(x)
    assert timed is not None
    assert sum(timed.gaps_s) == pytest.approx(timed.e2e_s - timed.ttft_s, abs=1e-9)
    assert len(timed.gaps_s) == x.num_output - 1
    assert check(report([x], span_s=at_s + 100), "sum of ITLs") is True


def test_percentiles_have_the_mean_beside_them():
    result = distribution([*range(101), None])
    assert result is not None
    assert (result.p50, result.p90, result.p95, result.p99) == (50, 90, 95, 99)
    assert (result.mean, result.min, result.max, result.count) == (50, 0, 100, 101)
    assert distribution([None]) is None
    assert slope([0, 1, 2], [1, 3, 5]) == pytest.approx((2.0, 1.0))
    assert slope([1, 1, 1], [1, 2, 3]) == (0.0, 0.0)


def test_goodput_is_30_when_30_of_100_meet_the_objectives():
    answers = steady(100, 0.01, ttft_s=lambda i: 0.1 if i % 10 < 3 else 0.9)
    result = report(answers, span_s=1.0, slos={"default": "ttft=500ms"})
    assert result.rates.goodput_per_s == pytest.approx(30)
    assert result.rates.attainment == pytest.approx(0.3)
    assert result.rates.token_goodput_per_s == pytest.approx(330)
    assert result.classes["default"].missed == {"ttft": 70}
    assert result.classes["default"].remaining_budget == pytest.approx(1 - 70 / 10)


def test_a_failed_request_never_counts_as_met():
    answers = steady(10, 0.1)
    answers[3].error, answers[4].error, answers[5].error = "timeout", "status 503", "dropped"
    result = report(answers, span_s=1.0, slos={"default": "e2e=10s"})
    assert result.rates.goodput_per_s == pytest.approx(7)
    counts = result.counts
    assert (counts.ok, counts.failed) == (7, 3)
    assert (counts.timeouts, counts.refused, counts.errors) == (1, 1, 1)
    assert counts.reasons == {"timeout": 1, "status 503": 1, "dropped": 1}
    assert result.classes["default"].missed == {"failed": 3}


def test_classes_are_judged_by_their_own_objectives():
    answers = steady(10, 0.1, ttft_s=lambda i: 0.6)
    for i, x in enumerate(answers):
        x.service_class = "fast" if i < 5 else "slow"
    result = report(answers, span_s=1.0, slos={"fast": "ttft=500ms", "slow": "ttft=1s"})
    assert result.classes["fast"].rates.attainment == 0.0
    assert result.classes["slow"].rates.attainment == 1.0
    assert result.rates.goodput_per_s == pytest.approx(5)


def test_two_dollars_an_hour_at_100_tokens_a_second_are_5_56_a_million():
    answers = steady(10, 1.0, tokens=90)  # 10 prompt and 90 answer tokens a second
    result = report(answers, price_per_hour=2.0)
    window_s = result.run.load.to_s
    assert result.rates.usd_per_million_tokens == pytest.approx(5.56 * window_s / 10, rel=1e-3)


def test_the_edges_are_cut():
    answers = steady(100, 0.1)
    result = report(answers, from_s=1.0, to_s=9.0)
    assert (result.counts.counted, result.counts.cut) == (81, 19)
    assert result.rates.output_tokens_per_s == pytest.approx(110, rel=0.02)
    assert result.rates.requests_per_s == pytest.approx(10, rel=0.02)
    assert check(result, "throughput × time") is True


def test_wrong_counts_are_seen():
    answers = steady(4, 0.1)
    answers[2].output_tokens = 12
    result = report(answers)
    assert check(result, "tokens in chunks") is False and check(result, "sum of ITLs") is False
    assert "1 of 4 differ: 2" in table.warnings(result)[0]


def test_ratios_above_one_are_flagged_and_not_clamped():
    run = run_of(steady(4, 0.1), 1.0)
    run.server.gauges = {"mbu_ratio_decode": [0.4, 1.2, None], "mfu_ratio": [0.1, 0.2]}
    result = build_report(run, "0")
    assert check(result, "MBU") is False and check(result, "MFU") is True
    (why,) = (line for line in table.warnings(result) if "MBU" in line)
    assert "at most 1.200" in why and "other work keeps busy" in why


def test_the_client_is_blamed_when_it_is_late_or_busy():
    meets_slo = report(steady(50, 0.1))
    assert not meets_slo.client.bottleneck
    late = steady(50, 0.1)
    for x in late:
        x.sent_s = x.scheduled_s + 0.05
    assert "50.0 ms late" in report(late).client.why
    run = run_of(steady(50, 0.1), 5.0)
    run.client.cpu_s = run.client.wall_s * 0.95
    assert "95% of a core" in build_report(run, "0").client.why
    run.client.late_s = [0.1] * 50
    assert "chunks were read" in build_report(run, "0").client.why


def test_a_growing_queue_is_called_over_saturated():
    calm = report(steady(200, 0.1, ttft_s=lambda i: 0.3 + 0.1 * (i % 3)), span_s=20.0)
    assert calm.saturation.over_saturated is False
    growing = report(steady(200, 0.1, ttft_s=lambda i: 0.1 + 0.05 * i), span_s=20.0)
    assert growing.saturation.over_saturated is True
    assert growing.saturation.ttft_per_s == pytest.approx(0.5, rel=0.01)
    assert any("Over-saturated" in line for line in table.warnings(growing))
    closed = report(steady(200, 0.1, ttft_s=lambda i: 0.1 + 0.05 * i), loop="closed")
    assert closed.saturation.over_saturated is None


@given(st.lists(st.floats(0.1, 9.0), min_size=1, max_size=40))
def test_tokens_are_throughput_times_time(at_s):
    answers = [exchange(i, t, [t + 0.1, t + 0.3, t + 0.3], [2, 3, 1]) for i, t in enumerate(at_s)]
    result = report(answers)
    assert check(result, "throughput × time") is True
    times = result.timeline
    assert sum(times.output_tokens_per_s) * times.step_s == pytest.approx(6 * len(at_s))
    assert sum(times.concurrency) * times.step_s == pytest.approx(0.3 * len(at_s), rel=1e-3)


@given(
    st.lists(
        st.tuples(st.sampled_from((0.0, 0.1, 0.25, 0.4, 0.5, 2.0)), st.integers(1, 5)), max_size=30
    )
)
def test_tokens_are_counted_where_they_fall(chunks):
    """As a histogram over the same edges has it; what comes at an edge belongs to what follows."""
    chunks.sort()
    answers = [exchange(0, 0.0, [at for at, _ in chunks] + [2.0], [n for _, n in chunks] + [1])]
    times = report(answers).timeline
    edges = np.arange(len(times.at_s) + 1) * times.step_s
    expected, _ = np.histogram(answers[0].chunk_s, edges, weights=answers[0].chunk_tokens)
    result = np.array(times.output_tokens_per_s) * times.step_s
    assert result == pytest.approx(expected)


def test_other_tools_words_are_named():
    assert also_called("tpot_s", ["vllm", "aiperf"]) == "vllm: TPOT, aiperf: Inter Token Latency"
    x = exchange(0, 0.0, [2.0, 3.0, 5.0], [1, 1, 2])
    result = per_token_with_ttft([(x, latency(x))])
    assert result is not None and result.mean == 5.0 / 4
    with pytest.raises(UsageError, match="'locust'"):
        check_words(["vllm", "locust"])


def test_a_report_is_read_as_it_was_written(tmp_path: Path):
    result = report(steady(20, 0.1), slos={"default": "ttft=1s"})
    path = tmp_path / "r.json"
    export.write_json(result, str(path))
    again = export.read_json(str(path))
    assert again == result
    assert build_report(again.run, "0") == result, "everything follows from the raw run"
    assert len(json.loads(path.read_text())["run"]["exchanges"][0]["chunk_s"]) == 11


def test_what_is_no_report_is_refused(tmp_path: Path):
    path = tmp_path / "r.json"
    with pytest.raises(UsageError, match="No such file"):
        export.read_json(str(path))
    path.write_text('{"format": "else"}')
    with pytest.raises(UsageError, match="is no report"):
        export.read_json(str(path))
    with pytest.raises(UsageError, match="/no/such/folder"):
        write("/no/such/folder/x", b"")


def test_csv_has_a_line_a_request(tmp_path: Path):
    answers = steady(5, 0.1)
    answers[2].error = "timeout"
    path = tmp_path / "r.csv"
    export.write_csv(report(answers), str(path))
    header, *lines = path.read_text().splitlines()
    assert header.split(",") == list(export.COLUMNS) and len(lines) == 5
    row = dict(zip(export.COLUMNS, lines[0].split(","), strict=True))
    assert float(row["ttft_s"]) == pytest.approx(0.1) and row["output_tokens"] == "11"
    assert lines[2].endswith("timeout")


def text_of(result: BenchReport, *words: str) -> str:
    written = io.StringIO()
    table.show_report(result, Console(file=written, width=160, no_color=True), words)
    return written.getvalue()


def test_the_terminal_shows_warnings_first_and_every_figure():
    answers = steady(40, 0.1, ttft_s=lambda i: 0.2)
    answers[3].error, answers[3].message = "status 503", "[bold]overloaded"
    result = report(answers, slos={"default": "ttft=100ms"}, price_per_hour=1.0)
    text = text_of(result, "vllm", "guidellm")
    assert text.startswith("! 1 of 40 requests failed\n!   1 × status 503: [bold]overloaded")
    assert re.search(r"TTFT \(vllm: TTFT, .*\) +200.0 ms", text)
    assert "guidellm: Time per Output Token (e2e / n)" in text
    assert "0.0% met their objectives" in text and "per million tokens" in text
    assert "ttft 39, failed 1" in text or "failed 1" in text


def sharing_search() -> tuple[list, GoodputSearch]:
    prompts = [[*range(50), 100 + i] for i in range(5)]
    points = [
        GoodputPoint(
            rate=rate,
            offered_per_s=rate,
            attainment=share,
            goodput_per_s=rate * share,
            output_tokens_per_s=rate,
            ttft_p99_s=0.1,
            tpot_p99_s=None,
            meets_slo=share >= 0.9,
        )
        for rate, share in ((4.0, 1.0), (8.0, 0.5))
    ]
    search = GoodputSearch(
        attainment=0.9, best_rate=4.0, goodput_per_s=4.0, points=points, note="4 </script> keeps"
    )
    return find_shared_prefixes(prompts), search


def test_the_page_stands_alone():
    answers = steady(40, 0.1)
    answers[3].error = "</script><b>"
    sharing, search = sharing_search()
    result = build_report(run_of(answers, 4.0, slos={"default": "ttft=1s"}), "0", sharing, search)
    text = page.html(result)
    assert not re.search(r"<(script|link|img)", text) and "</script>" not in text
    assert text.count('class="plot"') == 5 and len(text) < 300_000
    assert "5 requests share their first 50 tokens" in text


def test_two_runs_of_one_load_are_within_noise():
    rng = np.random.default_rng(0)

    def one(scale: float) -> BenchReport:
        waits = rng.gamma(4, 0.05 * scale, 400)
        answers = steady(400, 0.05, ttft_s=lambda i: float(waits[i]))
        return report(answers, span_s=20.0, slos={"default": "ttft=500ms"})

    same = comparison.compare(one(1.0), one(1.0))
    rows = {row.name: row for row in same.rows}
    assert rows["TTFT p50"].verdict == rows["TTFT mean"].verdict == "within noise"
    assert same.differences == []
    slower = {row.name: row for row in comparison.compare(one(1.0), one(1.5)).rows}
    assert slower["TTFT p50"].verdict == slower["attainment"].verdict == "worse"
    assert slower["TTFT p50"].ratio == pytest.approx(1.5, rel=0.15)
    faster = {row.name: row for row in comparison.compare(one(1.5), one(1.0)).rows}
    assert faster["TTFT p50"].verdict == faster["goodput/s"].verdict == "better"


def test_different_loads_are_said_to_be():
    a, b = report(steady(40, 0.1)), report(steady(80, 0.1), seed=3, loop="closed")
    result = comparison.compare(a, b)
    assert [line.partition(":")[0] for line in result.differences] == ["loop", "seed", "rate"]
    written = io.StringIO()
    comparison.show_comparison(result, "a.json", "b.json", Console(file=written, width=160))
    assert "not the same load: seed: 0 and 3" in written.getvalue()


def goodput_point(rate: float, *, meets_slo: bool) -> GoodputPoint:
    return GoodputPoint(
        rate=rate,
        offered_per_s=rate,
        attainment=1.0 if meets_slo else 0.5,
        goodput_per_s=rate,
        output_tokens_per_s=0.0,
        ttft_p99_s=None,
        tpot_p99_s=None,
        meets_slo=meets_slo,
    )


def searched(
    keeps: Callable[[float], bool], *, pauses: Iterable[int] = (), **more: float
) -> list[GoodputPoint]:
    """A search from 4 to 1000 of a server that keeps some rates; in the runs of these numbers, from
    1, the machine pauses, and all fail."""
    numbers = itertools.count(1)

    async def at_rate(rate: float) -> GoodputPoint:
        return goodput_point(rate, meets_slo=next(numbers) not in pauses and keeps(rate))

    return asyncio.run(search_rate(at_rate, start=4.0, highest=1000.0, **more))


@pytest.mark.parametrize("limit", [0.3, 3.7, 13.0, 900.0, 5000.0])
@pytest.mark.parametrize("precision", [1.1, 1.03])
def test_the_search_comes_within_its_precision(limit, precision):
    points = searched(lambda rate: rate <= limit, precision=precision)
    meets_slo, failed = bounds(points)
    assert min(limit, 1000.0) / precision <= meets_slo <= limit < max(failed, 1000.1)
    assert len(points) <= 16


def test_a_server_that_never_keeps_is_given_up():
    points = searched(lambda rate: False)
    assert len(points) < 10 and bounds(points)[0] == 0.0


@pytest.mark.parametrize("pause", range(1, 9))
def test_one_pause_of_the_machine_does_not_change_the_answer(pause):
    """It fails a rate that the server keeps: 4 at once, 8 beside 7.3, or one that fails anyway."""
    points = searched(lambda rate: rate <= 13.0, pauses={pause})
    assert 13.0 / 1.1 <= bounds(points)[0] <= 13.0


def test_a_rate_that_keeps_in_one_run_of_three_does_not_keep():
    runs: Counter[float] = Counter()

    def keeps(rate: float) -> bool:
        runs[rate] += 1
        return rate < 8.0 or (rate == 8.0 and runs[rate] == 2)

    points = searched(keeps)
    assert [p.meets_slo for p in points if p.rate == 8.0] == [False, True, False]
    meets_slo, failed = bounds(points)
    assert meets_slo < 8.0 == failed


def test_the_live_line_tells_what_is_on():
    class Client:
        tokens = 300

        def now_s(self) -> float:
            return 2.0

    class Load:
        running = 1

    load = Load()
    load.exchanges = [*steady(5, 0.1), exchange(5, 0.6, [], error="timeout"), exchange(6, 0.7, [])]
    text = progress.line(load, Client(), 60.0)
    assert text.startswith("2.0/60.0 s · sent 7 · in flight 1 · done 5 · failed 1 (timeout 1)")
    assert "150 tok/s · recent TTFT 100 ms" in text


def test_metrics_are_read_under_any_prefix():
    text = (
        "# HELP vllm:num_requests_running x\n"
        'vllm:num_requests_running{engine="0",model_name="a b"} 3.0\n'
        'vllm:num_requests_running{engine="1",model_name="a b"} 2.0\n'
        "headway:kv_cache_usage_perc 0.25\nvllm:prompt_tokens_total 1e3\nother_total 5\n"
        'headway:mbu_ratio{engine="0",model_name="m",steps="decode"} 0.42\n'
        'headway:mbu_ratio{engine="0",model_name="m",steps="prefill"} NaN\n'
    )
    result = scrape.parse(text)
    assert (
        result["num_requests_running"] == 5.0
        and result["mbu_ratio_decode"] == 0.42
        and result["kv_cache_usage_perc"] == 0.25
    )
    assert result["prompt_tokens_total"] == 1000.0 and "other_total" not in result


@given(
    st.lists(st.floats(0, 1e3), min_size=1, max_size=30), st.sampled_from([0, 12.5, 50, 99, 100])
)
def test_a_percentile_of_a_step_is_numpys(values, share):
    assert percentile(values, share) == float(np.percentile(values, share))
