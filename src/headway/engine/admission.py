"""Check of a request by the engine: no request that it admits can make a step raise."""

from headway.config.resolve import Settings
from headway.core.errors import RequestError
from headway.core.request import Request


def check(
    request: Request, max_model_len: int, vocab_size: int, eos_token_ids: frozenset[int]
) -> None:
    """Raise a RequestError that names the field when `request` can never run on this model."""
    length = len(request.prompt_token_ids)
    if length == 0:
        raise RequestError("The prompt is empty.", param="prompt", code="empty_array")
    if length >= max_model_len:
        raise RequestError(
            f"The prompt has {length} tokens; the context is {max_model_len} with the answer.",
            param="prompt",
            code="context_length_exceeded",
        )
    if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= vocab_size:
        raise RequestError(
            f"The prompt holds a token id outside 0 … {vocab_size - 1}.",
            param="prompt",
            code="invalid_value",
        )
    sampling = request.sampling
    sampling.check_vocabulary(vocab_size)
    if not sampling.min_tokens:
        return
    ends = eos_token_ids | set(sampling.stop_token_ids)
    if ends.issuperset(sampling.allowed_token_ids or range(vocab_size)):
        raise RequestError(
            "Every token that is allowed is an end token, which min_tokens forbids.",
            param="min_tokens",
            code="invalid_value",
        )


def longest(request: Request, settings: Settings) -> int:
    """Return the maximum tokens of prompt and answer."""
    limit, given = settings.max_model_len, request.sampling.max_tokens
    return limit if given is None else min(limit, len(request.prompt_token_ids) + given)


def scaled_len(request: Request, settings: Settings) -> int | None:
    """Return the length that RoPE is scaled for, as `Sequence.scaled_len`.

    It depends on the prompt and max_tokens only, so it stays the same as the answer grows, after a
    preemption, and in another engine.
    """
    if settings.rope is None:
        return None
    return settings.rope.scaled_len(len(request.prompt_token_ids), longest(request, settings))
