"""Pieces of answers that chat and completions share: token texts, log-probabilities, usage."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from headway.core.request import TokenLogprobs
from headway.frontend.answer import SequenceDelta
from headway.frontend.text import Tokenizer

FLOOR = -9999.0
"""Log-probability that OpenAI reports for a token of probability 0; JSON has no -inf."""

UNFINISHED = b'"finish_reason":null'
"""End fields of a chunk whose choice has not ended."""


def stream_end(delta: SequenceDelta) -> bytes:
    """Return the end fields of a chunk."""
    if delta.finish_reason is None:
        return UNFINISHED
    return end_fields(delta.finish_reason, delta.stop_reason)


def end_fields(finish_reason: str, stop_reason: str | int | None) -> bytes:
    """Return the end fields of a choice that has ended, as JSON without braces."""
    ended = {"finish_reason": finish_reason, "stop_reason": stop_reason}
    return msgspec.json.encode(ended)[1:-1]


def token_text(tokenizer: Tokenizer | None, token_id: int, as_id: bool = False) -> str:
    """Return the text of one token; half a character becomes the replacement character.

    `as_id`, and without a tokenizer: "token_id:5".
    """
    if tokenizer is None or as_id:
        return f"token_id:{token_id}"
    return tokenizer.piece(token_id).decode("utf-8", "replace")


def token_bytes(tokenizer: Tokenizer | None, token_id: int) -> list[int]:
    """Return the bytes of one token."""
    return list(tokenizer.piece(token_id)) if tokenizer else []


def chat_logprob(
    tokenizer: Tokenizer | None, token_id: int, logprob: float, as_ids: bool = False
) -> dict[str, Any]:
    """Return one entry of chat's `logprobs.content` or `top_logprobs`."""
    return {
        "token": token_text(tokenizer, token_id, as_ids),
        "logprob": max(logprob, FLOOR),
        "bytes": token_bytes(tokenizer, token_id),
    }


def chat_logprobs(
    tokenizer: Tokenizer | None, entries: list[TokenLogprobs] | None, as_ids: bool = False
) -> dict[str, Any] | None:
    """Return chat's `logprobs` object of some tokens, None without entries."""
    if entries is None:
        return None
    return {
        "content": [
            {
                **chat_logprob(tokenizer, entry.token_id, entry.logprob, as_ids),
                "top_logprobs": [
                    chat_logprob(tokenizer, *pair, as_ids)
                    for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: Tokenizer | None,
    entries: list[TokenLogprobs | None],
    token_ids: list[int],
    offsets: list[int],
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return completions' four parallel lists; `offsets` is where each token begins in the text.

    A prompt's first token has no entry: its log-probability is null.
    """
    return {
        "tokens": [token_text(tokenizer, token_id, as_ids) for token_id in token_ids],
        "token_logprobs": [max(e.logprob, FLOOR) if e else None for e in entries],
        "top_logprobs": [top_texts(tokenizer, e, as_ids) if e else None for e in entries],
        "text_offset": offsets,
    }


def top_texts(
    tokenizer: Tokenizer | None, entry: TokenLogprobs, as_ids: bool = False
) -> dict[str, float]:
    """Return {" the": -0.3, …} with the chosen token, as OpenAI does."""
    pairs = [
        *zip(entry.top_ids, entry.top_logprobs, strict=True),
        (entry.token_id, entry.logprob),
    ]
    texts: dict[str, float] = {}
    for token_id, logprob in pairs:
        texts.setdefault(token_text(tokenizer, token_id, as_ids), max(logprob, FLOOR))
    return texts


def prompt_logprobs(
    tokenizer: Tokenizer | None, entries: list[TokenLogprobs | None] | None
) -> list[dict[str, Any] | None] | None:
    """Return vLLM's `prompt_logprobs`: {id: {logprob, rank, decoded_token}} by position."""
    if entries is None:
        return None
    return [position_logprobs(tokenizer, entry) if entry else None for entry in entries]


def position_logprobs(tokenizer: Tokenizer | None, entry: TokenLogprobs) -> dict[str, Any]:
    """Return the alternatives of one position by rank, and the token of the prompt."""
    by_token = {}
    ranked = enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1)
    for rank, token_id, logprob in [
        *((rank, *pair) for rank, pair in ranked),
        (entry.rank, entry.token_id, entry.logprob),
    ]:
        by_token[str(token_id)] = {
            "logprob": max(logprob, FLOOR),
            "rank": rank,
            "decoded_token": token_text(tokenizer, token_id),
        }
    return by_token


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int = 0,
    reasoning_tokens: int | None = None,
    *,
    kv: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the `usage` object; `reasoning_tokens` is None where answers have no reasoning.

    `kv` counts the prompt tokens that are kept and read, where not all are.
    """
    details = {"completion_tokens_details": {"reasoning_tokens": reasoning_tokens}}
    counts = {f"{name}_tokens": count for name, count in kv.items()}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens, **counts},
        **({} if reasoning_tokens is None else details),
    }
