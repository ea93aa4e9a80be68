"""When `--retune` asks, applies, keeps and goes back: a scripted server on a clock."""

from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest

from fakes import make_settings
from headway.advise.retune import controller as rules
from headway.advise.retune.controller import Controller, slower
from headway.advise.retune.question import Answer, Begun, Question
from headway.core.live_settings import Changes, with_changes
from headway.telemetry.lately import Judged, Kept, Shape, kept_of, shape_of
from headway.telemetry.traffic import Stretch
from simulated_house import measured

STARTED = make_settings(max_num_seqs=64, budget=512, policy="slo")
FEWER: Changes = {"max_num_seqs": 8}


@dataclass
class Scripted:
    """A server to which `per_s` requests a second come, of which `meets` says what they met."""

    per_s: float = 2.0
    share: float = 0.5
    under_change: float = 0.5
    """The share while fewer rows are in force."""
    prompt: int = 100
    time_s: float = 0.0
    now: object = STARTED
    log: list[Judged] = field(default_factory=list)
    changed: list[Changes] = field(default_factory=list)
    asked_since: float = 0.0

    def now_s(self):
        return self.time_s

    def settings(self):
        return self.now

    def judged(self, since_s):
        return [each for each in self.log if each.at_s >= since_s]

    def calibration(self):
        return measured(STARTED)

    def stretch(self, since_s):
        self.asked_since = since_s
        return Stretch(until_s=self.time_s - since_s)

    def change(self, changes):
        self.changed.append(changes)
        self.now = with_changes(self.now, changes, STARTED)

    def pass_s(self, seconds: float) -> None:
        """Requests come for so long, evenly; of ten in a row so many are met."""
        until_s = self.time_s + seconds
        at_s = max(self.log[-1].at_s, self.time_s - 1 / self.per_s) if self.log else 0.0
        while (at_s := at_s + 1 / self.per_s) <= until_s:
            share = self.under_change if self.now.max_num_seqs == 8 else self.share
            met = len(self.log) * 7 % 10 < share * 10
            self.log.append(Judged(at_s, met, "default", self.prompt, 20, 0.2, 0.03))
        self.time_s = until_s


def until_asked(one: Controller, sight: Scripted, most_s: float = 2000.0) -> Question | None:
    """Ticks until there is a question."""
    end_s = sight.time_s + most_s
    while sight.time_s < end_s:
        sight.pass_s(5.0)
        asked = one.tick()
        if asked is not None:
            return asked
    return None


BETTER = Answer(changes=FEWER, gain=0.4, gain_interval=(0.2, 0.6), now=0.5, then=0.7, why="better")
NOTHING = Answer(why="none of 12 neighbours is better", now=0.5)


def test_asks_nothing_while_nearly_all_are_in_their_objectives():
    sight = Scripted(share=1.0)
    one = Controller(sight, STARTED)
    assert until_asked(one, sight, 600) is None
    assert "nothing to gain: 100%" in one.told.state


def test_asks_nothing_without_traffic():
    sight = Scripted(per_s=0.05)
    one = Controller(sight, STARTED)
    assert until_asked(one, sight, 600) is None
    assert "waits for traffic" in one.told.state


def test_asks_ever_more_rarely_until_the_traffic_is_another():
    sight = Scripted()
    one = Controller(sight, STARTED)
    times = []
    for _ in range(6):
        assert until_asked(one, sight).kind == "propose"
        times.append(sight.time_s)
        one.take(NOTHING)
    pauses = [b - a for a, b in pairwise(times)]
    assert times[0] >= rules.FIRST_S
    assert pauses == sorted(pauses) and pauses[-1] <= rules.MOST_PAUSE_S + 5
    assert pauses[-1] >= 8 * pauses[0]
    sight.per_s = 4.0
    begun_s = sight.time_s
    assert until_asked(one, sight, 120) is not None
    assert sight.time_s - begun_s < 80
    assert sight.asked_since >= begun_s - rules.RECENT_S, "of the new traffic alone"


def test_what_is_better_is_kept_and_asked_about_again():
    sight = Scripted(share=0.5, under_change=0.8)
    verdicts = []
    one = Controller(sight, STARTED, verdicts.append)
    until_asked(one, sight)
    one.take(BETTER)
    assert sight.changed == [FEWER] and one.told.changes[0].was == {"max_num_seqs": 64}
    changed_s = sight.time_s
    asked = until_asked(one, sight)
    assert asked.kind == "judge" and asked.changes == {"max_num_seqs": 64}
    assert sight.time_s - changed_s >= rules.WATCH_S, "while it is better nothing is simulated"
    one.take(Answer(changes=asked.changes, now=0.7, then=0.5))
    told = one.told.changes[0]
    assert told.outcome == "kept" and verdicts == [told]
    assert told.expected == pytest.approx(0.5, abs=0.05) and told.after > 0.75
    assert one.told.settings["max_num_seqs"] == 8
    assert until_asked(one, sight, 60).kind == "propose"


