"""Limits of the lengths of prompts and answers, and the tokens they count as."""

import msgspec

from headway.core.errors import RequestError
from headway.core.request import SamplingParams
from headway.core.slo import Slo

EXPECTED_ANSWER_TOKENS = 256
"""Expected tokens of an answer without a given length, in forecasts."""


class AdmissionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request as admission sees it, once its prompts are encoded.

    `prompt_param` and `answer_param` are the client's names of the prompt and of the answer's
    length; the second is None where the client gave no length.
    """

    lengths: list[int]
    sampling: SamplingParams
    max_model_len: int
    prompts: list[list[int]] | None = None
    salt: str = ""
    slo: Slo | None = None
    prompt_param: str = "prompt"
    answer_param: str | None = None


def check_prompt_lengths(request: AdmissionRequest, most: int | None) -> None:
    """Raise RequestError where a prompt has more than `most` tokens."""
    longest = max(request.lengths)
    if most is not None and longest > most:
        raise RequestError(
            f"The prompt has {longest} tokens; max_prompt_tokens is {most} here. Shorten it.",
            param=request.prompt_param,
            code="context_length_exceeded",
            reason="max_prompt_tokens",
        )


def longest_answer(request: AdmissionRequest) -> int:
    """Return the most tokens of an answer, or the expected ones where the client gave no length."""
    room = request.max_model_len - max(request.lengths)
    return request.sampling.max_tokens or min(EXPECTED_ANSWER_TOKENS, room)


def limit_answer(request: AdmissionRequest, most: int | None) -> None:
    """Limit answers to `most` tokens; RequestError where the client gave a greater length."""
    if most is None:
        return
    sampling = request.sampling
    length = sampling.max_tokens
    if request.answer_param is not None and length is not None and length > most:
        raise RequestError(
            f"{request.answer_param} is {length}; max_output_tokens is {most} here. Lower it.",
            param=request.answer_param,
            code="integer_above_max_value",
            reason="max_output_tokens",
        )
    room = max(1, request.max_model_len - max(request.lengths))
    longest = min(most, room) if length is None else min(length, most)
    if sampling.min_tokens > longest:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}; max_output_tokens is {most} here, and the "
            f"context has room for {room}. Lower it.",
            param="min_tokens",
            code="integer_above_max_value",
            reason="max_output_tokens",
        )
    sampling.max_tokens = longest


def max_output_tokens(request: AdmissionRequest) -> int:
    """Return the most tokens of all answers: of each `max_tokens`, or the rest of the context.

    Prompts of 10 and 90 tokens with n 2 in a context of 100: 2 × (90 + 10) without `max_tokens`,
    2 × (20 + 10) with 20.
    """
    sampling = request.sampling
    rooms = [max(1, request.max_model_len - length) for length in request.lengths]
    if sampling.max_tokens is not None:
        rooms = [min(room, sampling.max_tokens) for room in rooms]
    return sampling.n * sum(rooms)


def shorten_answers(request: AdmissionRequest, most: int) -> None:
    """Shorten answers without a given length so that they and the prompts have `most` tokens."""
    sampling, num_prompt = request.sampling, sum(request.lengths)
    if request.answer_param is not None or num_prompt + max_output_tokens(request) <= most:
        return
    each = (most - num_prompt) // (len(request.lengths) * sampling.n)
    longest = max(1, each, sampling.min_tokens)
    sampling.max_tokens = min(longest, sampling.max_tokens or longest)
