"""POST /v1/completions: a prompt (text, texts, ids, lists of ids) in, its continuation out."""

from typing import Any

import msgspec

from headway.core.errors import RequestError
from headway.core.request import TokenLogprobs
from headway.edge.errors import error_event, error_response
from headway.edge.event_stream import PING
from headway.frontend.answer import SequenceDelta
from headway.server import prompt_text
from headway.server.generation import IncomingRequest, Progress
from headway.server.models import ServedModel, ServerState
from headway.server.openai import render
from headway.server.openai.chat import check_fits, make_request
from headway.server.openai.offsets import Offsets, prompt_offsets
from headway.server.openai.schema import (
    CompletionBody,
    answer_length,
    check_common,
    sampling_params,
    truncate_prompt,
)
from headway.server.openai.usage import Usage

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256

encode = msgspec.json.encode


def prepare(state: ServerState, incoming: IncomingRequest) -> "CompletionDialect":
    """Check the body and encode its prompts; raises RequestError."""
    body: CompletionBody = incoming.body
    model = state.model(body.model)
    check(body)
    info = model.info()
    length = answer_length(body)
    max_tokens = DEFAULT_MAX_TOKENS if length is None else length
    room = max(1, info.max_model_len - max(1, max_tokens))
    prompts = [truncate_prompt(body, prompt, room) for prompt in encode_prompts(model, body)]
    only_prompt = max_tokens == 0 and bool(body.echo)
    if only_prompt:
        max_tokens = 1  # computed and dropped: what lm-eval's loglikelihood asks for
    elif length is None:
        space = max(1, info.max_model_len - max(map(len, prompts)))
        max_tokens = space if body.n_predict == -1 else min(max_tokens, space)
    for prompt in prompts:
        check_fits(len(prompt), max_tokens, info.max_model_len, "prompt")
    sampling = sampling_params(
        body,
        model.defaults,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        max_n=state.options.max_n,
    )
    if body.echo and body.logprobs is not None:
        sampling.prompt_logprobs = body.logprobs
    sampling.check_vocabulary(info.vocab_size)
    if sampling.stop:
        model.needs_tokenizer("stop")
    if sampling.grammar is not None:
        model.needs_tokenizer(sampling.grammar.param)
    request = make_request(state, incoming, body, prompts, sampling)
    return CompletionDialect(Progress(request), body, state.fingerprint, only_prompt)


def check(body: CompletionBody) -> None:
    """Raise RequestError for what types and ranges do not exclude."""
    check_common(body)
    if body.suffix is not None:
        raise RequestError("suffix is not supported.", param="suffix", code="unsupported_parameter")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(
            "best_of is supported only where it equals n.",
            param="best_of",
            code="unsupported_parameter",
        )
    if body.echo and body.logprobs is not None and body.stream:
        raise RequestError(
            "echo with logprobs cannot be streamed.", param="echo", code="invalid_value"
        )


def encode_prompts(model: ServedModel, body: CompletionBody) -> list[list[int]]:
    """Return the prompts as token ids; RequestError names the prompt at fault."""
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[Any] = [prompt]
    elif prompt and all(isinstance(item, int) for item in prompt):
        prompts = [prompt]
    else:
        prompts = prompt
    if not prompts:
        raise RequestError("prompt is empty.", param="prompt", code="empty_array")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(
            f"prompt holds {len(prompts)} prompts; at most {MAX_PROMPTS} are accepted.",
            param="prompt",
            code="array_above_max_length",
        )
    return [encode_prompt(model, item, i, body) for i, item in enumerate(prompts)]


def encode_prompt(model: ServedModel, item: Any, i: int, body: CompletionBody) -> list[int]:
    """Return one prompt, text or ids, as ids within the vocabulary."""
    where = "prompt" if isinstance(body.prompt, str) else f"prompt[{i}]"
    if isinstance(item, str):
        specials = body.add_special_tokens is not False
        truncates = body.truncate_prompt_tokens is not None
        item = prompt_text.encode(
            model, item, where, add_special_tokens=specials, truncated=truncates
        )
    elif not isinstance(item, list) or any(type(token) is not int for token in item):
        raise RequestError(
            f"{where} must be a string or a list of token ids.", param=where, code="invalid_type"
        )
    if not item:
        raise RequestError(f"{where} is empty.", param=where, code="empty_array")
    vocab_size = model.info().vocab_size
    if min(item) < 0 or max(item) >= vocab_size:
        raise RequestError(
            f"{where} holds a token id outside 0 … {vocab_size - 1}.",
            param=where,
            code="invalid_value",
        )
    ids: list[int] = item
    return ids


