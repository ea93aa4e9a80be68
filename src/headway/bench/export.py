"""A report as files: JSON with every raw timestamp, and CSV with a line for each request."""

import csv
from pathlib import Path

import msgspec

from headway.bench.latency import latency
from headway.bench.report import BenchReport
from headway.core.errors import UsageError
from headway.measure.saved import read_saved, write

COLUMNS = (
    *("id", "service_class", "conversation", "turn", "scheduled_s", "sent_s", "ended_s"),
    *("ttft_s", "publish_s", "tpot_s", "gap_p99_s", "e2e_s", "prompt_tokens", "output_tokens"),
    *("cached_tokens", "finish_reason", "status", "error"),
)


def write_json(report: BenchReport, path: str) -> None:
    """Write the whole report; `read_json` reads it."""
    write(path, msgspec.json.encode(report))


def read_json(path: str) -> BenchReport:
    """Return a report that `write_json` wrote; UsageError names what is wrong with the file."""
    return read_saved(path, BenchReport, "bench")


def write_csv(report: BenchReport, path: str) -> None:
    """Write a line for each request, failed ones included."""
    rows = []
    for x in report.run.exchanges:
        timed = latency(x)
        derived = {
            name: getattr(timed, name)
            for name in ("ttft_s", "publish_s", "tpot_s", "gap_p99_s", "e2e_s")
            if timed is not None
        }
        counts = {"prompt_tokens": x.num_prompt, "output_tokens": x.num_output}
        rows.append([{**msgspec.structs.asdict(x), **counts, **derived}.get(c) for c in COLUMNS])
    try:
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            writer.writerows(rows)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.", "Check the path.") from error
