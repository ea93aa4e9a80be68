"""`headway batch [FOLDER] FILE.jsonl`: a batch in OpenAI's form, the engine in this process."""

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import headway
from headway.cli.common import make_scorer, model_folder, model_name, print_settings, read_tokenizer
from headway.config.options import BatchOptions, EngineOptions, ServerOptions
from headway.core.errors import UsageError
from headway.core.progress import bytes_bar, items_bar
from headway.spec import read_model_spec
from headway.spec.model_files import sampling_defaults

if TYPE_CHECKING:
    from headway.batches.lines import BatchLine
    from headway.batches.offline import ResultFile, Tally
    from headway.cli.main import VerbCall
    from headway.server.models import ServerState

MAX_LINES = 5_000_000
MAX_PRINTED_FAULTS = 20


def batch(call: "VerbCall") -> int:
    """Answer the lines that the output does not have yet; return 0 when none failed, else 1."""
    if not 1 <= len(call.positionals) <= 2:
        raise UsageError("batch takes a folder and a file.", "headway batch FOLDER FILE.jsonl")
    *folders, file = call.positionals
    folder, source = model_folder(folders[0] if folders else None), Path(file)
    engine_options: EngineOptions = call.options[EngineOptions]
    options: BatchOptions = call.options[BatchOptions]
    if "--dry-run" in call.switches:
        print_settings(folder, engine_options, call.sources, call.deprecated)
        return 0
    read_model_spec(folder)
    names = options.served_model_name or [model_name(folder)]
    lines = read_lines(source, names)

    from headway.batches.offline import ResultFile

    output = ResultFile(Path(options.output) if options.output else default_output(source))
    try:
        output.refuse_strangers(lines)
        remaining = [line for line in lines if line.custom_id not in output.done]
        if output.done:
            print(f"{len(output.done)} of {len(lines)} lines are done.", file=sys.stderr)
        if remaining:
            state = load(folder, engine_options, names)
            begun_s = time.perf_counter()
            tally = asyncio.run(run(state, source, lines, remaining, output, options.concurrency))
            print(format_speed(tally, time.perf_counter() - begun_s), file=sys.stderr)
    finally:
        output.close()
    failed = f", {output.num_failed} of them failed" if output.num_failed else ""
    print(f"{output.path}: {len(lines)} results{failed}")
    return 1 if output.num_failed else 0


def default_output(source: Path) -> Path:
    """Return questions.results.jsonl in the folder of questions.jsonl."""
    return source.with_name(f"{source.stem}.results.jsonl")


def read_lines(source: Path, names: list[str]) -> "list[BatchLine]":
    """Return the lines of the input; UsageError after printing their faults."""
    from headway.batches.lines import ENDPOINTS, check_file

    try:
        checked = check_file(
            source,
            endpoints=ENDPOINTS,
            models=names,
            unnamed=names[0],
            max_line_bytes=int(ServerOptions().max_body),
            max_lines=MAX_LINES,
        )
    except OSError as error:
        raise UsageError(
            f"{source} cannot be read: {error.strerror}.", "headway batch FOLDER FILE.jsonl"
        ) from None
    if not checked.num_faults:
        return checked.lines
    for fault in checked.faults[:MAX_PRINTED_FAULTS]:
        where = f"line {fault.line}: " if fault.line else ""
        print(f"{where}{fault.message}", file=sys.stderr)
    if checked.num_faults > MAX_PRINTED_FAULTS:
        print(f"and {checked.num_faults - MAX_PRINTED_FAULTS} more", file=sys.stderr)
    fix = "Correct the lines and run it again."
    if any(fault.code == "model_not_found" for fault in checked.faults):
        fix = "Correct the lines, or give the name they use with --served-model-name."
    raise UsageError(f"{source} is no batch: {checked.num_faults} faults.", fix)


def load(folder: Path, options: EngineOptions, names: list[str]) -> "ServerState":
    """Return a server's state with the model in this process."""
    from headway.assemble import assemble
    from headway.frontend.local import LocalClient
    from headway.server.models import ServedModel, ServerState, answer_formats
    from headway.telemetry.live import Telemetry

    tokenizer = read_tokenizer(folder, options)
    with bytes_bar(f"Loading {folder.name}") as progress:
        assembled = assemble(folder, options, progress=progress)
    telemetry = Telemetry(names, assembled.spec, version=headway.__version__)
    client = LocalClient(assembled.engine, tokenizer=tokenizer, on_record=telemetry.on_step)
    telemetry.on_ready(client.info)
    format, reasoning = answer_formats(tokenizer, ServerOptions().tool_call_parser)
    model = ServedModel(
        names=names,
        client=client,
        tokenizer=tokenizer,
        telemetry=telemetry,
        defaults=sampling_defaults(folder),
        format=format,
        reasoning=reasoning,
        scorer=make_scorer(folder, options),
    )
    return ServerState(models=dict.fromkeys(names, model), options=ServerOptions())


async def run(
    state: "ServerState",
    source: Path,
    lines: "list[BatchLine]",
    remaining: "list[BatchLine]",
    output: "ResultFile",
    concurrency: int | None,
) -> "Tally":
    """Answer the remaining lines, with a progress bar over all lines."""
    from headway.batches.offline import answer_lines
    from headway.server.app import generating_endpoints

    model = state.rows[0]
    await model.client.start()
    try:
        with items_bar("Lines", len(lines)) as advance:
            for _ in range(len(lines) - len(remaining)):
                advance()
            return await answer_lines(
                generating_endpoints(state),
                source,
                remaining,
                output,
                concurrency=concurrency or 2 * model.info().max_num_seqs,
                on_line=advance,
            )
    finally:
        await model.client.stop()
        if model.scorer is not None:
            model.scorer.close()


def format_speed(tally: "Tally", seconds: float) -> str:
    """Return "500 lines in 12.3 s: 10240 tokens in, 8000 out, 650 tokens/s"."""
    return (
        f"{tally.num_lines} lines in {seconds:.1f} s: {tally.input_tokens} tokens in, "
        f"{tally.output_tokens} out, {tally.output_tokens / max(seconds, 1e-9):.0f} tokens/s"
    )
