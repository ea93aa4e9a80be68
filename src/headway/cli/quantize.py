"""`headway quantize FOLDER OUT`: write smaller formats, calibrated and judged by a gate."""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli.common import GATE_FAILED, folder_stamp, source_folder
from headway.cli.gated import check_gate, evaluate_folder, held_out
from headway.config.memory_plan import gib
from headway.config.options import EngineOptions, GateOptions, QuantizeOptions
from headway.core.errors import UsageError
from headway.core.progress import items_bar
from headway.core.request import SamplingParams
from headway.spec import read_model_spec
from headway.spec.formats import GROUPS, INT8, PLAIN, Format

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from headway.compress.calibration import CalibrationRows
    from headway.compress.partial import Partial
    from headway.compress.produce import QuantizationResult, Seconds
    from headway.compress.recipe import Recipe
    from headway.compress.rows import RowModel
    from headway.compress.search import Budget


def quantize(call: "VerbCall") -> int:
    """Write OUT; return 0, or 5 when the gate fails, with all files in OUT.partial."""
    if len(call.positionals) != 2:
        raise UsageError("quantize takes two folders.", "headway quantize FOLDER OUT")
    folder, out = source_folder(call.positionals[0], "quantize"), Path(call.positionals[1])
    call = against_source(call, folder)
    check_gate(call)
    options: QuantizeOptions = call.options[QuantizeOptions]

    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads do not spin as they wait
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # huge pages: 74 million page faults less
    from headway.compress import produce  # late: torch
    from headway.compress.estimate import use_threads
    from headway.compress.partial import Partial

    recipe = recipe_of(options, folder)
    use_threads(options.threads or len(os.sched_getaffinity(0)))
    model = produce.open_model(folder, recipe)
    if "--dry-run" in call.switches:
        print(outline(model, recipe, options))
        return 0
    calibration = calibration_rows(call, folder)
    work = Partial(out, f"{recipe.key} {calibration.digest} {folder_stamp(folder)}")
    with items_bar(
        f"Quantizing {folder.name}", produce.num_steps(model, options.format == "mixed")
    ) as advance:
        plan = produce.make(
            model,
            calibration,
            recipe,
            work,
            budget=budget_of(options, model, recipe),
            seconds=matrix_seconds(options, folder, model, recipe),
            file_format=options.file_format,  # type: ignore[arg-type]
            w8a8=options.format == "int8",
            advance=advance,
        )
    return finish(call, work, plan)


def finish(call: "VerbCall", partial: "Partial", plan: "QuantizationResult") -> int:
    """Evaluate the folder, write its card, rename it to OUT; return 5 when the gate fails."""
    from headway.compress.card import as_json, card, table
    from headway.compress.write import write_text

    figures = evaluate_folder(call, partial.folder, plan.name)
    write_text(partial.folder / "README.md", card(plan, figures.markdown))
    write_text(partial.folder / "quantize.json", json.dumps(as_json(plan), indent=2) + "\n")
    if figures.failed:
        print(f"{partial.out} is not written: the gate failed. It stays in {partial.folder}.")
        return GATE_FAILED
    partial.finish()
    print(table(plan))
    print(f"headway serve {partial.out}")
    return 0


def against_source(call: "VerbCall", folder: Path) -> "VerbCall":
    """Compare with FOLDER where --gate or texts are given without --against."""
    gate: GateOptions = call.options[GateOptions]
    if gate.against or not (gate.gate or gate.eval_data or gate.json):
        return call
    return replace(call, options={**call.options, GateOptions: replace(gate, against=str(folder))})


def recipe_of(options: QuantizeOptions, folder: Path) -> "Recipe":
    """Return the recipe; UsageError for options that exclude each other."""
    from headway.compress.grid import GridRule
    from headway.compress.mixed import candidates
    from headway.compress.recipe import Recipe, fits, stored_dtype
    from headway.compress.rotate import can_rotate

    if options.group not in GROUPS:
        raise UsageError(f"--group {options.group} is not offered.", "Give 32, 64 or 128.")
    budgets = (options.max_bits, options.max_bytes, options.max_step, options.max_kl)
    mixed, vllm = options.format == "mixed", options.readable_by == "vllm"
    wrong = {
        "A budget goes with --format mixed alone.": any(budgets) and not mixed,
        "Give one of --max-bits, --max-bytes and --max-step.": (
            sum(budget is not None for budget in budgets[:3]) > 1
        ),
        "--transform awq and smooth go with --format int4 and int8 alone.": (
            mixed and options.transform in ("awq", "smooth")
        ),
        "--file-format gptq holds --format int4 alone.": (
            options.file_format == "gptq" and options.format != "int4"
        ),
        "--ignore does not go with --file-format gptq, which holds one format.": (
            bool(options.ignore) and options.file_format == "gptq"
        ),
    }
    for cause, is_wrong in wrong.items():
        if is_wrong:
            raise UsageError(cause, "headway quantize --help says what goes together.")
    int4 = Format("int4", options.group)
    plain_head = vllm or options.head == "none" or options.file_format == "gptq"
    plain_head = plain_head or any(fits(pattern, "lm_head") for pattern in options.ignore)
    formats = {"int4": (int4,), "int8": (INT8,), "mixed": candidates(options.group)}
    spec = read_model_spec(folder)
    transform = options.transform
    if transform == "auto":
        transform = "rotate" if can_rotate(spec) else "none"
    return Recipe(
        formats=formats[options.format],
        head=PLAIN if plain_head else int4 if options.head == "int4" else INT8,
        method=options.method,  # type: ignore[arg-type]
        transform=transform,  # type: ignore[arg-type]
        rule=GridRule(
            dtype="float16" if options.file_format == "gptq" else stored_dtype(spec),
            positive=vllm or options.positive_scales or options.file_format == "gptq",
            searched=options.method == "gptq",
        ),
        seed=options.seed,
        fused=vllm,
        ignore=tuple(options.ignore),
    )


