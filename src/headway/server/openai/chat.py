"""POST /v1/chat/completions: messages in, a message out."""

from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.core.request import check_range
from headway.engine.answer import Delta
from headway.server.generation import Generation
from headway.server.models import State
from headway.server.openai import render
from headway.server.openai.schema import ChatBody, chat_messages, check_chat, sampling_params
from headway.telemetry.goodput import choose_class, request_slo

encode = msgspec.json.encode


def prepare(
    state: State, body: ChatBody, request_id: str, arrived_s: float
) -> tuple[Generation, "ChatDialect"]:
    """Check `body`, render and encode the messages; raises RequestError."""
    model = state.model(body.model)
    logprobs = check_chat(body)
    messages = chat_messages(body.messages)
    info = model.info()
    prompt = model.needs_tokenizer("messages").chat_ids(messages, **template_options(body))
    max_tokens = answer_length(body)
    fits(len(prompt), max_tokens, info.max_model_len, "messages")
    sampling = sampling_params(
        body,
        model.defaults,
        max_tokens=max_tokens,
        logprobs=logprobs,
        max_n=state.options.max_n,
    )
    sampling.check_vocabulary(info.vocab_size)
    if sampling.grammar is not None:
        model.needs_tokenizer(sampling.grammar.param)
    generation = Generation(
        model=model,
        model_name=body.model,
        prompts=[prompt],
        sampling=sampling,
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        request_id=request_id,
        created=int(state.clock.wall_s()),
        arrived_s=arrived_s,
        service_class=choose_class(model.telemetry.classes, body.service_class, body.service_tier),
        slo=request_slo(body.slo),
        wants_timings=bool(body.timings),
    )
    return generation, ChatDialect(generation, body, state.fingerprint)


def answer_length(body: ChatBody) -> int | None:
    """max_completion_tokens, or its old name max_tokens; None when neither is given."""
    given = {
        name: getattr(body, name)
        for name in ("max_completion_tokens", "max_tokens")
        if getattr(body, name) is not None
    }
    for name, value in given.items():
        check_range(name, value, 1, None)
    if len(set(given.values())) > 1:
        raise RequestError(
            "max_tokens and max_completion_tokens differ; give one.",
            param="max_tokens",
            code="invalid_value",
        )
    return next(iter(given.values()), None)


def template_options(body: ChatBody) -> dict[str, Any]:
    """What the chat template is told besides the messages."""
    options = dict(body.chat_template_kwargs or {})
    for name in ("messages", "tools"):
        options.pop(name, None)
    if body.add_generation_prompt is not None:
        options["add_generation_prompt"] = body.add_generation_prompt
    if body.continue_final_message is not None:
        options["continue_final_message"] = body.continue_final_message
    if body.reasoning_effort is not None:
        options["reasoning_effort"] = body.reasoning_effort
    return options


def fits(prompt_tokens: int, max_tokens: int | None, max_model_len: int, param: str) -> None:
    """Raise RequestError when prompt and answer do not fit in the context."""
    wanted = prompt_tokens + (max_tokens or 1)
    if wanted > max_model_len:
        answer = f" and {max_tokens} for the answer" if max_tokens else ""
        raise RequestError(
            f"The context holds {max_model_len} tokens; the prompt has {prompt_tokens}{answer}. "
            "Shorten the prompt or lower max_tokens.",
            param=param,
            code="context_length_exceeded",
        )


class ChatDialect:
    """Chunks and whole answers of chat; what does not change in a chunk is encoded once."""

    def __init__(self, generation: Generation, body: ChatBody, fingerprint: str) -> None:
        self._generation = generation
        self._tokenizer = generation.model.tokenizer
        self._return_ids = bool(body.return_token_ids)
        self._logprobs = bool(body.logprobs)
        self._common = generation.envelope("chat.completion.chunk", fingerprint)
        self._head = generation.chunk_head(self._common)
        self._plain = not (self._logprobs or self._return_ids)

    def opening(self, choice: int) -> bytes:
        return self._chunk(choice, b'{"role":"assistant","content":""}')

    def chunk(self, choice: int, delta: Delta) -> bytes:
        data = b""
        if delta.text or not self._plain:
            content = b'{"content":' + encode(delta.text) + b"}"
            data = self._chunk(choice, content, None, delta)
        if delta.finish_reason is not None:
            data += self._chunk(choice, b"{}", delta.finish_reason)
        return data

    def _chunk(
        self, choice: int, content: bytes, reason: str | None = None, delta: Delta | None = None
    ) -> bytes:
        logprobs = b"null"
        extra = b""
        if delta is not None and not self._plain:
            if self._logprobs:
                logprobs = encode(render.chat_logprobs(self._tokenizer, delta.logprobs))
            if self._return_ids:
                extra = b',"token_ids":' + encode(delta.token_ids)
        end = b"null" if reason is None else b'"' + reason.encode() + b'"'
        return b'%b%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]}\n\n' % (
            self._head,
            choice,
            content,
            logprobs,
            end,
            extra,
        )

    def usage_chunk(self) -> bytes:
        usage = self._generation.usage()
        return self._generation.last_chunk(self._common, usage)

    def whole(self, choices: list[list[Delta]]) -> dict[str, Any]:
        answer = {
            **self._common,
            "object": "chat.completion",
            "choices": [self._choice(i, deltas) for i, deltas in enumerate(choices)],
            "usage": self._generation.usage(),
            **self._generation.timings(),
        }
        if self._generation.sampling.prompt_logprobs is not None:
            entries = choices[0][0].prompt_logprobs if choices[0] else None
            answer["prompt_logprobs"] = render.prompt_logprobs(self._tokenizer, entries)
        if self._return_ids:
            answer["prompt_token_ids"] = self._generation.prompts[0]
        return answer

    def _choice(self, index: int, deltas: list[Delta]) -> dict[str, Any]:
        entries = [entry for delta in deltas for entry in delta.logprobs or []]
        choice: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": "".join(delta.text for delta in deltas),
                "refusal": None,
            },
            "logprobs": render.chat_logprobs(self._tokenizer, entries if self._logprobs else None),
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        if self._return_ids:
            choice["token_ids"] = [t for delta in deltas for t in delta.token_ids]
        return choice
