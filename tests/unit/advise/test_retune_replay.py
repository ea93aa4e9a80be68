"""A server's traffic once more, from the state in which it was."""

import pytest

from fakes import make_settings
from headway.advise.retune.question import Begun, Question
from headway.advise.retune.replay import begun_at, completed
from headway.advise.retune.trial import Part, Trial
from headway.core.service import service_classes
from headway.telemetry.traffic import Followed, Origin, Stretch
from simulated_house import SPEC, measured, poisson

ROWS = 4


def part(requests, *, from_s=0.0, until_s=None, begun=(), policy="slo", rows=ROWS) -> Part:
    """Steps of 20 ms, objectives of 500 ms and 50 ms."""
    settings = make_settings(
        max_num_seqs=rows, policy=policy, num_blocks=(1251,), block_size=16, max_model_len=2048
    )
    origin = Origin(spec=SPEC, settings=settings, classes=service_classes(["ttft=500ms,tpot=50ms"]))
    asked = Question(
        kind="propose",
        calibration=measured(settings, origin=origin),
        stretch=Stretch(requests=list(requests), from_s=from_s, until_s=until_s),
        started=settings,
        begun=list(begun),
    )
    return Part(Trial.of(asked), from_s)


def coming(rate=6.0, count=60, prompt=100, answer=20):
    return [Followed(float(at_s), prompt, 0, answer) for at_s in poisson(rate, count)]


def test_an_answer_that_is_under_way_goes_on_at_its_pace():
    """Ten tokens in a second: one of 40, the median, takes four."""
    requests = [Followed(0.0, 100, 0, 40, ttft_s=0.1, took_s=3.0) for _ in range(3)]
    runs = Followed(8.0, 100, 0, 10, ttft_s=1.0)
    longer, waits = Followed(5.0, 100, 0, 60, ttft_s=1.0), Followed(9.5, 100, 0, None)
    refused = Followed(9.0, 0, 0, None, took_s=0.0, met=False)
    *_, runs, longer, waits, refused = completed([*requests, runs, longer, waits, refused], 10.0)
    assert (runs.answer, runs.took_s) == (40, pytest.approx(5.0))
    assert longer.answer == 61 and longer.at_s + longer.took_s > 10.0
    assert (waits.answer, waits.took_s) == (40, None)
    assert (refused.prompt, refused.answer, refused.took_s) == (100, 40, 0.0)


def test_who_was_there_and_what_was_left_of_their_answers():
    over = Followed(0.0, 100, 0, 20, ttft_s=0.5, took_s=2.0)
    ran = Followed(1.0, 100, 50, 41, n=2, ttft_s=1.0, took_s=5.0, service_class="chat")
    waited = Followed(2.0, 100, 0, 20, ttft_s=1.5, took_s=3.0)
    waits, later = Followed(2.5, 100, 0, 20), Followed(4.0, 100, 0, 20)
    found = begun_at([over, ran, waited, waits, later], 3.0)
    assert found[0] == Begun(2.0, True, 111, 50, 30, 2, "chat")
    assert [(each.age_s, each.runs, each.answer) for each in found[1:]] == [
        (1.0, False, 20),
        (0.5, False, 20),
    ]


def test_who_ran_holds_rows_when_it_begins():
    """Four rows with 100 tokens left of each answer: nobody else has a token before these end."""
    runs = [Begun(1.0, True, 150, 0, 100) for _ in range(ROWS)]
    requests = coming()
    busy, empty = part(requests, begun=runs).begin({}), part(requests).begin({})
    assert busy.seen(1.5, 1.0).share < 0.2 and empty.seen(1.5, 1.0).share > 0.8
    engine = busy.replicas[0].engine
    engine.check_integrity()
    assert engine.settings.max_num_seqs == ROWS
    late = busy.seen(8.0, 6.0)
    assert late.met[-8:].mean() > 0.5, "these rows are free again"


def test_who_waited_is_as_old_as_it_was():
    """By arrival the queue goes first; with the newest too late already, none of it is in time."""
    waited = [Begun(3.0 - n / 100, False, 100, 0, 20) for n in range(40)]
    one = part(coming(), begun=waited, policy="fcfs").begin({})
    found = one.seen(2.0, 1.5)
    assert found.share == 0.0 and len(found.met) == sum(a.at_s < 1.5 for a in coming())
    first = one.exchanges[0]
    assert one.from_s - first.scheduled_s == pytest.approx(3.0)
    assert first.chunk_s[0] - first.scheduled_s > 3.0
    assert one.door.admission.num_admitted > 0
    one.door.admission.check_integrity()


def test_it_goes_on_where_it_was_stopped():
    """A quarter, then all of it: what all of it at once says; of a part the first are the same."""
    whole = part(coming(rate=12.0))
    stops, runs = whole.begin({}), whole.begin({})
    quarter = whole.see(stops, 0.25)
    assert list(whole.see(stops, 1.0).met) == list(whole.see(runs, 1.0).met)
    assert 0 < len(quarter.met) < len(runs.seen(whole.seconds, whole.seconds).met) / 2


def test_other_settings_begin_from_the_same_state():
    """Fewer rows than run: those go on, and nobody new begins before there is a row."""
    runs = [Begun(1.0, True, 150, 0, 30) for _ in range(ROWS)]
    one = part(coming(), begun=runs).begin({"max_num_seqs": 2})
    one.seen(0.3, 0.3)
    engine = one.replicas[0].engine
    assert engine.settings.max_num_seqs == 2 and len(engine.scheduler.running) == ROWS
    one.seen(3.0, 2.0)
    assert len(engine.scheduler.running) <= 2
    assert one.door.served.settings.max_num_seqs == 2


def test_what_stands_when_it_is_stopped_counts():
    """The last request has come just now, and has missed nothing yet."""
    one = part([*coming(count=30), Followed(9.9, 100, 0, 200)], until_s=10.0)
    found = one.begin({}).seen(10.0, 10.0)
    assert found.met[-1] == 1.0 and found.at_s[-1] == pytest.approx(9.9)
