"""A real `headway serve` in a process of its own, and what tests look at from outside.

Each server has a temp folder of its own, so that a socket left behind is seen. Nothing here ends a
process by name.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from forked import PARENT_NAME, Forked, can_be_forked, run_forked

PATIENCE_S = 150.0
NO_TORCH = "--executor=null"
"""For tests of processes and streams, not of tokens: the engine starts in half the time."""
PATIENT = "--engine-timeout=10m"
"""For tests that stop the engine for a while, however long that is."""
GREETING = re.compile(r"Headway is ready: (http://[^/\s]+)/v1")


def clean_environment() -> dict[str, str]:
    """Ours, without options that the person who runs the tests may have set."""
    return {k: v for k, v in os.environ.items() if not k.startswith("HEADWAY_")}


def headway(
    *arguments: str | Path,
    stdin: str | bytes = b"",
    env: dict[str, str] | None = None,
    real: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end: in a fork, or in a `real` interpreter of its own."""
    data = stdin.encode() if isinstance(stdin, str) else stdin
    command = [sys.executable, "-m", "headway.cli.main", *map(str, arguments)]
    environment = clean_environment() | (env or {})
    if real or not can_be_forked(command, environment):
        ran = subprocess.run(
            command,
            input=data,
            capture_output=True,
            env=environment,
            timeout=PATIENCE_S,
            check=False,
        )
        status, out, err = ran.returncode, ran.stdout, ran.stderr
    else:
        status, out, err = run_forked(command, data, environment, PATIENCE_S)
    return subprocess.CompletedProcess(command, status, out.decode(), err.decode())


def start_process(
    command: list[str], folder: Path, environment: dict[str, str], *, real: bool = False
) -> "Forked | subprocess.Popen[bytes]":
    """Start one that writes to `out` and `err` in this folder: a fork where it can be."""
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        if real or not can_be_forked(command, environment):
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment
            )
        return Forked(command, stdout=out, stderr=err, env=environment, starts_engines=True)


def wait_until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """The first true value of `condition`; fails when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def started_at(pid: int) -> int:
    """When a process began, in clock ticks of the system."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def children(pid: int) -> list[int]:
    """The living processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name, _, rest = stat.read_text().rpartition(")")
            state, parent = rest.split()[:2]
            if int(parent) == pid and state not in "ZX" and not name.endswith(PARENT_NAME):
                found.append(int(stat.parent.name))
    return found


def engines(pid: int) -> list[int]:
    """The engine processes among them; a chat has others beside, that render its template."""
    found = []
    for child in children(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if b"headway.assemble" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


class Hold:
    """While it is on, no engine starts of a server that has `env`."""

    def __init__(self, folder: Path) -> None:
        self._flag = folder / "hold"
        self.env = {"PYTHONPATH": str(folder)}
        (folder / "sitecustomize.py").write_text(
            "import os, sys, time\n"
            f"while 'headway.assemble' in sys.orig_argv and os.path.exists({str(self._flag)!r}):\n"
            "    time.sleep(0.02)\n"
        )

    def on(self) -> None:
        self._flag.touch()

    def off(self) -> None:
        self._flag.unlink(missing_ok=True)


class LiveAddress:
    """What answers at `url`, a server or a gateway: how a test asks it and its process."""

    process: "Forked | subprocess.Popen[bytes]"
    temp: Path
    url: str
    headers: dict[str, str]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stdout(self) -> str:
        return (self.temp / "out").read_text()

    @property
    def stderr(self) -> str:
        return (self.temp / "err").read_text()

    @property
    def model(self) -> str:
        """The first served name."""
        name: str = msgspec.json.decode(self.get("/v1/models")[1])["data"][0]["id"]
        return name

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body."""
        try:
            asked = urllib.request.Request(self.url + path, headers=self.headers)
            with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def post(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and parsed body of a JSON POST."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        request = urllib.request.Request(
            self.url + path, data=data, headers={"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, msgspec.json.decode(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, msgspec.json.decode(error.read())

    def probe(self) -> list[int]:
        """The tokens of one greedy request: the same as long as nothing disturbs another."""
        body = {
            "model": self.model,
            "prompt": [10, 20, 30, 40],
            "max_tokens": 12,
            "temperature": 0,
            "return_token_ids": True,
        }
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return tokens


class LiveServer(LiveAddress):
    """One server process. `url` is known once `wait_ready` came back."""

    def __init__(
        self,
        folder: Path | None,
        *flags: str,
        env: dict[str, str] | None = None,
        before: tuple[str, ...] = (),
        python: str = sys.executable,
        real: bool = False,
    ) -> None:
        """`before` are words in front of the command, such as a shell that ends in `exec`.

        `python` is the interpreter whose Headway is served. Without these it is a fork, as its
        engines are, unless it is to be a `real` interpreter of its own.
        """
        self.temp = Path(tempfile.mkdtemp(prefix="hw-"))
        self.sockets = self.temp / "t"
        self.sockets.mkdir()
        self.url = ""
        self.headers: dict[str, str] = {}
        words = [] if folder is None else [str(folder)]
        own = {"TMPDIR": str(self.sockets), "HEADWAY_DATA_DIR": str(self.temp / "data")}
        self.process = start_process(
            [*before, python, "-m", "headway.cli.main", "serve", *words, "--port=0", *flags],
            self.temp,
            clean_environment() | own | (env or {}),
            real=real,
        )

    def wait_ready(self) -> "LiveServer":
        """Wait for the greeting; fails with the server's words when it ends instead."""

        def greeted() -> re.Match[str] | None:
            found = GREETING.search(self.stdout)
            ended = found is None and self.process.poll() is not None
            assert not ended, f"exit status {self.process.returncode}: {self.stderr}"
            return found

        self.url = wait_until(greeted)[1]
        return self

    def engine_pid(self) -> int:
        """The one engine process."""
        (pid,) = engines(self.pid)
        return pid

    def is_ready(self) -> bool:
        return self.get("/ready")[0] == 200

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        total = 0.0
        for line in self.get("/metrics")[1].decode().splitlines():
            head, _, value = line.rpartition(" ")
            if re.fullmatch(rf"headway:{name}(\{{.*\}})?", head) and all(
                f'{key}="{text}"' in head for key, text in labels.items()
            ):
                total += float(value)
        return total

    def idle(self) -> bool:
        """Whether nothing runs, waits or holds a block."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(name) == 0 for name in names)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait_end(self, timeout_s: float = PATIENCE_S) -> int:
        """The exit status."""
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End whatever still runs and remove the temp folder."""
        engines = children(self.pid)
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in engines:
            with contextlib.suppress(ProcessLookupError):
                if alive(pid):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.temp, ignore_errors=True)
