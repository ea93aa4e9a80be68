"""POST /v1/chat/completions: messages in, a message out."""

from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.core.request import SamplingParams
from headway.core.service import request_slo
from headway.edge.errors import error_event, error_response
from headway.edge.event_stream import PING
from headway.frontend.answer import SequenceDelta
from headway.frontend.text import Tokenizer
from headway.frontend.text.parts import (
    CallArguments,
    CallBegins,
    ContentPart,
    ParsedOutput,
    Part,
    Reasoning,
)
from headway.frontend.text.tools.generic import with_tools
from headway.server import kv, prompt_text
from headway.server.context import ContextCut
from headway.server.generation import GenerationRequest, IncomingRequest, Progress
from headway.server.models import ServedModel, ServerState
from headway.server.openai import render
from headway.server.openai.calls import shorten_ids
from headway.server.openai.schema import (
    REASONING,
    ChatBody,
    Common,
    answer_length,
    chat_messages,
    check_chat,
    check_priority,
    content_text,
    sampling_params,
    truncate_prompt,
)
from headway.server.openai.tools import (
    ToolUse,
    format_for,
    grammar_after_reasoning,
    grammar_for,
    parser_spec_for,
    tool_use,
)
from headway.server.openai.usage import Usage
from headway.server.shorten import shorten_chat

encode = msgspec.json.encode


def prepare(state: ServerState, incoming: IncomingRequest) -> "ChatDialect":
    """Check the body, render and encode its messages; raises RequestError."""
    body: ChatBody = incoming.body
    model = state.model(body.model)
    body, cut = shorten_chat(model, body, body.context, incoming.owner)
    prompt = prompt_ids(model, body)
    room = max(1, model.info().max_model_len - (answer_length(body) or 1))
    request = build_request(state, incoming, body, truncate_prompt(body, prompt, room), cut=cut)
    return ChatDialect(Progress(request), body, state.fingerprint)


def prompt_ids(model: ServedModel, body: ChatBody) -> list[int]:
    """Return the ids of the rendered messages; RequestError beyond the context."""
    return prompt_text.encode(
        model,
        render_chat(model, body),
        "messages",
        add_special_tokens=bool(body.add_special_tokens),
        truncated=body.truncate_prompt_tokens is not None,
    )


def counted_prompt_ids(model: ServedModel, body: ChatBody) -> list[int]:
    """Return the ids of messages that are only counted, and may exceed the context."""
    text, specials = render_chat(model, body, counted=True), bool(body.add_special_tokens)
    return prompt_text.count(model, text, "messages", add_special_tokens=specials)


def render_chat(model: ServedModel, body: ChatBody, *, counted: bool = False) -> str:
    """Return the text of the messages; `counted` ones may be longer than a prompt."""
    tokenizer, messages = check_messages(model, body)
    prompt_text.check_messages(model, messages, counted=counted)
    return tokenizer.render(messages, **template_options(model, body))


def check_messages(model: ServedModel, body: ChatBody) -> tuple[Tokenizer, list[dict[str, Any]]]:
    """Return the tokenizer and the messages as templates expect them; raises RequestError."""
    check_chat(body)
    messages = chat_messages(body.messages)
    model.info()
    if model.format is not None and model.format.short_ids:
        messages = shorten_ids(messages)
    if model.format is not None and model.format.in_messages:
        use = body_tool_use(body)
        messages = with_tools(messages, use.prompt_tools() if use else [])
    return model.needs_tokenizer("messages"), messages


def build_request(
    state: ServerState,
    incoming: IncomingRequest,
    body: ChatBody,
    prompt: list[int],
    cut: ContextCut | None = None,
) -> GenerationRequest:
    """Build the request of a chat body with its encoded prompt, for every dialect that chats."""
    model = state.model(body.model)
    info = model.info()
    max_tokens = answer_length(body)
    check_fits(len(prompt), max_tokens, info.max_model_len, "messages")
    sampling = sampling_params(
        body,
        model.defaults,
        max_tokens=max_tokens,
        logprobs=num_logprobs(body),
        max_n=state.options.max_n,
    )
    sampling.check_vocabulary(info.vocab_size)
    if sampling.grammar is not None:
        model.needs_tokenizer(sampling.grammar.param)
    use = body_tool_use(body)
    parser_spec = parser_spec_for(model, use, prompt, continued_text(body))
    if use is not None and parser_spec is not None:
        sampling.grammar = grammar_for(model, use, parser_spec, sampling.grammar)
    elif parser_spec is not None and parser_spec.thinking and sampling.grammar is not None:
        sampling.grammar = grammar_after_reasoning(model, parser_spec, sampling.grammar)
    sampling.check_grammar()
    return make_request(
        state, incoming, body, [prompt], sampling, use=use, parser_spec=parser_spec, cut=cut
    )


