"""The planner's page on answers that are made up: each curve, each fleet, nothing from afar."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from headway.advise.plan import page
from headway.advise.plan.answer import PlanAnswer
from headway.advise.plan.capacity import MachineRow
from headway.advise.plan.trial import CapacityTrial, PlanTarget
from headway.core.slo import parse_slo

CURVES = [
    [(5.0, 1.0), (10.0, 0.95), (20.0, 0.4)],
    [(5.0, 0.98), (10.0, 0.7)],
    [(10.0, 1.0), (40.0, 0.2)],
]


def row(machine: str = "one", **more: Any) -> MachineRow:
    fields: dict[str, Any] = {
        "weights": "none", "label": "calibrated", "tensor": 1, "pipeline": 1, "kv_tokens": 20_000,
        "rows": 64, "prompt_s": 0.1, "tpot_s": 0.02, "rate": (8.0, 10.0, 12.0), "servers": 2,
        "servers_range": (2, 3), "attainment": (0.93, 0.97), "curves": CURVES,
    }  # fmt: skip
    return MachineRow(machine=machine, **fields | more)


def answer(*rows: MachineRow, **more: Any) -> PlanAnswer:
    fields: dict[str, Any] = {
        "headway": "0", "model": "tiny", "mean_rate": 12.0, "peak_rate": 18.0, "attainment": 0.9,
        "assumed": [], "refused": [], "best": "2 x one keep it",
    }  # fmt: skip
    return PlanAnswer(rows=list(rows), **fields | more)


def test_each_machine_has_a_colour_and_each_case_a_curve():
    """Solid as it is, dotted slower and faster; the line is what was asked for."""
    plot = page.capacity_plot(answer(row(), row("two")))
    assert [each.name for each in plot.series] == [
        f"{machine}, {case}" for machine in ("one", "two") for case in page.CASES
    ]
    assert [each.colour for each in plot.series] == [0] * 3 + [1] * 3
    assert [each.dashed for each in plot.series[:3]] == [False, True, True]
    first = plot.series[0]
    assert first.x == [5.0, 10.0, 20.0] and first.y == [100.0, 95.0, 40.0]
    assert plot.horizontals == [90.0]


def test_the_axis_says_what_the_load_is():
    text = page.html(answer(row()))
    assert "requests/s of one server" in text
    text = page.html(answer(row(at_once=(4, 6, 8)), at_once=12))
    assert "requests at once of one server" in text


def test_the_fleet_has_who_can_and_what_it_costs():
    made = answer(row(usd_per_hour=3.0), row("two", servers=None, servers_range=(0, 0)))
    text = page.html(made)
    (bars,) = page.fleet_plot(made).series
    assert (bars.x, bars.y) == (["one"], [2.0])
    assert "one: $3.00 an hour" in text and "two: $" not in text


def test_formats_and_degrees_tell_two_rows_of_one_machine_apart():
    rows = [row(), row(weights="int8"), row(tensor=2), row(pipeline=2)]
    names = [page.row_label(each) for each in rows]
    assert len(set(names)) == 4 and names[1] == "one, int8"
    assert "tensor parallel 2" in names[2] and "pipeline of 2" in names[3]


def test_where_nobody_can_there_is_no_fleet_to_draw():
    """And without curves no plot: the table and the sentence stay."""
    hopeless = row(servers=None, servers_range=(0, 0), curves=[], hopeless="a token takes 2 s")
    text = page.html(answer(hopeless, best="None of these machines can."))
    assert "<svg" not in text
    assert "None of these machines can." in text and "a token takes 2 s" in text


def test_the_page_stands_alone_and_names_are_text():
    text = page.html(answer(row("<img src=x>"), model="</script><b>"))
    assert "<img src=x>" not in text and "</script><b>" not in text
    assert not re.search(r"<(script|link|img)", text)


def test_what_the_terminal_shows_is_on_the_page_without_colours():
    shown = page.as_text(answer(row(), refused=["big: no room"], assumed=["answers of 20"]))
    assert "2 (2 to 3)" in shown and "93% to 97%" in shown
    assert "cannot: big: no room" in shown and "assumed: answers of 20" in shown
    assert "\x1b[" not in shown and "[bold]" not in shown


def test_a_search_is_kept_in_the_order_of_its_load_and_the_next_begins_anew():
    """Seen 10, 20, 15 times the traffic, which is 4/s: 40, 60, 80."""
    made = CapacityTrial.__new__(CapacityTrial)
    made.curve_points = [(10.0, 0.95), (20.0, 0.5), (15.0, 0.8)]
    assert made.curve(4.0) == [(40.0, 0.95), (60.0, 0.8), (80.0, 0.5)]
    assert made.curve() == []


@pytest.mark.parametrize(
    ("slos", "ttft_s", "tpot_s"),
    [
        (["ttft=2s,tpot=100ms", "ttft=1s"], 1.0, 0.1),
        (["ttft=500ms", "tpot=30ms"], 0.5, 0.03),
    ],
)
def test_the_strictest_of_all_classes_is_what_is_sized_for(slos, ttft_s, tpot_s):
    classes = [SimpleNamespace(slo=parse_slo(text)) for text in slos]
    target = PlanTarget(
        bench=SimpleNamespace(classes=[*classes, SimpleNamespace(slo=None)]),
        classes={}, attainment=0.9, answer_limit=100,
    )  # fmt: skip
    assert (target.strictest.ttft_s, target.strictest.tpot_s) == (ttft_s, tpot_s)
    nobody = SimpleNamespace(classes=[SimpleNamespace(slo=None)])
    assert PlanTarget(bench=nobody, classes={}, attainment=0.9, answer_limit=1).strictest is None
