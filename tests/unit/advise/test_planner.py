"""The planner: demand from percentiles, machines that fit or not, how many, what never helps."""

import re
from dataclasses import replace

import numpy as np
import pytest

from headway.advise.plan import answer, page
from headway.advise.plan.capacity import MachineRow, size_machine
from headway.advise.plan.demand import (
    demand_of,
    lengths_by,
    parse_burst,
    parse_cacheable,
    parse_percentiles,
)
from headway.advise.plan.machines import MachineCandidate, find_candidates
from headway.advise.plan.trial import CapacityTrial, PlanTarget
from headway.advise.simulate.machine import SimulatedMachine
from headway.advise.simulate.run import SIMULATED_URL
from headway.advise.simulate.truth import ROOFLINE, RooflineTruth
from headway.bench.run import prepare
from headway.cli.common import model_folder
from headway.config.options import BenchOptions, EngineOptions, PlanOptions
from headway.core.errors import UsageError
from headway.core.plan import Description
from headway.core.service import service_classes
from simulated_house import SPEC, served

CONTEXT = 2048
REQUESTS = 150
USUAL = {"prompts": "p50=100,p95=400,p99=600", "answers": "p50=20,p95=60,p99=90"}


def load(**more) -> BenchOptions:
    fields = {"slo": ["ttft=500ms,tpot=50ms"], "rate": 20.0}
    return BenchOptions(**{**fields, **more})


def demand(*, bench=None, most_requests=400, **more):
    options = PlanOptions(most_requests=most_requests, **{**USUAL, **more})
    return demand_of(prepare(SIMULATED_URL, bench or load()), options, CONTEXT)


def prompt_tokens(talk) -> int:
    return sum(piece.tokens for turn in talk.turns for piece in turn.system + turn.prompt)


# ── demand ──────────────────────────────────────────────────────────────────────────────────


def test_the_given_percentiles_come_out():
    wanted = parse_percentiles("p50=800,p95=4000,p99=9000", "--prompts", 100_000)
    shares = (np.arange(10_000) + 0.5) / 10_000
    result = lengths_by(wanted, shares, 100_000)
    assert np.percentile(result, (50, 95, 99)) == pytest.approx([800, 4000, 9000], rel=0.01)
    assert result[-1] > 12_000 and (np.diff(result) >= 0).all()


def test_a_short_tail_stays_short():
    """A lognormal through p50 and p95 would have a p99.9 of 7,000 here."""
    wanted = parse_percentiles("p50=100,p95=1000,p99=1100", "--prompts", 100_000)
    assert lengths_by(wanted, np.array([0.999]), 100_000)[0] < 1300


