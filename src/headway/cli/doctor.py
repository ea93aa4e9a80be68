"""`headway doctor`: examine this machine, a live server or a bench report."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from headway.cli.common import check_writable, is_model, model_folder, report_console
from headway.config.options import DoctorOptions, EngineOptions
from headway.core.errors import UsageError
from headway.core.machine import num_cores

if TYPE_CHECKING:
    from rich.console import Console

    from headway.advise.diagnosis import Diagnosis
    from headway.advise.reading import ServerReading
    from headway.advise.what_if.changes import WhatIfChange
    from headway.cli.main import VerbCall


def doctor(call: "VerbCall") -> int:
    """Examine a URL, a report, a folder, or this machine."""
    if len(call.positionals) > 1:
        raise UsageError("doctor takes one thing.", "headway doctor [FOLDER | URL | report.json]")
    options: DoctorOptions = call.options[DoctorOptions]
    if options.html:
        check_html(call.positionals, options)
    if options.data:
        return examine_chats(call.positionals, options)
    what = call.positionals[0] if call.positionals else None
    console = report_console()
    if options.machine and what is not None and not is_model(what):
        raise UsageError(f"--machine is this machine, not {what}.", "headway doctor --machine")
    changes = parse_changes(what, options)
    reading = read_source(what, options)
    if reading is None:
        return examine_machine(what, call.options[EngineOptions], options, console)
    return print_diagnosis(what or "", reading, changes, options, console)


def check_html(positionals: list[str], options: DoctorOptions) -> None:
    """Refuse --html where there is no page, or no place for it, before anything is watched."""
    if options.data or options.machine or not positionals or is_model(positionals[0]):
        raise UsageError(
            "--html is of a server or a report.", "headway doctor http://127.0.0.1:8000 --html FILE"
        )
    check_writable(options.html)


def examine_chats(positionals: list[str], options: DoctorOptions) -> int:
    """Print which parts of the prompts of recorded chats (--data) could be left out."""
    from headway.advise.recorded_chats import read_chats, report_on, show_report

    if positionals:
        raise UsageError("--data reads a file alone.", "headway doctor --data FILE")
    report = report_on(read_chats(Path(options.data)))
    if options.json:
        print(msgspec.json.encode(report).decode())
    else:
        show_report(report, report_console())
    return 0


def print_diagnosis(
    what: str,
    reading: "ServerReading",
    changes: "list[WhatIfChange]",
    options: DoctorOptions,
    console: "Console",
) -> int:
    """Print the diagnosis of a server or a report."""
    from headway.advise.diagnosis import diagnose
    from headway.advise.show import show_diagnosis

    diagnosis = diagnose(reading)
    simulate_changes(what, options, reading, diagnosis, changes)
    if options.html:
        write_page(diagnosis, options.html)
    if options.json:
        print(msgspec.json.encode(diagnosis).decode())
    else:
        show_diagnosis(diagnosis, console)
    return 0


def write_page(diagnosis: "Diagnosis", path: str) -> None:
    """Write the diagnosis as one HTML page."""
    from headway.advise.show import html
    from headway.measure.saved import write

    write(path, html(diagnosis).encode())


def read_source(what: str | None, options: DoctorOptions) -> "ServerReading | None":
    """Return the reading of a server or a report; None for a folder or this machine."""
    if what is None or is_model(what):
        return None
    if what.endswith(".json") or Path(what).is_file():
        from headway.advise.from_report import reading_from_report
        from headway.bench.export import read_json

        report = read_json(what)
        return reading_from_report(what, report, price_per_hour=options.price_per_hour)
    if "://" not in what and ":" not in what:
        raise UsageError(
            f"{what} is no folder, no report and no URL.",
            "headway doctor [FOLDER | URL | report.json]",
        )
    return watch_server(what, options)


def parse_changes(what: str | None, options: DoctorOptions) -> "list[WhatIfChange]":
    """Parse the changes of --what-if, before a server is watched."""
    if not options.what_if:
        return []
    from headway.advise.what_if.changes import EXAMPLE, parse_change

    if what is None or is_model(what) or Path(what).is_file():
        raise UsageError("--what-if asks a live server for its steps and traffic.", EXAMPLE)
    return [parse_change(text) for text in options.what_if]


def simulate_changes(
    url: str,
    options: DoctorOptions,
    reading: "ServerReading",
    diagnosis: "Diagnosis",
    changes: "list[WhatIfChange]",
) -> None:
    """Simulate the changes of --what-if, and the fixes where the server has the steps."""
    from headway.advise.what_if.gains import add_what_ifs, fetch

    if reading.source != "stats" or not (changes or (options.simulate and diagnosis.findings)):
        if changes:
            raise UsageError(f"{url} has no step records.", "What-ifs need a Headway server.")
        return
    started_s = time.perf_counter()

    def say(text: str) -> None:
        if time.perf_counter() - started_s > 2:
            print(f"simulating {text}", file=sys.stderr)

    try:
        calibration = fetch(url, options.api_key, options.model, options.seconds)
        add_what_ifs(diagnosis, reading, calibration, changes, say)
    except UsageError as error:
        if changes:
            raise
        diagnosis.not_known.append(f"what fixes give by simulation: {error.cause}")


def watch_server(url: str, options: DoctorOptions) -> "ServerReading":
    """Watch a live server, with a countdown."""
    from headway.advise.watch import watch

    def tick(passed_s: float) -> None:
        if sys.stderr.isatty():
            remaining_s = max(options.seconds - passed_s, 0)
            print(
                f"\rwatching {url}: {remaining_s:3.0f} s left ", end="", file=sys.stderr, flush=True
            )

    reading = watch(
        url,
        seconds=options.seconds,
        api_key=options.api_key,
        model=options.model,
        price_per_hour=options.price_per_hour,
        on_tick=tick,
    )
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
    return reading


def examine_machine(
    what: str | None, engine: EngineOptions, options: DoctorOptions, console: "Console"
) -> int:
    """Print the machine and the plan of a model on it."""
    from headway.advise import examine as examination

    if options.machine and engine.threads is None:
        engine = replace(engine, threads=num_cores())
    machine = examination.examine(
        model_folder(what),
        engine,
        budget_s=options.probe_seconds,
        accelerators=options.accelerators,
    )
    if options.json:
        print(msgspec.json.encode(machine).decode())
    else:
        examination.show_machine(machine, console, machine_only=options.machine)
    return 0
