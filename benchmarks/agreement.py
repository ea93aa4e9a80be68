"""Does `headway bench` agree with other load generators: `python benchmarks/agreement.py URL …`.

Each tool drives the same server with the same load, one after the other: even arrivals, text
completions, prompts and answers of fixed lengths. Their medians are set side by side under our
names (AIPerf's and guidellm's "inter token latency" is our TPOT). The tools are other people's:
`--aiperf` and `--guidellm` are the paths of their commands, best in environments of their own.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = "the a little girl boy dog cat went to park and saw big red ball tree was happy".split()
FIGURES = ("TTFT", "TPOT", "e2e")
Medians = dict[str, float]


def run(command: list[str], folder: Path) -> None:
    """Run one tool; its own words only when it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def prompts(args: argparse.Namespace, folder: Path) -> Path:
    """One file for all: lines of words, each prompt different from its first word on."""
    rng = random.Random(0)
    path = folder / "prompts.jsonl"
    texts = [" ".join(rng.choices(WORDS, k=args.input)) for _ in range(args.count)]
    lines = [
        json.dumps({"prompt": text} if args.tool != "aiperf" else {"text": text}) for text in texts
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


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
    for number in range(args.rounds):
        found = {}
        for tool in chosen:
            args.tool = tool
            with tempfile.TemporaryDirectory() as folder:
                found[tool] = TOOLS[tool](args, Path(folder))
            print(f"round {number + 1}: {tool} {found[tool]}", file=sys.stderr, flush=True)
        rounds.append(found)
    print(table(rounds))


if __name__ == "__main__":
    main()
