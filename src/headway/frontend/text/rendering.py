"""Rendering of chat templates in processes that can be killed.

Jinja's sandbox prevents access to the outside, but not endless loops or strings of gigabytes, and a
template comes with a model of any origin. `Renderer` has the interface of a `ChatTemplate` and uses
a few processes (`frontend.text.render_process`); it returns a prompt or raises RequestError within
`LIMIT_S` of processor time, whatever the template does.
"""

import contextlib
import queue
import signal
import sys
import weakref
from typing import Any

from headway.core.errors import RequestError, TokenizerError
from headway.frontend.lines import GoneError, LineProcess
from headway.frontend.text.template import not_compiled

LIMIT_S = 2.0
PATIENCE = 20
"""The process ends itself after `LIMIT_S` of processor time; the server waits this many times as
long, because the machine may be busy."""
START_S = 60.0
MAX_PROCESSES = 2


class Worker(LineProcess):
    """Process of one template; TokenizerError if the template does not compile."""

    def __init__(self, source: str, special_tokens: dict[str, str], limit_s: float) -> None:
        self._limit_s = limit_s
        super().__init__(
            [sys.executable, "-m", "headway.frontend.text.render_process", str(limit_s)]
        )
        try:
            fault = self.ask([source, special_tokens], START_S)
        except GoneError as error:
            raise not_compiled(f"it takes {error}") from error
        if fault is not None:
            self.close()
            raise TokenizerError(*fault)

    def render(self, messages: Any, options: Any) -> Any:
        """Return the (kind, content) of the process; GoneError on a timeout."""
        return self.ask([messages, options], PATIENCE * self._limit_s)

    def why_ended(self) -> Exception:
        """Return the reason why the process ended."""
        if self.process.wait(START_S) == -signal.SIGPROF:
            return TimeoutError(f"more than {self._limit_s:g} s")
        return OSError("more memory than it may")


Idle = queue.LifoQueue[Worker | None]
"""Idle processes, and None for one that is not started yet."""


class Renderer:
    """Chat template rendered by processes; see `ChatTemplate` for `render`.

    They start with the first rendering and end with the renderer.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], limit_s: float = LIMIT_S
    ) -> None:
        self.source = source
        self._special_tokens = special_tokens
        self._limit_s = limit_s
        self._idle: Idle = queue.LifoQueue()
        for _ in range(MAX_PROCESSES):
            self._idle.put(None)
        self.close = weakref.finalize(self, end, self._idle)

    def compile(self) -> None:
        """Start a process, which compiles the template; raises TokenizerError."""
        worker = self._idle.get()
        try:
            worker = worker or Worker(self.source, self._special_tokens, self._limit_s)
        finally:
            self._idle.put(worker)

    def render(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
        """Return the prompt (see `ChatTemplate.render`); blocks, so call it in a thread.

        Raises TokenizerError if the template does not compile.
        """
        worker = self._idle.get()
        try:
            worker = worker or Worker(self.source, self._special_tokens, self._limit_s)
            kind, text = worker.render(messages, options)
        except GoneError as error:
            worker = None
            raise refused(f"takes too much: {error}.") from error
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise refused(f"cannot be given this: {str(error)[:200]}.") from error
        finally:
            self._idle.put(worker)
        if kind == "text":
            return str(text)
        message, param, code = text
        raise RequestError(message, param=param, code=code)


def end(idle: Idle) -> None:
    """End the idle processes."""
    with contextlib.suppress(queue.Empty):
        while True:
            worker = idle.get_nowait()
            if worker is not None:
                worker.close()


def refused(why: str) -> RequestError:
    return RequestError(f"The model's chat template {why}", param="messages", code="invalid_value")
