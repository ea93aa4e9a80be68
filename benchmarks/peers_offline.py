"""Headway beside OpenVINO GenAI, llama.cpp, vLLM and another checkout, offline, in turns.

    python benchmarks/peers_offline.py FOLDER [--quantization int8,int4,int4:64] \\
        [--other CHECKOUT] \\
        [--openvino PYTHON [--openvino-formats int8,int4]] \\
        [--llama PYTHON SOURCE [--llama-types Q4_0,Q4_1]] \\
        [--vllm PYTHON] [--json OUT.json]

FOLDER is a Hugging Face folder. CHECKOUT is another source tree with its own compiled kernels: the
same measurement before and after a change, in turns A B B A, with the ratios paired. PYTHON of
`--openvino` has openvino-genai and optimum-intel; SOURCE is a built tree of llama.cpp with
llama-batched-bench and llama-quantize, PYTHON beside it runs its converter (`peer_models.py` makes
of FOLDER what they want); PYTHON of `--vllm` has vLLM. What is not there is skipped, and said.

Each engine computes prompts of 512 tokens, then decodes 1, 8 and 32 sequences of that context:
prompts are computed once a column, and in each repeat all take their turn at some decode steps, so
that every ratio is of neighbours in time. The table has medians of rates and of ratios, a ratio to
the other checkout with its quartiles.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from common import markdown, write_json
from offline import CONTEXT, DECODE_STEPS
from peer_models import PeerError, binaries, gguf_file, openvino_folder

ROOT = Path(__file__).resolve().parents[1]
PREFILL = "prefill"
MOST_REPEATS = 9
"""So many turns of 48 steps fit into the context behind a prompt."""
Rates = dict[str, dict[str, list[float]]]
"""Engine → column → tokens/s by repeat."""


class Engine(Protocol):
    """What is measured; a column is `prefill` or `batch N`. All raise PeerError."""

    def begin(self, column: str) -> None:
        """Compute the prompts of the sequences that decode."""

    def rate(self, column: str) -> float:
        """Tokens/s of a prompt, or of some steps."""

    def end(self, column: str) -> None:
        """Drop the sequences."""

    def close(self) -> None:
        """Leave no process behind."""


class Child:
    """An engine in a process of its own, which measures on request."""

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        self.script = Path(command[1]).name
        try:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            raise PeerError(f"{command[0]}: {error.strerror}") from error
        self._answer()

    def ask(self, request: str) -> float:
        """The number that is answered."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # how it ended is read below
        return self._answer()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("= "):
                return float(line[2:])
        raise PeerError(f"{self.script} ended with {self._process.wait()}")

    def begin(self, column: str) -> None:
        if column != PREFILL:
            self.ask(f"begin {batch_of(column)}")

    def rate(self, column: str) -> float:
        return self.ask("prefill" if column == PREFILL else "steps")

    def end(self, column: str) -> None:
        if column != PREFILL:
            self.ask("end")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class LlamaBench:
    """Runs of llama.cpp's own benchmark, which computes its prompts each time."""

    def __init__(self, folder: Path, model: Path, threads: int) -> None:
        self._program, self._model, self._threads = folder / "llama-batched-bench", model, threads
        if not model.is_file():
            raise PeerError(f"{model} is not a file")
        if not self._program.exists():
            raise PeerError(f"{folder} has no {self._program.name}")

    def begin(self, column: str) -> None: ...

    def rate(self, column: str) -> float:
        batch = 1 if column == PREFILL else batch_of(column)
        steps = 1 if column == PREFILL else DECODE_STEPS[batch]
        command = [str(self._program), "-m", str(self._model), "-t", str(self._threads)]
        command += ["-ngl", "0", "-npp", str(CONTEXT), "-ntg", str(steps), "-npl", str(batch)]
        command += ["-c", str(batch * (CONTEXT + steps)), "-b", str(CONTEXT), "-ub", str(CONTEXT)]
        found = subprocess.run(
            [*command, "--output-format", "jsonl"],
            env={**os.environ, "LD_LIBRARY_PATH": str(self._program.parent)},
            capture_output=True,
            text=True,
        )
        lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
        if found.returncode or len(lines) != 1:
            raise PeerError(f"{self._program.name} ended with {found.returncode}")
        figures: dict[str, float] = json.loads(lines[0])
        return figures["speed_pp" if column == PREFILL else "speed_tg"]

    def end(self, column: str) -> None: ...

    def close(self) -> None: ...


def batch_of(column: str) -> int:
    return int(column.removeprefix("batch "))


def headway(
    model: Path, quantization: str, load_format: str = "auto", checkout: Path = ROOT
) -> Child:
    """Headway of a source tree; the quantization `file` is what a GGUF file has."""
    if not any((checkout / "src" / "headway" / "runtime" / "native").glob("_native*.so")):
        raise PeerError(f"{checkout} has no compiled kernels")
    script = checkout / "benchmarks" / "headway_offline.py"  # names of modules differ between trees
    return Child(
        [sys.executable, str(script), str(model), quantization, load_format],
        {"PYTHONPATH": str(checkout.resolve() / "src")},
    )


def openvino(python: str, model: Path) -> Child:
    """OpenVINO GenAI on an exported model."""
    script = Path(__file__).with_name("openvino_offline.py")
    return Child([python, str(script), str(model)])