def test_a_planted_bad_change_is_undone_within_three_minutes():
    """The simulation promises much and is wrong; it says the same of the traffic since."""
    sight = Scripted(share=0.8, under_change=0.2)
    one = Controller(sight, STARTED)
    until_asked(one, sight)
    one.take(BETTER)
    changed_s = sight.time_s
    while one.watched is not None:
        asked = until_asked(one, sight, 200)
        one.take(Answer(changes=asked.changes, now=0.9, then=0.5))
    assert sight.time_s - changed_s <= 90
    assert sight.now.max_num_seqs == 64
    told = one.told.changes[0]
    assert told.outcome == "rolled_back" and "expected without it" in told.why
    assert until_asked(one, sight).left_alone == [FEWER]


def test_easier_traffic_is_no_credit():
    """More are in their objectives than before, but without the change all would be."""
    sight = Scripted(share=0.5, under_change=0.6)
    one = Controller(sight, STARTED)
    until_asked(one, sight)
    one.take(BETTER)
    asked = until_asked(one, sight, 300)
    one.take(Answer(changes=asked.changes, now=0.8, then=0.95))
    assert one.told.changes[0].outcome == "rolled_back"
    assert one.told.changes[0].expected == pytest.approx(0.95, abs=0.05)


def test_harder_traffic_is_no_blame():
    """Fewer are in their objectives than before; without the change it would be fewer still."""
    sight = Scripted(share=0.7, under_change=0.5)
    one = Controller(sight, STARTED)
    until_asked(one, sight)
    one.take(BETTER)
    while one.watched is not None:
        asked = until_asked(one, sight, 300)
        one.take(Answer(changes=asked.changes, now=0.4, then=0.1))
    assert one.told.changes[0].outcome == "kept"


def test_a_change_without_traffic_stays_unproved():
    sight = Scripted(share=0.5)
    one = Controller(sight, STARTED)
    until_asked(one, sight)
    one.take(BETTER)
    sight.per_s = 0.01
    assert until_asked(one, sight, 400) is None
    assert one.told.changes[0].outcome == "unproved" and sight.now.max_num_seqs == 64
    sight.per_s = 2.0
    assert until_asked(one, sight).left_alone == [], "nothing speaks against it"


def test_a_larger_share_of_far_fewer_is_no_gain():
    """Clients who wait for their answers ask a fifth as often, and nearly all is in time."""
    sight = Scripted(per_s=10.0, share=0.5, under_change=1.0)
    one = Controller(sight, STARTED)
    until_asked(one, sight)
    one.take(BETTER)
    sight.per_s, changed_s = 2.0, sight.time_s
    assert until_asked(one, sight, 100) is None or one.watched is None
    assert one.told.changes[0].outcome == "rolled_back" and "5.0 before" in one.told.changes[0].why
    assert one.told.changes[0].at_s == changed_s and sight.now.max_num_seqs == 64


def test_simulations_have_their_share_of_a_core():
    sight = Scripted()
    one = Controller(sight, STARTED)
    until_asked(one, sight)
    one.take(Answer(cpu_s=100.0, why="none"))
    spent_s = sight.time_s
    assert until_asked(one, sight, 10_000) is not None
    earned_s = (100.0 - rules.CPU_SAVED_S) / rules.CPU_SHARE
    assert sight.time_s >= earned_s > spent_s


def test_all_of_the_time_together_they_have_no_more_than_their_share():
    """Each question takes 9 s: the first is asked at once, the second when there is room for it."""
    sight = Scripted()
    one, asked_s = Controller(sight, STARTED), []
    while sight.time_s < 4000:
        if until_asked(one, sight, 5.0) is not None:
            one.take(Answer(cpu_s=9.0, why="none"))
            asked_s.append(sight.time_s)
        assert one.told.cpu_s <= rules.CPU_SAVED_S + rules.CPU_SHARE * sight.time_s
    assert asked_s[0] < 50 and asked_s[1] >= 6 / rules.CPU_SHARE
    assert 5 <= len(asked_s) <= 9
    assert [each.cpu_s for each in one.told.asked] == [9.0] * len(asked_s)


def test_a_simulation_that_is_not_trusted_changes_nothing_and_says_so():
    sight = Scripted(share=0.66)
    one = Controller(sight, STARTED)
    until_asked(one, sight)
    why = "its simulation says 95% in SLO where 66% were seen: not trusted"
    one.take(Answer(is_trusted=False, why=why, seen=0.66, now=0.95, num_requests=1600))
    assert one.told.state == why and sight.changed == []
    assert (one.told.asked[0].seen, one.told.asked[0].simulated) == (0.66, 0.95)
    assert until_asked(one, sight).kind == "propose", "it asks again later"


