"""Try a grammar in a process that can be killed, before it is compiled in the engine's own.

llguidance bounds what a grammar may cost, but not all of it: thirty patterns in one `allOf` compile
for hours, and nothing stops a thread. So a child process compiles each new grammar first. It is
started with the first one; one that takes too long or too much memory takes its process with it,
and the next grammar gets another.
"""

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import IO

import msgspec

from headway.core.clock import Clock
from headway.core.errors import HeadwayError, RequestError
from headway.core.grammar import Grammar
from headway.core.orphans import wake_when_orphaned
from headway.engine.grammar.compiler import as_lark, compile_grammar
from headway.engine.grammar.vocabulary import VocabularySource, load_vocabulary

LENGTH_BYTES = 4
MAX_MEMORY_BYTES = 4 * 2**30
READY_TIMEOUT_S = 60.0
PATIENCE = 20
"""The child ends itself after `limit_s` of processor time; the parent waits this much longer, for
the machine may be busy."""
WATCH_INTERVAL_S, IDLE_INTERVAL_S = 0.02, 0.5


class TrialResult(msgspec.Struct, array_like=True):
    """What came of a grammar: an error's parts, or none and the Lark of what was GBNF."""

    error: str = ""
    code: str = ""
    lark: str = ""


class GrammarTrial:
    """The child process; started when it is needed, killed when a grammar is too much for it."""

    def __init__(self, source: VocabularySource, limit_s: float, clock: Clock) -> None:
        self._source = source
        self._limit_s = limit_s
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._greeted = False
        """Whether the process has its vocabulary."""
        self._end: weakref.finalize[..., object] | None = None

    def check(self, grammar: Grammar) -> Grammar:
        """`grammar` as it is to be compiled; RequestError when that goes beyond the limits."""
        process = self._start()
        assert process.stdin is not None
        try:
            write_frame(process.stdin, msgspec.msgpack.encode(grammar))
            frame = self._read(process, PATIENCE * self._limit_s)
        except (BrokenPipeError, EOFError):
            frame = b""
        if not frame:
            self.close()
            raise RequestError(
                f"{grammar.param} takes more than {self._limit_s:g} s or too much memory to "
                "compile. Simplify it.",
                param=grammar.param,
                code="grammar_too_complex",
            )
        verdict = msgspec.msgpack.decode(frame, type=TrialResult)
        if verdict.error:
            raise RequestError(verdict.error, param=grammar.param, code=verdict.code)
        if not verdict.lark:
            return grammar
        return Grammar(kind="lark", text=verdict.lark, param=grammar.param)

    def launch(self) -> "subprocess.Popen[bytes]":
        """The living child, which may still load its vocabulary."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        command = [sys.executable, "-m", "headway.engine.grammar.trial"]
        command += [msgspec.json.encode(self._source).decode(), str(self._limit_s)]
        command += [str(os.getpid())]
        self._greeted = False
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._end = weakref.finalize(self, end_process, self._process)
        return self._process

    def _start(self) -> "subprocess.Popen[bytes]":
        """The living child, ready for a grammar."""
        process = self.launch()
        if self._greeted:
            return process
        try:
            self._greeted = bool(self._read(process, READY_TIMEOUT_S))
        except EOFError:
            self._greeted = False
        if not self._greeted:
            self.close()
            raise RequestError(
                "Grammars cannot be compiled now.", code="overloaded", status=503, retry_after_s=5
            )
        return process

    def _read(self, process: "subprocess.Popen[bytes]", timeout_s: float) -> bytes:
        """One frame; b"" when it does not come in time."""
        assert process.stdout is not None
        deadline_s = self._clock.now_s() + timeout_s
        parts = b""
        while len(parts) < LENGTH_BYTES or len(parts) < LENGTH_BYTES + length_of(parts):
            remaining_s = deadline_s - self._clock.now_s()
            if remaining_s <= 0 or not can_be_read(process.stdout, remaining_s):
                return b""
            part = os.read(process.stdout.fileno(), 65536)
            if not part:
                raise EOFError
            parts += part
        return parts[LENGTH_BYTES:]

    def close(self) -> None:
        """Kill the child."""
        self._process = None
        if self._end is not None:
            self._end()


def end_process(process: "subprocess.Popen[bytes]") -> None:
    """Kill a child and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.close()


def can_be_read(pipe: IO[bytes], timeout_s: float) -> bool:
    """Whether something came in time; `poll`, for `select` takes no descriptor above 1,023."""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    return bool(waiting.poll(timeout_s * 1000))


def length_of(frame: bytes) -> int:
    return int.from_bytes(frame[:LENGTH_BYTES], "little")


def write_frame(pipe: IO[bytes], data: bytes) -> None:
    """Length, then bytes."""
    whole = memoryview(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    while whole:
        whole = whole[pipe.write(whole) :]
    pipe.flush()


# ── in the child ────────────────────────────────────────────────────────────────────────────


class Watch(threading.Thread):
    """Ends the process when a compilation takes too long, or when the engine is gone."""

    def __init__(self, limit_s: float, parent: int) -> None:
        super().__init__(daemon=True)
        self._limit_s = limit_s
        self._parent = parent
        self._busy = threading.Event()
        self._began_s = 0.0

    def begin(self) -> None:
        """A compilation begins."""
        self._began_s = time.process_time()
        self._busy.set()

    def end(self) -> None:
        """It has ended."""
        self._busy.clear()

    def run(self) -> None:
        while os.getppid() == self._parent:
            if self._busy.wait(IDLE_INTERVAL_S):
                time.sleep(WATCH_INTERVAL_S)
            if self._busy.is_set() and time.process_time() - self._began_s > self._limit_s:
                break
        os._exit(1)


def main(source_text: str, limit_s: float, parent: int) -> None:
    """Load the vocabulary, then answer each grammar with a verdict until the pipe closes, or the
    process `parent` is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which ends this one
    wake_when_orphaned()
    watch = Watch(limit_s, parent)
    watch.start()
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe_in, pipe_out = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = load_vocabulary(msgspec.json.decode(source_text, type=VocabularySource))
    write_frame(pipe_out, b"ready")
    while True:
        head = pipe_in.read(LENGTH_BYTES)
        if len(head) < LENGTH_BYTES:
            return
        grammar = msgspec.msgpack.decode(pipe_in.read(length_of(head)), type=Grammar)
        verdict = TrialResult()
        watch.begin()
        try:
            compiled = as_lark(grammar)
            compile_grammar(vocabulary, compiled)
            verdict.lark = compiled.text if compiled is not grammar else ""
        except RequestError as error:
            verdict = TrialResult(error.cause, error.code or "invalid_value")
        watch.end()
        write_frame(pipe_out, msgspec.msgpack.encode(verdict))


if __name__ == "__main__":
    try:
        main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
    except HeadwayError as error:
        sys.exit(str(error))
