"""What an answer's keys and values lose, as its request may ask and as it is told.

The server holds them in one way; how much of them a generated token reads, or how much of a prompt
is kept, may be each request's own where `--kv-read` or `--kv-keep` let layers choose: as much as
the server's share, which passed the gate, or more. Example, `--kv-read 25%` and int8 keys:

    kv left out        read=0.25, int8 in the header x-headway-kv
    kv {"read": 0.5}   read=0.5, int8
    kv "int8"          honoured as it is; "exact" is 400, since int8 is not
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headway.config.kv_keep import kept_by_layer
from headway.config.kv_layers import kept_tokens
from headway.config.kv_read import tokens_read
from headway.core.errors import RequestError
from headway.core.request import check_range
from headway.engine.messages import Ready
from headway.spec.kv_format import APART, ROUNDED

EXACT, WINDOWS, READ, KEEP = "exact", "windows", "read", "keep"
NAMES = (EXACT, WINDOWS, READ, KEEP, *ROUNDED, *APART)
"""What a request may ask of keys and values by a word in its field `kv`."""

LOSSY = "--kv-layers, --kv-read, --kv-keep and --kv-cache-dtype"


class KVAsked(msgspec.Struct, forbid_unknown_fields=True):
    """The field `kv` as an object: the share of its context that a generated token reads, and that
    of its prompt that is kept."""

    read: float | None = None
    keep: float | None = None


Asked = str | KVAsked | None


class Shares(NamedTuple):
    """A request's own shares, None for the server's."""

    read: float | None = None
    keep: float | None = None

    def of(self, info: Ready) -> "Shares":
        """The shares that hold."""
        return Shares(
            info.kv_read if self.read is None else self.read,
            info.kv_keep if self.keep is None else self.keep,
        )


NONE, ALL = Shares(), Shares(1.0, 1.0)


def losses(info: Ready | None, own: Shares = NONE) -> list[str]:
    """What keys and values lose, none where they are exact: ["windows", "read", "int8"]."""
    if info is None:
        return []
    read, keep = own.of(info)
    found = {
        WINDOWS: bool(info.narrowed),
        READ: bool(info.bounded) and read is not None and read < 1,
        KEEP: bool(info.chooses) and keep is not None and keep < 1,
    }
    return [name for name, is_so in found.items() if is_so] + [
        name for name in (*ROUNDED, *APART) if name == info.kv_dtype
    ]


def told(info: Ready | None, own: Shares) -> str:
    """Return the header `x-headway-kv`, "" where nothing is lost: "windows, keep=0.25"."""
    if info is None:
        return ""
    read, keep = own.of(info)
    named = {READ: f"{READ}={read:g}", KEEP: f"{KEEP}={keep:g}"}
    return ", ".join(named.get(name, name) for name in losses(info, own))


def shares_of(info: Ready, asked: Asked) -> Shares:
    """A request's own shares; RequestError for what the server does not hold."""
    if asked is None:
        return NONE
    if isinstance(asked, KVAsked):
        return own_shares(info, asked)
    if asked not in NAMES:
        raise RequestError(
            f"kv is {asked[:64]!r}; it is one of {', '.join(NAMES)}, or an object.",
            param="kv",
            code="invalid_value",
        )
    if asked == EXACT and not losses(info, ALL):
        return Shares(1.0 if info.bounded else None, 1.0 if info.chooses else None)
    found = losses(info)
    if asked not in (found or [EXACT]):
        raise RequestError(
            f"kv is {asked!r}, and this server's keys and values are: "
            f"{', '.join(found) or EXACT}. Leave kv out, or ask a server that is started "
            + (f"without {LOSSY}." if asked == EXACT else "so."),
            param="kv",
            code="kv_not_held",
        )
    return NONE


def own_shares(info: Ready, asked: KVAsked) -> Shares:
    """The shares that an object names."""
    least = Shares(info.kv_read if info.bounded else 1.0, info.kv_keep if info.chooses else 1.0)
    check_share(READ, asked.read, least.read, "tokens read {} of their context")
    check_share(KEEP, asked.keep, least.keep, "prompts keep {} of their tokens")
    return Shares(asked.read, asked.keep)


def check_share(name: str, share: float | None, least: float | None, does: str) -> None:
    """RequestError for a share that is none, or less than the server's, which `does` so."""
    if share is None or least is None:
        return
    check_range(f"kv.{name}", share, 0, 1, integer=False, param="kv")
    if share < least:
        raise RequestError(
            f"kv.{name} is {share:g}, and this server's {does.format(f'{least:g}')} or more. "
            f"Ask for no less, or a server that is started with a smaller --kv-{name}.",
            param="kv",
            code="kv_not_held",
        )


def usage(info: Ready | None, prompts: Sequence[Sequence[int]], own: Shares) -> dict[str, int]:
    """Of the prompts' tokens those that are kept, and those that a generated token reads, where
    that is not all: {"kept": 430, "read": 512}."""
    found = dict[str, int]()
    if info is None:
        return found
    lost, (read, keep) = losses(info, own), own.of(info)
    if info.narrowed or KEEP in lost:
        found["kept"] = sum(kept_of(info, len(prompt), keep or 1.0) for prompt in prompts)
    if READ in lost:
        windows = [most for _, most in info.narrowed] or [0] * len(info.bounded)
        by_layer = [-1 if each else most for each, most in zip(info.bounded, windows, strict=True)]
        size = info.block_size
        found["read"] = sum(
            tokens_read(len(prompt), read or 1.0, size, by_layer) for prompt in prompts
        )
    return found


def kept_of(info: Ready, num_tokens: int, keep: float) -> int:
    """Of a prompt's tokens those that are kept to its end, in the mean over the layers."""
    windows = info.narrowed or [(0, 0)] * len(info.chooses)
    chosen = kept_by_layer(num_tokens, keep, info.block_size, info.chooses) or windows
    pairs = [own if own[1] else each for own, each in zip(chosen, windows, strict=True)]
    return kept_tokens(num_tokens, pairs)
