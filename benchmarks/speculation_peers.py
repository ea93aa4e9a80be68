"""What guesses bring here and in llama.cpp and OpenVINO GenAI, in turns on one machine.

    python benchmarks/speculation_peers.py FOLDER --draft DRAFT --llama BIN MODEL.gguf DRAFT.gguf \\
        --openvino PYTHON MODEL DRAFT [--json OUT.json]

FOLDER is a widened model (`widen.py`) and DRAFT its drafting model; the others are the same,
converted: llama.cpp wants both vocabularies equally long, so its draft's has rows of zeros behind.
BIN is a folder with llama-server, PYTHON has openvino-genai; `-` in place of a draft is none, and
what does not start is told and left out. Each engine answers the same token ids greedily, one
request at a time: without guesses, with what costs no model (here lookup; `ngram-cache`, which is
llama-lookup's, and `ngram-simple` of 3 tokens; prompt lookup) and with the draft. Told are tokens a
second from an answer's first token to its last and times that engine's own rate without.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from common import free_port, markdown, running, write_json
from headway import LLM
from ladder import CONTEXT, MAX_TOKENS, Native
from speculation import make_prompts

Told = tuple[list[int], float]
"""An answer's tokens, and seconds from its first to its last."""
Answer = Callable[[list[int]], Told]
NGRAM = ["--spec-ngram-simple-size-n", "3"]
LLAMA = {
    "off": [],
    "ngram-cache": ["--spec-type", "ngram-cache"],
    "ngram-simple": ["--spec-type", "ngram-simple", *NGRAM, "--spec-ngram-simple-size-m"],
    "draft": ["--spec-type", "draft-simple"],
}
KINDS = ("chats", "copies")


def ours(chosen: argparse.Namespace) -> dict[str, Answer]:
    """This engine, by what guesses."""

    def made(method: str) -> Answer:
        given: dict[str, Any] = {"speculative_method": method}
        if method != "off":
            given["num_speculative_tokens"] = chosen.num_speculative_tokens
        if method in ("draft", "auto"):
            given["draft_model"] = str(chosen.draft)
        native = Native(chosen.folder, "int4", **given)
        return lambda prompt: native.answer(prompt)[:2]

    return {how: made(how) for how in ("off", "ngram", "draft", "auto")}


def llama(chosen: argparse.Namespace, threads: int, stack: ExitStack) -> dict[str, Answer]:
    """A llama-server for each way of guessing; those that wait use no processor."""
    binaries, model, draft = chosen.llama

    def made(how: str) -> Answer:
        port = free_port()
        command = [f"{binaries}/llama-server", "-m", model, "-c", str(CONTEXT), "-np", "1"]
        command += ["-t", str(threads), "--port", str(port), "--log-disable", *LLAMA[how]]
        if how == "ngram-simple":
            command += [str(chosen.num_speculative_tokens)]
        if how == "draft":
            command += ["-md", draft]
        if how != "off":
            command += ["--spec-draft-n-max", str(chosen.num_speculative_tokens)]
        url, _ = stack.enter_context(running(command, port))

        def answer(prompt: list[int]) -> Told:
            asked = {"prompt": prompt, "n_predict": MAX_TOKENS, "temperature": 0}
            asked |= {"cache_prompt": False, "return_tokens": True}
            body = json.dumps(asked).encode()
            request = urllib.request.Request(f"{url}/completion", body)
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=300) as response:
                told = json.load(response)
            return told["tokens"], told["timings"]["predicted_ms"] / 1e3

        return answer

    return {how: made(how) for how in LLAMA if how != "draft" or draft != "-"}


def openvino(chosen: argparse.Namespace, ends: list[int], stack: ExitStack) -> dict[str, Answer]:
    """A process of its own that answers in each way."""
    python, model, draft = chosen.openvino
    script = Path(__file__).with_name("openvino_speculation.py")
    child = stack.enter_context(
        subprocess.Popen(
            [python, str(script), model, draft, str(chosen.num_speculative_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    assert child.stdin is not None and child.stdout is not None
    to, back = child.stdin, child.stdout
    stack.callback(to.close)
    if not any(line == "ready\n" for line in back):
        raise SystemExit(f"{script.name} ended; run it by hand to see why")

    def made(how: str) -> Answer:
        def answer(prompt: list[int]) -> Told:
            asked = {"how": how, "prompt": prompt, "ends": ends, "max_tokens": MAX_TOKENS}
            to.write(json.dumps(asked) + "\n")
            to.flush()
            told = json.loads(back.readline())
            return told["tokens"], told["seconds"]

        return answer

    return {how: made(how) for how in ("off", "lookup", "draft") if how != "draft" or draft != "-"}


def measure(
    engines: dict[str, dict[str, Answer]], sets: list[list[list[int]]], what: str
) -> dict[str, dict[str, list[float]]]:
    """Engine → how → tokens a second of each repeat; all take turns within a repeat."""
    found = {name: {how: [] for how in ways} for name, ways in engines.items()}
    for repeat, prompts in enumerate(sets):
        turns = [(name, how) for name, ways in engines.items() for how in ways]
        for name, how in turns if repeat % 2 == 0 else reversed(turns):
            told = [engines[name][how](prompt) for prompt in prompts]
            tokens = sum(max(len(ids) - 1, 0) for ids, _ in told)
            rate = tokens / sum(spent for _, spent in told)
            found[name][how].append(rate)
            words = f"{what}, {repeat + 1} of {len(sets)}: {name}, {how}: {rate:.1f} tok/s"
            print(words, file=sys.stderr, flush=True)
    return found


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft", default="headway-draft")
    parser.add_argument("--llama", nargs=3, metavar=("BIN", "GGUF", "DRAFT"))
    parser.add_argument("--openvino", nargs=3, metavar=("PYTHON", "MODEL", "DRAFT"))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=4, help="of each repeat")
    parser.add_argument("--json", type=Path, help="file for the figures")
    chosen = parser.parse_args()
    threads = len(os.sched_getaffinity(0))

    with ExitStack() as stack:
        engines = {"Headway": ours(chosen)}
        plain = LLM(chosen.folder, quantization="int4", max_model_len=CONTEXT, kv_memory="64MiB")
        ends = list(plain.spec.eos_token_ids)
        if chosen.llama:
            engines["llama.cpp"] = llama(chosen, threads, stack)
        if chosen.openvino:
            engines["OpenVINO GenAI"] = openvino(chosen, ends, stack)
        figures = {}
        for kind in chosen.kinds:
            made = make_prompts(plain, kind, chosen.repeats + 1, chosen.requests)
            sets = [[token_ids for token_ids, _ in prompts] for prompts in made]
            measure(engines, sets[chosen.repeats :], f"{kind}, warming")
            figures[kind] = measure(engines, sets[: chosen.repeats], kind)
    rows = []
    for name, ways in engines.items():
        for how in ways:
            cells = [name, how]
            for found in figures.values():
                rate, off = (statistics.median(found[name][each]) for each in (how, "off"))
                cells += [f"{rate:.1f}", f"{rate / off:.2f}"]
            rows.append(cells)
    columns = [f"{kind}, {what}" for kind in figures for what in ("tok/s", "x its own off")]
    print(f"{chosen.folder.name}, int4, {threads} threads, median of {chosen.repeats}\n")
    print(markdown(["engine", "guesses", *columns], rows))
    write_json(chosen.json, figures, indent=1)


if __name__ == "__main__":
    main()