def measure_all(
    makers: Mapping[str, Callable[[], Engine]], columns: list[str], repeats: int
) -> tuple[Rates, dict[str, str]]:
    """(rates, what was skipped → why); the first engine is one of Headway's."""
    skipped: dict[str, str] = {}
    engines: dict[str, Engine] = {}
    found: Rates = {}
    try:
        for name, make in makers.items():
            try:
                engines[name] = make()
            except PeerError as error:
                skipped[name] = str(error)
        found = {name: {} for name in engines}
        for column in columns:
            measure_column(column, engines, repeats, found, skipped)
    finally:
        for engine in engines.values():
            engine.close()
    return found, skipped


def measure_column(
    column: str, engines: dict[str, Engine], repeats: int, found: Rates, skipped: dict[str, str]
) -> None:
    """All engines in turns; each repeat the other way round. One that fails is dropped."""
    for engine in engines.values():
        engine.begin(column)
    for repeat in range(repeats):
        turns = list(engines.items())
        for name, engine in turns if repeat % 2 == 0 else reversed(turns):
            if f"{name}, {column}" in skipped:
                continue
            try:
                found[name].setdefault(column, []).append(engine.rate(column))
            except PeerError as error:
                skipped[f"{name}, {column}"] = str(error)
    for engine in engines.values():
        engine.end(column)


def ratios(found: Rates, one: str, other: str, column: str) -> list[float]:
    """One's rates over the other's, by repeat."""
    pairs = zip(found[one].get(column, []), found[other].get(column, []), strict=False)
    return [a / b for a, b in pairs]


def shown(values: list[float], quartiles: bool) -> str:
    """1.05x, or 1.05x (1.03 … 1.06)."""
    if not values:
        return "–"
    text = f"{statistics.median(values):.3f}x" if quartiles else f"{statistics.median(values):.2f}x"
    if quartiles and len(values) > 2:
        low, _, high = statistics.quantiles(values, n=4)
        text += f" ({low:.3f} … {high:.3f})"
    return text


def table(found: Rates, columns: list[str]) -> str:
    """Markdown: rates, and Headway's rates over each other engine's."""
    rows = []
    for name, rates in found.items():
        cells = [f"{statistics.median(rates[c]):.1f}" if rates.get(c) else "–" for c in columns]
        rows.append([name, *cells])
    ours = [name for name in found if name.startswith("Headway ") and not is_other(name)]
    for one in ours:
        for other in found:
            if other in ours or (is_other(other) and other != f"{one}, other"):
                continue
            cells = [shown(ratios(found, one, other, c), is_other(other)) for c in columns]
            rows.append([f"{one} / {'other' if is_other(other) else other}", *cells])
    return markdown(["tok/s", *columns], rows)


def is_other(name: str) -> bool:
    """Whether an engine is that of the other checkout."""
    return name.endswith(", other")


def engines_of(chosen: argparse.Namespace) -> dict[str, Callable[[], Engine]]:
    """What is to be measured: name → how to start it."""
    makers: dict[str, Callable[[], Engine]] = {}
    folder, load_format = chosen.folder, chosen.load_format
    for each in chosen.quantization.split(","):
        makers[f"Headway {each}"] = lambda each=each: headway(folder, each, load_format)
        if chosen.other:
            makers[f"Headway {each}, other"] = lambda each=each: headway(
                folder, each, load_format, chosen.other
            )
    if chosen.openvino:
        for each in chosen.openvino_formats.split(","):
            makers[f"OpenVINO {each}"] = lambda each=each: openvino(
                chosen.openvino, openvino_folder(folder, each, chosen.openvino)
            )
    if chosen.vllm:
        script = Path(__file__).with_name("vllm_offline.py")
        makers["vLLM"] = lambda: Child([chosen.vllm, str(script), str(folder)])
    if chosen.llama:
        python, source = chosen.llama[0], Path(chosen.llama[1])
        for each in chosen.llama_types.split(","):
            makers[f"llama.cpp {each}"] = lambda each=each: LlamaBench(
                binaries(source), gguf_file(folder, each, python, source), chosen.threads
            )
    return makers


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--quantization", default="int8,int4", help="none, int8, int4; with commas")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--other", type=Path, metavar="CHECKOUT")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--openvino-formats", default="int8,int4")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--llama", nargs=2, metavar=("PYTHON", "SOURCE"))
    parser.add_argument("--llama-types", default="Q4_0,Q4_1")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of llama.cpp")
    parser.add_argument("--batches", default="1,8,32", help='"": prefill alone')
    parser.add_argument("--repeats", type=int, default=5, choices=range(1, MOST_REPEATS + 1))
    parser.add_argument("--json", type=Path, help="file for the figures")
    chosen = parser.parse_args()
    batches = filter(None, chosen.batches.split(","))
    columns = [PREFILL, *(f"batch {batch}" for batch in batches)]
    found, skipped = measure_all(engines_of(chosen), columns, chosen.repeats)
    print(f"{chosen.folder.name}, medians of {chosen.repeats}\n")
    print(table(found, columns))
    for what, why in skipped.items():
        print(f"\n{what}: not measured, {why}")
    write_json(chosen.json, {"rates": found, "skipped": skipped}, indent=2)


if __name__ == "__main__":
    main()
