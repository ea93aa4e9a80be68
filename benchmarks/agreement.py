"""Does `headway bench` agree with other load generators: `python benchmarks/agreement.py URL …`.

Each tool drives the same server with the same load, one after the other: even arrivals, text
completions, prompts and answers of fixed lengths. Prompts of each run are its own, so that no tool
computes what another finds in the prefix cache; the server's counters are read to hold that, where
it has them. Another tool goes first in each round. Medians are set side by side under our names
(AIPerf's and guidellm's "inter token latency" is our TPOT). The tools are other people's:
`--aiperf` and `--guidellm` are the paths of their commands, best in environments of their own.
"""

import argparse
import json
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.bench.scrape import parse

WORDS = "the a little girl boy dog cat went to park and saw big red ball tree was happy".split()
FIGURES = ("TTFT", "TPOT", "e2e")
MOST_CACHED = 0.02
"""Of a run's prompt tokens: more that the server had already, and its TTFT is not another's."""
Medians = dict[str, float]


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


def cached_share(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Of the prompt tokens between two scrapes, those found in the prefix cache; None untold."""
    hits, queries = "prefix_cache_hits_total", "prefix_cache_queries_total"
    asked = after.get(queries, 0.0) - before.get(queries, 0.0)
    return (after.get(hits, 0.0) - before.get(hits, 0.0)) / asked if asked else None


def scrape(url: str) -> dict[str, float]:
    """The counters of the server's /metrics; {} where it has none."""
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            return parse(answer.read().decode())
    except OSError:
        return {}


def ours(args: argparse.Namespace, folder: Path) -> Medians:
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
    report = json.loads(path.read_text())
    answers = report["run"]["exchanges"]
    return {
        "TTFT": statistics.median(x["chunk_s"][0] - x["sent_s"] for x in answers) * 1e3,
        "TPOT": report["figures"]["tpot_s"]["p50"] * 1e3,
        "e2e": statistics.median(x["chunk_s"][-1] - x["sent_s"] for x in answers) * 1e3,
    }


def aiperf(args: argparse.Namespace, folder: Path) -> Medians:
    """NVIDIA's AIPerf: its inter token latency is (e2e − TTFT) / (n − 1)."""
    run(
        [
            *(args.aiperf, "profile", "--model", args.model, "--url", args.url, "--streaming"),
            *("--endpoint-type", "completions", "--tokenizer", args.tokenizer),
            *("--input-file", str(prompts(args, folder)), "--custom-dataset-type", "single_turn"),
            *("--output-tokens-mean", str(args.output), "--output-tokens-stddev", "0"),
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{args.output}"),
            *("--request-rate", str(args.rate), "--request-rate-mode", "constant"),
            *("--request-count", str(args.count), "--use-server-token-count"),
            *("--artifact-dir", str(folder / "aiperf"), "--ui", "none"),
        ],
        folder,
    )
    (path,) = (folder / "aiperf").rglob("profile_export_aiperf.json")
    found = json.loads(path.read_text())
    return {
        "TTFT": found["time_to_first_token"]["p50"],
        "TPOT": found["inter_token_latency"]["p50"],
        "e2e": found["request_latency"]["p50"],
    }


def guidellm(args: argparse.Namespace, folder: Path) -> Medians:
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
    requests = benchmark["requests"]["successful"]
    return {
        "TTFT": statistics.median(r["time_to_first_token_ms"] for r in requests),
        "TPOT": statistics.median(r["inter_token_latency_ms"] for r in requests),
        "e2e": statistics.median(r["request_latency"] for r in requests) * 1e3,
    }


TOOLS: dict[str, Callable[[argparse.Namespace, Path], Medians]] = {
    "headway": ours,
    "aiperf": aiperf,
    "guidellm": guidellm,
}


def table(rounds: list[dict[str, Medians]]) -> str:
    """Medians over the rounds, and how far each tool is from ours."""
    lines = [
        "| median, ms | " + " | ".join(rounds[0]) + " |",
        "| --- |" + " --- |" * len(rounds[0]),
    ]
    for figure in FIGURES:
        cells = []
        values = {
            tool: statistics.median(each[tool][figure] for each in rounds) for tool in rounds[0]
        }
        for tool, value in values.items():
            off = f" ({value / values['headway'] - 1:+.1%})" if tool != "headway" else ""
            cells.append(f"{value:.2f}{off}")
        lines.append(f"| {figure} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokenizer", required=True, help="folder, for the other tools")
    parser.add_argument("--aiperf", default="", help="path of its command; left out without one")
    parser.add_argument("--guidellm", default="")
    parser.add_argument("--rate", type=float, default=4.0)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--input", type=int, default=80, help="words of a prompt")
    parser.add_argument("--output", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    chosen = ["headway", *(name for name in ("aiperf", "guidellm") if getattr(args, name))]
    rounds: list[dict[str, Any]] = []
    begun = secrets.token_hex(4)
    for number in range(args.rounds):
        found = {}
        for tool in order(chosen, number):
            args.tool, args.run_name = tool, f"{begun} {number} {tool}"
            before = scrape(args.url)
            with tempfile.TemporaryDirectory() as folder:
                found[tool] = TOOLS[tool](args, Path(folder))
            share = cached_share(before, scrape(args.url))
            told = "unknown" if share is None else f"{share:.1%}"
            figures = ", ".join(f"{name} {value:.2f} ms" for name, value in found[tool].items())
            print(
                f"round {number + 1}: {tool} {figures}; {told} of the prompts was cached",
                file=sys.stderr,
                flush=True,
            )
            if share is not None and share > MOST_CACHED:
                sys.exit("The prompts were not new to the server: the figures say nothing.")
        rounds.append({tool: found[tool] for tool in chosen})
    print(table(rounds))


if __name__ == "__main__":
    main()
