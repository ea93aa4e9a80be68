"""What it costs to read or to keep fewer keys: `python benchmarks/kept_keys.py [FOLDER]`.

The model reads everything, and with `--kv-read` the best blocks alone, once with the layers of
`--whole-layers` whole and once without any; or with `--option kv-keep` it keeps that much of a
prompt, chosen by each of `--method`. Each row answers lookups whose question stands so many
characters behind the list, and is compared with the whole model on windows of text, every token of
which is read as if it had been generated; of prompts that are kept in part, those of the second
half. Shares of KV are those of `--context` tokens, over all layers; bounds of keys count as held
and as read.
"""

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from common import heading  # noqa: E402
from headway.cli.common import model_folder  # noqa: E402
from headway.core.kv_keep import tokens_kept  # noqa: E402
from headway.core.kv_read import blocks_read  # noqa: E402
from headway.evals.divergence import compare  # noqa: E402
from headway.evals.questions import ask  # noqa: E402
from headway.evals.text import TEXTS, read_text, windows  # noqa: E402
from headway.whole_model import FolderModel  # noqa: E402

DATA = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"
SEED = 1_000_003


def shares(model: FolderModel, context: int) -> tuple[float, float]:
    """(KV held, KV read by a decode) of a context, as shares of the whole model's."""
    settings, spec = model.llm.settings, model.llm.spec
    size, dtype = settings.cache.block_size, settings.cache.dtype
    held = read = whole = 0.0
    for group in spec.kv_groups:
        keys = group.bytes_per_token(dtype) * context
        bounds = keys - keys * size / (size + 1) if group.bounds and dtype == "bfloat16" else 0.0
        num_blocks = -(-context // size)
        part = blocks_read(settings.cache.read, num_blocks) / num_blocks if group.bounds else 1.0
        whole += keys - bounds
        if group.chooses:
            part = tokens_kept(settings.cache.keep, context, size) / context
            keys *= part
        held += keys
        read += (keys - bounds) * part + bounds if group.bounds else keys
    return held / whole, read / whole


def row(name: str, model: FolderModel, whole: FolderModel, chosen: argparse.Namespace) -> str:
    """One row of the table."""
    asked = ask(model, skills=(), questions=chosen.questions, seed=SEED, distances=chosen.distance)
    right = [share for share in asked.shares if share.skill and share.level == 0]
    held, read = shares(model, chosen.context)
    cells = [f"{held:.3f}", f"{read:.3f}", ", ".join(f"{one.right}" for one in right)]
    cells.append(f"{right[0].asked}" if right else "–")
    if model is whole:
        cells += ["0", "–"]
    else:
        text = read_text(chosen.data, chosen.text)
        found = compare(whole, model, windows(text, limit=chosen.windows))
        cells += [f"{found.kl:.4f}", f"{found.agreement:.1%}"]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    """Judge and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=None)
    parser.add_argument("--keep", default="50,25,12.5", help="percent that is read or kept")
    parser.add_argument("--option", choices=("kv-read", "kv-keep"), default="kv-read")
    parser.add_argument("--method", default="keydiff", help="keydiff,snapkv,h2o; with kv-keep")
    parser.add_argument("--whole-layers", default="1,2")
    parser.add_argument("--distance", default="0,300,800", help="characters before the question")
    parser.add_argument("--questions", type=int, default=10, help="a third of the lookups")
    parser.add_argument("--data", type=Path, default=DATA, help="folder that holds eval/ and text/")
    parser.add_argument("--text", choices=TEXTS, default="books")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--context", type=int, default=2048, help="whose shares are told")
    parser.add_argument("--kv-cache-dtype", default="auto")
    chosen = parser.parse_args()
    chosen.distance = [int(word) for word in chosen.distance.split(",")]
    folder = model_folder(chosen.folder)
    options: dict[str, Any] = {"kv_memory": "1GiB", "kv_cache_dtype": chosen.kv_cache_dtype}
    whole = FolderModel(folder, **options)
    apart = ", ".join(map(str, chosen.distance))
    print(
        heading(
            [chosen.option, "KV held", "KV read", f"right at {apart}", "of", "KL, nats", "top-1"]
        )
    )
    print(row("everything", whole, whole, chosen), flush=True)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "whole.yaml")
        rows = ", ".join(f"{layer}: whole" for layer in chosen.whole_layers.split(","))
        path.write_text(f"layers: {{{rows}}}\n")
        methods = chosen.method.split(",") if chosen.option == "kv-keep" else [""]
        kinds = itertools.product(chosen.keep.split(","), ("", str(path)), methods)
        for percent, file, method in kinds:
            given = f"{percent}%:{method}" if method else f"{percent}%"
            share = {chosen.option.replace("-", "_"): given, "kv_layers": file}
            name = given + (f", layers {chosen.whole_layers} whole" if file else "")
            model = FolderModel(folder, **options, **share)
            print(row(name, model, whole, chosen), flush=True)


if __name__ == "__main__":
    main()
