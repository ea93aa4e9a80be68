"""Stubs of OpenAI's and Anthropic's API that are as strict as they are, on loopback.

Each takes its key in its own header alone, refuses fields that its API does not know, and answers
"t0 t1 …" or, where the request has tools, one call of the first.
"""

import json
from typing import Any

from aiohttp import web

OPENAI_FIELDS = {
    *("model", "messages", "max_completion_tokens", "max_tokens", "stream", "stream_options"),
    *("temperature", "top_p", "stop", "tools", "tool_choice", "parallel_tool_calls", "n", "user"),
    *("response_format", "reasoning_effort", "logprobs", "top_logprobs", "seed", "metadata"),
}
ANTHROPIC_FIELDS = {
    *("model", "messages", "max_tokens", "system", "stream", "temperature", "top_p", "top_k"),
    *("stop_sequences", "tools", "tool_choice", "metadata", "thinking", "output_config"),
}
ARGUMENTS = '{"city": "Bern"}'
PROMPT, CACHED, OUTPUT = 20, 5, 3


class HostedStub:
    """One provider; `asked` are the bodies, `sent` the headers, `paths` the addresses it got."""

    def __init__(self, kind: str, key: str) -> None:
        self.kind = kind
        self.key = key
        self.asked: list[dict[str, Any]] = []
        self.sent: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.cut = False
        """Whether streams break off after their first token."""
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> "HostedStub":
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.paths.append(request.path_qs)
        self.sent.append(headers)
        own = {"anthropic": "x-api-key", "azure": "api-key"}.get(self.kind, "authorization")
        keys = {n: headers[n] for n in ("authorization", "x-api-key", "api-key") if n in headers}
        expected = f"Bearer {self.key}" if own == "authorization" else self.key
        if keys != {own: expected}:
            return self._error(401, "authentication_error", "no such key")
        if request.method == "GET":
            return web.json_response({"data": [{"id": "big"}, {"id": "small"}]})
        if self.kind == "anthropic" and "anthropic-version" not in headers:
            return self._error(400, "invalid_request_error", "anthropic-version is required")
        body = await request.json()
        self.asked.append(body)
        anthropic = self.kind == "anthropic"
        unknown = body.keys() - (ANTHROPIC_FIELDS if anthropic else OPENAI_FIELDS)
        if unknown or not request.path.endswith("/messages" if anthropic else "/chat/completions"):
            return self._error(400, "invalid_request_error", f"unknown: {unknown} {request.path}")
        if not body.get("stream"):
            return web.json_response(self._message(body) if anthropic else self._chat(body))
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        events = self._message_events(body) if anthropic else self._chunks(body)
        for number, event in enumerate(events):
            if self.cut and number == 3:
                assert request.transport is not None
                request.transport.abort()
                break
            name = f"event: {event['type']}\n" if "type" in event else ""
            await answer.write(f"{name}data: {json.dumps(event)}\n\n".encode())
        else:
            await answer.write(b"" if anthropic else b"data: [DONE]\n\n")
        return answer

    def _error(self, status: int, kind: str, message: str) -> web.Response:
        error = {"type": kind, "message": f"{message} (org-secret)"}
        return web.json_response({"type": "error", "error": error}, status=status)

    def _chat(self, body: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "t0 t1 t2"}
        if body.get("tools"):
            function = {"name": body["tools"][0]["function"]["name"], "arguments": ARGUMENTS}
            call = {"id": "call_1", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        reason = "tool_calls" if body.get("tools") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1} | {
            "model": body["model"],
            "choices": [choice],
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        details = {"cached_tokens": CACHED}
        counts = {"prompt_tokens": PROMPT, "completion_tokens": OUTPUT}
        return {**counts, "total_tokens": PROMPT + OUTPUT, "prompt_tokens_details": details}

    def _chunks(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1}
            return {**head, "model": body["model"], "choices": [choice]}

        deltas: list[dict[str, Any]] = [{"content": text} for text in ("t0 ", "t1 ", "t2")]
        if body.get("tools"):
            function = {"name": body["tools"][0]["function"]["name"], "arguments": ""}
            call = {"index": 0, "id": "call_1", "type": "function", "function": function}
            parts = [{"index": 0, "function": {"arguments": text}} for text in halves(ARGUMENTS)]
            deltas = [{"tool_calls": [each]} for each in (call, *parts)]
        reason = "tool_calls" if body.get("tools") else "stop"
        events = [chunk({"role": "assistant", "content": ""}), *map(chunk, deltas)]
        events.append(chunk({}, reason))
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append({**chunk({}), "choices": [], "usage": self._usage()})
        return events

    def _message(self, body: dict[str, Any]) -> dict[str, Any]:
        block: dict[str, Any] = {"type": "text", "text": "t0 t1 t2"}
        if body.get("tools"):
            block = {"type": "tool_use", "id": "toolu_1", "name": body["tools"][0]["name"]}
            block["input"] = json.loads(ARGUMENTS)
        counts = {"input_tokens": PROMPT - CACHED, "cache_read_input_tokens": CACHED}
        return {"id": "msg_1", "type": "message", "role": "assistant"} | {
            "model": body["model"],
            "content": [block],
            "stop_reason": "tool_use" if body.get("tools") else "end_turn",
            "stop_sequence": None,
            "usage": {**counts, "output_tokens": OUTPUT},
        }

    def _message_events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        whole = self._message(body)
        (block,) = whole["content"]
        usage = {**whole["usage"], "output_tokens": 1}
        start = {**whole, "content": [], "stop_reason": None, "usage": usage}
        if block["type"] == "text":
            texts = ("t0 ", "t1 ", "t2")
            deltas = [{"type": "text_delta", "text": text} for text in texts]
            block = {"type": "text", "text": ""}
        else:
            parts = ("", *halves(ARGUMENTS))
            deltas = [{"type": "input_json_delta", "partial_json": text} for text in parts]
            block = {**block, "input": {}}
        end = {"delta": {"stop_reason": whole["stop_reason"], "stop_sequence": None}}
        return [
            {"type": "message_start", "message": start},
            {"type": "content_block_start", "index": 0, "content_block": block},
            {"type": "ping"},
            *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", **end, "usage": {"output_tokens": OUTPUT}},
            {"type": "message_stop"},
        ]


def halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]
