"""How many contexts a KV memory holds at once where a part of each prompt is kept:

    python benchmarks/kept_memory.py [FOLDER] [--mib 256]

By the memory plan of the engine and what each context takes, in blocks; nothing is computed. Of
each context `--answer` tokens are answer, which is kept whole. Some layers are whole, as in
kept_keys.py, and one prompt that is not chosen from yet has room beside the others.
"""

import argparse
import tempfile
from pathlib import Path

from common import heading
from headway.assemble import plan_settings
from headway.cli.common import model_folder
from headway.config.kv_keep import tokens_kept
from headway.config.options import Bytes, EngineOptions


def at_once(chosen: argparse.Namespace, keep: str, layers: str) -> int:
    """Contexts that have room beside one another."""
    length = chosen.prompt + chosen.answer
    options = EngineOptions(
        device="cpu",
        attention_backend="reference",
        load_format="dummy",
        kv_memory=Bytes(chosen.mib * 2**20),
        kv_cache_dtype=chosen.kv_cache_dtype,
        kv_keep=keep,
        kv_layers=layers,
        max_model_len=length,
        max_num_seqs=512,
        max_num_batched_tokens=512,
    )
    spec, settings, _, _ = plan_settings(model_folder(chosen.folder), options)
    cache, found = settings.cache, []
    for group, count in zip(spec.kv_groups, cache.num_blocks, strict=True):
        whole = -(-length // cache.block_size)
        each, free = whole, count - 1
        if group.chooses:
            kept = tokens_kept(cache.keep, chosen.prompt, cache.block_size) + chosen.answer
            each, free = -(-kept // cache.block_size), free - 2 * whole
        found.append(free // each)
    return min(found)


def main() -> None:
    """Count and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=None)
    parser.add_argument("--keep", default="50,25,12.5", help="percent that is kept")
    parser.add_argument("--whole-layers", default="1,2")
    parser.add_argument("--mib", type=int, default=256, help="MiB of KV memory")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--answer", type=int, default=256)
    chosen = parser.parse_args()
    whole = at_once(chosen, "", "")
    print(heading(["kv-keep", f"contexts in {chosen.mib} MiB", "ratio"]))
    print(f"| all | {whole} | 1.00 |")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "whole.yaml")
        rows = ", ".join(f"{layer}: whole" for layer in chosen.whole_layers.split(","))
        path.write_text(f"layers: {{{rows}}}\n")
        for percent in chosen.keep.split(","):
            count = at_once(chosen, f"{percent}%", str(path))
            name = f"{percent}%, layers {chosen.whole_layers} whole"
            print(f"| {name} | {count} | {count / whole:.2f} |")


if __name__ == "__main__":
    main()
