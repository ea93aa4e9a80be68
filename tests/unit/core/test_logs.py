"""Log lines nobody forges, and what systemd is told."""

import errno
import io
import logging
import os
import socket
import sys
import unicodedata

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.core.logs import FORMATTERS, UNSAFE, LossyHandler, escape_line
from headway.edge.notify import Notifier

FORGED = (
    "x\n2026-11-21 10:00:00,000 ERROR headway root logged in\x1b[2J\x9b31m\u202etxt\u2028\0\ud800"
)


def record(message: str, *arguments: object, error: BaseException | None = None):
    exc_info = (type(error), error, error.__traceback__) if error else None
    return logging.LogRecord("headway.test", 30, "file.py", 1, message, arguments, exc_info)


@given(st.text(st.characters()))
def test_plain_text_is_one_line_and_harmless(text):
    assert not {unicodedata.category(c) for c in escape_line(text)} & UNSAFE
    assert len(escape_line(text).splitlines()) <= 1
    assert escape_line(escape_line(text)) == escape_line(text)


def test_what_is_readable_stays():
    assert (
        escape_line("The model said “très bien” 🌊 in 日本語.")
        == "The model said “très bien” 🌊 in 日本語."
    )
    assert escape_line("a\r\nb\x1b[0m") == "a\\r\\nb\\x1b[0m"


@pytest.mark.parametrize("name", FORMATTERS)
def test_a_client_cannot_write_lines_of_its_own(name):
    line = FORMATTERS[name]().format(record("ignored %s", FORGED))
    assert len(line.splitlines()) == 1
    assert not set(line) & {"\x1b", "\x9b", "\u202e", "\u2028", "\0"}
    line.encode()


def test_a_traceback_is_indented_in_text_and_a_field_in_json():
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        failed = record("it failed", error=error)
    first, *trace = FORMATTERS["text"]().format(failed).split("\n")
    assert first.endswith("WARNING headway.test it failed")
    assert trace and all(line.startswith("    ") for line in trace)
    content = msgspec.json.decode(FORMATTERS["json"]().format(failed))
    assert (content["level"], content["logger"], content["message"]) == (
        *("warning", "headway.test", "it failed"),
    )
    assert content["trace"][0].startswith("Traceback")
    assert "\\x1b[2J" in content["trace"][-1]


def test_a_full_disk_loses_lines_and_nothing_else(capsys):
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    LossyHandler(Full()).emit(record("hello"))
    assert capsys.readouterr().err == ""


# ── systemd ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets")
@pytest.mark.parametrize("abstract", [False, True])
async def test_states_go_to_the_unit(tmp_path, abstract):
    path = f"@headway-test-{os.getpid()}" if abstract else str(tmp_path / "unit")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unit:
        unit.bind("\0" + path[1:] if abstract else path)
        unit.settimeout(60)
        environment = {"NOTIFY_SOCKET": path, "WATCHDOG_USEC": "20000", "OTHER": "1"}
        notifier = Notifier.take(environment)
        assert environment == {"OTHER": "1"}, "a child would speak for the unit"
        notifier.ready()
        assert unit.recv(1000).startswith(b"READY=1\n")
        notifier.reloading()
        assert unit.recv(1000).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        notifier.stopping()
        assert unit.recv(1000).startswith(b"STOPPING=1\n")
        alive = iter([True, False, True])
        with pytest.raises((StopIteration, RuntimeError)):
            await notifier.watch(lambda: next(alive))
        assert [unit.recv(1000), unit.recv(1000)] == [b"WATCHDOG=1"] * 2


@pytest.mark.parametrize(
    "environment", [{}, {"NOTIFY_SOCKET": "/nobody/is/there"}, {"NOTIFY_SOCKET": ""}]
)
def test_without_a_unit_it_is_silent(environment):
    Notifier.take(dict(environment)).ready()


@pytest.mark.parametrize(
    ("environment", "watchdog_s"),
    [
        ({"WATCHDOG_USEC": "3000000"}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}, 3.0),
        ({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_whose_watchdog_it_is(environment, watchdog_s):
    assert Notifier.take(dict(environment)).watchdog_s == watchdog_s
