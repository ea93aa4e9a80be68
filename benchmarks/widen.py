"""Writes a small model in the sizes of a large one: the same answers, at its cost.

python benchmarks/widen.py FOLDER OUT --like qwen2.5-0.5b
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli import main as verbs
from headway.cli.common import source_folder
from headway.config.options.field import option
from headway.core.errors import UsageError
from headway.core.progress import bytes_bar
from headway.spec import read_model_spec

if TYPE_CHECKING:
    from headway.cli.main import VerbCall


@dataclass(frozen=True, slots=True, kw_only=True)
class WidenOptions:
    """The shape to fill, and the type of the weights."""

    like: str = option(
        "",
        "The shape: qwen2.5-0.5b, qwen2.5-1.5b, qwen2.5-3b, llama-3.2-1b or smollm2-135m.",
        common=True,
    )
    dtype: str = option(
        "auto",
        "Type of the weights; auto keeps bfloat16 and writes float32 for any other.",
        choices=("auto", "bfloat16", "float32"),
        common=True,
    )


ROW = verbs.Verb(
    group="compress",
    usage="widen FOLDER OUT",
    help="Write a small model in the sizes of a large one: the same answers, its cost.",
    tables=(WidenOptions,),
    function=f"{__name__}:widen",
)


def widen(call: "VerbCall") -> int:
    """Write OUT and say what it is; with --dry-run only whether FOLDER fits."""
    if len(call.positionals) != 2:
        raise UsageError("widen takes two folders.", "widen.py FOLDER --like qwen2.5-0.5b OUT")
    folder, out = source_folder(call.positionals[0], "widen"), Path(call.positionals[1])
    options: WidenOptions = call.options[WidenOptions]

    import widening as room  # late: torch

    like = room.find_shape(options.like)
    plan = room.plan_widening(read_model_spec(folder), like, options.dtype)
    if "--dry-run" not in call.switches:
        with bytes_bar(f"Writing {out.name}") as progress:
            room.widen(folder, like, out, dtype=options.dtype, progress=progress)
    small, large = plan.small, plan.large
    print(f"{folder.resolve().name} in the shape of {options.like.lower()}, {plan.dtype}")
    for name, a, b in (
        ("hidden size", small.hidden_size, large.hidden_size),
        ("layers", small.num_layers, large.num_layers),
        ("query heads", small.num_heads, large.num_heads),
        ("KV heads", small.num_kv_heads, large.num_kv_heads),
        ("head size", small.head_dim, large.head_dim),
        ("MLP size", small.intermediate_size, large.intermediate_size),
        ("vocabulary", small.vocab_size, large.vocab_size),
    ):
        print(f"  {name:<12} {a:>7} → {b:>7}")
    print(f"  copies of the stream: {plan.num_copies}; headway serve {out}")
    return 0


def main(arguments: list[str]) -> int:
    """Run with the command line's reader of options, help and errors."""
    verbs.VERBS["widen"] = ROW
    try:
        return verbs.main(["widen", *arguments])
    finally:
        del verbs.VERBS["widen"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
