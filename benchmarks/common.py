"""What scripts share: a server of ours that is measured, Markdown tables, figures as JSON."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 600.0
STOP_S = 60.0
TICKS = os.sysconf("SC_CLK_TCK")


# ── servers ─────────────────────────────────────────────────────────────────────────────────


def serve_command(folder: str | Path, *flags: str) -> list[str]:
    """`headway serve` of this Python; an empty folder is the embedded model."""
    model = [str(folder)] if str(folder) else []
    return [sys.executable, "-m", "headway.cli.main", "serve", *model, *flags]


@contextmanager
def serving(folder: str | Path, *flags: str) -> Iterator[tuple[str, int]]:
    """`headway serve` on a free port: (URL, process id), ready; it is stopped afterwards."""
    port = free_port()
    with running(serve_command(folder, f"--port={port}", *flags), port) as started:
        yield started


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[tuple[str, int]]:
    """A server that `command` starts on `port`: (URL, process id), ready.

    Raises SystemExit, with what it wrote to stderr on the terminal, when it does not start.
    """
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until_ready(url, process)
        yield url, process.pid
    except ChildProcessError as error:
        raise SystemExit(str(error)) from None
    finally:
        stop(process)


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, process: "subprocess.Popen[Any]") -> None:
    """Return when the server can answer; ChildProcessError when it ends or takes too long."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise ChildProcessError(f"the server ended with status {process.returncode}")
        ready = status_of(f"{url}/ready")
        if ready == 200 or (ready == 404 and status_of(f"{url}/health") == 200):
            return
        time.sleep(0.1)
    raise ChildProcessError(f"the server was not ready within {START_S:g} s")


def status_of(url: str) -> int:
    """The status of a GET, 404 for the /ready of many peers; 0 where nobody listens yet."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def get_json(url: str) -> Any:
    """What a GET answers."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        return json.load(answer)


def stop(process: "subprocess.Popen[Any]") -> None:
    """End a server; by force when it does not."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def children(pid: int) -> list[int]:
    """The processes that any thread of `pid` started; [] when it has gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (thread / "children").read_text().split())
    return found


def cpu_s(pid: int) -> float:
    """User and system seconds of one process; OSError when it has gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


# ── kernels ─────────────────────────────────────────────────────────────────────────────────


def use_instruction_set(name: str) -> None:
    """From now on native kernels are of this set, such as "avx2"; "" leaves the best.

    Raises SystemExit where this CPU does not run it.
    """
    if not name:
        return
    from headway.runtime.native import _native

    names = _native.instruction_sets()
    if name not in names:
        raise SystemExit(f"this CPU does not run {name}, but {', '.join(names)}")
    _native.instruction_sets = lambda: [name]


# ── figures ─────────────────────────────────────────────────────────────────────────────────


def line(cells: Sequence[object]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(map(str, cells)) + " |"


def heading(columns: Sequence[str]) -> str:
    """The two lines a Markdown table begins with."""
    return f"{line(columns)}\n{line(['---'] * len(columns))}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table as the docs have it."""
    return "\n".join([heading(columns), *map(line, rows)])


def write_json(path: Path | None, figures: Any, indent: int | None = None) -> None:
    """Write the figures as JSON, where a file was named."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=indent))
