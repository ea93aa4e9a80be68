"""Does `headway bench` agree with other load generators: `python benchmarks/agreement.py URL …`.

Each tool drives the same server with the same load, one after the other: even arrivals, text
completions, prompts and answers of fixed lengths. Prompts of each run are its own, so that no tool
computes what another finds in the prefix cache; the server's counters are read to hold that, where
it has them. Medians are set side by side under our names (AIPerf's and guidellm's "inter token
latency" is our TPOT).

A machine is not alike from one minute to the next. So turns are short and many, another tool goes
first in each round, and each tool is compared with ours of the same round: the table has the median
of those ratios, and between what 95% of the medians lie when the rounds are drawn again. Each
tool's means are also set beside those that the server itself counted of the same requests
(`/metrics`): this compares the clocks alone.

With `--together` the tools of a round send at once, each its share of the rate, and only requests
that left while all were sending count: whatever the machine does, it does to all of them. Ours
begins when another's first request is there. The rates differ a little, so that none always comes
behind another.

    aiperf    |———————————————————————————|        0.97 requests/s
    headway        |———————————————————————————|   1.03
    counted        |——————————————————————|

The tools are other people's: `--aiperf` and `--guidellm` are the paths of their commands, best in
environments of their own.
"""

import argparse
import json
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from headway.bench.scrape import parse

WORDS = "the a little girl boy dog cat went to park and saw big red ball tree was happy".split()
FIGURES = {
    "TTFT": "time_to_first_token_seconds",
    "TPOT": "request_time_per_output_token_seconds",
    "e2e": "e2e_request_latency_seconds",
}
"""Our name → the histogram in which a server counts it."""
MOST_CACHED = 0.02
"""Of a run's prompt tokens: more that the server had already, and its TTFT is not another's."""
RATES_APART = 0.06
"""Of tools that send at once, so much between one's rate and the next one's."""
LEAST_DRAWN, DRAWS = 5, 4000
"""Rounds of which an interval can be told; how often they are drawn again."""
Figures = dict[str, float]


class Answer(NamedTuple):
    """One request as a tool saw it: when it left, seconds since 1970, and its figures in ms."""

    sent_s: float
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float


@dataclass
class Reading:
    """What a tool says of its run, in ms by figure, and what the server counted of it."""

    medians: Figures
    means: Figures
    own: Figures = field(default_factory=dict)

    @classmethod
    def of(cls, answers: list[Answer]) -> Self:
        """The medians and means of these answers."""
        columns = dict(zip(FIGURES, list(zip(*answers, strict=True))[1:], strict=True))
        return cls(
            {figure: statistics.median(values) for figure, values in columns.items()},
            {figure: statistics.mean(values) for figure, values in columns.items()},
        )


class Run(NamedTuple):
    """A run of a tool. `counters` are of its timed requests alone, where it knows them itself."""

    answers: list[Answer]
    counters: dict[str, float] | None = None


def own_means(counters: dict[str, float]) -> Figures:
    """The server's means in ms from what its histograms grew by; of those that it has."""
    counts = {figure: counters.get(f"{name}_count", 0.0) for figure, name in FIGURES.items()}
    return {
        figure: counters[f"{FIGURES[figure]}_sum"] / count * 1e3
        for figure, count in counts.items()
        if count
    }


