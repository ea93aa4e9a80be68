"""docs/bench.md is executed: every command line of it, and its file of classes."""

import re
import shlex
from pathlib import Path

import pytest
from live_server import headway

from fake_openai import FakeServer

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "bench.md").read_text(encoding="utf-8")
LINES = [
    line
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for line in block.splitlines()
    if line.startswith("headway bench http")
]
TRACES = {
    "azure.csv": "azure2023_code/AzureLLMInferenceTrace_code.csv",
    "mooncake.jsonl": "mooncake_conversation/conversation_trace.jsonl",
    "sharegpt.jsonl": "sharegpt300/sharegpt-llama-3.1-8b-300-sps10.jsonl",
}


def arguments(line: str, folder: Path, request: pytest.FixtureRequest) -> list[str]:
    """The words after `headway`, with real files where the page names some."""
    for name, path in TRACES.items():
        if f":{name}" in line:
            traces = request.getfixturevalue("shared") / "traces"
            line = line.replace(f":{name}", f":{traces / path}")
    classes = folder / "classes.yaml"
    classes.write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])  # type: ignore[index]
    return shlex.split(line.replace("classes.yaml", str(classes)))[1:]


@pytest.mark.parametrize("line", LINES)
def test_every_command_says_what_it_would_send(
    line: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    words = arguments(line, tmp_path, request)
    files = ("--json", "--html", "a.json", "report.html")
    done = headway(*(word for word in words if word not in files), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "conversations of" in done.stdout


def test_the_first_two_and_the_comparison_run(tmp_path: Path) -> None:
    with FakeServer(ttft=0.02, itl=0.002) as fake:
        for line in LINES[:2]:
            line = re.sub(r"http://\S+", fake.url, line).replace("2m", "3s")
            line = line.replace("a.json", f"{tmp_path}/a.json")
            done = headway(*shlex.split(line.replace("report.html", f"{tmp_path}/r.html"))[1:])
            assert done.returncode == 0, done.stderr
            assert "TTFT" in done.stdout and "✓ tokens in chunks = usage" in done.stdout
    assert "<svg" in (tmp_path / "r.html").read_text()
    done = headway("bench", "compare", tmp_path / "a.json", tmp_path / "a.json")
    assert done.returncode == 0 and "within noise" in done.stdout


def test_the_page_names_every_workload_and_arrival() -> None:
    from headway.bench.arrivals import ARRIVALS
    from headway.bench.workload import WORKLOADS

    for name in WORKLOADS:
        assert re.search(rf"^\| `{name}(:FILE)?` \|", PAGE, re.MULTILINE), name
    for name in ARRIVALS:
        assert f"| `{name}` |" in PAGE
