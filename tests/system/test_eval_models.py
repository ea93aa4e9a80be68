"""`headway eval` on real engines and a real server: a folder and its own URL must agree.

The tiny model answers nonsense, but always the same. The command runs in this process, the server
in its own. Intervals, tests and the gate's rule are in tests/unit/evals/test_eval_figures.py.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from live_server import LiveServer

from conftest import StartServer
from headway.cli.common import GATE_FAILED
from headway.cli.main import main
from headway.core.errors import HeadwayError
from headway.core.scoring import Score
from headway.evals.report import EvalReport, read_report
from headway.evals.url import UrlModel, open_url
from headway.whole_model import FolderModel

FEW = ("--questions=2", "--skills=copy,classify,lookup", "--levels=1,3", "--kv-memory=64MiB")
TEXT = "Once upon a time there was a little girl who liked to play with her friends. " * 12
CHATS = [
    [{"role": "user", "content": "Tell me about the sea."}],
    [{"role": "user", "content": "x"}],
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder of a few hundred words."""
    files = {
        "text/val.txt": TEXT,
        "eval/wikitext-2/test.txt": TEXT[:600],
        "eval/lambada/lambada_test.jsonl": "\n".join(
            json.dumps({"text": f"they found a big red ball under the {word}"})
            for word in ("tree", "weather", "sea", "garden")
        ),
    }
    for name, text in files.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path / "data"


@pytest.fixture
def asked(server: LiveServer) -> Iterator[UrlModel]:
    """The tiny model behind its URL."""
    with open_url(server.url + "/v1") as model:
        yield model


@pytest.fixture(scope="module")
def folder(tiny_model: Path) -> FolderModel:
    """The tiny model in this process."""
    return FolderModel(tiny_model, kv_memory="64MiB")


def run(*words: str | Path, status: int = 0) -> None:
    assert main(["eval", *map(str, words)]) == status


# ── one model in two ways ───────────────────────────────────────────────────────────────────


def test_a_folder_and_its_url_are_equally_good(
    tiny_model: Path, server: LiveServer, data: Path, tmp_path: Path
) -> None:
    """All suites; the same replies, the same bits, no divergence."""
    kept = tmp_path / "b.json"
    run(
        server.url, "--against", tiny_model, "--gate", "--suite=all", "--data", data, *FEW,
        "--json", kept, "--html", tmp_path / "b.html",
    )  # fmt: skip
    report = read_report(str(kept))
    assert report.model == "tiny" and report.place == server.url
    assert report.against is not None and report.against.place == str(tiny_model)
    assert report.skills is not None and report.against.skills is not None
    assert len(report.skills.items) == 2 * 3 * 2
    assert report.skills.items == report.against.skills.items
    assert report.skills.unfit == 2, "lookup at level 3 exceeds the 512 tokens of the tiny model"
    assert all(len(item.reply) > 0 for item in report.skills.items if item.reply is not None)
    figures = report.text.figures, report.against.text.figures
    assert [f.name for f in figures[0]] == ["wikitext-2", "books", "lambada"]
    for ours, theirs in zip(*figures, strict=True):
        assert ours.value == pytest.approx(theirs.value, abs=1e-4)
    assert report.divergence is not None and report.divergence.method.endswith("lower bound")
    told = {each.name: each.value for each in report.divergence.figures}
    for name in ("wikitext-2", "books"):
        assert told[f"{name}: same likeliest token"] == 1.0
        assert told[f"{name}: KL"] == pytest.approx(0, abs=1e-4)
        assert told[f"{name}: perplexity, B / A"] == pytest.approx(1, abs=1e-4)
    assert "<svg" in (tmp_path / "b.html").read_text()


