"""How long the prompts and the answer of a request may be, and what they count as."""

import msgspec

from headway.core.errors import RequestError
from headway.core.request import SamplingParams
from headway.core.slo import Slo

UNKNOWN_ANSWER = 256
"""Tokens that an answer of no given length is expected to have, in forecasts."""


class AdmissionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a request wants, once its prompts are encoded.

    `prompt_param` and `answer_param` are the client's names for them; the second is None where it
    left the length of the answer to us.
    """

    lengths: list[int]
    sampling: SamplingParams
    max_model_len: int
    prompts: list[list[int]] | None = None
    salt: str = ""
    slo: Slo | None = None
    prompt_param: str = "prompt"
    answer_param: str | None = None


def check_prompts(asked: AdmissionRequest, most: int | None) -> None:
    """Raise RequestError when a prompt is longer than `most`."""
    longest = max(asked.lengths)
    if most is not None and longest > most:
        raise RequestError(
            f"The prompt has {longest} tokens; max_prompt_tokens is {most} here. Shorten it.",
            param=asked.prompt_param,
            code="context_length_exceeded",
            reason="max_prompt_tokens",
        )


def longest_answer(asked: AdmissionRequest) -> int:
    """Tokens of an answer at most; where the client gave no length, what it is expected to have."""
    left = asked.max_model_len - max(asked.lengths)
    return asked.sampling.max_tokens or min(UNKNOWN_ANSWER, left)


def bound_answer(asked: AdmissionRequest, most: int | None) -> None:
    """Raise RequestError when the answer asked for is longer than `most`; cut one not asked for."""
    if most is None:
        return
    sampling = asked.sampling
    wanted = sampling.max_tokens
    if asked.answer_param is not None and wanted is not None and wanted > most:
        raise RequestError(
            f"{asked.answer_param} is {wanted}; max_output_tokens is {most} here. Lower it.",
            param=asked.answer_param,
            code="integer_above_max_value",
            reason="max_output_tokens",
        )
    left = max(1, asked.max_model_len - max(asked.lengths))
    longest = min(most, left) if wanted is None else min(wanted, most)
    if sampling.min_tokens > longest:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}; max_output_tokens is {most} here, and the "
            f"context has room for {left}. Lower it.",
            param="min_tokens",
            code="integer_above_max_value",
            reason="max_output_tokens",
        )
    sampling.max_tokens = longest


def max_output_tokens(asked: AdmissionRequest) -> int:
    """Tokens of all its answers at most: of each `max_tokens`, or what the context has room for.

    Prompts of 10 and 90 tokens with n 2 in a context of 100: 2 × (90 + 10) without `max_tokens`,
    2 × (20 + 10) with 20.
    """
    sampling = asked.sampling
    rooms = [max(1, asked.max_model_len - length) for length in asked.lengths]
    if sampling.max_tokens is not None:
        rooms = [min(room, sampling.max_tokens) for room in rooms]
    return sampling.n * sum(rooms)


def shorten_answers(asked: AdmissionRequest, most: int) -> None:
    """Shorten answers of no given length so that all of them and the prompts have `most` tokens."""
    sampling, num_prompt = asked.sampling, sum(asked.lengths)
    if asked.answer_param is not None or num_prompt + max_output_tokens(asked) <= most:
        return
    each = (most - num_prompt) // (len(asked.lengths) * sampling.n)
    longest = max(1, each, sampling.min_tokens)
    sampling.max_tokens = min(longest, sampling.max_tokens or longest)
