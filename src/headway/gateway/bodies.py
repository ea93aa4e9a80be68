"""Fields that the gateway reads of a request body: types, prompts, lengths, features."""

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

encode = msgspec.json.encode
Number = Annotated[int, Meta(ge=-(2**53), le=2**53)]


class Body(msgspec.Struct):
    """Fields of a body that the gateway uses. Its types are checked here, so that no upstream reads
    a quoted number differently; upstreams check all other fields. `prompt` and `tokens` may hold
    token ids."""

    model: str | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    n: Number | None = None
    best_of: Number | None = None
    max_tokens: Number | None = None
    max_completion_tokens: Number | None = None
    max_output_tokens: Number | None = None
    n_predict: Number | None = None
    prompt: Any = None
    tokens: Any = None


def prompts_of(given: Any) -> list[Any]:
    """Split a field: [1, 2] is one prompt of two tokens, ["a", "b"] and [[1], [2]] are two."""
    if isinstance(given, list) and given and not isinstance(given[0], int):
        return given
    return [given]


def num_ids(given: Any) -> int:
    """Count the token ids in prompts: 2 in [1, 2], 3 in [[1, 2], [3]], 0 in "a"."""
    return sum(len(each) for each in prompts_of(given) if isinstance(each, list))


def prompt_bytes(raw: dict[str, Any], names: Iterable[str]) -> bytes:
    """Concatenate the fields and items of lists, so that equal prompts have equal prefixes."""
    parts = []
    for name in names:
        value = raw.get(name)
        if isinstance(value, str):
            parts.append(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, list):
            parts += [encode(item) for item in value]
        elif value is not None:
            parts.append(encode(value))
    return b"".join(parts)


def answer_length(raw: dict[str, Any], names: Iterable[str]) -> tuple[int | None, str | None]:
    """Return (maximum answer tokens, the field that states it), or (None, None) without one.

    Of several fields the largest value wins, because upstreams differ in the field they use.
    """
    given = [(raw[name], name) for name in names if (raw.get(name) or 0) > 0]
    return max(given, default=(None, None))


def needs_of(raw: dict[str, Any]) -> frozenset[str]:
    """Return the features that an upstream needs: tools, schemas, images."""
    needs = set()
    if raw.get("tools"):
        needs.add("tools")
    text = raw.get("text")
    formats = [raw.get("response_format"), text.get("format") if isinstance(text, dict) else None]
    if any(isinstance(each, dict) and each.get("type") == "json_schema" for each in formats):
        needs.add("schemas")
    if has_image(raw.get("messages")) or has_image(raw.get("input")):
        needs.add("images")
    return frozenset(needs)


IMAGES = ("image_url", "image", "input_image")


def has_image(messages: Any) -> bool:
    """Return whether a message has an image part."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in IMAGES:
                return True
    return False
