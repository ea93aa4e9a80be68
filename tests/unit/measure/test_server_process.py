"""A server that is started for a measurement: ready, dead, deaf, late, interrupted.

`sys.executable` is a script that ends up in a small server of our own, so nothing is loaded.
"""

import os
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from headway.measure import server_process
from headway.measure.server_process import DiedError, ServerProcess, free_port, is_ready

SERVER = """
import os, signal, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
port = int(next(word for word in sys.argv if word.startswith("--port=")).partition("=")[2])
print("told:", *sys.argv[1:], flush=True)
class Told(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end":
            print("first\\nsecond\\nthird\\nfourth", flush=True)
            os._exit(9)
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
    def log_message(self, *said):
        pass
if "--deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "--never" in sys.argv:
    time.sleep(600)
if "--dies" in sys.argv:
    print("No memory.")
    sys.exit(3)
HTTPServer(("127.0.0.1", port), Told).serve_forever()
"""


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started is that server, whatever module is named."""
    (tmp_path / "server.py").write_text(SERVER)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/server.py" "$@"\n')
    script.chmod(0o755)
    monkeypatch.setattr(server_process.sys, "executable", str(script))


def runs(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_is_ready_when_it_is_entered_and_gone_afterwards():
    with ServerProcess(Path("folder"), ["--max-num-seqs=4"]) as server:
        pid, log = server._process.pid, server._log
        assert is_ready(server.url) and runs(pid)
        server.check()
        log_tail = server.log_tail()
        assert (
            "-m headway.cli.main serve folder --port=" in log_tail
            and "--max-num-seqs=4" in log_tail
        )
    assert not runs(pid) and not log.exists() and not is_ready(server.url)


def test_who_does_not_hear_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_process, "STOP_S", 0.3)
    with ServerProcess(Path("folder"), ["--deaf"]) as server:
        pid = server._process.pid
    assert not runs(pid)


def test_who_dies_while_it_starts_is_told_with_its_words():
    with pytest.raises(DiedError) as error, ServerProcess(Path("folder"), ["--dies"]):
        pass
    assert error.value.cause == "It ended with status 3." and "No memory." in error.value.fix


def test_who_dies_later_is_found_and_the_last_lines_are_told():
    with ServerProcess(Path("folder")) as server:
        with suppress(OSError):
            urllib.request.urlopen(f"{server.url}/end", timeout=30)
        server._process.wait(30)
        with pytest.raises(DiedError) as error:
            server.check()
    assert error.value.cause == "It ended with status 9."
    assert error.value.fix == "second third fourth"


def test_who_is_never_ready_is_given_up_and_ended():
    made = ServerProcess(Path("folder"), ["--never"], start_s=0.5)
    with pytest.raises(DiedError, match="not ready within"), made:
        pass
    assert made._process.poll() is not None


def interrupted(*given: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("flags", [[], ["--never"]])
def test_a_ctrl_c_leaves_no_server(flags: list[str], monkeypatch: pytest.MonkeyPatch):
    """While it is waited for, and while it is used."""
    made = ServerProcess(Path("folder"), flags)
    if flags:
        monkeypatch.setattr(server_process, "is_ready", interrupted)
    with pytest.raises(KeyboardInterrupt), made:
        raise KeyboardInterrupt
    assert made._process.poll() is not None and not made._log.exists()


def test_a_second_ctrl_c_while_it_ends_leaves_none_either(monkeypatch: pytest.MonkeyPatch):
    """It does not hear, and nobody waits for it any more: it is ended at once."""
    made = ServerProcess(Path("folder"), ["--deaf"])
    with pytest.raises(KeyboardInterrupt), made:
        monkeypatch.setattr(made._process, "terminate", interrupted)
    assert made._process.poll() is not None and not made._log.exists()


def test_several_beside_each_other_have_a_port_each():
    with ServerProcess(Path("one")) as first, ServerProcess(Path("two")) as second:
        assert first.url != second.url
        assert is_ready(first.url) and is_ready(second.url)
        assert "serve one" in first.log_tail() and "serve two" in second.log_tail()
    first.stop()  # once more does nothing


def test_nobody_listens_on_a_free_port():
    began_s = time.monotonic()
    assert not is_ready(f"http://127.0.0.1:{free_port()}")
    assert time.monotonic() - began_s < 60