def growth(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What each counter grew by."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def run(command: list[str], folder: Path) -> None:
    """Run one tool; its own words only when it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def texts(run_name: str, count: int, num_words: int) -> list[str]:
    """Prompts of one run, the same for the same name; each begins with a word of its own."""
    rng = random.Random(run_name)
    return [
        " ".join([f"{rng.getrandbits(64):016x}", *rng.choices(WORDS, k=num_words - 1)])
        for _ in range(count)
    ]


def prompts(args: argparse.Namespace, folder: Path) -> Path:
    """The file of this run's prompts, a line each."""
    path, name = folder / "prompts.jsonl", "text" if args.tool == "aiperf" else "prompt"
    lines = [json.dumps({name: text}) for text in texts(args.run_name, args.count, args.input)]
    path.write_text("\n".join(lines) + "\n")
    return path


def order(tools: list[str], round_number: int) -> list[str]:
    """Who goes when: in round 0 a b c, in round 1 b c a, in round 2 c a b."""
    first = round_number % len(tools)
    return tools[first:] + tools[:first]


def cached_share(counters: dict[str, float]) -> float | None:
    """Of the prompt tokens counted, those found in the prefix cache; None where nobody told."""
    asked = counters.get("prefix_cache_queries_total", 0.0)
    return counters.get("prefix_cache_hits_total", 0.0) / asked if asked else None


def scrape(url: str) -> dict[str, float]:
    """The counters of the server's /metrics; {} where it has none."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            return parse(answer.read().decode())
    except OSError:
        return {}


def ours(args: argparse.Namespace, folder: Path) -> Run:
    """`headway bench`; from when a request left, as the others count, not from when it was due."""
    path = folder / "headway.json"
    run(
        [
            *(sys.executable, "-m", "headway.cli.main", "bench", args.url, f"--json={path}"),
            *("--arrivals=constant", f"--rate={args.rate}", f"--num-requests={args.count}"),
            *(f"--workload=prompts:{prompts(args, folder)}", f"--output-len={args.output}"),
            *("--warmup=0", "--cooldown=0"),
        ],
        folder,
    )
    found = json.loads(path.read_text())["run"]
    answers = []
    for each in found["exchanges"]:
        first_s, last_s = each["chunk_s"][0], each["chunk_s"][-1]
        tpot_s = (last_s - first_s) / (each["output_tokens"] - 1)
        e2e_s = last_s - each["sent_s"]
        seconds = (first_s - each["sent_s"], tpot_s, e2e_s)
        answers.append(Answer(found["started_at"] + each["sent_s"], *(s * 1e3 for s in seconds)))
    return Run(answers, found["server"]["counters"])


def aiperf(args: argparse.Namespace, folder: Path) -> Run:
    """NVIDIA's AIPerf: its inter token latency is (e2e − TTFT) / (n − 1).

    By itself it reads the server's metrics each 333 ms and works on them on the server's cores:
    at even arrivals each second request meets that, and waits 20 ms longer for its first token.
    """
    run(
        [
            *(args.aiperf, "profile", "--model", args.model, "--url", args.url, "--streaming"),
            *("--endpoint-type", "completions", "--tokenizer", args.tokenizer),
            *("--input-file", str(prompts(args, folder)), "--custom-dataset-type", "single_turn"),
            *("--output-tokens-mean", str(args.output), "--output-tokens-stddev", "0"),
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{args.output}"),
            *("--request-rate", str(args.rate), "--request-rate-mode", "constant"),
            *("--request-count", str(args.count), "--use-server-token-count"),
            *("--no-server-metrics", "--no-gpu-telemetry"),
            *("--artifact-dir", str(folder / "aiperf"), "--ui", "none"),
        ],
        folder,
    )
    (path,) = (folder / "aiperf").rglob("profile_export.jsonl")
    answers = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        names = ("time_to_first_token", "inter_token_latency", "request_latency")
        figures = (row["metrics"][name]["value"] for name in names)
        answers.append(Answer(row["metadata"]["request_start_ns"] / 1e9, *figures))
    return Run(answers)


def guidellm(args: argparse.Namespace, folder: Path) -> Run:
    """guidellm: its inter token latency is (e2e − TTFT) / (n − 1); request latency in seconds."""
    path = folder / "guidellm.json"
    backend = {
        "kind": "openai_http",
        "target": args.url,
        "model": args.model,
        "request_format": "/v1/completions",
        "max_tokens": args.output,
        "extras": {"body": {"ignore_eos": True, "min_tokens": args.output}},
    }
    run(
        [
            *(args.guidellm, "run", "--backend", json.dumps(backend)),
            *("--profile", f"kind=constant,rate={args.rate}"),
            *("--constraint", f"kind=max_requests,count={args.count}"),
            *("--data", f"kind=json_file,path={prompts(args, folder)}"),
            *("--tokenizer", f"kind=hf_auto,model={args.tokenizer}"),
            *("--output", f"kind=json,path={path}", "--disable-console"),
        ],
        folder,
    )
    (benchmark,) = json.loads(path.read_text())["benchmarks"]
    return Run(
        [
            Answer(
                row["request_start_time"],
                row["time_to_first_token_ms"],
                row["inter_token_latency_ms"],
                row["request_latency"] * 1e3,
            )
            for row in benchmark["requests"]["successful"]
        ]
    )


TOOLS: dict[str, Callable[[argparse.Namespace, Path], Run]] = {
    "headway": ours,
    "aiperf": aiperf,
    "guidellm": guidellm,
}


def apart(rounds: list[dict[str, Reading]], tool: str, figure: str) -> str:
    """How far the tool's medians are from ours of the same rounds: "+1.2%, +0.3 to +2.0%".

    Rounds of 100 and 101, 150 and 151.5, 80 and 80.8 ms are +1.0%, whatever the machine did.
    """
    ratios = [each[tool].medians[figure] / each["headway"].medians[figure] - 1 for each in rounds]
    middle = f"{statistics.median(ratios):+.1%}"
    if len(ratios) < LEAST_DRAWN:
        return middle
    rng = random.Random(0)
    drawn = [statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(DRAWS)]
    low, *_, high = statistics.quantiles(drawn, n=40)
    return f"{middle}, {100 * low:+.1f} to {high:+.1%}"


def table(rounds: list[dict[str, Reading]]) -> str:
    """Medians over the rounds, how far each tool is from ours, and each from the server's own."""
    head = " | ".join(rounds[0])
    lines = [f"| median, ms | {head} |", "| --- |" + " --- |" * len(rounds[0])]
    for figure in FIGURES:
        cells = []
        values = {
            tool: statistics.median(each[tool].medians[figure] for each in rounds)
            for tool in rounds[0]
        }
        for tool, value in values.items():
            off = f" ({apart(rounds, tool, figure)})" if tool != "headway" else ""
            cells.append(f"{value:.2f}{off}")
        lines.append(f"| {figure} | " + " | ".join(cells) + " |")
    shared = [f for f in FIGURES if all(f in r.own for each in rounds for r in each.values())]
    if shared:
        lines += ["", f"| mean beside the server's own | {head} |", lines[1]]
    for figure in shared:
        offs = [
            statistics.median(above_own(each[tool], figure) for each in rounds)
            for tool in rounds[0]
        ]
        lines.append(f"| {figure} | " + " | ".join(f"{off:+.1%}" for off in offs) + " |")
    return "\n".join(lines)


def above_own(reading: Reading, figure: str) -> float:
    """How far the tool's mean is from the server's own of the same requests: 0.01 is 1% more."""
    return reading.means[figure] / reading.own[figure] - 1


def run_of(tool: str, args: argparse.Namespace, run_name: str, **load: float) -> Run:
    """Let one tool send its run, with `load` in place of the arguments of that name."""
    given = argparse.Namespace(**{**vars(args), **load, "tool": tool, "run_name": run_name})
    with tempfile.TemporaryDirectory() as folder:
        return TOOLS[tool](given, Path(folder))


def measured(tool: str, args: argparse.Namespace, run_name: str) -> Reading:
    """One run of one tool, told on stderr; ends the script when its prompts were not new."""
    before = scrape(args.url)
    answers, counters = run_of(tool, args, run_name)
    found = Reading.of(answers)
    counters = counters or growth(before, scrape(args.url))
    found.own = own_means(counters)
    say(run_name, found, f", the server's own {told(found.own)}; {new_or_exit(counters)}")
    return found


def measured_together(tools: list[str], args: argparse.Namespace, name: str) -> dict[str, Reading]:
    """All tools at once, each its share of the rate; what left while all were sending."""
    before, middle = scrape(args.url), (len(tools) - 1) / 2

    def send(place: int, tool: str) -> Run:
        if tool == "headway":
            wait_for_another(args.url, before)
        rate = args.rate / len(tools) * (1 + RATES_APART * (place - middle))
        return run_of(tool, args, f"{name} {tool}", rate=rate)

    with ThreadPoolExecutor(len(tools)) as pool:
        runs = {tool: pool.submit(send, place, tool) for place, tool in enumerate(tools)}
    cached = new_or_exit(growth(before, scrape(args.url)))
    shared = overlap({tool: run.result().answers for tool, run in runs.items()})
    found = {tool: Reading.of(answers) for tool, answers in shared.items()}
    for tool, reading in found.items():
        say(f"{name} {tool}", reading, f"; {len(shared[tool])} requests count; {cached}")
    return found


def wait_for_another(url: str, before: dict[str, float]) -> None:
    """Until the server has counted a prompt since `before`; a minute where it counts none."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if growth(before, scrape(url)).get("prompt_tokens_total"):
            return
        time.sleep(0.2)


def overlap(runs: dict[str, list[Answer]]) -> dict[str, list[Answer]]:
    """Of each run the answers to what left while all of them were sending; ends the script where
    that is nothing."""
    first_s = max(min(answer.sent_s for answer in answers) for answers in runs.values())
    last_s = min(max(answer.sent_s for answer in answers) for answers in runs.values())
    found = {
        tool: [answer for answer in answers if first_s <= answer.sent_s <= last_s]
        for tool, answers in runs.items()
    }
    if not all(found.values()):
        sys.exit("The tools did not send at the same time: give them more with --count.")
    return found


def new_or_exit(counters: dict[str, float]) -> str:
    """What share of the prompts was cached; ends the script when they were not new."""
    share = cached_share(counters)
    if share is not None and share > MOST_CACHED:
        sys.exit("The prompts were not new to the server: the figures say nothing.")
    return f"{'?' if share is None else f'{share:.1%}'} of the prompts was cached"


def say(name: str, reading: Reading, more: str) -> None:
    """One run on stderr, when it is over."""
    text = f"{name}: {told(reading.medians)}; means {told(reading.means)}{more}"
    print(text, file=sys.stderr, flush=True)


def told(figures: Figures) -> str:
    """TTFT 65.81, TPOT 12.02 ms."""
    return ", ".join(f"{name} {value:.2f}" for name, value in figures.items()) + " ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--tokenizer", required=True, type=os.path.abspath, help="folder, for the other tools"
    )
    parser.add_argument("--aiperf", default="", help="path of its command; left out without one")
    parser.add_argument("--guidellm", default="")
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--count", type=int, default=20, help="requests of a turn")
    parser.add_argument("--input", type=int, default=80, help="words of a prompt")
    parser.add_argument("--output", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--together", action="store_true", help="all tools at once, not in turn")
    args = parser.parse_args()
    chosen = ["headway", *(name for name in ("aiperf", "guidellm") if getattr(args, name))]
    rounds: list[dict[str, Reading]] = []
    begun = secrets.token_hex(4)
    for number in range(args.rounds):
        turns, name = order(chosen, number), f"{begun} {number}"
        if args.together:
            found = measured_together(turns, args, name)
        else:
            found = {tool: measured(tool, args, f"{name} {tool}") for tool in turns}
        rounds.append({tool: found[tool] for tool in chosen})
    print(table(rounds))


if __name__ == "__main__":
    main()
