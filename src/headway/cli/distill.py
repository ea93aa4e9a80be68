"""`headway distill TEACHER STUDENT OUT --data …`: train a student on its teacher's distribution."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.common import GATE_FAILED, source_folder
from headway.cli.gated import QualityFigures, check_gate, evaluate_folder, held_out
from headway.config.memory_plan import gib
from headway.config.options import DistillOptions
from headway.core.errors import UsageError
from headway.core.progress import steps_bar
from headway.measure.chart import Panel, chart
from headway.spec import read_model_spec
from headway.spec.formats import GROUPS, INT8
from headway.spec.quantization import Quantization

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from headway.compress.train.run import DistillPlan, TeacherStudent

CARD = """# {name}

`{student}` taught by `{teacher}`, by `headway distill`: its distribution over the next token is
learned, not its answers.

| what | how |
| --- | --- |
{rows}

![loss](loss.svg)
{figures}"""


def distill(call: "VerbCall") -> int:
    """Train, write OUT, evaluate; return 0, or 5 when the gate fails."""
    if len(call.positionals) != 3:
        raise UsageError(
            "distill takes three folders.", "headway distill TEACHER STUDENT OUT --data skills"
        )
    teacher, student = (source_folder(given, "distill") for given in call.positionals[:2])
    out = Path(call.positionals[2])
    options: DistillOptions = call.options[DistillOptions]
    if options.quantize_group not in GROUPS:
        raise UsageError(
            f"--quantize-group {options.quantize_group} is not offered.", "Give 32, 64 or 128."
        )
    check_gate(call)

    from headway.compress.estimate import use_threads
    from headway.compress.folder import check_free  # late: torch
    from headway.compress.train import run as training
    from headway.compress.train.texts import read_sources
    from headway.frontend.text import Tokenizer
    from headway.runtime.checkpoint_files import find_files

    check_free(out)
    for folder in [teacher] if options.fresh else [teacher, student]:
        read_model_spec(folder)
        find_files(folder)
    use_threads(options.threads)
    plan = plan_of(options, student)
    models = training.open_models(teacher, student, plan)  # before texts are read, for minutes
    sources = read_sources(options.data, Tokenizer(teacher), options.seed, held_out(call))
    pair = training.prepare(*models, plan, sources, options.save_every)
    rows = describe_run(pair, plan) | {"memory": f"about {gib(training.memory(pair))}"}
    print("\n".join(f"{name:<14} {value}" for name, value in rows.items()))
    if "--dry-run" in call.switches:
        return 0
    identity = {
        "teacher": training.identity(teacher),
        "student": training.identity(student),
        **dataclasses.asdict(plan),
        "quantization": str(plan.quantization),
        "data": [[s.name, s.share, len(s.tokens_N)] for s in sources],
    }
    run = out.with_name(f"{out.name}.training")
    with steps_bar("step", plan.steps) as advance:
        training.distill(
            pair, run, identity, lambda done, losses: advance(done, format_losses(losses))
        )
    names = {"teacher": teacher.resolve().name, "student": student.resolve().name}
    return write(call, pair, out, run, student, {**names, "rows": rows})


def plan_of(options: DistillOptions, student: Path) -> "DistillPlan":
    """Return the training plan of the options; quantized layers of STUDENT keep their formats."""
    from headway.compress.train.model import spec_of
    from headway.compress.train.run import DistillPlan

    formats = () if options.fresh else spec_of(student).formats
    return DistillPlan(
        steps=options.steps,
        step_tokens=options.step_tokens,
        row_length=options.row_length,
        learning_rate=options.learning_rate,
        temperature=options.temperature,
        cross_entropy=options.cross_entropy,
        quantization=Quantization.of(
            options.quantize, options.quantize_group, checkpoint=formats, int8=INT8
        ),
        fresh=options.fresh,
        keep_zeros=options.keep_zeros,
        seed=options.seed,
    )


def format_losses(losses: dict[str, float]) -> str:
    """Format losses by source: train-000.txt 0.0081, skills 0.0013."""
    return ", ".join(f"{Path(name).name} {value:.4f}" for name, value in losses.items())


def describe_run(pair: "TeacherStudent", plan: "DistillPlan") -> dict[str, str]:
    """Return the rows that describe the run, for the terminal and the card."""
    mixture = pair.losses.mixture
    sources = [
        f"{Path(source.name).name} ({len(source.tokens_N):,} tokens, {share:.0%})"
        + (f" without {source.left_out:,} tested paragraphs" if source.left_out else "")
        for source, share in zip(mixture.sources, mixture.shares, strict=True)
    ]
    tokens = mixture.num_rows * mixture.length
    loss = f"{1 - plan.cross_entropy:.0%} divergence from the teacher at temperature "
    loss += f"{plan.temperature:g}, {plan.cross_entropy:.0%} cross entropy"
    rows = {
        "parameters": f"{pair.student.spec.num_parameters:,}; the teacher's "
        f"{pair.teacher.spec.num_parameters:,}",
        "data": ", ".join(sources),
        "steps": f"{plan.steps:,} of {tokens:,} tokens in rows of {mixture.length}",
        "rate": f"to {plan.learning_rate:g}, then half a cosine; AdamW, seed {plan.seed}",
        "loss": loss,
    }
    if plan.quantization.rounded:
        rows["rounding"] = f"{plan.quantization}, trained under it; inputs int8 by token"
    if pair.num_zeros:
        rows["zeros"] = f"{pair.num_zeros:,} weights are held at zero"
    return rows


def write(
    call: "VerbCall",
    pair: "TeacherStudent",
    out: Path,
    run: Path,
    student: Path,
    facts: dict[str, Any],
) -> int:
    """Write the folder with its record, figures and card; nothing where the gate fails."""
    from headway.compress.folder import new_folder
    from headway.compress.train.written import write_student

    with new_folder(out) as partial:
        write_student(pair.student, student, partial)
        record = json.loads((run / "training.json").read_text())
        facts["rows"]["time"] = "{:.0f} minutes by the median pace, {:.0f} in all".format(
            *record["minutes"]
        )
        for name in ("loss.csv", "training.json"):
            shutil.copy(run / name, partial / name)
        (partial / "loss.svg").write_text(curves(run / "loss.csv", out.name), encoding="utf-8")
        figures = evaluate_folder(call, partial, out.name)
        (partial / "README.md").write_text(card(out.name, facts, figures), encoding="utf-8")
        if figures.failed:
            shutil.rmtree(partial)
    if figures.failed:
        print(f"{out} is not written: the gate failed. {run} keeps what was trained.")
        return GATE_FAILED
    shutil.rmtree(run)
    print(f"headway serve {out}")
    return 0


def card(name: str, facts: dict[str, Any], figures: QualityFigures) -> str:
    """Return the text of the model card."""
    rows = "\n".join(f"| {what} | {how} |" for what, how in facts["rows"].items())
    rest = {"teacher": facts["teacher"], "student": facts["student"], "figures": figures.markdown}
    return CARD.format(name=name, rows=rows, **rest)


def curves(log: Path, title: str) -> str:
    """Return the losses by step as SVG."""
    import csv

    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in rows[0] if name not in ("step", "lr", "seconds")]
    lines = {
        Path(name).name: [(float(row["step"]), float(row[name])) for row in rows] for name in names
    }
    return chart([Panel(title=f"{title}: loss", x="step", y="nats a token", lines=lines)])
