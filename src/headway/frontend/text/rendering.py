"""Chat templates compiled and rendered in a process that can be killed, for all callers.

Jinja's sandbox keeps a template from reaching out, not from looping for ever or from building a
string of gigabytes, and a template comes with a model from anywhere. `Renderer` has the face of a
`ChatTemplate` and a few such processes behind it; it promises an answer or a RequestError within
`LIMIT_S` of processor time, whatever the template does. The process is
`frontend.text.render_process`: a line of JSON in, a line out.
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
"""The process ends itself after `LIMIT_S` of processor time; the server waits this much longer, for
the machine may be busy."""
START_S = 60.0
MAX_PROCESSES = 2


class Worker(LineProcess):
    """The process of one template; TokenizerError where it does not compile."""

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
        """(kind, text), as the process has it; GoneError when there is none in time."""
        return self.ask([messages, options], PATIENCE * self._limit_s)

    def why_ended(self) -> Exception:
        """Why the process is gone."""
        if self.process.wait(START_S) == -signal.SIGPROF:
            return TimeoutError(f"more than {self._limit_s:g} s")
        return OSError("more memory than it may")


Idle = queue.LifoQueue[Worker | None]
"""Processes that wait for work, and None for one that is not there yet."""


class Renderer:
    """A chat template behind processes; see `ChatTemplate` for `render`.

    They start with the first rendering, and end with the renderer.
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
        """The prompt's text, as `ChatTemplate.render` has it; blocks, so call it in a thread.

        Raises TokenizerError where the template does not compile.
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
    """End the processes that wait for work."""
    with contextlib.suppress(queue.Empty):
        while True:
            worker = idle.get_nowait()
            if worker is not None:
                worker.close()


def refused(why: str) -> RequestError:
    return RequestError(f"The model's chat template {why}", param="messages", code="invalid_value")
