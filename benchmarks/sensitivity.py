"""Do the evals see a loss: `python benchmarks/sensitivity.py FOLDER`.

The matrices of a model are rounded to int8 (a scale a row), int4 and int2 (a scale for 64 weights)
and every copy is judged on the same windows of text and the same held-out questions. Each row says
how far it is from the row above: the difference, its 95% interval and p. Skills need a chat
template and are left out without one.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from common import heading  # noqa: E402
from headway.evals.text import TEXTS, read_text  # noqa: E402
from headway.whole_model import FolderModel  # noqa: E402
from rounding import ROUNDINGS, write_rounded  # noqa: E402
from sensitivity import (  # noqa: E402
    MEMORY,
    Difference,
    Quality,
    Task,
    chance,
    fewer_right,
    judge,
    more_bits,
    more_divergence,
)

DATA = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"


def shown(each: Difference, digits: int) -> str:
    """+0.0123 (+0.0100 … +0.0150, p 0.0001)."""
    low, high, mean = (f"{x:+.{digits}f}" for x in (each.low, each.high, each.mean))
    return f"{mean} ({low} … {high}, p {each.p:.2g})"


def row(quality: Quality, above: Quality | None) -> str:
    """One row of the table."""
    divergence, accuracy = quality.divergence, "–"
    cells = [f"{divergence.kl:.5f}", f"{divergence.agreement:.1%}"]
    cells += [f"{divergence.perplexity_ratio:.4f}", f"{quality.text.bits_per_byte:.4f}"]
    if quality.right:
        accuracy = f"{quality.accuracy:.1%}"
    if above is not None:
        cells[0] += f"; {shown(more_divergence(above, quality), 5)}"
        cells[3] += f"; {shown(more_bits(above, quality), 4)}"
        if quality.right:
            accuracy += f"; {shown(fewer_right(above, quality), 3)}"
    return f"| {quality.name} | {' | '.join([*cells, accuracy])} |"


def main() -> None:
    """Judge and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", type=Path, default=DATA, help="folder that holds eval/ and text/")
    parser.add_argument("--text", choices=TEXTS, default="books")
    parser.add_argument("--windows", type=int, default=200, help="of the text, evenly spread")
    parser.add_argument("--questions", type=int, default=20, help="of each skill and level")
    chosen = parser.parse_args()

    reference = FolderModel(chosen.folder, name="reference", kv_memory=MEMORY)
    has_chat = reference.tokenizer.template is not None
    task = Task(
        text=read_text(chosen.data, chosen.text),
        windows=chosen.windows,
        questions=chosen.questions if has_chat else 0,
    )
    print(f"{chosen.folder.name}: {task.windows} windows of {chosen.text}", end="")
    if task.questions:
        share = chance(task.questions)
        print(f", {task.questions} questions of each skill and level, of which always ", end="")
        print(f"saying the same gets {share:.1%}", end="")
    print("\n")
    columns = ("KL, nats a token", "top-1", "perplexity ratio", "bits per byte", "skills")
    print(heading(["weights", *columns]))
    unrounded = reference.llm.settings.dtype.replace("float", "fp").replace("bfp", "bf")
    above = judge(unrounded, chosen.folder, reference, task)
    print(row(above, None), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for name, rounding in ROUNDINGS.items():
            folder = write_rounded(chosen.folder, Path(scratch) / name, rounding)
            quality = judge(name, folder, reference, task)
            print(row(quality, above), flush=True)
            above = quality


if __name__ == "__main__":
    main()
