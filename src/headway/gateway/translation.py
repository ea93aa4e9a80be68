"""Translation between chats and messages, where an upstream speaks the other of the two.

    client asks            upstream speaks        the gateway sends
    /v1/chat/completions   messages (anthropic)   /v1/messages: `ChatAsMessages`
    /v1/messages           chats (openai, azure,  /v1/chat/completions: `MessagesAsChat`
                           bedrock)

A field that the other dialect has no word for is refused by name with `unsupported_parameter`, so
that another upstream is asked; none is dropped that changes the answer. Answers come back in the
client's dialect, whole or event by event, so all that reads them knows one dialect.
"""

import time
from typing import Any, Protocol

import msgspec

from headway.core.errors import RequestError
from headway.edge import body as bodies
from headway.edge.anthropic_blocks import add_messages, content_blocks, text_parts
from headway.edge.anthropic_tools import ToolChoice, offer_tools
from headway.edge.chat_builder import ChatBuilder
from headway.gateway.events import Event
from headway.gateway.providers import CHAT, MESSAGES

encode, decode = msgspec.json.encode, msgspec.json.decode
DEFAULT_MAX_TOKENS = 4096
"""`max_tokens` of a message for a chat that states no length: messages need one."""
MAX_BLOCKS, MAX_ID = 10_000, 200
"""Blocks or calls of one stream; characters of its id, which each chunk repeats."""


