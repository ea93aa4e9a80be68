"""`headway run` and `headway chat`: a model in this process, its text on stdout as it comes."""

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.common import engine_arguments, obtain_model, print_settings
from headway.config.options import EngineOptions, SamplingOptions
from headway.core.errors import UsageError
from headway.core.request import SamplingParams

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from headway.llm import LLM


def run(call: "VerbCall") -> int:
    """Print the answer to one prompt, alone, on stdout; `-` reads the prompt from stdin.

    With a chat template the prompt is a user's message; --raw completes it as text.
    """
    if not 1 <= len(call.positionals) <= 2:
        raise UsageError("run takes a model and a prompt.", "headway run MODEL PROMPT")
    if {"--chat", "--raw"} <= call.switches:
        raise UsageError("--chat and --raw exclude each other.", "Leave one out.")
    *folders, prompt = call.positionals
    folder = local_model(folders[0] if folders else None, call)
    if "--dry-run" in call.switches:
        print_settings(folder, call.options[EngineOptions], call.sources, call.deprecated)
        return 0
    llm = load(folder, call)
    text = sys.stdin.read() if prompt == "-" else prompt
    tokenizer = llm.needs_tokenizer()
    has_template = tokenizer.template is not None or "--chat" in call.switches
    if has_template and "--raw" not in call.switches:
        ids = tokenizer.chat_ids([{"role": "user", "content": text}])
    else:
        ids = tokenizer.encode(text)
    print_answer(llm, ids, sampling(llm, call.options[SamplingOptions], len(ids)))
    return 0


def chat(call: "VerbCall") -> int:
    """Chat until the end of input, an empty line or Ctrl-D."""
    if len(call.positionals) > 1:
        raise UsageError("chat takes one model.", "headway chat MODEL")
    folder = local_model(call.positionals[0] if call.positionals else None, call)
    if "--dry-run" in call.switches:
        print_settings(folder, call.options[EngineOptions], call.sources, call.deprecated)
        return 0
    llm = load(folder, call)
    messages: list[dict[str, Any]] = []
    with contextlib.suppress(EOFError):
        while text := input("> " if sys.stdin.isatty() else "").strip():
            messages.append({"role": "user", "content": text})
            ids = llm.needs_tokenizer().chat_ids(messages)
            answer = print_answer(llm, ids, sampling(llm, call.options[SamplingOptions], len(ids)))
            messages.append({"role": "assistant", "content": answer})
    return 0


def local_model(given: str | None, call: "VerbCall") -> Path:
    """The folder or file of a model; UsageError for a server's URL, with what asks one."""
    if given is not None and given.startswith(("http://", "https://")):
        url = given.rstrip("/").removesuffix("/v1")
        raise UsageError(
            f"{given} is a server; run and chat load a model folder into this process.",
            f"Open {url}/ in a browser to chat with a Headway, or ask {url}/v1/chat/completions "
            "with curl or any OpenAI client.",
        )
    return obtain_model(given, call)


def load(folder: Any, call: "VerbCall") -> "LLM":
    """Load the model, with a progress bar."""
    from headway.llm import LLM

    return LLM(folder, **engine_arguments(call.options[EngineOptions]))


def print_answer(llm: "LLM", ids: list[int], params: SamplingParams) -> str:
    """Print the answer while it is generated, and return it."""
    pieces = []
    for delta in llm.stream({"prompt_token_ids": ids}, params):
        pieces.append(delta.text)
        print(delta.text, end="", flush=True)
    print(flush=True)
    return "".join(pieces)


def sampling(llm: "LLM", options: SamplingOptions, prompt_tokens: int) -> SamplingParams:
    """Return the flags over the model's defaults; the answer may fill the context."""
    params = llm.get_default_sampling_params()
    for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
        value = getattr(options, name)
        if value is not None:
            setattr(params, name, value)
    params.top_k = max(params.top_k, 0)
    params.stop = options.stop
    params.max_tokens = options.max_tokens or max(1, llm.settings.max_model_len - prompt_tokens)
    return params
