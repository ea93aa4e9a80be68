"""A cascade of two real servers: right answers and CPU seconds, beside each alone and chance.

    python benchmarks/cascade.py            headway-draft, then headway-tiny at the cost of 135M
    python benchmarks/cascade.py --cheap FOLDER --dear FOLDER --questions 50 --evidence FILE

`headway gateway calibrate` makes the evidence from questions of one seed; those of another are
then asked through the gateway three times: of the dear route, of the cheap one, of the cascade. CPU
is that of the servers with their engines, and of the gateway. Random routing at the same cost asks
a share of the questions cheaply, whichever they are: its right answers follow from the two alone.
The curve is that of one threshold of the margin for all skills, as if it were known: the cheap
answers at least so sure are kept, the others asked again of the dear route at its mean cost.
Embedded as they are both models take what HTTP takes, and no cascade pays; so the dear one is
widened (docs/widen.md): the same answers at the cost of its shape.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import aiohttp

from common import children, free_port, markdown, running, serving
from headway.evals.questions import MAX_TOKENS, OTHER_TOKENS
from headway.evals.skills.example import Example
from headway.evals.skills.suite import SKILLS, TEST_SEED, examples
from headway.evals.statistics import wilson

TICKS = os.sysconf("SC_CLK_TCK")
AT_ONCE = 8
COLUMNS = ("route", "right", "of dear", "CPU seconds", "of dear", "right, 95%")


def cpu_s(pid: int) -> float:
    """Seconds of CPU of a process and of those that it has started."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        own = (int(fields[11]) + int(fields[12])) / TICKS
        return own + sum(map(cpu_s, children(pid)))
    return 0.0


def headway(*words: str) -> None:
    """Run a verb to its end."""
    subprocess.run([sys.executable, "-m", "headway.cli.main", *words], check=True)


@contextlib.contextmanager
def gateway(file: Path) -> Iterator[tuple[str, int]]:
    port = free_port()
    flags = [f"--port={port}", f"--data-dir={file.parent}", "--log-level=error"]
    with running(
        [sys.executable, "-m", "headway.cli.main", "gateway", str(file), *flags], port
    ) as on:
        yield on


async def asked(
    url: str, model: str, questions: list[tuple[str, Example]]
) -> tuple[list[bool], list[float]]:
    """Whether each answer of a route is right; of the cheap one its margin in nats, too."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(http: aiohttp.ClientSession, skill: str, example: Example) -> tuple[bool, float]:
        body = {
            "model": model,
            "messages": example.messages,
            "max_tokens": MAX_TOKENS.get(skill, OTHER_TOKENS),
            "temperature": 0,
            "metadata": {"task": skill},
            **({"logprobs": True, "top_logprobs": 2} if model == "cheap" else {}),
        }
        async with places, http.post(f"{url}/v1/chat/completions", json=body) as answer:
            choice = (await answer.json())["choices"][0]
            return example.accepts(choice["message"]["content"] or ""), margin(choice)

    async with aiohttp.ClientSession() as http:
        found = await asyncio.gather(*(one(http, *question) for question in questions))
    return [right for right, _ in found], [least for _, least in found]


def margin(choice: dict[str, Any]) -> float:
    """The least gap in nats from a token to the next likeliest; 0 without log-probabilities."""
    gaps = [
        token["logprob"] - other["logprob"]
        for token in (choice.get("logprobs") or {}).get("content") or ()
        for other in token["top_logprobs"]
        if other["token"] != token["token"]
    ]
    return min(gaps, default=0.0)


def config(folder: Path, cheap: str, dear: str, evidence: str) -> Path:
    """The gateway's file: each route alone, and the cascade."""
    price = {"hour": 1.0}
    file = folder / "gateway.yaml"
    cascade = {"cheap": "cheap", "evidence": evidence, "checks": ["margin"], "within": "120s"}
    content = {
        "upstreams": [
            {"name": "c", "url": f"{cheap}/v1", "price": price},
            {"name": "d", "url": f"{dear}/v1", "price": price},
        ],
        "models": [
            {"name": "cascade", "upstreams": ["d"], "cascade": cascade},
            {"name": "cheap", "upstreams": ["c"]},
            {"name": "dear", "upstreams": ["d"]},
        ],
    }
    file.write_text(json.dumps(content))
    return file


