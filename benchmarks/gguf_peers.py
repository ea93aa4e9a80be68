"""Headway beside llama.cpp on the same GGUF files, offline, in turns on one machine.

    python benchmarks/gguf_peers.py FILE.gguf … --llama BIN [--json OUT.json]

BIN is a folder with llama-batched-bench. For each file: prefill of 512 and decodes of 1 and 8
sequences of that context, both programs in turns within a repeat, so that a ratio is of neighbours
in time (`peers_offline.py` has the turns); the table holds medians of rates and of ratios. Random
token ids, so the file's tokenizer is not asked.
"""

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

from common import markdown
from peer_models import PeerError
from peers_offline import Engine, LlamaBench, headway, measure_all


def compare(file: Path, folder: Path, columns: list[str], repeats: int) -> dict[str, object]:
    """Rates of both on one file: name → column → tokens/s by repeat, and the file's size."""
    makers: dict[str, Callable[[], Engine]] = {
        "Headway": lambda: headway(file, "file"),
        "llama.cpp": lambda: LlamaBench(folder, file, os.cpu_count() or 1),
    }
    found, skipped = measure_all(makers, columns, repeats)
    if skipped:
        raise PeerError("; ".join(f"{what}: {why}" for what, why in skipped.items()))
    return {"rates": found, "file_bytes": file.stat().st_size}


def rows_of(name: str, figures: dict[str, object], columns: list[str]) -> list[list[str]]:
    """The file's rows of the table: both programs, and the median of their ratios."""
    rates = figures["rates"]
    assert isinstance(rates, dict)
    rows = [
        [f"{name}, {who}", *(f"{statistics.median(found[each]):.1f}" for each in columns)]
        for who, found in rates.items()
    ]
    mine, theirs = rates["Headway"], rates["llama.cpp"]
    ratios = [
        statistics.median(a / b for a, b in zip(mine[each], theirs[each], strict=True))
        for each in columns
    ]
    return [*rows, ["ratio", *(f"{ratio:.2f}x" for ratio in ratios)]]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--llama", type=Path, required=True, metavar="BIN")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for the figures")
    chosen = parser.parse_args()
    columns = ["prefill", *(f"batch {batch}" for batch in chosen.batches.split(","))]
    found, rows = {}, []
    for file in chosen.files:
        found[file.stem] = compare(file, chosen.llama, columns, chosen.repeats)
        rows += rows_of(file.stem, found[file.stem], columns)
    print(markdown(["tok/s", *columns], rows))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
