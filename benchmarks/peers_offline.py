"""Headway beside OpenVINO GenAI and llama.cpp, offline, on one machine in one run.

    python benchmarks/peers_offline.py FOLDER --quantization int4 \\
        --openvino PYTHON MODEL --llama BIN MODEL.gguf [--json OUT.json]

FOLDER is a Hugging Face folder; MODEL is the same model exported for OpenVINO GenAI, MODEL.gguf for
llama.cpp; PYTHON has openvino-genai, BIN is a folder with llama-batched-bench (and llama-bench,
which alone gives prefill and batch 1). Neither is a dependency; what is not there is skipped, and
the table says why. In each repeat all take turns at prefill of 512 and at decodes of 1, 8 and 32
sequences of that context, with the bandwidth probed before, so that every ratio is of neighbours in
time; the table holds medians of rates and of ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path

from common import markdown
from headway import LLM
from offline import CONTEXT, DECODE_STEPS, PROBE_S, Rates

Measure = Callable[[str], float]
"""Tokens/s of one column."""


class SkippedError(Exception):
    """Why a peer, or one of its columns, is not measured."""


def ours(llm: LLM) -> Measure:
    """Headway's rates."""
    rates = Rates(llm)
    rates.prefill()
    return lambda column: rates.prefill() if column == "prefill" else rates.decode(batch_of(column))


def batch_of(column: str) -> int:
    return int(column.removeprefix("batch "))


def openvino(python: str, model: Path) -> Measure:
    """A process that measures on request; SkippedError when it does not come up."""
    script = Path(__file__).with_name("openvino_offline.py")
    if not model.is_dir():
        raise SkippedError(f"{model} is not a folder")
    try:
        child = subprocess.Popen(
            [python, str(script), str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError as error:
        raise SkippedError(f"{python}: {error.strerror}") from error
    assert child.stdin is not None and child.stdout is not None
    to, back = child.stdin, child.stdout

    def answer() -> str:
        for line in back:
            if line.strip() == "ready" or line[:1].isdigit():
                return line.strip()
        raise SkippedError(f"openvino_offline.py ended with {child.wait()}; run it by hand")

    def measure(column: str) -> float:
        to.write(column + "\n")
        to.flush()
        return float(answer())

    answer()
    return measure


def llama(binaries: Path, model: Path, threads: int) -> Measure:
    """Runs of llama.cpp's own benchmarks."""
    batched, single = binaries / "llama-batched-bench", binaries / "llama-bench"
    if not model.is_file():
        raise SkippedError(f"{model} is not a file")
    if not batched.exists() and not single.exists():
        raise SkippedError(f"{binaries} has neither {batched.name} nor {single.name}")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(binaries)}

    def rows(command: list[str]) -> list[dict[str, float]]:
        found = subprocess.run(command, env=environment, capture_output=True, text=True)
        if found.returncode:
            raise SkippedError(f"{Path(command[0]).name} ended with {found.returncode}")
        lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
        return [json.loads(line) for line in lines]

    def measure(column: str) -> float:
        batch = 1 if column == "prefill" else batch_of(column)
        steps = DECODE_STEPS[batch]
        shared = ["-m", str(model), "-t", str(threads), "-ngl", "0"]
        if batched.exists():
            context = batch * (CONTEXT + steps)
            shape = ["-npp", str(CONTEXT), "-ntg", str(steps), "-npl", str(batch)]
            shape += ["-c", str(context), "-b", str(CONTEXT), "-ub", str(CONTEXT)]
            (row,) = rows([str(batched), *shared, *shape, "--output-format", "jsonl"])
            return row["speed_pp" if column == "prefill" else "speed_tg"]
        if batch > 1:
            raise SkippedError(f"{single.name} decodes one sequence; build {batched.name}")
        shape = ["-p", str(CONTEXT), "-n", "0"]
        if column != "prefill":
            shape = ["-p", "0", "-n", str(steps), "-d", str(CONTEXT)]
        (row,) = rows([str(single), *shared, *shape, "-r", "1", "-o", "jsonl"])
        return row["avg_ts"]

    return measure


def measure_all(
    makers: dict[str, Callable[[], Measure]], llm: LLM, columns: list[str], repeats: int
) -> tuple[list[float], dict[str, dict[str, list[float]]], dict[str, str]]:
    """(bandwidths in B/s, name → column → rates by repeat, what was skipped → why)."""
    skipped: dict[str, str] = {}
    measures: dict[str, Measure] = {}
    for name, make in makers.items():
        try:
            measures[name] = make()
        except SkippedError as error:
            skipped[name] = str(error)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in measures}
    bandwidths = []
    for repeat in range(repeats):
        llm.engine.executor.probe(PROBE_S)
        bandwidths.append(llm.engine.executor.describe().ceilings.bandwidth_bytes_per_s)
        for column in columns:
            turns = list(measures.items())
            for name, measure in turns if repeat % 2 == 0 else reversed(turns):
                try:
                    found[name].setdefault(column, []).append(measure(column))
                except SkippedError as error:
                    skipped[f"{name}, {column}"] = str(error)
    return bandwidths, found, skipped


def table(found: dict[str, dict[str, list[float]]], columns: list[str]) -> str:
    """Markdown: rates, and Headway's over each peer's."""
    rows = []
    for name, rates in found.items():
        cells = [f"{statistics.median(rates[c]):.1f}" if rates.get(c) else "–" for c in columns]
        rows.append([name, *cells])
    for name, rates in list(found.items())[1:]:
        cells = []
        for column in columns:
            pairs = zip(found["Headway"][column], rates.get(column, []), strict=False)
            ratios = [mine / theirs for mine, theirs in pairs]
            cells.append(f"{statistics.median(ratios):.2f}x" if ratios else "–")
        rows.append([f"Headway / {name}", *cells])
    return markdown(["tok/s", *columns], rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quantization", default="int4", help="none, int8 or int4")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--openvino", nargs=2, metavar=("PYTHON", "MODEL"))
    parser.add_argument("--llama", nargs=2, metavar=("BIN", "GGUF"))
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    chosen = parser.parse_args()
    columns = ["prefill", *(f"batch {batch}" for batch in chosen.batches.split(","))]
    llm = LLM(
        chosen.folder,
        quantization=chosen.quantization,
        load_format=chosen.load_format,
        max_model_len=1024,
        max_num_seqs=32,
        skip_tokenizer_init=True,
    )
    makers: dict[str, Callable[[], Measure]] = {"Headway": lambda: ours(llm)}
    if chosen.openvino:
        makers["OpenVINO GenAI"] = lambda: openvino(chosen.openvino[0], Path(chosen.openvino[1]))
    if chosen.llama:
        threads = llm.settings.threads
        makers["llama.cpp"] = lambda: llama(Path(chosen.llama[0]), Path(chosen.llama[1]), threads)
    bandwidths, found, skipped = measure_all(makers, llm, columns, chosen.repeats)
    name = f"{chosen.folder.name}, {chosen.quantization}, {llm.settings.threads} threads"
    print(f"{name}, {max(bandwidths) / 1e9:.1f} GB/s, median of {chosen.repeats}\n")
    print(table(found, columns))
    for what, why in skipped.items():
        print(f"\n{what}: not measured, {why}")
    if chosen.json:
        figures = {"bandwidth_bytes_per_s": bandwidths, "rates": found, "skipped": skipped}
        chosen.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
