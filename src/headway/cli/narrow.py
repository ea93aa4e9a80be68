"""`headway narrow FOLDER OUT.yaml`: windows by layer, found by measuring, judged, then written."""

import os
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.common import engine_arguments, model_folder
from headway.cli.gated import GATE_FAILED, Figures, check_gate, evaluated, held_out
from headway.core.errors import UsageError
from headway.core.model_spec import read_model_spec
from headway.core.options import EngineOptions, GateOptions, NarrowOptions
from headway.core.progress import items_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headway.cli.main import Call
    from headway.evals.narrowing import Found, Layers, Losses, Row, Windows
    from headway.whole_model import FolderModel

DISTANCES = [0, 300, 800]
"""Characters between list and question of the lookups that are measured, and asked by the gate."""
USUAL_CONTEXT = 2048


def narrow(call: "Call") -> int:
    """Search, show, write OUT.yaml, evaluate; 0, or 5 where quality or the gate forbids it."""
    if len(call.positionals) != 2:
        raise UsageError(
            "narrow takes a folder and the file to write.", "headway narrow FOLDER OUT.yaml"
        )
    folder, out = model_folder(call.positionals[0]), Path(call.positionals[1])
    call = completed(call, folder)
    check_gate(call)
    layers = layers_of(call, folder)
    if "--dry-run" in call.switches:
        most = sum(len(layers.choices(layer)) for layer in range(len(layers.seen)))
        print(f"at most {most} windows in {len(layers.seen)} layers are measured, one at a time")
        return 0
    refuse_written(out)
    layers, found = searched(call, folder, out, layers)
    options: NarrowOptions = call.options[NarrowOptions]
    print("\n".join(told(layers, found)))
    if found.lost.worst > options.max_loss:
        print(
            f"{out} is not written: {found.lost.worst_kind} loses {found.lost.worst:.4f} nats a "
            f"token, above --max-loss {options.max_loss:g}. A larger --share keeps more."
        )
        return GATE_FAILED
    return judged(call, folder, out, layers, found)


def completed(call: "Call", folder: Path) -> "Call":
    """The call with the gate's own folder and distances where none are given."""
    gate: GateOptions = call.options[GateOptions]
    engine: EngineOptions = call.options[EngineOptions]
    if engine.kv_layers:
        raise UsageError("narrow looks for what --kv-layers says.", "Leave --kv-layers out.")
    options: NarrowOptions = call.options[NarrowOptions]
    if "int4" in engine.kv_cache_dtype and options.sinks:
        raise UsageError(
            f"--kv-cache-dtype int4 reads no sinks, and --sinks is {options.sinks}.",
            "Give --sinks 0, or another type.",
        )
    against = gate.against or (str(folder) if gate.gate else "")
    gate = replace(gate, against=against, distances=gate.distances or DISTANCES)
    return replace(call, options={**call.options, GateOptions: gate})


def layers_of(call: "Call", folder: Path) -> "Layers":
    """What each layer of the model sees at the context of --context."""
    from headway.evals.narrowing import Layers

    options: NarrowOptions = call.options[NarrowOptions]
    engine: EngineOptions = call.options[EngineOptions]
    spec = read_model_spec(folder)
    longest = min(engine.max_model_len or spec.default_len, spec.max_len)
    context = min(USUAL_CONTEXT, longest) if options.context is None else options.context
    if context > longest:
        raise UsageError(
            f"--context {context}: the model sees {longest} tokens.", f"Give {longest} at most."
        )
    return Layers(
        seen=tuple(min(layer.window or context, context) for layer in spec.layers),
        sinks=options.sinks,
        candidates=tuple(sorted(set(options.candidates))),
        judged=context,
    )


def refuse_written(out: Path) -> None:
    """UsageError before the search where the file is there, or cannot be."""
    if out.exists():
        raise UsageError(f"{out} is there already.", "Name another file, or remove it.")
    if not out.parent.is_dir():
        raise UsageError(f"There is no folder {out.parent}.", "Make it first.")


def searched(call: "Call", folder: Path, out: Path, layers: "Layers") -> tuple["Layers", "Found"]:
    """The windows, each candidate measured by the engine that would serve it; what was tried."""
    from headway.evals.narrowing import judged_length, search
    from headway.whole_model import FolderModel

    options: NarrowOptions = call.options[NarrowOptions]
    arguments = engine_arguments(call.options[EngineOptions])
    model = FolderModel(folder, **arguments)
    rows = measured_rows(call, model)
    layers = replace(layers, judged=judged_length(rows, options.items))
    tokens = [row.token_ids for row in rows]
    whole = model.score_ids(tokens, top=1)
    del model  # its memory is the next one's
    trial = beside(out, "trial")

    def measure(windows: "Windows") -> "Losses":
        from headway.evals.narrowing import losses

        trial.write_text(as_yaml(windows, layers.sinks), encoding="utf-8")
        narrowed = FolderModel(folder, **{**arguments, "kv_layers": str(trial)})
        return losses(rows, whole, narrowed.score_ids(tokens, top=1))

    try:
        with items_bar(f"Narrowing {folder.resolve().name}", len(layers.seen)) as advance:
            most, max_loss = options.share, options.max_loss
            return layers, search(layers, most, max_loss, measure, advance)
    finally:
        trial.unlink(missing_ok=True)