def test_a_stored_report_stands_for_its_model(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "a.json"
    run(tiny_model, *FEW, "--suite=skills", "--json", kept)
    first = read_report(str(kept))
    assert first.comparison is None and first.skills is not None
    praised = msgspec.convert(msgspec.to_builtins(first), EvalReport)
    for item in praised.skills.items:
        item.right = True
    kept.write_bytes(msgspec.json.encode(praised))
    capsys.readouterr()
    run(tiny_model, *FEW, "--against", kept, "--gate", "--tolerance=0.3", status=GATE_FAILED)
    assert "gate: fails: skills" in capsys.readouterr().out


# ── what a URL can be asked ─────────────────────────────────────────────────────────────────


def test_greedy_answers_are_the_engines_own(asked: UrlModel, folder: FolderModel) -> None:
    assert asked.name == "tiny" and asked.chats
    replies = asked.generate(CHATS, max_tokens=8)
    assert list(replies) == list(folder.generate(CHATS, max_tokens=8))
    assert all(replies)


def test_a_chat_beyond_the_context_has_no_answer(asked: UrlModel, folder: FolderModel) -> None:
    chats = [CHATS[0], [{"role": "user", "content": TEXT * 3}]]
    for model in (asked, folder):
        replies = model.generate(chats, max_tokens=8)
        assert replies[0] and replies[1] is None


def close(ours: Score, theirs: Score) -> None:
    """The same log-probabilities; the first has none."""
    assert ours.logprobs[0] is theirs.logprobs[0] is None
    assert ours.logprobs[1:] == pytest.approx(theirs.logprobs[1:], abs=1e-4)


@pytest.mark.parametrize("way", ["prompt_logprobs", "echo"])
def test_both_ways_to_log_probabilities_agree_with_the_engine(
    asked: UrlModel, folder: FolderModel, way: str
) -> None:
    texts = ["the engine takes requests", TEXT[:80]]
    asked._scoring_method = way
    for top in (0, 5):
        for ours, theirs in zip(asked.score(texts, top=top), folder.score(texts, top=top)):
            close(ours, theirs)
            assert ours.token_ids == ([] if way == "echo" else theirs.token_ids)
            assert len(ours.top) == len(theirs.top) == len(theirs.logprobs)
            for of_ours, of_theirs in zip(ours.top, theirs.top):
                assert top <= len(of_ours) <= top + 1 or not of_theirs
                if way != "echo":
                    assert of_ours == pytest.approx(of_theirs, abs=1e-4)
                else:
                    best = sorted(of_ours.values(), reverse=True)[: len(of_theirs)]
                    assert best == pytest.approx(sorted(of_theirs.values())[::-1], abs=1e-4)


def test_the_better_way_is_found(asked: UrlModel) -> None:
    assert asked.score(["the engine"])[0].token_ids
    assert asked._scoring_method == "prompt_logprobs"


def test_a_model_without_a_template_continues_a_transcript(
    tiny_model: Path, tmp_path: Path, start_server: StartServer
) -> None:
    bare = shutil.copytree(tiny_model, tmp_path / "bare")
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    live = start_server(folder=bare).wait_ready()
    offline = FolderModel(bare, kv_memory="64MiB")
    with open_url(live.url) as model:
        assert not model.chats
        replies = list(model.generate(CHATS, max_tokens=8))
    assert all(replies) and replies == list(offline.generate(CHATS, max_tokens=8))


def refused(capsys: pytest.CaptureFixture[str], *words: Any, status: int) -> str:
    """The two lines on stderr."""
    run(*words, status=status)
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 2, told
    return told


def test_refusals_are_told_before_anything_is_asked(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refused(capsys, server.url, "--model=other", status=1)
    assert "404" in told and "other" in told and "--model" in told
    told = refused(capsys, tmp_path, status=3)
    assert "config.json" in told
    told = refused(capsys, server.url, "--against", tmp_path / "none", status=3)
    assert "none" in told


def test_a_key_is_asked_for_and_sent(start_server: StartServer) -> None:
    live = start_server("--api-key=sesame", "--executor=null").wait_ready()
    with pytest.raises(HeadwayError, match="--api-key"), open_url(live.url, model="tiny"):
        pass
    with open_url(live.url, api_key="sesame") as model:
        assert model.name == "tiny"


def test_a_server_without_prompt_log_probabilities_is_refused(asked: UrlModel) -> None:
    asked.url += "/nothing"
    with pytest.raises(HeadwayError, match="does not tell the log-probabilities"):
        asked.score(["text"])
