"""Savings of prompts and answers that are a fifth shorter, as a yardstick.

Seconds are those of a mean request, by its measured prefill and decode times; dollars follow from
the price of its tokens. `recorded_chats` finds the parts that prompts could omit.
"""

from collections.abc import Iterator

import msgspec

from headway.advise.reading import ServerReading
from headway.advise.words import percent, tokens

STABLE_PREFIX_SHARE, CUT_SHARE = 0.5, 0.2


class Saving(msgspec.Struct, kw_only=True):
    """The saving of a change of the product: seconds a request, dollars an hour."""

    what: str
    seconds: float
    share: float
    usd_per_hour: float | None
    note: str


def savings(r: ServerReading) -> list[Saving]:
    """Return all savings that can be computed from the reading."""
    return [*shorter_answers(r), *shorter_prompts(r)]


def shorter_answers(r: ServerReading) -> Iterator[Saving]:
    """Yield the saving of answers that are a fifth shorter, where the decode time is known."""
    if r.decode_s:
        what = f"answers {percent(CUT_SHARE)} shorter ({tokens(r.lengths.output.mean)} tokens now)"
        yield of_answers(r, what, CUT_SHARE, "output length is a product decision")


def shorter_prompts(r: ServerReading) -> Iterator[Saving]:
    """Yield the savings of shorter prompts and of a stable prefix, where the prefill time is
    known."""
    if not r.prefill_s:
        return
    length = r.lengths.prompt.mean
    what = f"prompts {percent(CUT_SHARE)} shorter ({tokens(length)} tokens now)"
    yield of_prompts(r, what, CUT_SHARE, "prefill time is in proportion to the tokens computed")
    share = STABLE_PREFIX_SHARE
    if r.prefix.shared_tokens and length:
        share = min(r.prefix.shared_tokens / length, 1.0)
    what = f"a stable prefix of {percent(share)} of the prompt"
    yield of_prompts(r, what, share, "the prefix cache computes it once")


def of_answers(r: ServerReading, what: str, share: float, note: str) -> Saving:
    """Return the saving of a share of the answer's tokens."""
    price, length = r.spend.usd_per_million_output, r.lengths.output.mean
    return saving(r, what, (r.decode_s or 0.0) * share, price, length, share, note)


def of_prompts(r: ServerReading, what: str, share: float, note: str) -> Saving:
    """Return the saving of a share of the prompt's tokens."""
    price, length = r.spend.usd_per_million_input, r.lengths.prompt.mean
    return saving(r, what, (r.prefill_s or 0.0) * share, price, length, share, note)


def saving(
    r: ServerReading,
    what: str,
    seconds: float,
    per_million: float | None,
    length: float | None,
    share: float,
    note: str,
) -> Saving:
    return Saving(
        what=what,
        seconds=seconds,
        share=r.share_of_request(seconds),
        usd_per_hour=usd(per_million, length, share, r.load.finished_per_s),
        note=note,
    )


def usd(
    per_million: float | None, length: float | None, share: float, per_s: float | None
) -> float | None:
    """Return the dollars an hour that `share` of the tokens cost now; None without a price.

    $5 a million, 200 tokens, a fifth of them, 2 requests/s: 5e-6 · 40 · 7200 = $1.44.
    """
    if per_million is None or length is None or not per_s:
        return None
    return per_million / 1e6 * length * share * per_s * 3600
