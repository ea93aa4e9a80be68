"""The field `kv`: what the KV of a request may lose, and the header that reports it.

The server holds keys and values in one way. Where `--kv-read` or `--kv-keep` let layers choose, a
request may set its own share of tokens that are read, or kept of the prompt: at least the share of
the server, which passed the gate. Example, `--kv-read 25%` and int8 keys:

    kv left out        read=0.25, int8 in the header x-headway-kv
    kv {"read": 0.5}   read=0.5, int8
    kv "int8"          accepted, since the KV is int8; "exact" is answered with 400
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headway.config.kv_keep import keep_limits
from headway.config.kv_layers import mean_kept_tokens
from headway.config.kv_read import tokens_read
from headway.core.errors import RequestError
from headway.core.request import check_range
from headway.engine.messages import Ready
from headway.spec.kv_format import APART, ROUNDED

EXACT, WINDOWS, READ, KEEP = "exact", "windows", "read", "keep"
NAMES = (EXACT, WINDOWS, READ, KEEP, *ROUNDED, *APART)
"""Words that the field `kv` may have."""

LOSSY = "--kv-layers, --kv-read, --kv-keep and --kv-cache-dtype"


class KVAsked(msgspec.Struct, forbid_unknown_fields=True):
    """The field `kv` as an object: the share of the context that a generated token reads, and the
    share of the prompt that is kept."""

    read: float | None = None
    keep: float | None = None


KVField = str | KVAsked | None


class KVShares(NamedTuple):
    """Shares of a request; None stands for that of the server."""

    read: float | None = None
    keep: float | None = None

    def of(self, info: Ready) -> "KVShares":
        """Return the shares with those of the server in place of None."""
        return KVShares(
            info.kv_read if self.read is None else self.read,
            info.kv_keep if self.keep is None else self.keep,
        )


SERVER_SHARES, FULL_SHARES = KVShares(), KVShares(1.0, 1.0)


def losses(info: Ready | None, own: KVShares = SERVER_SHARES) -> list[str]:
    """Return what the KV loses, [] where it is exact. Example: ["windows", "read", "int8"]."""
    if info is None:
        return []
    read, keep = own.of(info)
    by_name = {
        WINDOWS: bool(info.narrowed),
        READ: bool(info.bounded) and read is not None and read < 1,
        KEEP: bool(info.chooses) and keep is not None and keep < 1,
    }
    return [name for name, is_so in by_name.items() if is_so] + [
        name for name in (*ROUNDED, *APART) if name == info.kv_dtype
    ]


def format_header(info: Ready | None, own: KVShares) -> str:
    """Return the header `x-headway-kv`, "" where nothing is lost: "windows, keep=0.25"."""
    if info is None:
        return ""
    read, keep = own.of(info)
    named = {READ: f"{READ}={read:g}", KEEP: f"{KEEP}={keep:g}"}
    return ", ".join(named.get(name, name) for name in losses(info, own))


def request_shares(info: Ready, field: KVField) -> KVShares:
    """Return the shares that a request asks for; RequestError where they cannot be served."""
    if field is None:
        return SERVER_SHARES
    if isinstance(field, KVAsked):
        return object_shares(info, field)
    if field not in NAMES:
        raise RequestError(
            f"kv is {field[:64]!r}; it is one of {', '.join(NAMES)}, or an object.",
            param="kv",
            code="invalid_value",
        )
    if field == EXACT and not losses(info, FULL_SHARES):
        return KVShares(1.0 if info.bounded else None, 1.0 if info.chooses else None)
    lost = losses(info)
    if field not in (lost or [EXACT]):
        raise RequestError(
            f"kv is {field!r}, and this server's keys and values are: "
            f"{', '.join(lost) or EXACT}. Leave kv out, or ask a server that is started "
            + (f"without {LOSSY}." if field == EXACT else "so."),
            param="kv",
            code="kv_not_held",
        )
    return SERVER_SHARES


def object_shares(info: Ready, field: KVAsked) -> KVShares:
    """Return the shares of `kv` as an object."""
    least = KVShares(info.kv_read if info.bounded else 1.0, info.kv_keep if info.chooses else 1.0)
    check_share(READ, field.read, least.read, "tokens read {} of their context")
    check_share(KEEP, field.keep, least.keep, "prompts keep {} of their tokens")
    return KVShares(field.read, field.keep)


def check_share(name: str, share: float | None, least: float | None, does: str) -> None:
    """Raise RequestError for a share out of range or below `least`, which `does` describes."""
    if share is None or least is None:
        return
    check_range(f"kv.{name}", share, 0, 1, integer=False, param="kv")
    if share < least:
        raise RequestError(
            f"kv.{name} is {share:g}, and this server's {does.format(f'{least:g}')} or more. "
            f"Ask for at least that, or a server with a smaller --kv-{name}.",
            param="kv",
            code="kv_not_held",
        )


def usage(info: Ready | None, prompts: Sequence[Sequence[int]], own: KVShares) -> dict[str, int]:
    """Return how many prompt tokens are kept, and how many a generated token reads.

    A count of all tokens is left out. Example: {"kept": 430, "read": 512}.
    """
    counts = dict[str, int]()
    if info is None:
        return counts
    lost, (read, keep) = losses(info, own), own.of(info)
    if info.narrowed or KEEP in lost:
        counts["kept"] = sum(num_kept_tokens(info, len(prompt), keep or 1.0) for prompt in prompts)
    if READ in lost:
        windows = [most for _, most in info.narrowed] or [0] * len(info.bounded)
        by_layer = [-1 if each else most for each, most in zip(info.bounded, windows, strict=True)]
        size = info.block_size
        counts["read"] = sum(
            tokens_read(len(prompt), read or 1.0, size, by_layer) for prompt in prompts
        )
    return counts


def num_kept_tokens(info: Ready, num_tokens: int, keep: float) -> int:
    """Return how many tokens of a prompt are kept to its end, as the mean over the layers."""
    windows = info.narrowed or [(0, 0)] * len(info.chooses)
    chosen = keep_limits(num_tokens, keep, info.block_size, info.chooses) or windows
    pairs = [own if own[1] else each for own, each in zip(chosen, windows, strict=True)]
    return mean_kept_tokens(num_tokens, pairs)
