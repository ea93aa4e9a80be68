"""Chat templates rendered in a process that can be killed.

Jinja's sandbox keeps a template from reaching out, not from looping for ever or from building a
string of gigabytes, and a template comes with a model from anywhere. `Renderer` has the face of a
`ChatTemplate` and a few such processes behind it; it promises an answer or a RequestError within
`LIMIT_S` of processor time, whatever the template does. The process is
`frontend.text.render_process`: a line of JSON in, a line out.
"""

import contextlib
import os
import queue
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.frontend.text.template import ChatTemplate

LIMIT_S = 2.0
PATIENCE = 20
"""The process ends itself after `LIMIT_S` of processor time; the server waits this much longer, for
the machine may be busy."""
START_S = 60.0
MAX_PROCESSES = 2
READ_BYTES = 2**20


class GoneError(Exception):
    """The process has ended, or had to be ended."""


class Worker:
    """One process; `render` writes a line and reads one, or ends the process."""

    def __init__(self, template: ChatTemplate, limit_s: float) -> None:
        self._limit_s = limit_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headway.frontend.text.render_process", str(limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the server's
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._ask([template.source, template.special_tokens], START_S)

    def render(self, messages: Any, options: Any) -> Any:
        """(kind, text), as the process has it; GoneError when there is none in time."""
        return self._ask([messages, options], PATIENCE * self._limit_s)

    def _ask(self, content: Any, timeout_s: float) -> Any:
        try:
            line = self._exchange(msgspec.json.encode(content) + b"\n", timeout_s)
        except (OSError, TimeoutError) as error:
            self.close()
            raise GoneError(str(error)) from error
        return msgspec.json.decode(line)

    def _exchange(self, data: bytes, timeout_s: float) -> bytes:
        """Write `data` and read up to the end of a line."""
        deadline_s = time.monotonic() + timeout_s
        left = memoryview(data)
        answer: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._out, selectors.EVENT_READ)
            selector.register(self._in, selectors.EVENT_WRITE)
            while not (answer and answer[-1].endswith(b"\n")):
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"more than {timeout_s:.0f} s")
                for key, _ in ready:
                    if key.fd == self._in:
                        left = left[os.write(self._in, left) :]
                        if not left:
                            selector.unregister(self._in)
                    else:
                        piece = os.read(self._out, READ_BYTES)
                        if not piece:
                            raise self._ended()
                        answer.append(piece)
        return b"".join(answer)

    def _ended(self) -> Exception:
        """Why the process is gone."""
        if self._process.wait(START_S) == -signal.SIGPROF:
            return TimeoutError(f"more than {self._limit_s:g} s")
        return OSError("it took more memory than it may")

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.kill()
        with self._process:  # closes the pipes and waits
            pass


class Renderer:
    """A chat template behind processes; see `ChatTemplate` for `render`."""

    def __init__(self, template: ChatTemplate, limit_s: float = LIMIT_S) -> None:
        self.source = template.source
        self.special_tokens = template.special_tokens
        self._template = template
        self._limit_s = limit_s
        self._idle: queue.LifoQueue[Worker | None] = queue.LifoQueue()
        for _ in range(MAX_PROCESSES):
            self._idle.put(None)  # a place for a process that is not there yet

    def render(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
        """The prompt's text, as `ChatTemplate.render` has it; blocks, so call it in a thread."""
        worker = self._idle.get()
        try:
            worker = worker or Worker(self._template, self._limit_s)
            kind, text = worker.render(messages, options)
        except GoneError as error:
            worker = None
            raise refused(f"takes too much: {error}.") from error
        except (ValueError, OverflowError, RecursionError) as error:
            raise refused(f"cannot be given this: {str(error)[:200]}.") from error
        finally:
            self._idle.put(worker)
        if kind == "text":
            return str(text)
        message, param, code = text
        raise RequestError(message, param=param, code=code)

    def close(self) -> None:
        """End the processes that wait for work."""
        for _ in range(MAX_PROCESSES):
            worker = self._idle.get()
            if worker is not None:
                worker.close()
            self._idle.put(None)


def refused(why: str) -> RequestError:
    return RequestError(f"The model's chat template {why}", param="messages", code="invalid_value")