def make_request(
    state: ServerState,
    incoming: IncomingRequest,
    body: Common,
    prompts: list[list[int]],
    sampling: SamplingParams,
    **fields: Any,
) -> GenerationRequest:
    """Return the request with the fields that chat and completions share, and `fields`."""
    model = state.model(body.model)
    return GenerationRequest(
        model=model,
        model_name=state.name(body.model),
        prompts=prompts,
        sampling=sampling,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        request_id=incoming.request_id,
        created=incoming.created,
        arrived_s=incoming.arrived_s,
        caller=incoming.caller,
        service_class=incoming.service_class,
        slo=request_slo(body.slo),
        priority=check_priority(body.priority),
        wants_timings=bool(body.timings),
        cache_salt=body.cache_salt,
        shares=kv.request_shares(model.info(), incoming.body.kv),
        **fields,
    )


def body_tool_use(body: ChatBody) -> ToolUse | None:
    """Return the tools of the body, None without any."""
    return tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)


def continued_text(body: ChatBody) -> str:
    """Return the text that the answer continues, "" for a message of its own."""
    content = body.messages[-1].get("content") if body.continue_final_message else None
    return content if isinstance(content, str) else ""


def echoed_text(body: ChatBody) -> str:
    """Return the last message of the assistant, with which an answer with `echo` begins, or ""."""
    last = body.messages[-1]
    if not body.echo or last.get("role") != "assistant":
        return ""
    return content_text(last.get("content"), "messages") or ""


def num_logprobs(body: ChatBody) -> int | None:
    """Return how many alternatives to report; None for no log-probabilities."""
    return (body.top_logprobs or 0) if body.logprobs else None


def template_options(model: ServedModel, body: ChatBody) -> dict[str, Any]:
    """Return the arguments of the chat template besides the messages."""
    options = dict(body.chat_template_kwargs or {})
    for name in ("messages", "tools"):
        options.pop(name, None)
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message is not None:
        options["continue_final_message"] = body.continue_final_message
    for name in ("reasoning_effort", "documents"):
        if getattr(body, name) is not None:
            options[name] = getattr(body, name)
    use = body_tool_use(body)
    if use is not None and not format_for(model).in_messages:
        options["tools"] = use.prompt_tools()
    return options


def check_fits(prompt_tokens: int, max_tokens: int | None, max_model_len: int, param: str) -> None:
    """Raise RequestError where prompt and answer do not fit in the context."""
    num_tokens = prompt_tokens + (max_tokens or 1)
    if num_tokens > max_model_len:
        answer = f" and {max_tokens} for the answer" if max_tokens else ""
        raise RequestError(
            f"The context holds {max_model_len} tokens; the prompt has {prompt_tokens}{answer}. "
            "Shorten the prompt or lower max_tokens.",
            param=param,
            code="context_length_exceeded",
        )


OPENING = b'{"role":"assistant","content":""}'
OPENING_WITH_TOOLS = b'{"role":"assistant","content":null}'


