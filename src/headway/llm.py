"""The offline API, in vLLM's shape: the engine in the caller's process, without HTTP.

    from headway import LLM, SamplingParams

    llm = LLM("path/to/folder")
    for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)

Engine, scheduler and text processing are those of the server.
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.assemble import assemble
from headway.config.options import EngineOptions, read_options
from headway.core.errors import RequestError, ServerFaultError, UsageError
from headway.core.progress import bytes_bar, items_bar
from headway.core.request import Request, SamplingParams, TokenLogprobs
from headway.core.terms import Terms
from headway.frontend.answer import OutputProcessor, SequenceDelta
from headway.frontend.text import Tokenizer
from headway.spec import read_model_spec
from headway.spec.embedded import model_folder
from headway.spec.model_files import sampling_defaults

Prompt = str | list[int] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class Logprob:
    """One alternative at one position."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of the `n` answers. `finish_reason` is `stop` or `length`."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """One prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False


class LLM:
    """A model in this process: that of a folder, or an embedded one by name.

    Keyword arguments are the engine's options: `dtype`, `max_model_len`, `device`, `kv_memory`,
    `skip_tokenizer_init` and the rest of --help=all.

    Raises HeadwayError if the folder cannot be served.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        folder = model_folder(model)
        self.options = make_options(options)
        read_model_spec(folder)  # so that a missing model is reported before a missing tokenizer
        self.tokenizer: Tokenizer | None = None
        if not self.options.skip_tokenizer_init:
            template = self.options.chat_template
            self.tokenizer = Tokenizer(
                model_folder(self.options.tokenizer or folder),
                Path(template) if template else None,
                control_tokens=self.options.chat_control_tokens,
            )
        with bytes_bar(f"Loading {folder.name}") as progress:
            assembled = assemble(folder, self.options, progress=progress)
        self.engine, self.spec = assembled.engine, assembled.spec
        self.settings, self.reasons = assembled.settings, assembled.reasons
        self._sampling = sampling_defaults(folder)
        self._request_ids = itertools.count(1)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of the model's generation_config.json, else the defaults."""
        return SamplingParams(**self._sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; return the outputs in the order of the prompts.

        A prompt is text, a list of token ids, or a dict with `prompt` or `prompt_token_ids`. There
        is one SamplingParams for all prompts, or one for each. `priority` has one number per
        prompt; under the policy `priority`, the lowest goes first. Raises RequestError before
        anything runs if a prompt or a parameter is invalid.
        """
        listed = as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(listed)
        if len(sampling_params) != len(listed):
            raise RequestError(
                f"There are {len(listed)} prompts and {len(sampling_params)} sampling_params.",
                param="sampling_params",
            )
        if priority is not None and len(priority) != len(listed):
            raise RequestError(
                f"There are {len(listed)} prompts and {len(priority)} priorities.",
                param="priority",
            )
        requests = [
            (self._request(prompt, params, level), prompt)
            for prompt, params, level in zip(
                listed, sampling_params, priority or [0] * len(listed), strict=True
            )
        ]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, with the model's chat template."""
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        tokenizer = self.needs_tokenizer()
        prompts: list[Prompt] = [
            {"prompt_token_ids": tokenizer.chat_ids(conversation, **template_options)}  # type: ignore[arg-type]
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams) -> Iterator[SequenceDelta]:
        """Yield the deltas of a prompt's first answer; closing the iterator frees its KV blocks."""
        request = self._request(prompt, sampling_params)
        answer = OutputProcessor(request, self.tokenizer)
        self.engine.add(request)
        try:
            for _, delta in self._deltas({request.request_id: answer}):
                if delta.index == 0:
                    yield delta
        finally:
            self.engine.abort(request.request_id)

    def _request(self, prompt: Prompt, sampling: SamplingParams, priority: int = 0) -> Request:
        ids = self._prompt_ids(prompt)
        if sampling.stop:
            self.needs_tokenizer()
        return Request(
            next(self._request_ids),
            ids,
            sampling,
            arrived_s=self.engine.clock.now_s(),
            terms=Terms(priority=priority),
        )

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids") or prompt.get("prompt") or []
        if isinstance(prompt, str):
            return self.needs_tokenizer().encode(prompt)
        return list(prompt)

    def needs_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raises UsageError if the LLM was made without one."""
        if self.tokenizer is None:
            raise UsageError(
                "This LLM was made with skip_tokenizer_init=True.",
                'Give prompts as {"prompt_token_ids": [...]}.',
            )
        return self.tokenizer

    def _run(
        self, requests: list[tuple[Request, Prompt]], show_progress: bool
    ) -> list[RequestOutput]:
        answers: dict[int, OutputProcessor] = {}
        outputs: dict[int, RequestOutput] = {}
        try:
            for request, prompt in requests:
                self.engine.add(request)
                answers[request.request_id] = OutputProcessor(request, self.tokenizer)
                outputs[request.request_id] = new_output(request, prompt)
            with items_bar("Prompts", len(requests), show_progress) as advance:
                for request_id, delta in self._deltas(answers):
                    output = outputs[request_id]
                    self._append_delta(output, delta)
                    if answers[request_id].num_unfinished == 0 and not output.finished:
                        output.finished = True
                        advance()
        finally:
            for request, _ in requests:
                self.engine.abort(request.request_id)
        return list(outputs.values())

    def _deltas(self, answers: dict[int, OutputProcessor]) -> Iterator[tuple[int, SequenceDelta]]:
        """Run the engine until all of `answers` are complete."""
        self.engine.flush()
        while any(answer.num_unfinished for answer in answers.values()):
            self.engine.wait_for_work()
            updates, _ = self.engine.step()
            for _, error in self.engine.drain_refusals():
                raise error
            for update in updates:
                answer = answers.get(update.request_id)
                for delta, abort in answer.push_all(update) if answer is not None else ():
                    if abort:
                        self.engine.abort(update.request_id, update.index)
                    if delta.finish_reason == "error":
                        raise ServerFaultError("A step failed; the log says why.")
                    yield update.request_id, delta

    def _append_delta(self, output: RequestOutput, delta: SequenceDelta) -> None:
        completion = output.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids += delta.token_ids
        completion.finish_reason = delta.finish_reason
        completion.stop_reason = delta.stop_reason
        if delta.prompt_logprobs is not None:
            output.prompt_logprobs = [self._by_id(entry) for entry in delta.prompt_logprobs]
        for entry in delta.logprobs or []:
            completion.logprobs = completion.logprobs or []
            completion.logprobs.append(self._by_id(entry) or {})
            completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + entry.logprob

    def _by_id(self, entry: TokenLogprobs | None) -> dict[int, Logprob] | None:
        """Return {token id: Logprob} of one position: the alternatives and the token itself."""
        if entry is None:
            return None
        ranked = zip(itertools.count(1), entry.top_ids, entry.top_logprobs)
        by_id = {
            token_id: Logprob(logprob, rank, self._text(token_id))
            for rank, token_id, logprob in ranked
        }
        by_id[entry.token_id] = Logprob(entry.logprob, entry.rank, self._text(entry.token_id))
        return by_id

    def _text(self, token_id: int) -> str:
        return self.tokenizer.piece(token_id).decode("utf-8", "replace") if self.tokenizer else ""


def make_options(given: dict[str, Any]) -> EngineOptions:
    """Return EngineOptions from keyword arguments; raises UsageError for an unknown one."""
    arguments = []
    for name, value in given.items():
        if value is not None:
            text = json.dumps(value) if isinstance(value, dict) else value
            arguments.append(f"--{name.replace('_', '-')}={text}")
    tables, _, _ = read_options([EngineOptions], arguments, {})
    options: EngineOptions = tables[EngineOptions]
    return options


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or several as a list: [1, 2] is one prompt of two tokens."""
    if isinstance(prompts, str | dict):
        return [prompts]
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]  # type: ignore[list-item]
    return listed  # type: ignore[return-value]


def new_output(request: Request, prompt: Prompt) -> RequestOutput:
    """Return an output without generated text."""
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    return RequestOutput(
        request_id=str(request.request_id),
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=request.prompt_token_ids,
        outputs=[CompletionOutput(index=i) for i in range(request.sampling.n)],
    )