class CompletionDialect:
    """Dialect of completions."""

    def __init__(
        self, progress: Progress, body: CompletionBody, fingerprint: str, only_prompt: bool
    ) -> None:
        self.progress = progress
        request = self._request = progress.request
        self._tokenizer = request.model.tokenizer
        self._body = body
        self._only_prompt = only_prompt
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._hides = request.sampling.skip_special_tokens
        self._common = request.envelope("text_completion", fingerprint)
        self._usage = Usage(progress, body.stream_options)
        self._head = self._usage.head(self._common)
        self._offsets: dict[int, Offsets] = {}
        self._begun: set[int] = set()

    def prompt_of(self, choice: int) -> tuple[str | None, list[int]]:
        """Return (text of the prompt as sent, None for ids or a truncated text; its ids)."""
        number = choice // self._request.sampling.n
        sent = self._body.prompt
        item = sent if isinstance(sent, str) or isinstance(sent[0], int) else sent[number]
        whole = self._body.truncate_prompt_tokens is None
        return (item if isinstance(item, str) and whole else None), self._request.prompts[number]

    def echoed(self, choice: int) -> str:
        """Return the text of the prompt of a choice, "" without `echo`."""
        if not self._body.echo:
            return ""
        text, prompt = self.prompt_of(choice)
        if text is not None or self._tokenizer is None:
            return text or ""
        return self._tokenizer.decode(prompt, skip_special_tokens=self._hides)

    def opening(self, choice: int) -> bytes:
        text = self.echoed(choice)
        self._offsets[choice] = Offsets(self._tokenizer, hides=self._hides, at=len(text))
        return self._chunk(choice, text) if text else b""

    def chunk(self, choice: int, delta: SequenceDelta) -> bytes:
        body = self._body
        if self._only_prompt:
            return self._chunk(choice, "", render.end_fields("length", None))
        self._usage.count(delta)
        plain = body.logprobs is None and not body.return_token_ids
        if plain and not delta.text and delta.finish_reason is None and self._tokenizer:
            return b""
        logprobs, ids = b"null", b""
        if body.logprobs is not None:
            entries: list[Any] = list(delta.logprobs or [])
            shown = [entry.token_id for entry in entries]
            offsets = self._offsets[choice].place(shown)
            logprobs = encode(
                render.completion_logprobs(self._tokenizer, entries, shown, offsets, self._as_ids)
            )
        if body.return_token_ids or self._tokenizer is None:
            ids = b',"token_ids":' + encode(delta.token_ids)
        return self._chunk(choice, delta.text, render.stream_end(delta), logprobs, ids)

    def _chunk(
        self,
        choice: int,
        text: str,
        end: bytes = render.UNFINISHED,
        logprobs: bytes = b"null",
        ids: bytes = b"",
    ) -> bytes:
        if choice not in self._begun:
            self._begun.add(choice)
            if self._body.return_token_ids:
                ids += b',"prompt_token_ids":' + encode(self.prompt_of(choice)[1])
        return b'%b%d,"text":%b,"logprobs":%b,%b%b}]%b}\n\n' % (
            self._head,
            choice,
            encode(text),
            logprobs,
            end,
            ids,
            self._usage.tail(),
        )

    failure = staticmethod(error_event)
    refusal = staticmethod(error_response)

    def ping(self) -> bytes:
        return PING

    def ending(self) -> bytes:
        return self.progress.ending(self.usage_chunk)

    def usage_chunk(self) -> bytes:
        return self.progress.last_chunk(self._common, self._usage_object())

    def _usage_object(self) -> dict[str, Any]:
        if self._only_prompt:
            request = self._request
            return render.usage(request.num_prompt_tokens, 0, kv=request.kv_usage)
        return self.progress.usage()

    def whole(self, choices: list[list[SequenceDelta]]) -> dict[str, Any]:
        n = self._request.sampling.n
        answers = []
        for index, deltas in enumerate(choices):
            first = choices[index - index % n]  # a prompt's log-probabilities come with its first
            prompt_logprobs = next((d.prompt_logprobs for d in first if d.prompt_logprobs), None)
            answers.append(self._choice(index, deltas, prompt_logprobs))
        answer = {**self._common, "choices": answers, "usage": self._usage_object()}
        return answer | self.progress.timings()

    def _choice(
        self,
        index: int,
        deltas: list[SequenceDelta],
        prompt_logprobs: list[TokenLogprobs | None] | None,
    ) -> dict[str, Any]:
        prompt = self._request.prompts[index // self._request.sampling.n]
        generated = [] if self._only_prompt else deltas
        echoed = self.echoed(index)
        choice: dict[str, Any] = {
            "index": index,
            "text": echoed + "".join(delta.text for delta in generated),
            "logprobs": None,
            "finish_reason": "length" if self._only_prompt else deltas[-1].finish_reason,
            "stop_reason": None if self._only_prompt else deltas[-1].stop_reason,
        }
        if self._body.logprobs is not None:
            choice["logprobs"] = self._logprobs(index, echoed, generated, prompt_logprobs)
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = render.prompt_logprobs(self._tokenizer, prompt_logprobs)
        if self._body.return_token_ids or self._tokenizer is None:
            choice["token_ids"] = [t for delta in generated for t in delta.token_ids]
            choice["prompt_token_ids"] = prompt
        return choice

    def _logprobs(
        self,
        index: int,
        echoed: str,
        generated: list[SequenceDelta],
        prompt_logprobs: list[TokenLogprobs | None] | None,
    ) -> dict[str, Any]:
        """Return the log-probabilities of an answer; with `echo` also of its prompt."""
        entries: list[Any] = [e for delta in generated for e in delta.logprobs or []]
        shown = [entry.token_id for entry in entries]
        offsets = Offsets(self._tokenizer, hides=self._hides, at=len(echoed)).place(shown)
        if self._body.echo:
            prompt = self._request.prompts[index // self._request.sampling.n]
            entries = [*(prompt_logprobs or [None] * len(prompt)), *entries]
            shown, offsets = prompt + shown, self._prompt_offsets(index, echoed) + offsets
        return render.completion_logprobs(self._tokenizer, entries, shown, offsets, self._as_ids)

    def _prompt_offsets(self, index: int, echoed: str) -> list[int]:
        """Return where each token of a prompt begins in its text."""
        text, prompt = self.prompt_of(index)
        if text is None or self._tokenizer is None:
            return prompt_offsets(self._tokenizer, prompt, echoed, self._hides)
        special = self._body.add_special_tokens is not False
        return self._tokenizer.offsets(text, add_special_tokens=special)
