"""The playbook: which step is next for a made-up server, its table, and its flowchart."""

import io
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console

from doctor_cases import CASES, HEALTHY, varied
from headway.advise import rules
from headway.advise.diagnosis import diagnose
from headway.advise.playbook.page import flowchart, html
from headway.advise.playbook.show import show
from headway.advise.playbook.walk import (
    BEFORE,
    DONE,
    LATER,
    NEXT,
    NOTHING,
    STEPS,
    UNKNOWN,
    Playbook,
    walk,
)
from headway.advise.reading import LoadReading, Reading

ORDER = "measure shorten structure cache batch quantize route speculate".split()


def walked(reading: Reading) -> Playbook:
    return walk(reading, diagnose(reading))


def case(rule: str) -> Reading:
    """A server for which a rule of the doctor holds."""
    return varied(HEALTHY, CASES[rule][0])


@pytest.mark.parametrize(
    ("rule", "step"),
    [
        ("long-prefill", "shorten"),
        ("validation", "structure"),
        ("small-batch", "batch"),
        ("kv-capacity", "batch"),
        ("weight-bytes", "quantize"),
        ("over-saturated", "quantize"),
    ],
)
def test_the_first_open_step_is_next(rule, step):
    found = walked(case(rule))
    assert found.next == step, [(each.name, each.state, each.rule) for each in found.stages]
    [stage] = [each for each in found.stages if each.state == NEXT]
    assert stage.do and stage.brings and stage.share >= 0.03
    assert found.said.startswith(f"next: {step}. ")


def test_steps_stand_in_their_order_and_later_ones_wait():
    found = walked(case("validation"))
    assert [each.name for each in found.stages] == ORDER
    places = [each.state for each in found.stages]
    assert places.index(NEXT) < min(i for i, state in enumerate(places) if state == LATER)
    assert NEXT not in places[places.index(NEXT) + 1 :]


def test_few_requests_are_measured_first():
    few = replace(HEALTHY, load=replace(HEALTHY.load, num_ended=3))
    found = walked(few)
    assert found.next == "measure" and "3 requests ended" in found.stages[0].brings


def test_what_is_cached_is_done_and_what_is_narrow_too():
    reading = varied(HEALTHY, {"prefix.hit_rate": 0.8, "weights.choices": {}, "kv.choices": {}})
    states = {each.name: each.state for each in walked(reading).stages}
    assert states["cache"] == states["quantize"] == states["measure"] == DONE
    assert states["structure"] == NOTHING
    assert walked(reading).next == ""
    assert walked(reading).said == "nothing is left to do here"


def test_what_the_source_does_not_tell_is_not_known():
    bare = Reading(source="metrics", subject="x", load=LoadReading(num_ended=100))
    states = {each.name: each.state for each in walked(bare).stages}
    assert states["shorten"] == states["cache"] == states["batch"] == UNKNOWN


def test_what_disturbs_is_told_and_changes_no_order():
    found = walked(case("contention"))
    assert found.before == ["Others use the cores that the model needs."]
    assert found.next == walked(HEALTHY).next


def test_every_rule_of_a_step_is_a_rule_of_the_doctor():
    names = {rule.name for rule in rules.RULES}
    told = [name for step in STEPS for name in step.rules]
    assert set(told) | set(BEFORE) <= names and len(told) == len(set(told))
    left = names - set(told) - set(BEFORE)
    assert left == {"slow-forward", "retries", "under-loaded"}


def test_dollars_stand_where_the_spend_is_saved():
    reading = varied(case("small-batch"), {"spend.price_per_hour": 2.0})
    stage = next(each for each in walked(reading).stages if each.name == "batch")
    assert stage.usd_per_hour == pytest.approx(2 * stage.share)
    quantized = walked(case("weight-bytes")).stages[5]
    assert quantized.saves_s == pytest.approx(quantized.share * HEALTHY.request_s)


def test_the_table_names_the_next_step_first():
    console = Console(width=160, record=True, file=io.StringIO())
    show(walked(case("validation")), console)
    lines = console.export_text().splitlines()
    assert lines[0].startswith("next: structure.")
    assert all(any(f"{i} {name}" in line for line in lines) for i, name in enumerate(ORDER, 1))


def test_the_flowchart_is_drawing_that_a_browser_reads():
    found = walked(case("validation"))
    tree = ET.fromstring(flowchart(found))
    steps = list(tree.iter("g"))
    assert [each.get("data-step") for each in steps] == ORDER
    assert [each.get("class") for each in steps].count("next") == 1
    boxes = [(float(r.get("y")), float(r.get("height"))) for r in tree.findall("g/rect[1]")]
    assert all(y + height < below for (y, height), (below, _) in pairwise(boxes))
    width = float(tree.get("viewBox").split()[2])
    for rect in tree.iter("rect"):
        assert float(rect.get("x")) + float(rect.get("width")) <= width
    for group in steps:
        low, high = (float(group.find("rect").get(name)) for name in ("y", "height"))
        assert all(low < float(t.get("y")) < low + high for t in group.findall("text")[:2])


def test_the_page_is_whole_and_escapes():
    reading = replace(case("validation"), subject="http://<b>")
    page = html(diagnose(reading), walked(reading))
    assert page.startswith("<!doctype html>") and "<svg" in page and "<b>" not in page
    assert not re.search(r'(?:src|href)="', page), "nothing is fetched"