def test_what_is_judged_begins_with_those_who_were_there_before():
    sight = Scripted(share=0.5, under_change=0.4)
    one = Controller(sight, STARTED)
    until_asked(one, sight)
    begun = [Begun(1.0, True, 100, 0, 10)]
    one.take(msgspec.structs.replace(BETTER, begun=begun))
    changed_s = sight.time_s
    asked = until_asked(one, sight)
    assert asked.kind == "judge" and asked.begun == begun
    assert sight.asked_since == changed_s + rules.SETTLES_S, "not what met rows of before"
    one.take(Answer(changes=asked.changes, then=0.9))
    assert one.watched is None
    asked = until_asked(one, sight)
    assert asked.kind == "propose" and sight.asked_since > changed_s + rules.FIRST_LOOK_S


def test_an_answer_about_other_traffic_changes_nothing():
    """It took two minutes, and the prompts are longer now."""
    sight = Scripted()
    one = Controller(sight, STARTED)
    until_asked(one, sight)
    sight.prompt = 400
    sight.pass_s(120.0)
    one.take(BETTER)
    assert sight.changed == [] and "other than when it was asked" in one.told.state
    asked_s = sight.time_s
    assert until_asked(one, sight, 60).kind == "propose"
    assert sight.asked_since >= asked_s - rules.RECENT_S


def test_changes_are_limited_an_hour(monkeypatch):
    monkeypatch.setattr(rules, "MOST_AN_HOUR", 2)
    sight = Scripted(share=0.5, under_change=0.5)
    one = Controller(sight, STARTED)
    for rows in (32, 16):
        assert until_asked(one, sight).kind == "propose"
        one.take(Answer(changes={"max_num_seqs": rows}, gain=0.1, now=0.5))
        until_asked(one, sight)
        one.take(Answer(changes={"max_num_seqs": 64}, now=0.5, then=0.4))
    first_s = one.told.changes[0].at_s
    until_asked(one, sight, 5000)
    assert sight.time_s >= first_s + rules.HOUR_S


def test_who_gives_no_answer_is_asked_later():
    sight = Scripted()
    one = Controller(sight, STARTED)
    until_asked(one, sight)
    assert one.tick() is None, "one question at a time"
    one.gave_up("its process failed")
    assert one.told.state == "its process failed"
    assert until_asked(one, sight) is not None
    sight.now = None
    one.take(BETTER)  # the engine has died meanwhile
    assert sight.changed == []


def watched(**before):
    """A change before which these medians were seen, and simulated."""
    kept = Kept(100, 0.5, 0.05, before.get("ttft_s", 1.0), before.get("tpot_s", 0.05))
    simulated = Answer(now_ttft_s=1.0, now_tpot_s=0.05)
    return rules.Watched(None, 0.0, kept, Shape(0, 0, 0, 0, {}), simulated, 0.0)


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "then_ttft_s", "says"),
    [
        (1.0, 0.05, 1.0, ""),
        (2.0, 0.05, 1.0, "TTFT is 2.0 times"),
        (2.0, 0.05, 2.0, ""),  # the traffic since takes twice as long anyway
        (1.0, 0.1, 1.0, "TPOT is 2.0 times"),
        (2.0, 0.02, 1.0, ""),  # one is dearer, the other cheaper: a choice, not a loss
    ],
)
def test_slower_is_beside_what_was_expected(ttft_s, tpot_s, then_ttft_s, says):
    after = Kept(100, 0.5, 0.05, ttft_s, tpot_s)
    found = slower(watched(), after, Answer(then_ttft_s=then_ttft_s, then_tpot_s=0.05))
    assert found.startswith(says) and bool(found) == bool(says)


def requests(count, per_s=2.0, prompt=100, answer=20, name="chat"):
    return [Judged(i / per_s, i % 2 == 0, name, prompt, answer) for i in range(count)]


def test_other_traffic_is_more_than_chance():
    usual = shape_of(requests(60), 30)
    assert not usual.differs(shape_of(requests(66, 2.2), 30))
    assert usual.differs(shape_of(requests(120, 4.0), 30))
    assert usual.differs(shape_of(requests(60, prompt=200), 30))
    assert usual.differs(shape_of(requests(60, name="bulk"), 30))
    few = shape_of(requests(9), 30)
    assert not few.differs(shape_of(requests(14, 3.0), 30)), "of nine, five more are chance"


def test_the_error_is_of_blocks():
    """Whole blocks of 5 s that are met or missed tell far less than as many requests by turns."""
    turns = [Judged(i / 2, i % 2 == 0) for i in range(40)]
    blocks = [Judged(i / 2, i // 10 % 2 == 0) for i in range(40)]
    assert kept_of(turns).share == kept_of(blocks).share == 0.5
    assert kept_of(blocks).error == pytest.approx(0.5 / 3**0.5, rel=0.01)
    assert kept_of(turns).error < 0.1
    assert kept_of([]).error == 1.0 and kept_of(requests(5)).ttft_s is None