def outline(model: "RowModel", recipe: "Recipe", options: QuantizeOptions) -> str:
    """Return the text of `--dry-run`: what a run would write and take."""
    from headway.compress.estimate import estimate
    from headway.compress.produce import uniform

    estimated = estimate(model, recipe, uniform(model, recipe), options.rows, options.row_length)
    size = gib(estimated.file_bytes)
    mixed = " (of the smallest formats; the budget decides)" if options.format == "mixed" else ""
    return (
        f"{recipe.summary}\n"
        f"calibration   {options.rows} rows of {options.row_length} tokens: "
        f"{', '.join(options.calibrate)}\n"
        f"weights       {size}, {estimated.bits:.2f} bits a weight of the layers{mixed}\n"
        f"time          about {estimated.seconds / 60:.1f} min at this moment's speed\n"
        f"memory        about {gib(estimated.memory_bytes)}"
    )


def calibration_rows(call: "VerbCall", folder: Path) -> "CalibrationRows":
    """Return the calibration rows, without held-out texts."""
    from headway.compress.calibration import parse_sources, read_calibration
    from headway.frontend.text.tokenizer import Tokenizer

    options: QuantizeOptions = call.options[QuantizeOptions]
    tokenizer = Tokenizer(folder)
    return read_calibration(
        parse_sources(options.calibrate),
        tokenizer,
        rows=options.rows,
        length=options.row_length,
        seed=options.seed,
        tested=held_out(call),
        chats=tokenizer.template is not None,
        write=partial(write_rows, folder, options),
    )


def write_rows(
    folder: Path, options: QuantizeOptions, begins: list[list[int]], length: int
) -> list[list[int]]:
    """Sample rows from the model of `folder`, seeded, each a continuation of one of `begins`.

    A row has `length` tokens, or as many as the model's context.
    """
    from headway.llm import LLM

    length = min(length, read_model_spec(folder).max_len)
    begins = [ids[: length - 1] for ids in begins]
    print(f"{folder.name} writes {len(begins)} rows to be calibrated on.", file=sys.stderr)
    llm = LLM(folder, max_model_len=length, threads=options.threads)
    params = [
        SamplingParams(
            temperature=1,
            max_tokens=length - len(ids),
            ignore_eos=True,
            seed=options.seed + i,
        )
        for i, ids in enumerate(begins)
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in begins], params)
    rows = zip(begins, outputs, strict=True)
    return [ids + list(output.outputs[0].token_ids) for ids, output in rows]


def budget_of(options: QuantizeOptions, model: "RowModel", recipe: "Recipe") -> "Budget | None":
    """Return the budget of the options, or the bytes of Q4_K_M; None for one format."""
    from headway.compress.mixed import layer_weights, q4_k_m_bytes
    from headway.compress.search import Budget

    if options.format != "mixed":
        return None
    most: float | None = options.max_bytes
    if options.max_bits is not None:
        most = options.max_bits / 8 * layer_weights(model)
    if most is None and options.max_step is None and options.max_kl is None:
        most = q4_k_m_bytes(model, recipe)
    return Budget(max_bytes=most, max_seconds=options.max_step, max_kl=options.max_kl)


def matrix_seconds(
    options: QuantizeOptions, folder: Path, model: "RowModel", recipe: "Recipe"
) -> "Seconds":
    """Return the time of a matrix by format with the serving kernels, for --max-step."""
    from headway.compress.timing import no_seconds, seconds_by

    if options.max_step is None:
        return no_seconds
    from headway.planning import plan_settings
    from headway.runtime.kernels import choose_kernels

    kernels = {}
    for format in (*recipe.formats, PLAIN):
        engine = EngineOptions(quantization=format.kind, quantization_group=format.group or 64)
        _, settings, _, machine = plan_settings(folder, engine)
        kernels[format] = choose_kernels(settings, machine).linear_for("layers.0.mlp.down")
    return seconds_by(kernels, model.dtype)