def test_the_context_cuts_the_tail():
    wanted = parse_percentiles("p50=100,p95=1900", "--prompts", 2048)
    assert lengths_by(wanted, np.array([0.9999]), 2048)[0] == 2048


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("p50=100,p95=40", "p50 is 100 and p95 only 40"),
        ("p50=0,p95=40", "p50 is 0 tokens"),
        ("p50=-5,p95=40", "no percentile"),
        ("p50=nan,p95=40", "no percentile"),
        ("p50=10,p99=9999", "the context has 2048"),
        ("p50=10", "one percentile says nothing"),
        ("p50=10,p50=20", "given twice"),
        ("mean=4,p50=3", "no percentile"),
        ("p0=4,p50=5", "no percentile"),
    ],
)
def test_percentiles_that_are_none_are_refused_by_name(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        parse_percentiles(text, "--prompts", 2048)


@pytest.mark.parametrize(
    "text", ["3x", "3x:30s", "0.5x:30s/10m", "3x:10m/30s", "x:1s/2s", "-1x:1s/2s"]
)
def test_bursts_that_are_none_are_refused(text: str):
    with pytest.raises(UsageError, match="--burst"):
        parse_burst(text)


@pytest.mark.parametrize("text", ["1.2", "x", "0.4:0", "-0.1", "0.4:x"])
def test_shares_that_are_none_are_refused(text: str):
    with pytest.raises(UsageError, match="--cacheable"):
        parse_cacheable(text)


def test_a_burst_is_in_the_traffic():
    calm, result = demand(most_requests=1200), demand(most_requests=1200, burst="3x:10s/10m")
    assert calm.peak_rate == calm.mean_rate == 20
    assert result.peak_rate == 60 and result.mean_rate == 20
    times = np.array([talk.at_s for talk in result.conversations])
    assert np.histogram(times, np.arange(0, times[-1], 5.0))[0].max() / 5 > 50


def test_what_is_cacheable_is_shared():
    result = demand(cacheable="0.4:80")
    begins = [talk.turns[0].system for talk in result.conversations]
    shared = sum(piece.tokens for system in begins for piece in system)
    assert shared / sum(map(prompt_tokens, result.conversations)) == pytest.approx(0.4, abs=0.06)
    assert len({system[0].key for system in begins if system}) == 8


def test_those_who_ask_again_are_in_the_load():
    plain, more = demand(), demand(retries=0.25)
    extra = len(more.conversations) / len(plain.conversations) - 1
    assert extra == pytest.approx(0.25, abs=0.08) and more.peak_rate == pytest.approx(25)


def test_of_a_long_trace_the_busiest_stretch_is_planned_for(tmp_path):
    rows = [i / 1.0 for i in range(200)] + [200 + i / 50 for i in range(100)] + [300.0]
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:{int(t) // 60:02}:{t % 60:010.7f},100,10" for t in rows]
    path = tmp_path / "azure.csv"
    path.write_text("\n".join(lines))
    bench = load(workload=f"azure:{path}", rate=None)
    options = PlanOptions(most_requests=100)
    result = demand_of(prepare(SIMULATED_URL, bench), options, CONTEXT)
    assert result.peak_rate == pytest.approx(50, rel=0.05) and result.mean_rate < 1.1
    assert "busiest 100" in result.assumed[0]


# ── machines ────────────────────────────────────────────────────────────────────────────────


def machine(step_s: float = 0.01, token_s: float = 2e-4, spread: float = 1.0) -> MachineCandidate:
    """Steps of 10 ms and 0.2 ms a token; both ends of the roofline differ by `spread`."""
    ends = tuple(
        RooflineTruth(1e-9, 1e-12, token_s * more, 1e-15, 1e-12, 1e-9, step_s * more)
        for more in (1 / spread, spread)
    )
    settings = served(policy="slo", max_num_seqs=16, budget=256).settings
    result = SimulatedMachine(
        spec=SPEC,
        settings=settings,
        description=Description(device="cpu"),
        model="m",
        label=ROOFLINE,
        ends=ends,
    )
    return MachineCandidate(
        name="box", weights="none", machinery=result, usd_per_hour=2.0, watts=100.0
    )


def wanted(**more) -> PlanTarget:
    bench = prepare(SIMULATED_URL, load(**more))
    classes = service_classes(bench.options.slo)
    return PlanTarget(bench=bench, classes=classes, attainment=0.9, answer_limit=200)


def sized(
    rate: float, candidate: MachineCandidate | None = None, survive: int = 0, **more
) -> MachineRow:
    plan_demand = demand(bench=load(rate=rate, **more), most_requests=REQUESTS)
    return size_machine(
        candidate or machine(), plan_demand, replace(wanted(rate=rate, **more), survive=survive)
    )


@pytest.fixture(scope="module")
def many() -> MachineRow:
    """What 120 requests a second take."""
    return sized(120.0)


def test_as_many_servers_as_the_traffic_takes(many: MachineRow):
    """N keeps the attainment and N − 1 does not."""
    assert many.servers is not None and many.servers >= 2
    trial = CapacityTrial(machine(), wanted(rate=120.0))
    talks = demand(bench=load(rate=120.0), most_requests=REQUESTS).conversations
    report, _ = trial.run(talks, many.servers, 0, 0.5)
    less, _ = trial.run(talks, many.servers - 1, 0, 0.5)
    assert report.rates.attainment >= 0.9 > less.rates.attainment


def test_cost_and_energy_follow_from_servers_and_time(many: MachineRow):
    assert many.usd_per_hour == pytest.approx(2.0 * many.servers)
    assert 0 < many.kwh_per_year <= 0.1 * 8766 * many.servers
    assert many.joules_per_token > 0 and many.usd_per_million_tokens > 0
    assert many.breaks_first.startswith("at 1.4 times the traffic")


def test_two_ends_of_a_roofline_give_a_range_and_a_loss_one_server_more(many: MachineRow):
    row = sized(120.0, machine(spread=1.5), survive=1)
    low, high = row.servers_range
    assert low < high
    assert many.servers_range[0] == many.servers_range[1]
    assert row.servers == many.servers + 1


def test_what_no_number_of_servers_helps_is_said_first():
    row = sized(5.0, slo=["ttft=20ms,tpot=50ms"])
    assert row.servers is None and "no number of servers helps" in row.hopeless
    assert "prompts of at most" in row.hopeless
    row = sized(5.0, slo=["ttft=5s,tpot=5ms"])
    assert "a token alone takes 10.2 ms, the objective is 5 ms" in row.hopeless


def test_machines_of_the_table_fit_or_say_why():
    result, refused = find_candidates(
        model_folder(None),
        PlanOptions(machines=["L4", "H100-SXM5-80GB"], formats=["none", "int8"]),
        EngineOptions(),
        500,
    )
    assert [(each.name, each.tensor) for each in result] == [("L4", 1), ("H100-SXM5-80GB", 1)]
    assert result[0].usd_per_hour is None and result[1].usd_per_hour == 3.99
    assert len(refused) == 2 and "int8" in refused[0].why


@pytest.fixture(scope="module")
def crowd() -> MachineRow:
    """What 40 clients take that ask the next as soon as they have an answer."""
    return sized_at_once(40)


def sized_at_once(number: int, most_requests: int = REQUESTS) -> MachineRow:
    bench = load(concurrency=number)
    plan_demand = demand(bench=bench, most_requests=most_requests)
    assert plan_demand.at_once == number and plan_demand.peak_rate == 0
    return size_machine(machine(), plan_demand, wanted(concurrency=number))


def test_so_many_at_once_take_so_many_servers(crowd: MachineRow):
    """N keep 90% of them in their objectives, and N − 1 do not."""
    assert crowd.at_once is not None and 0 < crowd.at_once[1] < 40
    assert crowd.servers is not None and crowd.servers > 1
    assert crowd.servers_range[0] <= crowd.servers <= crowd.servers_range[1]
    plan_demand = demand(bench=load(concurrency=40), most_requests=REQUESTS)
    trial = CapacityTrial(machine(), wanted(concurrency=40))
    report, missed = (
        trial.run(plan_demand.conversations, servers, 0, 1.0, 40)[0].rates.attainment
        for servers in (crowd.servers, crowd.servers - 1)
    )
    assert report >= 0.9 > missed
    assert "at 1.4 times the traffic" in crowd.breaks_first


def test_never_are_there_more_at_once_than_was_asked():
    plan_demand = demand(bench=load(concurrency=16), most_requests=REQUESTS)
    trial = CapacityTrial(machine(), wanted(concurrency=16))
    _, world = trial.run(plan_demand.conversations, 1, 0, 1.0, 16)
    assert len(world.exchanges) == len(plan_demand.conversations)
    sent = sorted((x.sent_s, x.ended_s) for x in world.exchanges)
    for at_s, _ in sent[16:]:
        assert sum(begun <= at_s < ended for begun, ended in sent) <= 16


def test_one_client_finds_one_server_enough():
    row = sized_at_once(1, most_requests=50)
    assert row.servers == 1 and row.at_once is not None and row.at_once[1] >= 1


def test_a_machine_that_nobody_knows_is_refused():
    with pytest.raises(UsageError, match="no machine 'Abacus'"):
        find_candidates(model_folder(None), PlanOptions(machines=["Abacus"]), EngineOptions(), 10)


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        (PlanOptions(**USUAL), {"slo": []}, "plan needs objectives"),
        (PlanOptions(**USUAL), {"attainment": 1.0}, "allows no miss"),
        (PlanOptions(**USUAL, burst="3x:1s/1m"), {"concurrency": 8}, "--burst needs a rate"),
        (PlanOptions(**USUAL, retries=0.1), {"concurrency": 8}, "--retries needs a rate"),
        (PlanOptions(**USUAL), {"concurrency": 10**9}, "2,000 requests are too few to simulate"),
        (PlanOptions(**USUAL, growth=100), {"concurrency": 40}, "to simulate 4,000 at once"),
        (PlanOptions(prompts="p50=1,p95=2"), {}, "belong together"),
        (PlanOptions(burst="3x:1s/1m"), {}, "--burst describes percentiles"),
        (PlanOptions(**USUAL, price=["L4"]), {}, "is no price"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_anything_runs(options, more, message):
    with pytest.raises(UsageError, match=message):
        answer.plan_capacity(model_folder(None), options, load(**more), EngineOptions(), "0")


def test_an_answer_from_end_to_end():
    """This machine by its roofline: a range, labelled, and in one sentence."""
    result = answer.plan_capacity(
        model_folder(None),
        PlanOptions(**USUAL, most_requests=60, price=["here=1.5"]),
        load(rate=2.0),
        EngineOptions(),
        "0",
    )
    (row,) = result.rows
    assert row.label == ROOFLINE and row.servers == 1 and row.usd_per_hour == 1.5
    assert result.best.startswith("1 x here") and "roofline" in result.best


def test_the_page_has_the_curves_and_stands_alone():
    """A curve for each case, falling from what is kept to what is not; no file is asked for."""
    result = answer.plan_capacity(
        model_folder(None),
        PlanOptions(**USUAL, most_requests=60),
        load(rate=200.0),
        EngineOptions(),
        "0",
    )
    (row,) = result.rows
    assert len(row.curves) == 3
    for curve in row.curves:
        assert curve == sorted(curve) and len({load for load, _ in curve}) == len(curve)
        shares = [share for _, share in curve]
        assert shares[0] >= 0.9 or row.rate[0] == 0
    text = page.html(result)
    assert "What one server holds" in text and "The fleet" in text
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", text)
