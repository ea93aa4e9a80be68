"""Chat templates rendered in a process that can be killed.

Jinja's sandbox keeps a template from reaching out, not from looping for ever or from building a
string of gigabytes, and a template comes with a model from anywhere. `Renderer` has the face of a
`ChatTemplate` and a few such processes behind it; it promises an answer or a RequestError within
`LIMIT_S` of processor time, whatever the template does. The process is
`frontend.text.render_process`: a line of JSON in, a line out.
"""

import queue
import signal
import sys
from typing import Any

from headway.core.errors import RequestError
from headway.frontend.lines import GoneError, LineProcess
from headway.frontend.text.template import ChatTemplate

LIMIT_S = 2.0
PATIENCE = 20
"""The process ends itself after `LIMIT_S` of processor time; the server waits this much longer, for
the machine may be busy."""
START_S = 60.0
MAX_PROCESSES = 2


class Worker(LineProcess):
    """The process of one template."""

    def __init__(self, template: ChatTemplate, limit_s: float) -> None:
        self._limit_s = limit_s
        super().__init__(
            [sys.executable, "-m", "headway.frontend.text.render_process", str(limit_s)]
        )
        self.ask([template.source, template.special_tokens], START_S)

    def render(self, messages: Any, options: Any) -> Any:
        """(kind, text), as the process has it; GoneError when there is none in time."""
        return self.ask([messages, options], PATIENCE * self._limit_s)

    def why_ended(self) -> Exception:
        """Why the process is gone."""
        if self.process.wait(START_S) == -signal.SIGPROF:
            return TimeoutError(f"more than {self._limit_s:g} s")
        return OSError("it took more memory than it may")


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