def measured_rows(call: "Call", model: "FolderModel") -> "list[Row]":
    """Answers of the whole model to questions that no evaluation asks, and --calibrate's texts."""
    from headway.compress.calibration import parse_sources, read_calibration
    from headway.evals.narrowing import rows_of, text_rows

    options: NarrowOptions = call.options[NarrowOptions]
    rows = list(rows_of(model, options.items, call.options[GateOptions].distances))
    if options.calibrate:
        texts = read_calibration(
            parse_sources(options.calibrate),
            model.tokenizer,
            rows=options.rows,
            length=min(options.row_length, model.max_model_len - 1),
            seed=0,
            tested=held_out(call),
            chats=model.tokenizer.template is not None,
        )
        rows += text_rows(texts.rows)
    return rows


def told(layers: "Layers", found: "Found") -> "list[str]":
    """What was measured: each window alone, what was chosen, what it loses by kind."""
    lines = [
        f"windows of less than {layers.judged} tokens were tried, which enough answers look beyond",
        "layer  chosen  nats a token lost alone, by window",
    ]
    for layer, alone in enumerate(found.alone):
        tried = ", ".join(f"{window}: {lost:.4f}" for window, lost in alone.items() if window)
        lines.append(f"{layer:<6} {found.windows[layer] or 'whole':<7} {tried}")
    held = sum(layers.tokens(layer, window) for layer, window in enumerate(found.windows))
    lines.append(
        f"together: {held:,} of {sum(layers.seen):,} layer-tokens at a context of "
        f"{max(layers.seen):,}, a share of {layers.share(found.windows):.3f}"
    )
    for kind, lost in found.lost.kinds.items():
        lines.append(
            f"  {kind:<14} {lost.nats:+.4f} nats a token, {lost.changed} of {lost.items} changed"
        )
    return lines


def judged(call: "Call", folder: Path, out: Path, layers: "Layers", found: "Found") -> int:
    """The file under its name, unless the gate fails."""
    partial = beside(out, "partial")
    content = as_yaml(found.windows, layers.sinks)
    try:
        partial.write_text(content, encoding="utf-8")
        engine = replace(call.options[EngineOptions], kv_layers=str(partial))
        with_file = replace(call, options={**call.options, EngineOptions: engine})
        figures = evaluated(with_file, folder, f"{folder.resolve().name} with {out.name}")
        if figures.failed:
            print(f"{out} is not written: the gate failed.")
            return GATE_FAILED
        comments = [f"Windows by layer of {folder.resolve().name}, by `headway narrow`."]
        comments += [*told(layers, found), *gate_lines(figures)]
        head = "".join(f"# {line}\n" for line in comments)
        partial.write_text(head + content, encoding="utf-8")
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)
    print(f"headway serve {call.positionals[0]} --kv-layers {out}")
    return 0


def gate_lines(figures: Figures) -> "Sequence[str]":
    """What the evaluation said, a line a measure; that there was none."""
    if figures.report is None or figures.report.comparison is None:
        return ["not evaluated: --gate does"]
    comparison = figures.report.comparison
    return [f"beside {comparison.first}:"] + [
        f"  {m.name:<24} loss {m.loss:+.4f} ({m.low:+.4f} … {m.high:+.4f}), {m.verdict}"
        for m in comparison.measures
    ]


def beside(out: Path, what: str) -> Path:
    """A file of this process in the folder of OUT, so that a rename is whole."""
    return out.with_name(f".{out.name}.{what}.{os.getpid()}")


def as_yaml(windows: "Windows", sinks: int) -> str:
    """The file that --kv-layers reads; (64, 0, 64, 64) are rows 0 and 2-3."""
    lines = ["layers:"]
    for window, run in groupby(enumerate(windows), key=lambda pair: pair[1]):
        indexes = [layer for layer, _ in run]
        name = str(indexes[0]) if len(indexes) == 1 else f"{indexes[0]}-{indexes[-1]}"
        if window:
            lines.append(f"  {name}: {{window: {window}, sinks: {sinks}}}")
    return "\n".join([*lines, ""])
