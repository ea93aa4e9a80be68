"""How what-ifs are asked of a live server and told: who may ask, what is left out, which words."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest
from rich.console import Console

from doctor_cases import CASES, HEALTHY, QUEUED, all_at, varied
from fakes import make_settings
from headway.advise import show
from headway.advise.diagnosis import Diagnosis, diagnose
from headway.advise.simulate.outcome import Interval
from headway.advise.what_if.case import MAX_ANSWER_TOKENS, case_of, conversations_of
from headway.advise.what_if.changes import parse_change
from headway.advise.what_if.compare import CaseFigures, Gain, PresentCase, figures
from headway.advise.what_if.gains import MAX_FIXES, add_what_ifs, fetch, format_gain
from headway.cli import doctor
from headway.cli.common import model_folder
from headway.cli.main import main
from headway.config.options import DoctorOptions
from headway.core.errors import UsageError
from headway.core.service import service_classes
from headway.measure.record import Exchange
from headway.telemetry.calibration import MachineCalibration
from headway.telemetry.traffic import Origin, TrafficRequest
from simulated_house import SPEC, measured, poisson


def told(count: int = 60, rate: float = 7.5, **more) -> MachineCalibration:
    """A server of four rows with so much traffic."""
    settings = make_settings(
        num_blocks=(1251,), block_size=16, max_num_seqs=4, budget=512, max_model_len=2048,
        policy="slo",
    )  # fmt: skip
    traffic = more.pop("traffic", None) or [
        TrafficRequest(t, 200, 0, 20) for t in poisson(rate, count)
    ]
    classes = service_classes(["ttft=500ms,tpot=50ms"])
    origin = Origin(spec=SPEC, settings=settings, classes=classes)
    return measured(settings, traffic=traffic, origin=origin, **more)


# ── who is asked ────────────────────────────────────────────────────────────────────────────


@contextmanager
def answering(status: int, body: bytes = b"") -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """(address of a server that says this to everybody, what it was asked: path and key)."""
    asked: list[tuple[str, str]] = []

    class Told(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("authorization", "")))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *said: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Told) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_the_server_is_asked_for_its_last_minutes():
    """At least one and at most five, of the model that was named, with the key that was given."""
    result = told()
    with answering(200, msgspec.json.encode(result)) as (url, asked):
        assert case_of(fetch(url, "secret", "tiny", 5.0)) == case_of(result)
        fetch(url, "", "", 1e6)
    assert asked == [
        ("/calibration?seconds=60&model=tiny", "Bearer secret"),
        ("/calibration?seconds=300", ""),
    ]


@pytest.mark.parametrize(
    ("status", "says"),
    [(401, "--api-key"), (403, "operator"), (404, "status 404"), (503, "ready")],
)
def test_who_does_not_tell_is_named(status: int, says: str):
    with answering(status) as (url, _), pytest.raises(UsageError) as error:
        fetch(url, "", "", 60.0)
    assert url in error.value.cause and says in error.value.cause + error.value.fix


def test_an_answer_that_is_no_calibration_is_no_case():
    with answering(200, b'{"format": "cake"}') as (url, _), pytest.raises(UsageError) as error:
        fetch(url, "", "", 60.0)
    assert "/calibration" in error.value.cause


@pytest.mark.parametrize("what", [[], [str(model_folder(None))]])
def test_folders_and_machines_have_no_what_if(what: list[str], capsys):
    """Before anything is measured: a folder has no traffic."""
    assert main(["doctor", *what, "--what-if", "rate=2x"]) == 2
    assert "live server" in capsys.readouterr().err


def test_a_report_has_no_what_if(tmp_path, capsys):
    report = tmp_path / "report.json"
    report.write_text("{}")
    assert main(["doctor", str(report), "--what-if", "rate=2x"]) == 2
    assert "live server" in capsys.readouterr().err


def test_a_wrong_change_is_told_before_a_server_is_watched(capsys):
    """Nobody listens there: who looked would say so."""
    assert main(["doctor", "http://127.0.0.1:9", "--what-if", "speed=2x"]) == 2
    said = capsys.readouterr().err
    assert "speed cannot be simulated" in said and "max_num_seqs" in said


def asked_of(options: DoctorOptions, reading, calibration: MachineCalibration | None) -> Diagnosis:
    """What the verb writes into a diagnosis of this reading."""
    result = diagnose(reading)
    changes = [parse_change(text) for text in options.what_if]
    body = b"" if calibration is None else msgspec.json.encode(calibration)
    with answering(200 if body else 404, body) as (url, _):
        doctor.simulate_changes(url, options, reading, result, changes)
    return result


def test_without_a_question_the_doctor_goes_on_where_the_server_tells_too_little():
    """What fixes give is then not known, and said so; a question is answered or refused."""
    busy = varied(HEALTHY, CASES["rows"][0])
    short = told(count=5)
    result = asked_of(DoctorOptions(), busy, short)
    assert any("a simulation needs 50 and 20" in text for text in result.not_known)
    assert result.what_ifs == [] and all(each.simulated is None for each in result.findings)
    with pytest.raises(UsageError, match="a simulation needs 50 and 20"):
        asked_of(DoctorOptions(what_if=["rate=2x"]), busy, short)
    with pytest.raises(UsageError, match="no /calibration"):
        asked_of(DoctorOptions(what_if=["rate=2x"]), busy, None)


def test_simulate_false_leaves_the_fixes_and_answers_the_question():
    busy = varied(HEALTHY, CASES["rows"][0])
    off = DoctorOptions(simulate=False)
    assert asked_of(off, busy, told()).simulated_from == []
    on = asked_of(replace(off, what_if=["rate=0.5x"]), busy, told())
    assert [each.change for each in on.what_ifs] == ["rate=0.5x"]


def test_metrics_alone_tell_no_steps():
    """A server of another kind: no fix is simulated, a question is refused."""
    other = replace(varied(HEALTHY, CASES["rows"][0]), source="metrics")
    assert asked_of(DoctorOptions(), other, told()).simulated_from == []
    with pytest.raises(UsageError, match="has no step records"):
        asked_of(DoctorOptions(what_if=["rate=2x"]), other, told())


# ── what a case is made of ──────────────────────────────────────────────────────────────────


def test_each_of_n_answers_is_a_request():
    result = told(traffic=[TrafficRequest(0.1 * n, 100, 40, 10, n=2) for n in range(20)])
    talks = conversations_of(case_of(result))
    assert len(talks) == 40 and talks[0] == talks[1] != talks[2]
    (turn,) = talks[0].turns
    assert (turn.system[0].tokens, turn.prompt[0].tokens, turn.output_tokens) == (40, 60, 10)


def test_nothing_is_longer_than_the_context():
    """A prompt of 3,000 tokens was there under another context: it is cut, and still asked."""
    result = told(traffic=[TrafficRequest(0.1 * n, 3000, 2990, 500) for n in range(20)])
    for talk in conversations_of(case_of(result)):
        (turn,) = talk.turns
        pieces = sum(piece.tokens for piece in turn.system + turn.prompt)
        assert pieces + turn.output_tokens <= 2048 and turn.output_tokens >= 1


def test_where_nobody_came_to_an_end_there_is_no_case():
    with pytest.raises(UsageError, match="None of its recent requests has ended"):
        case_of(told(traffic=[TrafficRequest(0.1 * n, 0, 0, None) for n in range(30)]))


def test_of_much_traffic_the_latest_is_simulated():
    """10,000 requests of 20 tokens: the last 2,500, from the first of them on, as they came."""
    traffic = [TrafficRequest(0.01 * n, 100 + n, 0, 20) for n in range(10_000)]
    kept = case_of(told(traffic=traffic)).traffic
    assert len(kept) == MAX_ANSWER_TOKENS // 20 and kept[0].at_s == 0.0
    assert kept[-1].prompt == 100 + 9_999
    assert kept[-1].at_s == pytest.approx(0.01 * (len(kept) - 1))
    few = case_of(told(traffic=[TrafficRequest(1.0 * n, 100, 0, 1900, n=9) for n in range(100)]))
    assert len(few.traffic) == 20, "as few as tell enough, however long they are"


def test_a_disk_is_left_out_of_a_simulated_cache():
    result = told()
    cache = replace(result.origin.settings.cache, disk_folder="/somewhere", disk_bytes=2**30)
    result.origin.settings = replace(result.origin.settings, cache=cache)
    assert case_of(result) == replace(case_of(told()), calibration=result)


# ── what clients saw ────────────────────────────────────────────────────────────────────────


def seen(first_s: float, gap_s: float, tokens: int = 5, **more) -> Exchange:
    chunks = [first_s + gap_s * n for n in range(tokens)]
    return Exchange(
        id=0, scheduled_s=0.0, asked_prompt_tokens=10, asked_output_tokens=tokens,
        chunk_s=chunks, chunk_tokens=[1] * tokens, output_tokens=tokens, ended_s=chunks[-1], **more,
    )  # fmt: skip


def test_figures_are_those_of_the_clients():
    """Two in time, one with slow tokens, one refused, one that broke: two of five are in SLO."""
    refused = Exchange(
        id=1, scheduled_s=0.0, asked_prompt_tokens=10, asked_output_tokens=5, error="status 503",
        ended_s=0.1,
    )  # fmt: skip
    broken = msgspec.structs.replace(refused, error="disconnected")
    result = [seen(0.1, 0.02), seen(0.3, 0.02), seen(0.1, 0.2), refused, broken]
    told_ = figures(result, service_classes(["ttft=500ms,tpot=50ms"]))
    assert told_.in_slo == 2 / 5 and told_.refused == 1 / 5
    assert told_.request_s == pytest.approx((0.18 + 0.38 + 0.9) / 3)
    assert told_.ttft_p50_s == pytest.approx(0.1) and told_.tpot_p50_s == pytest.approx(0.02)


def test_where_nobody_was_answered_there_are_no_times():
    refused = Exchange(
        id=1, scheduled_s=0.0, asked_prompt_tokens=10, asked_output_tokens=5, error="status 429"
    )
    told_ = figures([refused], service_classes([]))
    assert told_ == CaseFigures(
        request_s=None, ttft_p50_s=None, ttft_p99_s=None, tpot_p50_s=None, in_slo=0.0, refused=1.0
    )


def test_a_class_has_its_own_objectives():
    """What is too slow for a chat is in time at night; a class that is unknown is the default."""
    classes = service_classes(["ttft=100ms,tpot=50ms", "night:ttft=60m,tpot=10s"])
    slow = seen(5.0, 1.0)
    for name, met in (("night", 1.0), ("", 0.0), ("unknown", 0.0)):
        mine = msgspec.structs.replace(slow, service_class=name)
        assert figures([mine], classes).in_slo == met, name


# ── which words ─────────────────────────────────────────────────────────────────────────────


NOW = CaseFigures(request_s=1.0, ttft_p50_s=0.2, ttft_p99_s=0.9, tpot_p50_s=0.04, in_slo=0.7,
              refused=0.0)  # fmt: skip
THEN = msgspec.structs.replace(NOW, request_s=0.75, in_slo=0.9)
GAIN = Gain(
    change="max_num_seqs=64", label="calibrated", now=NOW, then=THEN, share=0.25,
    share_interval=Interval(0.2, 0.3), points=0.2, points_interval=Interval(0.1, 0.3),
)  # fmt: skip


def test_a_line_says_what_is_saved_and_who_is_refused():
    assert format_gain(GAIN) == "simulated, calibrated: +25% (+20% to +30%), in SLO 70% → 90%"
    fuller = msgspec.structs.replace(GAIN, then=msgspec.structs.replace(THEN, refused=0.12))
    assert format_gain(fuller).endswith(", refused 0% → 12%")


def shown(result: Diagnosis) -> str:
    written = io.StringIO()
    show.show_diagnosis(result, Console(file=written, width=220, no_color=True))
    return written.getvalue()


def test_the_table_has_the_figures_and_the_label():
    result = diagnose(HEALTHY)
    assert "What if" not in shown(result)
    result.what_ifs = [
        GAIN,
        msgspec.structs.replace(GAIN, change="kv_cache_dtype=int8", label="transferred"),
    ]
    text = shown(result)
    first, second = (line for line in text.splitlines() if "→" in line and "=" in line)
    assert "max_num_seqs=64" in first and "+25% (+20% to +30%)" in first
    assert "1.0 s → 750 ms" in first and "70% → 90%" in first
    assert "calibrated" in first and "transferred" in second


def test_json_has_what_the_screen_has():
    reading = varied(HEALTHY, CASES["rows"][0])
    result = diagnose(reading)
    add_what_ifs(result, reading, told(), [parse_change("rate=2x")])
    again = json.loads(msgspec.json.encode(result))
    (what_if,) = again["what_ifs"]
    assert what_if["change"] == "rate=2x" and what_if["label"] == "calibrated"
    assert what_if["then"]["request_s"] > what_if["now"]["request_s"]
    assert msgspec.convert(again, Diagnosis).what_ifs == result.what_ifs


def test_a_fix_that_cannot_be_is_left_out_and_a_question_is_refused():
    """Half of the KV, where one request fills more: nothing is promised of it."""
    reading = varied(HEALTHY, CASES["rows"][0])
    result = diagnose(reading)
    (finding,) = [each for each in result.findings if each.name == "rows"]
    finding.what_if = "kv_memory=0.01x"
    add_what_ifs(result, reading, told(), [])
    assert finding.simulated is None
    with pytest.raises(UsageError, match="one of the traffic has"):
        add_what_ifs(result, reading, told(), [parse_change("kv_memory=0.01x")])
    assert result.what_ifs == []


def test_every_fix_that_can_be_simulated_is_a_change_that_parses():
    """In every case of every rule: what the doctor advises is what the simulation is asked."""
    seen_: set[str] = set()
    for holds, _ in CASES.values():
        for each in diagnose(varied(HEALTHY, holds)).findings:
            if each.what_if:
                change = parse_change(each.what_if)
                assert str(change) == each.what_if
                seen_.add(change.name)
    assert {"max_num_seqs", "rate", "prompts", "kv_memory", "max_num_batched_tokens"} <= seen_


def test_the_first_four_fixes_are_simulated():
    reading = varied(HEALTHY, CASES["rows"][0], QUEUED)
    result = diagnose(reading)
    last = result.findings[-1]
    result.findings = [msgspec.structs.replace(last, what_if="max_num_seqs=32") for _ in range(6)]
    add_what_ifs(result, reading, told(), [])
    done = [each.simulated is not None for each in result.findings]
    assert done == [n < MAX_FIXES for n in range(6)]


def test_a_present_that_is_simulated_far_off_is_said():
    """The reading says 50 s a request; the simulation of the same requests half a second."""
    off = varied(HEALTHY, {"latency.e2e": all_at(50.0)})
    result = diagnose(off)
    add_what_ifs(result, off, told(), [parse_change("rate=1x")])
    assert any("faster than" in text and "directions" in text for text in result.simulated_from)
    near = PresentCase(case_of(told())).figures[0].request_s
    close = varied(HEALTHY, {"latency.e2e": all_at(near)})
    result = diagnose(close)
    add_what_ifs(result, close, told(), [parse_change("rate=1x")])
    assert not any("directions" in text for text in result.simulated_from)
    assert "60 requests" in result.simulated_from[0]
