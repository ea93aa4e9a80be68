"""`headway batch` without a model: an output resumed after any cut, and the command's words."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from headway.batches.offline import ResultFile
from headway.batches.results import Result
from headway.cli.batch import default_output, format_speed, read_lines, run
from headway.cli.main import main
from headway.core.errors import HeadwayError, UsageError
from in_process import fake_state

COUNT = 120


def entry(number: int, **body: Any) -> dict[str, Any]:
    url, asked = "/v1/completions", {"prompt": f"Tell me of {number}"}
    if number % 2:
        messages = [{"role": "user", "content": f"What is 2 + {number}?"}]
        url, asked = "/v1/chat/completions", {"messages": messages}
    body = {"model": "tiny", "max_tokens": 3, "temperature": 0, "seed": 1, **asked, **body}
    return {"custom_id": f"{number}", "method": "POST", "url": url, "body": body}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(entry(i)) + "\n" for i in range(COUNT)))
    return path


async def answer(source: Path, output: ResultFile) -> int:
    lines = read_lines(source, ["tiny"])
    output.refuse_strangers(lines)
    left = [line for line in lines if line.custom_id not in output.done]
    tally = await run(fake_state(), source, lines, left, output, None)
    assert tally.num_lines == len(left) and "tokens/s" in format_speed(tally, 1.0)
    return tally.num_lines


def results(path: Path) -> dict[str, Any]:
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


async def test_an_output_cut_anywhere_is_completed(source: Path):
    target = default_output(source)
    assert target.name == "questions.results.jsonl"
    output = ResultFile(target)
    assert await answer(source, output) == COUNT
    output.close()
    whole, data = results(target), target.read_bytes()
    assert whole.keys() == {f"{i}" for i in range(COUNT)}
    chance = random.Random(3)
    for _ in range(4):
        cut = chance.randrange(len(data))
        target.write_bytes(data[:cut])
        output = ResultFile(target)
        kept = len(output.done)
        assert kept == data[:cut].count(b"\n")
        assert await answer(source, output) == COUNT - kept
        output.close()
        again = results(target)
        assert texts(again) == texts(whole)


def texts(found: dict[str, Any]) -> dict[str, Any]:
    """custom_id → the answer's choices, without what differs between runs."""
    return {name: line["response"]["body"]["choices"] for name, line in found.items()}


async def test_a_bad_line_fails_alone_and_stays_so(source: Path):
    with source.open("a") as file:
        file.write(json.dumps(entry(COUNT, temperature=9)) + "\n")
    output = ResultFile(default_output(source))
    await answer(source, output)
    output.close()
    assert output.num_failed == 1
    again = ResultFile(default_output(source))
    assert again.num_failed == 1 and len(again.done) == COUNT + 1
    again.close()


def test_an_output_is_refused_when_it_is_not_ours(source: Path):
    target = default_output(source)
    target.write_text("a letter\n")
    with pytest.raises(UsageError, match="something else"):
        ResultFile(target)
    target.write_text('{"custom_id": "stranger"}\n')
    output = ResultFile(target)
    with pytest.raises(UsageError, match="stranger"):
        output.refuse_strangers(read_lines(source, ["tiny"]))
    with pytest.raises(UsageError, match="Another headway batch"):
        ResultFile(target)
    output.close()
    with pytest.raises(UsageError, match="cannot be written"):
        ResultFile(target.parent)


def test_a_full_disk_leaves_whole_lines(source: Path, monkeypatch: pytest.MonkeyPatch):
    """/dev/full says ENOSPC; here the disk takes half a line first."""
    target = default_output(source)
    output = ResultFile(target)
    output.write(Result(line=b'{"custom_id":"0"}', failed=False))
    real, calls = os.write, iter([True])

    def half(descriptor: int, data: bytes) -> int:
        if next(calls, False):
            return real(descriptor, data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headway.batches.offline.os.write", half)
    with pytest.raises(HeadwayError, match="disk is full") as caught:
        output.write(Result(line=b'{"custom_id":"1"}', failed=False))
    assert "again" in caught.value.fix
    monkeypatch.undo()
    output.close()
    assert target.read_bytes() == b'{"custom_id":"0"}\n'


def test_faults_are_told_by_line_before_a_model_is_loaded(
    source: Path, capsys: pytest.CaptureFixture[str]
):
    with source.open("a") as file:
        file.write("{\n" * 30)
    assert main(["batch", str(source), "--served-model-name=tiny"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and not default_output(source).exists()
    lines = told.err.splitlines()
    assert lines[0].startswith(f"line {COUNT + 1}: The line is not JSON")
    assert "and 10 more" in lines and "30 faults" in told.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "headway batch FOLDER FILE.jsonl"),
        (["a", "b", "c"], "a folder and a file"),
        (["/nowhere.jsonl"], "/nowhere.jsonl"),
        (["{source}"], "--served-model-name"),
        (["/nowhere", "{source}"], "/nowhere"),
    ],
)
def test_a_wrong_command_is_told_in_two_lines(
    source: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
):
    filled = [text.format(source=source) for text in arguments]
    assert main(["batch", *filled]) in (2, 3)
    assert words in capsys.readouterr().err
