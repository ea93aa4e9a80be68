"""`headway widen FOLDER --like SHAPE OUT`: a small model at the cost of a large one."""

from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.common import source_folder
from headway.core.errors import UsageError
from headway.core.model_spec import read_model_spec
from headway.core.options import WidenOptions
from headway.core.progress import bytes_bar

if TYPE_CHECKING:
    from headway.cli.main import Call


def widen(call: "Call") -> int:
    """Write OUT and say what it is; with --dry-run only whether FOLDER fits."""
    if len(call.positionals) != 2:
        raise UsageError("widen takes two folders.", "headway widen FOLDER --like qwen2.5-0.5b OUT")
    folder, out = source_folder(call.positionals[0], "widen"), Path(call.positionals[1])
    options: WidenOptions = call.options[WidenOptions]

    from headway.compress import widen as room  # late: torch

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
