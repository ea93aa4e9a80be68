"""What is told of prompts that begin alike: see `sharing`, which finds them."""

import msgspec


class PrefixSharing(msgspec.Struct, kw_only=True):
    """Some of the last 32 prompts that begin alike, and where they part. No text of theirs.

    `looks_like` names what stands there (a date, a UUID, …), `alike_after` the tokens behind it
    that are alike again and that a cache cannot reuse. `text` and `outliers` are sentences.
    """

    requests: int
    shared_tokens: int
    median_length: float
    looks_like: str
    alike_after: int
    text: str
    outliers: list[str]