def measured(given: argparse.Namespace, folder: Path, dear: str) -> None:
    questions = [
        (skill, example)
        for skill in SKILLS
        for level in given.levels
        for example in islice(examples(skill, level, TEST_SEED), given.questions)
    ]
    levels = [f"--levels={','.join(map(str, given.levels))}"]
    with serving(given.cheap) as (cheap_url, cheap_pid), serving(dear) as (dear_url, dear_pid):
        evidence = given.evidence or str(folder / "evidence.json")
        file = config(folder, cheap_url, dear_url, evidence)
        if not Path(evidence).exists():
            flags = [*levels, f"--questions={given.calibration}", f"--tolerance={given.tolerance}"]
            headway("gateway", "calibrate", str(file), "--concurrency=8", *flags)
        found: dict[str, tuple[list[bool], float]] = {}
        margins: list[float] = []
        with gateway(file) as (url, gateway_pid):
            pids = (cheap_pid, dear_pid, gateway_pid)
            for model in ("dear", "cheap", "cascade"):
                before_s = sum(map(cpu_s, pids))
                right, told = asyncio.run(asked(url, model, questions))
                found[model] = right, sum(map(cpu_s, pids)) - before_s
                margins = told if model == "cheap" else margins
    show(found, questions)
    curve(found, margins)


def show(found: dict[str, tuple[list[bool], float]], questions: list[tuple[str, Any]]) -> None:
    """The routes beside each other and beside random routing, then skill by skill."""
    (dear, dear_s), (cheap, cheap_s), (_, cascade_s) = (
        found[name] for name in ("dear", "cheap", "cascade")
    )
    rows: list[tuple[Any, ...]] = []
    for name, (right, seconds) in found.items():
        low, high = wilson(sum(right), len(right))
        kept, cost = f"{sum(right) / sum(dear):.1%}", f"{seconds / dear_s:.1%}"
        rows.append((name, sum(right), kept, f"{seconds:.1f}", cost, f"{low:.1%} … {high:.1%}"))
    share = min(1.0, max(0.0, (dear_s - cascade_s) / (dear_s - cheap_s)))
    chance = share * sum(cheap) + (1 - share) * sum(dear)
    rows.append(
        (
            f"random, {share:.0%} cheap",
            f"{chance:.1f}",
            f"{chance / sum(dear):.1%}",
            f"{cascade_s:.1f}",
            f"{cascade_s / dear_s:.1%}",
            "",
        )
    )
    print(f"\n{len(questions)} questions\n\n{markdown(COLUMNS, rows)}\n")
    by_skill = []
    for skill in SKILLS:
        places = [i for i, question in enumerate(questions) if question[0] == skill]
        cells = []
        for right, _ in found.values():
            count = sum(right[i] for i in places)
            low, high = wilson(count, len(places))
            cells.append(f"{count} ({low:.0%} … {high:.0%})")
        by_skill.append((skill, *cells, len(places)))
    print(markdown(("skill", *found, "asked"), by_skill))


def curve(found: dict[str, tuple[list[bool], float]], margins: list[float]) -> None:
    """Right answers by cost, for one threshold after the other, beside random routing."""
    (dear, dear_s), (cheap, cheap_s) = found["dear"], found["cheap"]
    count, rows = len(dear), []
    order = sorted(range(count), key=lambda place: -margins[place])
    for kept in range(count, -1, -count // 12):
        right = sum(cheap[i] for i in order[:kept]) + sum(dear[i] for i in order[kept:])
        cost_s = cheap_s + dear_s * (count - kept) / count
        share = min(1.0, max(0.0, (dear_s - cost_s) / (dear_s - cheap_s)))
        chance = share * sum(cheap) + (1 - share) * sum(dear)
        rows.append((f"{kept / count:.0%}", f"{cost_s / dear_s:.0%}", right, f"{chance:.0f}"))
    print(f"\n{markdown(('kept', 'of dear CPU', 'right', 'random routing'), rows)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cheap", default="headway-draft")
    parser.add_argument("--dear", default="", help="by default headway-tiny, widened")
    parser.add_argument("--like", default="smollm2-135m", help="the shape it is widened to")
    parser.add_argument("--questions", type=int, default=50, help="of each skill and level")
    parser.add_argument("--calibration", type=int, default=150, help="the same, for the evidence")
    parser.add_argument("--levels", type=int, nargs="+", default=[1])
    parser.add_argument("--tolerance", type=float, default=0.05)
    parser.add_argument("--evidence", help="go by this file; it is made where it is not there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.evidence:
            given.evidence = str(Path(given.evidence).resolve())
        dear = given.dear or str(folder / "dear")
        if not given.dear:
            headway("widen", "headway-tiny", f"--like={given.like}", dear)
        measured(given, folder, dear)


if __name__ == "__main__":
    main()