class Translator(Protocol):
    """Translator of one attempt; `path` is where the translated request goes."""

    path: str

    def request(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Return the upstream's body; RequestError names a field that has no translation."""

    def whole(self, data: bytes) -> bytes:
        """Return a whole answer in the client's dialect; raises ValueError, KeyError, TypeError."""

    def events(self, events: list[Event]) -> list[Event]:
        """Return events of a stream in the client's dialect; raises as `whole` does."""


def translator_of(path: str, speaks: str | None, model: str) -> "Translator | None":
    """Return the translator of a client's path for an upstream that `speaks` one; None for none.

    `model` is the name that answers have.
    """
    if path == CHAT and speaks == MESSAGES:
        return ChatAsMessages(model)
    if path == MESSAGES and speaks == CHAT:
        return MessagesAsChat(model)
    return None


def unsupported_field(
    name: str, why: str = "this upstream's API has no such field"
) -> RequestError:
    """Return the error of a field without a translation, after which another upstream is asked."""
    return RequestError(
        f"{name} cannot be sent on: {why}.", param=name, code="unsupported_parameter"
    )


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else ""


# ── a chat, sent as messages ────────────────────────────────────────────────────────────────

SAME = ("temperature", "top_p", "top_k", "stream", "thinking")
"""Fields with one name in both dialects."""
WITHOUT_EFFECT = {
    *("model", "messages", "max_tokens", "max_completion_tokens", "n_predict", "stream_options"),
    *("store", "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("user", "tools", "tool_choice", "parallel_tool_calls", "stop", "response_format"),
    *("reasoning_effort", "continue_final_message", "add_generation_prompt", "service_tier"),
    *SAME,
}
"""Fields of a chat that are translated below, or that do not change an answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
}
"""Fields of a chat that may be there with a value that asks for nothing."""
CHOICES = {"auto": "auto", "required": "any", "none": "none"}
EFFORTS = ("low", "medium", "high", "xhigh", "max")
FINISH_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


def check_fields(raw: dict[str, Any]) -> None:
    """Raise RequestError for a field of a chat that messages do not have."""
    for name, value in raw.items():
        if name == "tools" and not isinstance(value, list | None):
            raise unsupported_field(name, "it must be a list")
        if name in WITHOUT_EFFECT or value is None or value in NEUTRAL.get(name, ()):
            continue
        raise unsupported_field(name)


def message_body(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a chat as the body of /v1/messages; raises RequestError."""
    check_fields(raw)
    body: dict[str, Any] = {name: raw[name] for name in SAME if raw.get(name) is not None}
    lengths = [raw.get(name) or 0 for name in ("max_completion_tokens", "max_tokens", "n_predict")]
    body |= {"model": raw["model"], "max_tokens": max(lengths) or DEFAULT_MAX_TOKENS}
    body |= turns_of(raw.get("messages"))
    stop = raw.get("stop")
    if stop:
        body["stop_sequences"] = [stop] if isinstance(stop, str) else stop
    if raw.get("user"):
        body["metadata"] = {"user_id": raw["user"]}
    body |= message_tools(raw) | message_output(raw)
    return body


def turns_of(messages: Any) -> dict[str, Any]:
    """Return `system` and `messages` of a chat's messages; turns of one role are joined."""
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with a message.", param="messages")
    system: list[dict[str, Any]] = []
    turns: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        where = f"messages[{i}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role in ("system", "developer"):
            system += message_blocks(message.get("content"), where, "this role has text alone")
            continue
        blocks = turn_blocks(message, role, where)
        role = "assistant" if role == "assistant" else "user"
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += blocks
        else:
            turns.append({"role": role, "content": blocks})
    return {"messages": turns} | ({"system": system} if system else {})


def turn_blocks(message: dict[str, Any], role: Any, where: str) -> list[dict[str, Any]]:
    """Return the blocks of a message of the user, the assistant or a tool."""
    if role is None:
        raise unsupported_field(where, "it must be an object with a role")
    content = message.get("content")
    if role == "user":
        return message_blocks(content, where)
    if role == "tool":
        result = message_blocks(content, where)
        call = message.get("tool_call_id")
        return [{"type": "tool_result", "tool_use_id": call, "content": result}]
    if role != "assistant":
        raise unsupported_field(f"{where}.role", "it must be system, user, assistant or tool")
    blocks = message_blocks(content, where, "an answer has text alone") if content else []
    for number, call in enumerate(message.get("tool_calls") or ()):
        blocks.append(tool_use(call, f"{where}.tool_calls[{number}]"))
    return blocks


def message_blocks(content: Any, where: str, text_only: str = "") -> list[dict[str, Any]]:
    """Return the content of a chat's message as blocks; `text_only` says why images are refused."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        raise RequestError(f"{where}.content must be a string or a list.", param=f"{where}.content")
    blocks = []
    for i, part in enumerate(content):
        place = f"{where}.content[{i}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text":
            blocks.append({"type": "text", "text": text_of(part.get("text"))})
        elif kind == "image_url" and not text_only:
            blocks.append(image_block(part.get("image_url"), place))
        else:
            raise unsupported_field(
                f"{place}.type", text_only or "text and image_url have a translation"
            )
    return [block for block in blocks if block.get("text") != ""]


def image_block(image: Any, where: str) -> dict[str, Any]:
    """Return an image: its bytes of a data: URL, or its address, which the provider fetches."""
    url = text_of(image.get("url") if isinstance(image, dict) else image)
    if url.startswith("data:"):
        media, comma, data = url.removeprefix("data:").partition(",")
        if not comma or not media.endswith(";base64"):
            raise unsupported_field(f"{where}.image_url.url", "a data: URL must be of base64")
        source = {"type": "base64", "media_type": media.removesuffix(";base64"), "data": data}
        return {"type": "image", "source": source}
    if not url.startswith(("https://", "http://")):
        raise unsupported_field(f"{where}.image_url.url", "it must be https: or data:")
    return {"type": "image", "source": {"type": "url", "url": url}}


def tool_use(call: Any, where: str) -> dict[str, Any]:
    """Return a call of a chat as a block; its arguments must be a JSON object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise unsupported_field(where, "it must be the call of a function")
    try:
        arguments = decode(text_of(function.get("arguments")) or "{}")
    except (msgspec.DecodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise unsupported_field(f"{where}.function.arguments", "it must be a JSON object")
    name, call_id = text_of(function.get("name")), text_of(call.get("id"))
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def message_tools(raw: dict[str, Any]) -> dict[str, Any]:
    """Return `tools` and `tool_choice` of messages."""
    tools = []
    for i, tool in enumerate(raw.get("tools") or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            raise unsupported_field(f"tools[{i}]", "tools of the type function have a translation")
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        names = [name for name in ("name", "description", "strict") if function.get(name)]
        tools.append({name: function[name] for name in names} | {"input_schema": schema})
    if not tools:
        return {}
    return {"tools": tools, "tool_choice": message_choice(raw)}


def message_choice(raw: dict[str, Any]) -> dict[str, Any]:
    """Return `tool_choice` of messages."""
    choice = raw.get("tool_choice") or "auto"
    body: dict[str, Any] = {}
    if isinstance(choice, str) and choice in CHOICES:
        body["type"] = CHOICES[choice]
    elif isinstance(choice, dict) and isinstance(choice.get("function"), dict):
        body |= {"type": "tool", "name": choice["function"].get("name")}
    else:
        raise unsupported_field("tool_choice", "it must be auto, none, required or a function")
    if raw.get("parallel_tool_calls") is False and body["type"] != "none":
        body["disable_parallel_tool_use"] = True
    return body


def message_output(raw: dict[str, Any]) -> dict[str, Any]:
    """Return `output_config` of messages: a schema and an effort."""
    config: dict[str, Any] = {}
    given = raw.get("response_format")
    given = given if isinstance(given, dict) else {}
    kind, schema = given.get("type"), given.get("json_schema")
    if kind == "json_schema" and isinstance(schema, dict):
        config["format"] = {"type": kind, "schema": schema.get("schema")}
    elif kind not in (None, "text"):
        raise unsupported_field("response_format", "json_schema has a translation")
    effort = raw.get("reasoning_effort")
    if effort not in (None, *EFFORTS):
        raise unsupported_field("reasoning_effort", f"it must be one of {', '.join(EFFORTS)}")
    config |= {} if effort is None else {"effort": effort}
    return {"output_config": config} if config else {}


class ChatAsMessages:
    """Translator of a chat for an upstream that speaks messages."""

    path = MESSAGES

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = "chatcmpl-0"
        self._created = int(time.time())
        self._usage: dict[str, Any] = {}
        self._calls: dict[int, int] = {}
        """Index of a block → index of its call in the chat."""

    def request(self, raw: dict[str, Any]) -> dict[str, Any]:
        return message_body(raw)

    def whole(self, data: bytes) -> bytes:
        body = decode(data)
        if body.get("type") != "message":
            raise ValueError("an error in place of a message")
        blocks = body["content"]
        text = "".join(text_of(block.get("text")) for block in blocks)
        thoughts = "".join(text_of(block.get("thinking")) for block in blocks)
        calls = [chat_call(block) for block in blocks if block.get("type") == "tool_use"]
        content = text if text or not calls else None
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message |= {"reasoning_content": thoughts} if thoughts else {}
        message |= {"tool_calls": calls} if calls else {}
        reason = FINISH_REASONS.get(body.get("stop_reason"), "stop")
        self._id = text_of(body.get("id"))
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        usage = chat_usage(body.get("usage") or {})
        return encode(self._head("chat.completion") | {"choices": [choice], "usage": usage})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def events(self, events: list[Event]) -> list[Event]:
        return [each for event in events for each in self._event(event)]

    def _event(self, event: Event) -> list[Event]:
        if event.comment:
            return []
        body = decode(event.data)
        kind = body.get("type")
        if kind == "message_start":
            self._id = text_of(body["message"].get("id"))[:MAX_ID]
            self._usage = dict(body["message"].get("usage") or {})
            return [self._chunk({"role": "assistant", "content": ""})]
        if kind == "content_block_start":
            return self._start(body)
        if kind == "content_block_delta":
            return self._delta(body)
        if kind == "message_delta":
            self._usage |= body.get("usage") or {}
            reason = FINISH_REASONS.get(body["delta"].get("stop_reason"), "stop")
            return [self._chunk({}, reason)]
        if kind == "message_stop":
            usage = {"choices": [], "usage": chat_usage(self._usage)}
            last = Event(data=encode(self._head("chat.completion.chunk") | usage))
            return [last, Event(data=b"[DONE]")]
        if kind == "error":
            return [Event(data=encode({"error": body.get("error") or {}}))]
        return []

    def _start(self, body: dict[str, Any]) -> list[Event]:
        block = body["content_block"]
        if block.get("type") != "tool_use":
            return []
        if len(self._calls) >= MAX_BLOCKS:
            raise ValueError("too many calls")
        index = self._calls[body["index"]] = len(self._calls)
        function = {"name": block["name"], "arguments": ""}
        call = {"index": index, "id": block["id"], "type": "function", "function": function}
        return [self._chunk({"tool_calls": [call]})]

    def _delta(self, body: dict[str, Any]) -> list[Event]:
        delta = body["delta"]
        if delta.get("type") == "input_json_delta":
            if not delta["partial_json"]:
                return []
            function = {"arguments": delta["partial_json"]}
            call = {"index": self._calls[body["index"]], "function": function}
            return [self._chunk({"tool_calls": [call]})]
        if delta.get("text"):
            return [self._chunk({"content": delta["text"]})]
        if delta.get("thinking"):
            return [self._chunk({"reasoning_content": delta["thinking"]})]
        return []

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return Event(data=encode(self._head("chat.completion.chunk") | {"choices": [choice]}))


def chat_call(block: dict[str, Any]) -> dict[str, Any]:
    """Return a tool_use block as a call of a chat."""
    function = {"name": block["name"], "arguments": encode(block["input"]).decode()}
    return {"id": block["id"], "type": "function", "function": function}


def chat_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a message's usage as that of a chat, where cached tokens are part of the prompt."""
    cached = usage.get("cache_read_input_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    prompt = (usage.get("input_tokens") or 0) + cached + written
    output = usage.get("output_tokens") or 0
    counts = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {**counts, "prompt_tokens_details": {"cached_tokens": cached}}


# ── messages, sent as a chat ────────────────────────────────────────────────────────────────


class SentMessages(msgspec.Struct, kw_only=True):
    """Fields of /v1/messages that have a translation, or need none."""

    model: str
    messages: list[dict[str, Any]]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: ToolChoice | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None


KNOWN = frozenset(SentMessages.__struct_fields__)


def chat_body(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a message's body as a chat; raises RequestError."""
    for name, value in raw.items():
        if name not in KNOWN and value is not None:
            raise unsupported_field(name)
    body = bodies.typed(raw, SentMessages)
    builder = ChatBuilder(takes_images=True)
    if body.system:
        content = text_parts(content_blocks(body.system, "system"), "system")
        builder.add_message({"role": "system", "content": content}, "system")
    add_messages(builder, body.messages)
    for message in builder.messages:
        message.pop("reasoning_content", None)  # thoughts are the provider's own, and signed
    if not builder.messages or builder.messages[-1]["role"] == "assistant":
        raise unsupported_field("messages", "this upstream continues no answer of the assistant")
    offer_tools(builder, body.tools, body.tool_choice)
    if "tool_choice" in builder.fields and not builder.fields.get("tools"):
        del builder.fields["tool_choice"]
    config = body.output_config or {}
    form = config.get("format") or body.output_format
    if not isinstance(form, dict | None):
        raise unsupported_field("output_config.format", "it must be an object")
    if form is not None:
        schema = {"name": "output", "schema": form.get("schema"), "strict": True}
        form = {"type": "json_schema", "json_schema": schema}
    more = {
        "model": body.model,
        "max_completion_tokens": body.max_tokens,
        "stop": body.stop_sequences or None,
        "stream": body.stream,
        "stream_options": {"include_usage": True} if body.stream else None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "response_format": form,
        "reasoning_effort": config.get("effort"),
        "user": text_of((body.metadata or {}).get("user_id")) or None,
    }
    return builder.raw() | {name: value for name, value in more.items() if value is not None}


class MessagesAsChat:
    """Translator of messages for an upstream that speaks chats."""

    path = CHAT

    def __init__(self, model: str) -> None:
        self._model = model
        self._usage: dict[str, Any] = message_usage({})
        self._reason = "end_turn"
        self._index = -1
        """Index of the last block."""
        self._open = ""
        """Type of the open block, with the number of its call."""
        self._has_started = False

    def request(self, raw: dict[str, Any]) -> dict[str, Any]:
        return chat_body(raw)

    def whole(self, data: bytes) -> bytes:
        body = decode(data)
        if body.get("error"):
            raise ValueError("an error in place of an answer")
        choice = body["choices"][0]
        message = choice["message"]
        blocks: list[dict[str, Any]] = []
        thoughts = text_of(message.get("reasoning_content") or message.get("reasoning"))
        if thoughts:
            blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
        text = text_of(message.get("content") or message.get("refusal"))
        if text:
            blocks.append({"type": "text", "text": text})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            use = {"type": "tool_use", "id": call["id"], "name": function["name"]}
            blocks.append({**use, "input": tool_input(function.get("arguments"))})
        self._usage = message_usage(body.get("usage") or {})
        reason = STOP_REASONS.get(choice.get("finish_reason"), "end_turn")
        return encode(self._message(text_of(body.get("id")), blocks, reason))

    def _message(
        self, name: str, content: list[dict[str, Any]], reason: str | None
    ) -> dict[str, Any]:
        return {
            **{"id": name, "type": "message", "role": "assistant", "model": self._model},
            **{"content": content, "stop_reason": reason, "stop_sequence": None},
            "usage": self._usage,
        }

    def events(self, events: list[Event]) -> list[Event]:
        return [each for event in events for each in self._event(event)]

    def _event(self, event: Event) -> list[Event]:
        if event.comment:
            return []
        if event.data == b"[DONE]":
            return self._end()
        body = decode(event.data)
        if body.get("error"):
            return [named("error", error=body["error"])]
        events = []
        if not self._has_started:
            self._has_started = True
            message = self._message(text_of(body.get("id")), [], None)
            events.append(named("message_start", message=message))
        if body.get("usage"):
            self._usage = message_usage(body["usage"])
        for choice in body.get("choices") or ():
            if choice.get("index", 0) == 0:
                events += self._choice(choice)
        return events

    def _choice(self, choice: dict[str, Any]) -> list[Event]:
        delta = choice.get("delta") or {}
        events: list[Event] = []
        thoughts = text_of(delta.get("reasoning_content") or delta.get("reasoning"))
        if thoughts:
            events += self._block("thinking", {"thinking": "", "signature": ""})
            events.append(self._delta("thinking_delta", thinking=thoughts))
        text = text_of(delta.get("content") or delta.get("refusal"))
        if text:
            events += self._block("text", {"text": ""})
            events.append(self._delta("text_delta", text=text))
        for call in delta.get("tool_calls") or ():
            events += self._call(call)
        if choice.get("finish_reason"):
            self._reason = STOP_REASONS.get(choice["finish_reason"], "end_turn")
        return events

    def _call(self, call: dict[str, Any]) -> list[Event]:
        """Return the events of a part of a call: the first has its name."""
        function = call.get("function") or {}
        place = f"tool_use {call.get('index', 0)}"
        block: dict[str, Any] = {"id": call.get("id"), "name": function.get("name"), "input": {}}
        events = self._block(place, block)
        text = text_of(function.get("arguments"))
        if text:
            events.append(self._delta("input_json_delta", partial_json=text))
        return events

    def _block(self, place: str, block: dict[str, Any]) -> list[Event]:
        """Return the events that open a block of this place, unless it is the open one."""
        if self._open == place:
            return []
        events = self._close()
        self._open, self._index = place, self._index + 1
        if self._index >= MAX_BLOCKS:
            raise ValueError("too many blocks")
        content = {"type": place.partition(" ")[0], **block}
        return [*events, named("content_block_start", index=self._index, content_block=content)]

    def _delta(self, kind: str, **fields: str) -> Event:
        return named("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = ""
        return [named("content_block_stop", index=self._index)]

    def _end(self) -> list[Event]:
        delta = {"stop_reason": self._reason, "stop_sequence": None}
        last = named("message_delta", delta=delta, usage=self._usage)
        return [*self._close(), last, named("message_stop")]


def tool_input(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a call; text that is no JSON object is under `_malformed`."""
    text = text_of(arguments) or "{}"
    try:
        value = decode(text)
    except (msgspec.DecodeError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"_malformed": text}


def named(kind: str, **fields: Any) -> Event:
    """Return an event of /v1/messages."""
    return Event(kind.encode(), encode({"type": kind, **fields}))


def message_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's usage as that of a message, which counts cached tokens apart."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    cache = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    prompt, output = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    return {"input_tokens": prompt - cached, **cache, "output_tokens": output}
