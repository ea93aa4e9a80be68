"""The answer of /v1/responses: an object of items, and the events of its stream.

One writer serves both: a whole answer is the sum of the events. An example, "Hi" and a call:

    response.created, response.in_progress
    response.output_item.added      0  message, in progress
    response.content_part.added     0  output_text ""
    response.output_text.delta      0  "Hi"
    response.output_text.done       0  "Hi"
    response.content_part.done, response.output_item.done
    response.output_item.added      1  function_call get_weather, arguments ""
    response.function_call_arguments.delta, ….done
    response.output_item.done       1
    response.completed              the whole object, with usage
"""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.edge.errors import error_body, error_response
from headway.edge.event_stream import PING
from headway.frontend.answer import SequenceDelta
from headway.server.generation import Progress
from headway.server.models import ServerState
from headway.server.responses.output import Output
from headway.server.responses.schema import ResponsesBody, wants_logprobs
from headway.server.responses.store import StoredResponse
from headway.server.responses.tools import Tools

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesDialect:
    """Dialect of one response; with an `entry` it is stored when it ends."""

    refusal = staticmethod(error_response)

    def __init__(
        self,
        state: ServerState,
        progress: Progress,
        body: ResponsesBody,
        tools: Tools,
        entry: StoredResponse | None,
    ) -> None:
        self.background = bool(body.background)
        self._state = state
        self.progress = progress
        request = self._request = progress.request
        self._body = body
        self._entry = entry
        self._finish: str | None = None
        stem = request.request_id.partition("_")[2]
        tokenizer = request.model.tokenizer
        self._output = Output(stem, tools, tokenizer if wants_logprobs(body) else None)

    # ── stream ──────────────────────────────────────────────────────────────────────────────

    def ping(self) -> bytes:
        return PING

    def opening(self, choice: int) -> bytes:
        for kind in ("response.created", "response.in_progress"):
            self._output.emit(kind, response=self.snapshot("in_progress"))
        return self._output.drain_events()

    def chunk(self, choice: int, delta: SequenceDelta) -> bytes:
        self._output.append_delta(delta)
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            self._output.close("incomplete" if delta.finish_reason in INCOMPLETE else "completed")
        return self._output.drain_events()

    def ending(self) -> bytes:
        status = "incomplete" if self._finish in INCOMPLETE else "completed"
        response = self._store(self.snapshot(status))
        self._output.emit(f"response.{status}", response=response)
        return self._output.drain_events()

    def failure(self, error: RequestError) -> bytes:
        """Return `response.failed`, with the `error` on which the official client raises."""
        self._output.close_item()
        response = self._store(self.snapshot("failed", error))
        self._output.emit("response.failed", response=response, **error_body(error))
        return self._output.drain_events()

    # ── whole answer ────────────────────────────────────────────────────────────────────────

    def whole(self, choices: list[list[SequenceDelta]]) -> dict[str, Any]:
        for delta in choices[0]:
            self.chunk(0, delta)
        status = "incomplete" if self._finish in INCOMPLETE else "completed"
        return self._store(self.snapshot(status))

    def queued(self, task: "asyncio.Task[None]") -> dict[str, Any]:
        """Store the response before it begins and return it; from then on it can be retrieved."""
        response = self.snapshot("queued")
        if self._entry is not None:
            self._entry = replace(self._entry, response=msgspec.json.encode(response), task=task)
            self._state.responses.put(self._entry)
        return response

    def cancelled(self) -> None:
        """Store a response that was cancelled."""
        self._output.close_item()
        self._store(self.snapshot("cancelled"))

    def _store(self, response: dict[str, Any]) -> dict[str, Any]:
        """Return the response, stored unless `store` is false or it was deleted meanwhile."""
        entry, store = self._entry, self._state.responses
        if entry is not None:
            if entry.task is None or store.find(entry.response_id, entry.owner):
                store.put(replace(entry, response=msgspec.json.encode(response), task=None))
            self._entry = None
        return response

    def snapshot(self, status: str, error: RequestError | None = None) -> dict[str, Any]:
        """Return the response object as it stands."""
        request, body = self._request, self._body
        sampling = request.sampling
        over = status not in ("queued", "in_progress")
        return {
            "id": request.request_id,
            "object": "response",
            "created_at": request.created,
            "completed_at": int(self._state.clock.wall_s()) if status == "completed" else None,
            "status": status,
            "background": self.background,
            "error": {"code": "server_error", "message": str(error)} if error else None,
            "incomplete_details": (
                {"reason": INCOMPLETE[self._finish or "length"]} if status == "incomplete" else None
            ),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": request.model_name,
            "output": self._output.items if over else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": None,
            "reasoning": {
                "effort": body.reasoning.effort if body.reasoning else None,
                "summary": None,
            },
            "safety_identifier": None,
            "service_tier": body.service_tier or "default",
            "store": self._entry is not None,
            "temperature": sampling.temperature,
            "text": text_config(body),
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "truncation": "disabled",
            "usage": usage(self.progress) if over else None,
            "user": None,
            **self.progress.timings(),
        }


def text_config(body: ResponsesBody) -> dict[str, Any]:
    """Return the `text` object with its defaults."""
    format = body.text.format if body.text and body.text.format else None
    given = (
        {k: v for k, v in msgspec.to_builtins(format).items() if v is not None} if format else {}
    )
    return {"format": given or {"type": "text"}, "verbosity": "medium"}


def usage(progress: Progress) -> dict[str, Any]:
    """Return the token counts of a response."""
    prompt, answer = progress.request.num_prompt_tokens, progress.num_generated
    details = {"cached_tokens": progress.num_cached, "cache_write_tokens": 0}
    kv = {f"{name}_tokens": count for name, count in progress.request.kv_usage.items()}
    return {
        "input_tokens": prompt,
        "input_tokens_details": {**details, **kv},
        "output_tokens": answer,
        "output_tokens_details": {"reasoning_tokens": progress.num_reasoned},
        "total_tokens": prompt + answer,
    }
