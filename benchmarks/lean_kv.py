"""How small a context's keys and values become, one means after the other, in bytes held:

    python benchmarks/lean_kv.py [FOLDER] [--context 2048]

Multi-query, windows in all layers but one, layers that share, fewer bits: what Character.AI (2024)
name for a KV cache 20 times smaller. The model's shape with as many KV heads as query heads, all
layers global, in 16 bits, counts as 1. By the arithmetic of the memory plan, whole blocks; nothing
is computed.
"""

import argparse

from common import heading
from headway.cli.common import model_folder
from headway.spec import read_model_spec
from literature.lean import table


def main() -> None:
    """Count and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=None)
    parser.add_argument("--context", type=int, default=2048)
    chosen = parser.parse_args()
    spec = read_model_spec(model_folder(chosen.folder))
    print(heading([f"{chosen.context:,} tokens", "KiB held", "times fewer", "to be trained"]))
    for means, count, times in table(spec, chosen.context):
        trained = "yes" if means.trained else "no"
        print(f"| {means.name} | {count / 1024:,.1f} | {times:.1f} | {trained} |")


if __name__ == "__main__":
    main()
