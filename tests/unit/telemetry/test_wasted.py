"""What prompts say twice, tools that nobody calls, and answers that could have been shorter."""

import random
from dataclasses import dataclass

import pytest

from headway.core.clock import VirtualClock
from headway.telemetry.sharing import RecentPrompts
from headway.telemetry.wasted import (
    FEW_OFFERS,
    MOST_TOOLS,
    RUN,
    ToolTally,
    answer_waste,
    looped,
    said_twice,
)


@dataclass
class Answer:
    output_tokens: int
    is_bounded: bool = True
    is_structured: bool = False
    looped_tokens: int = 0


def test_only_whole_runs_that_stood_before_count():
    rng = random.Random(0)
    text = [rng.randrange(1000) for _ in range(200)]
    part = text[40:80]
    assert said_twice(text) == 0
    assert said_twice(text + part) == len(part)
    assert said_twice(text + part + part) == 2 * len(part)
    assert said_twice(text + text[: RUN - 1]) == 0
    assert said_twice(text + text[:RUN]) == RUN
    assert said_twice([str(i) for i in text] * 2) == len(text)


def test_a_run_may_not_overlap_itself():
    assert said_twice([1] * (2 * RUN - 1)) == 0
    assert said_twice([1] * (2 * RUN)) == RUN


@pytest.mark.parametrize("period", [1, 2, 7, 32])
def test_an_end_that_repeats_itself_is_found(period):
    rng = random.Random(period)
    head, cycle = [rng.randrange(500, 900) for _ in range(40)], list(range(period))
    answer = head + cycle * (130 // period)
    assert looped(answer) == len(answer) - len(head) - period
    assert looped([*answer, 999]) == 0
    assert looped(head) == looped([]) == 0


def test_tools_that_were_offered_often_and_never_called():
    tally = ToolTally()
    for number in range(FEW_OFFERS):
        for name, size in (("idle", 100), ("dear", 900), ("used", 100)):
            tally.offered(name, size)
        if number == 3:
            tally.called("used")
    tally.offered("new", 10)
    tally.called("nobody's")
    assert [(tool.name, tool.requests) for tool in tally.idle()] == [("dear", 10), ("idle", 10)]


def test_tools_are_forgotten_in_their_order():
    tally = ToolTally()
    for number in range(MOST_TOOLS + 5):
        for _ in range(FEW_OFFERS):
            tally.offered(f"tool {number}", 1)
    for _ in range(FEW_OFFERS - 1):
        tally.offered("tool 0", 1)  # it was forgotten, and is counted anew
    assert "tool 0" not in {tool.name for tool in tally.idle()}


def test_what_a_cap_a_schema_and_a_stop_rule_would_leave_out():
    answers = [Answer(100, is_bounded=False, looped_tokens=50) for _ in range(9)]
    answers += [Answer(1000, is_bounded=False)]
    answers += [Answer(20, is_structured=True) for _ in range(10)]
    found = answer_waste(answers)
    assert (found.answers, found.tokens, found.unbounded) == (20, 2100, 10)
    assert found.cap == 100 and found.above_cap == 900
    assert found.looped_tokens == 450
    assert found.schema_saves == pytest.approx((1900 - 10 * 20) / 2100)


def test_too_few_to_compare_are_not_compared():
    assert answer_waste([]) is None
    assert answer_waste([Answer(0)]) is None
    assert answer_waste([Answer(10), Answer(5, is_structured=True)]).schema_saves is None


def test_recent_prompts_are_priced_by_the_measured_second_of_a_token():
    recent = RecentPrompts(VirtualClock())
    recent.remember(list(range(100)) + list(range(50)))
    recent.remember(list(range(200, 300)))
    recent.refresh(None)
    found = recent.waste(0.002)
    assert (found.prompts, found.tokens, found.twice_tokens) == (2, 250, 50)
    assert found.twice_share == 0.2 and found.twice_s == pytest.approx(25 * 0.002)
