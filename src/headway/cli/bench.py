"""`headway bench URL | MODEL` and `headway bench compare A.json B.json`."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING

import headway
from headway.cli.common import (
    check_writable,
    is_model,
    model_name,
    obtain_model,
    report_console,
)
from headway.config.options import BenchOptions, EngineOptions, flag_name, to_arguments
from headway.core.errors import UsageError

if TYPE_CHECKING:
    from headway.bench.report import BenchReport
    from headway.bench.trial import Trial
    from headway.cli.main import VerbCall

UNSTARTED_URL = "http://127.0.0.1"
"""What a dry run of a model has in place of its server."""


def bench(call: "VerbCall") -> int:
    """Put the load on a server, or on one that is started of a model, and report."""
    if call.positionals[:1] == ["compare"]:
        return compare(call.positionals[1:])
    if len(call.positionals) != 1:
        raise UsageError(
            "bench takes one URL or model.", "headway bench http://127.0.0.1:8000, or a folder."
        )
    options: BenchOptions = call.options[BenchOptions]

    from headway.bench import names, trial

    names.check_words(options.words)
    check_writable(options.json, options.csv, options.html)
    with open_server(call) as url:
        if "--dry-run" in call.switches:
            print(trial.outline(url, options))
            return 0
        report = run(trial.find_goodput if options.find_goodput else trial.run_once, url, options)
    return publish(report, options)


@contextmanager
def open_server(call: "VerbCall") -> Iterator[str]:
    """Yield the URL that was given, or that of a server of the model, stopped at the end.

    Raises UsageError for engine options beside a URL, and for a word that is neither.
    """
    from headway.evals.url import is_url
    from headway.measure.server_process import ServerProcess

    (word,) = call.positionals
    if is_url(word):
        refuse_engine_options(call, word)
        yield word
        return
    folder = obtain_model(word, call)
    if not is_model(folder):
        raise UsageError(
            f"{word} is neither a URL nor a model on this machine.",
            "Give http://HOST:PORT, a folder, a GGUF file or a name that headway ls shows.",
        )
    if "--dry-run" in call.switches:
        yield UNSTARTED_URL
        return
    print(f"Starting a server of {model_name(folder)} …", file=sys.stderr, flush=True)
    with ServerProcess(folder, to_arguments(call.options[EngineOptions])) as server:
        yield server.url


def refuse_engine_options(call: "VerbCall", url: str) -> None:
    """Raise UsageError for an engine option on the command line beside a URL."""
    for field in fields(EngineOptions):
        if call.sources.get(field.name) == "flag":
            raise UsageError(
                f"{flag_name(field.name)} is for a model that bench starts, and {url} runs.",
                "Leave it out, or give a model in place of the URL.",
            )


def run(trial: "Trial", url: str, options: BenchOptions) -> "BenchReport":
    """Run the trial in an event loop of its own."""
    import uvloop

    from headway.bench.progress import live

    with live() as watch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report: BenchReport = runner.run(trial(url, options, headway.__version__, watch))
        return report


def publish(report: "BenchReport", options: BenchOptions) -> int:
    """Print the report and write its files."""
    from headway.bench import export, page, table
    from headway.measure.saved import write

    if options.json:
        export.write_json(report, options.json)
    if options.csv:
        export.write_csv(report, options.csv)
    if options.html:
        write(options.html, page.html(report).encode())
    table.show_report(report, report_console(), options.words)
    return 0


def compare(paths: list[str]) -> int:
    """Print two reports side by side."""
    if len(paths) != 2:
        raise UsageError("compare takes two reports.", "headway bench compare A.json B.json")
    from headway.bench import comparison
    from headway.bench.export import read_json

    first, second = (read_json(path) for path in paths)
    comparison.show_comparison(
        comparison.compare(first, second), paths[0], paths[1], report_console()
    )
    return 0
