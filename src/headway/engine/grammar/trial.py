"""Trial of a grammar in a child process that can be killed, before the engine compiles it.

llguidance bounds most of a grammar's cost, but not all: thirty patterns in one `allOf` compile for
hours, and a thread cannot be stopped. So a child process compiles each new grammar first. It is
started with the first one; a grammar that takes too long or too much memory ends the process, and
the next grammar gets a new one.
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
from headway.engine.grammar.compiler import compile_grammar, gbnf_as_lark
from headway.engine.grammar.vocabulary import VocabularySource, load_vocabulary

LENGTH_BYTES = 4
MAX_MEMORY_BYTES = 4 * 2**30
READY_TIMEOUT_S = 60.0
WAIT_FACTOR = 20
"""The child ends itself after `limit_s` of processor time; the parent waits this multiple of it,
because the machine may be busy."""
WATCH_INTERVAL_S, IDLE_INTERVAL_S = 0.02, 0.5


class TrialResult(msgspec.Struct, array_like=True):
    """Result of a trial: the parts of an error, or none and the Lark text of a GBNF grammar."""

    error: str = ""
    code: str = ""
    lark: str = ""


class GrammarTrial:
    """The child process: started when needed, killed when a grammar exceeds its limits."""

    def __init__(self, source: VocabularySource, limit_s: float, clock: Clock) -> None:
        self._source = source
        self._limit_s = limit_s
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._greeted = False
        """Whether the process has loaded its vocabulary."""
        self._end: weakref.finalize[..., object] | None = None

    def check(self, grammar: Grammar) -> Grammar:
        """Return the grammar to compile; raises RequestError if it exceeds the limits."""
        process = self._start()
        assert process.stdin is not None
        try:
            write_frame(process.stdin, msgspec.msgpack.encode(grammar))
            frame = self._read(process, WAIT_FACTOR * self._limit_s)
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
        """Return the living child, which may still load its vocabulary."""
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
        """Return the living child after it has loaded its vocabulary."""
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
        """Read one frame; b"" on a timeout."""
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
    """Return whether data arrived in time; by `poll`, as `select` has a limit of 1,023."""
    waiting = select.poll()
    waiting.register(pipe, select.POLLIN)
    return bool(waiting.poll(timeout_s * 1000))


def length_of(frame: bytes) -> int:
    return int.from_bytes(frame[:LENGTH_BYTES], "little")


def write_frame(pipe: IO[bytes], data: bytes) -> None:
    """Write a length, then the bytes."""
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
        """Start timing a compilation."""
        self._began_s = time.process_time()
        self._busy.set()

    def end(self) -> None:
        """Stop timing."""
        self._busy.clear()

    def run(self) -> None:
        while os.getppid() == self._parent:
            if self._busy.wait(IDLE_INTERVAL_S):
                time.sleep(WATCH_INTERVAL_S)
            if self._busy.is_set() and time.process_time() - self._began_s > self._limit_s:
                break
        os._exit(1)


def main(source_text: str, limit_s: float, parent: int) -> None:
    """Load the vocabulary, then answer each grammar, until the pipe closes or `parent` is gone."""
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
            compiled = gbnf_as_lark(grammar)
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
