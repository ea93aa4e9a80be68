"""What-ifs: changes are checked, and simulated beside the present."""

import msgspec
import pytest

from doctor_cases import CASES, HEALTHY, varied
from fakes import make_settings
from headway.advise.diagnosis import diagnose
from headway.advise.what_if.case import WhatIfCase, case_of
from headway.advise.what_if.changes import parse_change
from headway.advise.what_if.compare import PresentCase
from headway.advise.what_if.gains import add_what_ifs
from headway.bench.calibrate import parse_calibration
from headway.core.errors import UsageError
from headway.core.service import service_classes
from headway.telemetry.calibration import MachineCalibration, StepColumns
from headway.telemetry.traffic import Origin, TrafficRequest
from simulated_house import SPEC, measured, poisson


def calibration(rate: float = 8.0, rows: int = 4, cached: int = 0) -> MachineCalibration:
    """What a server with so many rows tells: prompts of 200 tokens, answers of 20."""
    settings = make_settings(
        num_blocks=(1251,),
        block_size=16,
        max_num_seqs=rows,
        budget=512,
        max_model_len=2048,
        policy="slo",
    )
    classes = service_classes(["ttft=500ms,tpot=50ms"])
    return measured(
        settings,
        traffic=[TrafficRequest(float(t), 200, cached, 20) for t in poisson(rate, 150)],
        origin=Origin(spec=SPEC, settings=settings, classes=classes),
    )


def gain(case: WhatIfCase, text: str):
    return PresentCase(case, runs=1).gain(parse_change(text).of(case), text)


def test_no_change_gives_nothing():
    """Common random numbers: what does not differ gives the very same figures."""
    case = case_of(calibration())
    for text in ("rate=1x", "max_num_seqs=4", "policy=slo", "kv_memory=1x", "prompts=1x"):
        result = gain(case, text)
        assert (result.share, result.points) == (0.0, 0.0), text
        assert result.share_interval.low == result.share_interval.high == 0.0


def test_what_helps_helps_and_what_hurts_hurts():
    case = case_of(calibration(rate=7.5))
    helps = ("rate=0.5x", "max_num_seqs=32", "prompts=0.5x", "answers=0.5x", "prefix=190",
             "replicas=2")  # fmt: skip
    for text in helps:
        result = gain(case, text)
        assert result.share > 0.05 and result.share_interval.low > 0, text
    for text in ("rate=2x", "max_num_seqs=1", "prompts=2x", "answers=2x"):
        assert gain(case, text).share_interval.high < 0, text


def test_labels_say_what_was_measured():
    case = case_of(calibration())
    assert gain(case, "max_num_batched_tokens=64").label == "calibrated"
    assert gain(case, "kv=int8").label == gain(case, "quantization=int4").label == "transferred"


def test_int8_kv_holds_more_tokens():
    case = case_of(calibration())
    then = parse_change("kv=int8").of(case)
    assert 3.5 < then.settings.cache.num_blocks[0] / case.settings.cache.num_blocks[0] < 4
    assert parse_change("kv_memory=2x").of(case).settings.cache.num_blocks == (2501,)
    assert parse_change("block_size=32").of(case).settings.cache.num_blocks == (626,)


def test_who_was_refused_counts_with_the_lengths_of_the_others():
    result = calibration()
    result.traffic += [TrafficRequest(99.0, 0, 0, None), TrafficRequest(99.5, 300, 0, None)]
    case = case_of(result)
    assert [(request.prompt, request.answer) for request in case.traffic[-2:]] == [
        (200, 20),
        (300, 20),
    ]


def test_it_survives_the_way_through_json():
    result = calibration()
    again = parse_calibration(msgspec.json.encode(result), "x")
    assert case_of(again) == case_of(result)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rate", "NAME=VALUE"),
        ("rate=", "NAME=VALUE"),
        ("rate=2", "multiple"),
        ("rate=0x", "no multiple"),
        ("rate=-1x", "no multiple"),
        ("rate=nanx", "no multiple"),
        ("rate=1e9x", "no multiple"),
        ("speed=2x", "cannot be simulated"),
        ("prefix=long", "tokens"),
        ("policy=best", "not one of"),
        ("max_num_seqs=0", "out of range"),
    ],
)
def test_bad_changes_are_refused_by_name(text: str, says: str):
    with pytest.raises(UsageError) as error:
        parse_change(text)
    assert says in error.value.cause + error.value.fix


@pytest.mark.parametrize(
    "text",
    [
        "policy=2x",
        "kv_memory=0.01x",
        "kv_memory=50%",
        "speculative_method=auto",
        "quantization=fp8",
        "kv=int4",
    ],
)
def test_what_cannot_be_simulated_is_refused(text: str):
    with pytest.raises(UsageError):
        parse_change(text).of(case_of(calibration()))


def test_too_little_is_refused():
    result = calibration()
    for changes in ({"origin": None}, {"traffic": result.traffic[:9]}, {"steps": StepColumns()}):
        with pytest.raises(UsageError):
            case_of(msgspec.structs.replace(result, **changes))


def test_fixes_are_simulated():
    """Rows are full: the doctor's own fix is simulated, and what it gives stands in the finding."""
    reading = varied(HEALTHY, CASES["rows"][0])
    diagnosis = diagnose(reading)
    add_what_ifs(diagnosis, reading, calibration(rate=7.5, rows=4), [parse_change("rate=0.9x")])
    finding = next(each for each in diagnosis.findings if each.name == "rows")
    assert finding.what_if.startswith("max_num_seqs=")
    assert finding.simulated is not None and finding.simulated.share > 0
    assert [each.change for each in diagnosis.what_ifs] == ["rate=0.9x"]
    assert diagnosis.simulated_from
