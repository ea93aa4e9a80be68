"""`headway prune FOLDER OUT`: write a smaller model, and print before what that gains here."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.common import GATE_FAILED, source_folder
from headway.cli.gated import QualityFigures, check_gate, evaluate_folder, held_out
from headway.config.memory_plan import gib
from headway.config.options import PruneOptions
from headway.core.errors import UsageError
from headway.core.progress import items_bar
from headway.spec import read_json

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from headway.compress.prune.prune import Pruned, PruneSettings

CARD = """# {name}

`{folder}` with less in it, by `headway prune`: {what}. Nothing was trained afterwards;
`headway distill {folder} {name} OUT` brings back most of what this took.

| | before | now | |
| --- | --- | --- | --- |
{rows}
{figures}"""


def prune(call: "VerbCall") -> int:
    """Print the gains, prune, write OUT, evaluate; return 0, or 5 when the gate fails."""
    if len(call.positionals) != 2:
        raise UsageError("prune takes two folders.", "headway prune FOLDER OUT --neurons 0.33")
    folder, out = source_folder(call.positionals[0], "prune"), Path(call.positionals[1])
    options: PruneOptions = call.options[PruneOptions]
    check_gate(call)

    from headway.compress.estimate import use_threads
    from headway.compress.folder import check_free  # late: torch
    from headway.compress.prune import promise
    from headway.compress.prune.prune import check
    from headway.compress.train.model import spec_of
    from headway.runtime.checkpoint_files import find_files

    check_free(out)
    spec, cuts = spec_of(folder), cuts_of(options)
    find_files(folder)
    use_threads(options.threads)
    check(spec, cuts)
    after = promise.smaller_spec(spec, cuts)
    rows = promise.size_rows(spec, after, cuts)
    for row in rows:
        print("{:<22} {:>14} → {:>14}  {}".format(*row))
    print(f"memory for it          about {gib(promise.memory(spec, after, cuts))}: fp32")
    if "--dry-run" in call.switches:
        return 0
    pruned = run_pruning(call, folder, cuts)
    return write(call, folder, out, pruned, rows)


def cuts_of(options: PruneOptions) -> "PruneSettings":
    """Return what the options cut; --pattern 2:4 alone is half of the weights."""
    from headway.compress.prune.masks import TWO_OF_FOUR, Pattern
    from headway.compress.prune.prune import PruneSettings

    pattern = None
    if options.pattern == "2:4":
        if options.sparsity not in (0.0, 0.5):
            raise UsageError(
                f"--pattern 2:4 is half of the weights, not {options.sparsity:g}.",
                "Leave --sparsity out.",
            )
        pattern = TWO_OF_FOUR
    elif options.sparsity:
        pattern = Pattern(options.sparsity)
    return PruneSettings(
        layers=options.layers,
        kv_heads=options.kv_heads,
        heads=options.heads,
        neurons=options.neurons,
        pattern=pattern,
        method=options.method,
    )


def run_pruning(call: "VerbCall", folder: Path, cuts: "PruneSettings") -> "Pruned":
    """Prune the model, with a progress bar."""
    options: PruneOptions = call.options[PruneOptions]
    from headway.compress.prune.prune import num_steps, prune
    from headway.compress.train.data import Mixture
    from headway.compress.train.model import TrainedModel
    from headway.compress.train.texts import SKILLS, read_sources
    from headway.frontend.text import Tokenizer

    model = TrainedModel.open(folder, trainable=False)  # weights that do not fit end it first
    sources = read_sources(
        options.calibrate or [SKILLS], Tokenizer(folder), options.seed, held_out(call)
    )
    rows_BT, _, _ = Mixture(
        sources=sources, num_rows=options.rows, length=options.row_length, seed=options.seed
    ).batch(0)
    generation = folder / "generation_config.json"
    with items_bar(f"Pruning {folder.resolve().name}", num_steps(model.spec, cuts)) as advance:
        return prune(
            model,
            read_json(folder / "config.json"),
            read_json(generation) if generation.exists() else {},
            rows_BT,
            cuts,
            advance,
        )


def write(call: "VerbCall", folder: Path, out: Path, pruned: "Pruned", rows: list[Any]) -> int:
    """Write the folder with its card; nothing where the gate fails."""
    from headway.compress.folder import copy_text_files, new_folder, write_model

    with new_folder(out) as partial:
        copy_text_files(folder, partial)
        write_model(partial, pruned.config, pruned.model.tensors(), pruned.model.spec.dtype)
        figures = evaluate_folder(call, partial, out.name)
        text = card(folder.resolve().name, out.name, pruned, rows, figures)
        (partial / "README.md").write_text(text, encoding="utf-8")
        if figures.failed:
            shutil.rmtree(partial)
    if figures.failed:
        print(f"{out} is not written: the gate failed.")
        return GATE_FAILED
    print(f"headway serve {out}")
    return 0


def card(folder: str, name: str, pruned: "Pruned", rows: list[Any], figures: QualityFigures) -> str:
    """Return the text of the model card."""
    table = [f"| {' | '.join(row)} |" for row in rows]
    table += [
        f"| zeros in {kind} | | {share:.1%} | |" for kind, share in pruned.zeros.items() if share
    ]
    what = ", ".join(row[0] for row in rows if not row[0].startswith(("bytes", "FLOPs", "KV by")))
    return CARD.format(
        name=name,
        folder=folder,
        what=what or "single weights are zero",
        rows="\n".join(table),
        figures=figures.markdown,
    )
