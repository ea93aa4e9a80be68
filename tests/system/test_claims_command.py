"""`claims_page.py` on the embedded model and on a running server, with real engines."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import StartServer
from headway.spec.embedded import model_folder
from literature import batching, bottlenecks, speculation, table
from literature.shapes import llama
from literature.subject import Subject

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "claims_page.py"


def claims(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the script of the page."""
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def figures(row: dict) -> dict[str, float]:
    return {figure["name"]: figure["value"] for figure in row["finding"]["figures"]}


def test_a_folder_is_served_and_asked_and_the_page_written(tmp_path: Path) -> None:
    """A claim of each kind: arithmetic, one that asks a server, one that sets up engines."""
    page, told = tmp_path / "claims.html", tmp_path / "claims.json"
    only = "mbu,cache-date,cost-structured,batching-bus"
    done = claims("--only", only, "--runs=3", f"--out={page}", f"--json={told}")
    assert done.returncode == 0, done.stderr
    report = json.loads(told.read_bytes())
    rows = {row["key"]: row for row in report["rows"]}
    assert set(rows) == set(only.split(","))
    assert all(row["finding"] for row in rows.values()), rows
    assert "[4/4]" in done.stderr and "a server is started" in done.stderr
    rates = figures(rows["cache-date"])
    assert rates["as it is"] > 80 > 20 > rates["date in the first line"]
    failed = figures(rows["cost-structured"])
    assert failed["fail with it"] <= failed["fail without a schema"]
    assert "headway-tiny" in page.read_text(encoding="utf-8")
    assert "batching-bus" in done.stdout


def test_a_running_server_is_asked_what_a_url_allows(start_server: StartServer) -> None:
    server = start_server(folder=model_folder(None)).wait_ready()
    done = claims(server.url, "--only", "cache-many-shot,guess-copies,dollars", "--runs=3")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[1]: line for line in done.stdout.splitlines() if "│" in line}
    assert table.NOT_ASKED in lines["guess-copies"] and "not measured" in lines["guess-copies"]
    assert "5.56" in lines["dollars"]
    assert "less time to the first token" in lines["cache-many-shot"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("a", "b"), "one folder or one URL"),
        (("--only", "speed"), "'speed'"),
        (("--out", "/nowhere/at/all.html", "--only", "mbu"), "/nowhere/at/all.html"),
        (("http://127.0.0.1:9", "--only", "mbu,cache-book"), ""),
        (("--runs", "1"), "runs"),
        (("http://127.0.0.1:9", "--quantization", "int4"), "quantization"),
    ],
)
def test_what_cannot_be_asked_is_said(words: tuple[str, ...], named: str) -> None:
    """A URL where nobody listens is a row without a verdict; all else is refused by name."""
    done = claims(*words)
    if named:
        assert done.returncode == 2 and named in done.stderr, done.stderr
    else:
        assert done.returncode == 0 and "cannot be reached" in done.stdout


def test_all_claims_are_listed() -> None:
    listed = claims("--only", "list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == [claim.key for claim in table.CLAIMS]


def test_guesses_leave_the_tokens_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source on a few questions; copies need fewer steps by far, on any machine."""
    monkeypatch.setattr(speculation, "BATCHES", (1, 2))
    monkeypatch.setattr(speculation, "CHATS", ("lookup",))
    monkeypatch.setattr(speculation, "KINDS", {"chats": ("lookup",), "copies": ("copy",)})
    with Subject(folder=model_folder(None), repeats=3) as subject:
        found = subject.once(speculation.guessed)
        assert found.same and not found.missing
        assert found.a_step("lookup", "copies").value > 1.5
        assert found.a_step("off", "copies").value == 1
        told = speculation.copies(subject)
    assert "The tokens were the same." in told.why
    assert {name for name, _, _ in found.runs} == {"off", "draft", "lookup", "lookahead", "medusa"}


def test_steps_are_timed_in_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small shape: each way gives a prompt's and a step's seconds; int8 has half the bytes."""
    shape = llama(128, 256, 2, 4, vocab_size=512)
    monkeypatch.setattr(bottlenecks, "SMALL", shape)
    monkeypatch.setattr(bottlenecks, "PROMPT", 32)
    found = bottlenecks.steps(Subject(folder=model_folder(None), repeats=3))
    assert set(found.prefill) == set(found.decode) == {*bottlenecks.WAYS, bottlenecks.ON_THE_WALL}
    assert all(
        s > 0 for rows in (found.prefill, found.decode) for row in rows.values() for s in row
    )
    assert found.bytes["int4, one thread"] < found.bytes["int8, one thread"] < 2


def test_a_static_batch_takes_more_steps_where_lengths_vary() -> None:
    """By count, not by time: the same tokens in more steps."""
    from literature.engines import EngineFactory

    factory = EngineFactory.of(model_folder(None), max_num_seqs=4)
    varied = [(8, 4), (8, 32), (8, 4), (8, 32)] * 2
    static = factory.play(factory.engine("static"), varied, seed=0)
    continuous = factory.play(factory.engine(), varied, seed=0)
    assert static.tokens == continuous.tokens == sum(answer for _, answer in varied)
    assert static.steps > continuous.steps
    alike = [(8, batching.ALIKE // 4)] * 8
    assert factory.play(factory.engine("static"), alike, 0).steps == pytest.approx(
        factory.play(factory.engine(), alike, 0).steps, abs=2
    )


def test_a_script_asks_one_claim_alone() -> None:
    root = Path(__file__).resolve().parents[2]
    script = root / "benchmarks" / "claims" / "kv_bytes.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True, timeout=150
    )
    assert done.stdout.count("source: ") == 4
    assert "KV of 32 requests of 2,048 tokens: 53.7 GB" in done.stdout