def part_delta(part: Part) -> bytes:
    """Return a part as OpenAI streams it: a call's id and name first, then its arguments."""
    match part:
        case ContentPart(text):
            return encode({"content": text})
        case Reasoning(text):
            return encode(dict.fromkeys(REASONING, text))
        case CallBegins(index, name, call_id):
            function = {"name": name, "arguments": ""}
            call = {"index": index, "id": call_id, "type": "function", "function": function}
            return encode({"tool_calls": [call]})
        case CallArguments(index, text):
            return encode({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
    return b""


class ChatDialect:
    """Dialect of chat; the constant parts of a chunk are encoded once."""

    def __init__(self, progress: Progress, body: ChatBody, fingerprint: str) -> None:
        self.progress = progress
        request = self._request = progress.request
        self._tokenizer = request.model.tokenizer
        self._return_ids = bool(body.return_token_ids)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._hides_reasoning = body.include_reasoning is False
        self._echoed = echoed_text(body)
        self._logprobs = bool(body.logprobs)
        self._common = request.envelope("chat.completion.chunk", fingerprint)
        self._usage = Usage(progress, body.stream_options)
        self._head = self._usage.head(self._common)
        self._begun = False
        self._plain = not (self._logprobs or self._return_ids)
        self._opening = OPENING_WITH_TOOLS if request.use else OPENING

    def opening(self, choice: int) -> bytes:
        opening = self._chunk(choice, self._opening)
        if self._echoed:
            opening += self._chunk(choice, encode({"content": self._echoed}))
        return opening

    def chunk(self, choice: int, delta: SequenceDelta) -> bytes:
        data = b""
        self._usage.count(delta)
        if delta.parts is not None:
            data = self._part_chunks(choice, delta)
        elif delta.text or not self._plain:
            content = b'{"content":' + encode(delta.text) + b"}"
            data = self._chunk(choice, content, delta=delta)
        if delta.finish_reason is not None:
            data += self._chunk(choice, b"{}", render.stream_end(delta))
        return data

    def _part_chunks(self, choice: int, delta: SequenceDelta) -> bytes:
        """Return a chunk for each part; fields of the tokens go with the first."""
        shown = (part for part in delta.parts or () if self._shows(part))
        contents = [content for part in shown if (content := part_delta(part))]
        if not contents and not self._plain and delta.token_ids:
            contents = [b"{}"]
        chunks = [
            self._chunk(choice, content, delta=None if number else delta)
            for number, content in enumerate(contents)
        ]
        return b"".join(chunks)

    def _shows(self, part: Part) -> bool:
        return not (self._hides_reasoning and isinstance(part, Reasoning))

    def _chunk(
        self,
        choice: int,
        content: bytes,
        end: bytes = render.UNFINISHED,
        delta: SequenceDelta | None = None,
    ) -> bytes:
        logprobs = b"null"
        extra = b""
        if delta is not None and not self._plain:
            if self._logprobs:
                logprobs = encode(
                    render.chat_logprobs(self._tokenizer, delta.logprobs, self._as_ids)
                )
            if self._return_ids:
                extra = b',"token_ids":' + encode(delta.token_ids)
        return b'%b%d,"delta":%b,"logprobs":%b,%b%b}]%b}\n\n' % (
            self._head,
            choice,
            content,
            logprobs,
            end,
            extra,
            self._tail(),
        )

    def _tail(self) -> bytes:
        """Return the bytes after the choices: usage, and in the first chunk the prompt's ids."""
        prompt = b""
        if self._return_ids and not self._begun:
            prompt = b',"prompt_token_ids":' + encode(self._request.prompts[0])
        self._begun = True
        return self._usage.tail() + prompt

    failure = staticmethod(error_event)
    refusal = staticmethod(error_response)

    def ping(self) -> bytes:
        return PING

    def ending(self) -> bytes:
        return self.progress.ending(self.usage_chunk)

    def usage_chunk(self) -> bytes:
        usage = self.progress.usage()
        return self.progress.last_chunk(self._common, usage)

    def whole(self, choices: list[list[SequenceDelta]]) -> dict[str, Any]:
        answer = {
            **self._common,
            "object": "chat.completion",
            "choices": [self._choice(i, deltas) for i, deltas in enumerate(choices)],
            "usage": self.progress.usage(),
            **self.progress.timings(),
        }
        if self._request.sampling.prompt_logprobs is not None:
            entries = choices[0][0].prompt_logprobs if choices[0] else None
            answer["prompt_logprobs"] = render.prompt_logprobs(self._tokenizer, entries)
        if self._return_ids:
            answer["prompt_token_ids"] = self._request.prompts[0]
        return answer

    def _message(self, index: int, deltas: list[SequenceDelta]) -> dict[str, Any]:
        if self._request.parser_spec is None:
            content = self._echoed + "".join(delta.text for delta in deltas)
            return {"role": "assistant", "content": content, "refusal": None}
        output = self.progress.outputs.get(index, ParsedOutput())
        message: dict[str, Any] = {
            "role": "assistant",
            "content": (self._echoed + output.content) or (None if output.calls else ""),
            "refusal": None,
        }
        if output.reasoning and not self._hides_reasoning:
            message |= dict.fromkeys(REASONING, output.reasoning)
        if output.calls:
            message["tool_calls"] = [
                {
                    "id": call.call_id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in output.calls
            ]
        return message

    def _choice(self, index: int, deltas: list[SequenceDelta]) -> dict[str, Any]:
        entries = [entry for delta in deltas for entry in delta.logprobs or []]
        choice: dict[str, Any] = {
            "index": index,
            "message": self._message(index, deltas),
            "logprobs": render.chat_logprobs(
                self._tokenizer, entries if self._logprobs else None, self._as_ids
            ),
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        if self._return_ids:
            choice["token_ids"] = [t for delta in deltas for t in delta.token_ids]
        return choice
