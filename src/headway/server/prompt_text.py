"""The text of a prompt on its way to token ids, refused as soon as it is certain not to fit.

No token stands for more bytes than the longest entry of the vocabulary, so a text of more bytes
than that for each token of the context is refused before it is tokenized. A long text is tokenized
part by part, no further than the context. Of a prompt that is truncated, and of messages before a
template renders them, the part that remains is not known: they may be 16 times as long.
"""

from collections.abc import Iterable
from typing import Any

from headway.core.errors import RequestError
from headway.edge.lanes import checkpoint
from headway.server.models import ServedModel

COUNTABLE_BYTES, COUNTABLE_BYTES_PER_TOKEN = 2**20, 16
"""Limit of a text that is only counted: the larger of these bytes, in all or for each token of the
context."""
RENDERED_BYTES = 32 * 2**20
"""Limit of the text of all messages before rendering, stored responses included."""


def encode(
    model: ServedModel,
    text: str,
    param: str,
    *,
    add_special_tokens: bool = True,
    truncated: bool = False,
) -> list[int]:
    """Return the ids of a prompt's text; RequestError where it cannot fit in the context.

    A prompt that is `truncated` afterwards is encoded to its end.
    """
    tokenizer, most = model.needs_tokenizer(param), model.info().max_model_len
    check_bytes(text, tokenizer.text_limit(most, loosely=truncated), most, param)
    ids: list[int] = []
    for part in tokenizer.encode_parts(text, add_special_tokens=add_special_tokens):
        if len(ids) > most and not truncated:
            raise too_long_error(
                f"The context holds {most} tokens; the prompt has {len(ids)} or more.", param
            )
        checkpoint()
        ids += part
    return ids


def count(
    model: ServedModel, text: str, param: str, *, add_special_tokens: bool = True
) -> list[int]:
    """Return the ids of a text that need not fit in the context; RequestError beyond the limit."""
    check_countable(model, has_more_bytes(text, countable_bytes(model)), param)
    ids: list[int] = []
    tokenizer = model.needs_tokenizer(param)
    for part in tokenizer.encode_parts(text, add_special_tokens=add_special_tokens):
        checkpoint()
        ids += part
    return ids


def countable_bytes(model: ServedModel) -> int:
    """Return the most bytes of a text that is only counted."""
    return max(COUNTABLE_BYTES, COUNTABLE_BYTES_PER_TOKEN * model.info().max_model_len)


def check_countable(model: ServedModel, is_too_long: bool, param: str) -> None:
    """Raise RequestError where a text is too long to be counted."""
    if is_too_long:
        raise RequestError(
            f"{param} has more than {countable_bytes(model)} bytes, which is all that is "
            "tokenized at once here. Send it in parts.",
            param=param,
            code="string_above_max_length",
        )


def check_messages(
    model: ServedModel, messages: Iterable[dict[str, Any]], *, counted: bool = False
) -> None:
    """Raise RequestError for messages that cannot fit, before a template renders them."""
    size = sum(len(message.get("content") or "") for message in messages)
    if counted:
        check_countable(model, size > countable_bytes(model), "messages")
        return
    tokenizer, most = model.needs_tokenizer("messages"), model.info().max_model_len
    limit = min(tokenizer.text_limit(most, loosely=True), RENDERED_BYTES)
    if size > limit:
        raise too_long_error(
            f"The context holds {most} tokens; the messages have {size} characters, and {limit} "
            "are the most that are rendered here.",
            "messages",
        )


def check_bytes(text: str, limit: int, most: int, param: str) -> None:
    """Raise RequestError for a text of more than `limit` bytes, which cannot be `most` tokens."""
    if has_more_bytes(text, limit):
        raise too_long_error(
            f"The context holds {most} tokens, which are {limit} bytes at most; the prompt has "
            f"{len(text)} characters.",
            param,
        )


def has_more_bytes(text: str, limit: int) -> bool:
    """Whether `text` has more than `limit` bytes of UTF-8, mostly without encoding it."""
    return len(text) > limit or (
        4 * len(text) > limit and len(text.encode("utf-8", "surrogatepass")) > limit
    )


def too_long_error(why: str, param: str) -> RequestError:
    return RequestError(f"{why} Shorten the prompt.", param=param, code="context_length_exceeded")
