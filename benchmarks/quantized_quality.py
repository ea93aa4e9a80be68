"""What rounded weights cost in quality: `python benchmarks/quantized_quality.py [FOLDER]`.

Folders of `headway quantize` are rows as well: `--also NAME=PATH`, as often as wanted.

The embedded model (or that of FOLDER) is served in its own type, in int8 and in int4 by groups,
with keys and values in its own type or in int8, and as an FP8 folder, and judged against itself in
fp32 on the same windows of text and the same held-out questions. A difference is to the row of its
own type, with its 95% interval and p: within the interval of zero is noise.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from common import heading  # noqa: E402
from headway.cli.common import model_folder  # noqa: E402
from headway.evals.text import TEXTS, read_text  # noqa: E402
from headway.spec.formats import GROUPS  # noqa: E402
from headway.whole_model import FolderModel  # noqa: E402
from read_folders import write_fp8  # noqa: E402
from sensitivity import (  # noqa: E402
    MEMORY,
    Difference,
    Quality,
    Task,
    fewer_right,
    judge,
    more_bits,
    more_divergence,
)

DATA = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"
INT8_KV = {"kv_cache_dtype": "int8"}
ROWS: dict[str, dict[str, object]] = {
    "bf16, KV int8": INT8_KV,
    "bf16, KV int4": {"kv_cache_dtype": "int4"},
    "bf16, KV int8/int4": {"kv_cache_dtype": "int8/int4"},
    "bf16, KV int4/int8": {"kv_cache_dtype": "int4/int8"},
    "bf16, KV int4, layers 0 and 1 as computed": {
        "kv_cache_dtype": "int4",
        "kv_cache_dtype_skip_layers": "0,1",
    },
    "int8": {"quantization": "int8"},
    "int8, KV int8": {"quantization": "int8", **INT8_KV},
    **{
        f"int4, groups of {group}": {"quantization": "int4", "quantization_group": group}
        for group in GROUPS
    },
    "int4, groups of 64, KV int8": {"quantization": "int4", **INT8_KV},
}
FP8_ROWS: dict[str, dict[str, object]] = {
    "FP8 by output": {},
    "FP8 by output, --fp8 int8": {"fp8": "int8"},
}
"""Of the model as an FP8 folder."""


def shown(each: Difference, digits: int) -> str:
    """+0.0123 (+0.0100 … +0.0150, p 0.0001)."""
    low, high, mean = (f"{x:+.{digits}f}" for x in (each.low, each.high, each.mean))
    return f"{mean} ({low} … {high}, p {each.p:.2g})"


def row(quality: Quality, plain: Quality) -> str:
    """One row of the table."""
    divergence = quality.divergence
    cells = [f"{divergence.kl:.5f}", f"{divergence.agreement:.1%}"]
    cells.append(f"{quality.text.bits_per_byte:.4f}")
    cells.append(f"{quality.accuracy:.1%}" if quality.right else "–")
    if quality is not plain:
        cells[0] += f"; {shown(more_divergence(plain, quality), 5)}"
        cells[2] += f"; {shown(more_bits(plain, quality), 4)}"
        if quality.right:
            cells[3] += f"; {shown(fewer_right(plain, quality), 3)}"
    return f"| {quality.name} | {' | '.join(cells)} |"


def main() -> None:
    """Judge and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=None)
    parser.add_argument("--data", type=Path, default=DATA, help="folder that holds eval/ and text/")
    parser.add_argument("--text", choices=TEXTS, default="books")
    parser.add_argument("--windows", type=int, default=100, help="of the text, evenly spread")
    parser.add_argument("--questions", type=int, default=10, help="of each skill and level")
    parser.add_argument("--only", default=None, help="rows whose name has this; empty: none")
    parser.add_argument(
        "--also", action="append", default=[], metavar="NAME=PATH", help="one more row: a folder"
    )
    chosen = parser.parse_args()

    folder = model_folder(chosen.folder)
    reference = FolderModel(folder, name="fp32", kv_memory=MEMORY, dtype="float32")
    has_chat = reference.tokenizer.template is not None
    task = Task(
        text=read_text(chosen.data, chosen.text),
        windows=chosen.windows,
        questions=chosen.questions if has_chat else 0,
    )
    print(f"{folder.name}: {task.windows} windows of {chosen.text}, ", end="")
    print(f"{task.questions} questions of each skill and level\n")
    kl = "KL from fp32, nats a token"
    print(heading(["weights", kl, "top-1", "bits per byte", "skills"]))
    plain = judge("bf16", folder, reference, task, dtype="bfloat16")
    print(row(plain, plain), flush=True)
    for name, options in ROWS.items():
        if chosen.only is not None and (not chosen.only or chosen.only not in name):
            continue
        quality = judge(name, folder, reference, task, dtype="bfloat16", **options)
        print(row(quality, plain), flush=True)
    with tempfile.TemporaryDirectory() as place:
        fp8 = write_fp8(folder, Path(place) / "fp8", 0)
        for name, options in FP8_ROWS.items():
            if chosen.only is None or (chosen.only and chosen.only in name):
                quality = judge(name, fp8, reference, task, dtype="bfloat16", **options)
                print(row(quality, plain), flush=True)
    for given in chosen.also:
        name, _, path = given.rpartition("=")
        quality = judge(name or Path(path).name, Path(path), reference, task, dtype="bfloat16")
        print(row(quality, plain), flush=True)


if __name__ == "__main__":
    main()
