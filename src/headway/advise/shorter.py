"""What shorter prompts and answers would save of this traffic, as far as it was recorded.

A fifth less of either is a yardstick; what stands twice, what nobody called or drew on, what a
schema would shorten and what repeats itself is this traffic's own waste (`measured`). Seconds are
of a mean request, by its measured prefill and decode times; dollars by the price of its tokens.
"""

from collections.abc import Iterator

import msgspec

from headway.advise.reading import Reading
from headway.advise.words import percent, plural, tokens
from headway.telemetry.wasted import PromptWaste

STABLE, SHORTER = 0.5, 0.2
BYTES_PER_TOKEN = 4.0
"""Of a tool's description, where only its bytes are known."""
LITTLE = 0.005
"""Of the tokens: less is not told."""


class Saving(msgspec.Struct, kw_only=True):
    """What a change of the product would save: seconds a request, dollars an hour."""

    what: str
    seconds: float
    share: float
    usd_per_hour: float | None
    note: str
    measured: bool = False
    """Whether it is waste that was seen in this traffic, and no yardstick."""


def savings(r: Reading) -> list[Saving]:
    """All that is known."""
    return [*shorter_answers(r), *shorter_prompts(r), *wasted_answers(r), *wasted_prompts(r)]


def unknown(r: Reading) -> Iterator[str]:
    """What this traffic cannot tell."""
    found = r.waste.answers
    if found is not None and found.schema_saves is None:
        lacks = "structured" if found.structured < found.prose else "without a schema"
        yield f"what schemas in place of prose would save: too few answers were {lacks}"


def shorter_answers(r: Reading) -> Iterator[Saving]:
    """A fifth of the answer, where the time of decoding is known."""
    if r.decode_s:
        what = f"answers {percent(SHORTER)} shorter ({tokens(r.lengths.output.mean)} tokens now)"
        yield of_answers(r, what, SHORTER, "output length is a product decision")


def shorter_prompts(r: Reading) -> Iterator[Saving]:
    """A fifth of the prompt, or what a stable prefix would be of it, where prefill is known."""
    if not r.prefill_s:
        return
    length = r.lengths.prompt.mean
    what = f"prompts {percent(SHORTER)} shorter ({tokens(length)} tokens now)"
    yield of_prompts(r, what, SHORTER, "prefill time is in proportion to the tokens computed")
    share = STABLE
    if r.prefix.shared_tokens and length:
        share = min(r.prefix.shared_tokens / length, 1.0)
    what = f"a stable prefix of {percent(share)} of the prompt"
    yield of_prompts(r, what, share, "the prefix cache computes it once")


def wasted_answers(r: Reading) -> Iterator[Saving]:
    """What a cap, a schema or a stop rule would have left out of the answers that ended."""
    found = r.waste.answers
    if found is None or not r.decode_s:
        return
    above = found.above_cap / found.tokens
    if above > LITTLE:
        yield of_answers(
            r,
            f"max_tokens {found.cap}, enough for 9 of 10 answers",
            above,
            f"cuts the longest tenth: {found.unbounded} of {plural(found.answers, 'request')} "
            "named no limit",
        )
    schema = found.schema_saves
    if schema is not None and schema > LITTLE:
        short = found.structured_tokens / found.structured
        long = found.prose_tokens / found.prose
        yield of_answers(
            r,
            f"schemas in place of prose ({tokens(short)} tokens, not {tokens(long)})",
            schema,
            "if both say the same, which no length can tell",
            measured=True,
        )
    looped = found.looped_tokens / found.tokens
    if looped > LITTLE:
        yield of_answers(
            r,
            f"a stop rule for answers that repeat their end ({percent(looped)} of their tokens)",
            looped,
            "stop strings, a schema, repetition_penalty",
            measured=True,
        )


def wasted_prompts(r: Reading) -> Iterator[Saving]:
    """What stands twice in a prompt, and tools and documents that no answer used."""
    found, length = r.waste.prompts, r.lengths.prompt.mean
    if found is None or not r.prefill_s or not length:
        return
    if found.twice_share > LITTLE:
        yield of_prompts(
            r,
            f"what stands twice in one prompt ({percent(found.twice_share)} of its tokens)",
            found.twice_share,
            f"of {plural(found.prompts, 'prompt')}; context.keep drops documents and results that "
            "are said twice",
            measured=True,
        )
    if found.tools:
        size = sum(
            found.in_mean(tool.num_bytes / BYTES_PER_TOKEN, tool.requests) for tool in found.tools
        )
        share = min(size / length, 1.0)
        names = ", ".join(tool.name for tool in found.tools)
        most = max(tool.requests for tool in found.tools)
        yield of_prompts(
            r,
            f"tools that no answer called: {names}",
            share,
            f"of {plural(most, 'request')}; about {tokens(size)} tokens at {BYTES_PER_TOKEN:g} "
            "bytes each, less where a cache has them",
            measured=True,
        )
    yield from unused_documents(r, found, length)
    yield from given_examples(r, found, length)


def unused_documents(r: Reading, found: PromptWaste, length: float) -> Iterator[Saving]:
    """Documents from which the answer behind them took nothing."""
    documents = found.documents
    if documents is None or not documents.unused_tokens:
        return
    each = documents.unused_tokens / documents.answers
    share = min(found.in_mean(each, documents.requests) / length, 1.0)
    last = documents.places[-1]
    if share > LITTLE:
        never = f"; {documents.idle} were never used" if documents.idle else ""
        yield of_prompts(
            r,
            f"documents that their answer took no word from "
            f"({documents.shown - documents.used} of {documents.shown})",
            share,
            f"of {plural(documents.answers, 'answer')}{never}; place {len(documents.places)} was "
            f"used in {percent(last.used / last.shown)}; answers in other words are not seen",
            measured=True,
        )


def given_examples(r: Reading, found: PromptWaste, length: float) -> Iterator[Saving]:
    """The most that fewer examples could save: whether they help is for an evaluation."""
    examples = found.examples
    if examples is None:
        return
    share = min(found.in_mean(examples.tokens, examples.requests) / length, 1.0)
    if share > LITTLE:
        yield of_prompts(
            r,
            f"examples, were none needed ({examples.pairs:.1f} before "
            f"{plural(examples.requests, 'question')})",
            share,
            "headway eval URL --suite examples --data FILE says how many change the answers",
        )


def of_answers(r: Reading, what: str, share: float, note: str, measured: bool = False) -> Saving:
    """A share of the answer's tokens."""
    price, length = r.spend.usd_per_million_output, r.lengths.output.mean
    return saving(r, what, (r.decode_s or 0.0) * share, price, length, share, note, measured)


def of_prompts(r: Reading, what: str, share: float, note: str, measured: bool = False) -> Saving:
    """A share of the prompt's tokens."""
    price, length = r.spend.usd_per_million_input, r.lengths.prompt.mean
    return saving(r, what, (r.prefill_s or 0.0) * share, price, length, share, note, measured)


def saving(
    r: Reading,
    what: str,
    seconds: float,
    per_million: float | None,
    length: float | None,
    share: float,
    note: str,
    measured: bool,
) -> Saving:
    return Saving(
        what=what,
        seconds=seconds,
        share=r.share_of_request(seconds),
        usd_per_hour=usd(per_million, length, share, r.load.finished_per_s),
        note=note,
        measured=measured,
    )


def usd(
    per_million: float | None, length: float | None, share: float, per_s: float | None
) -> float | None:
    """Dollars an hour that `share` of the tokens cost now; None without a price.

    $5 a million, 200 tokens, a fifth of them, 2 requests/s: 5e-6 · 40 · 7200 = $1.44.
    """
    if per_million is None or length is None or not per_s:
        return None
    return per_million / 1e6 * length * share * per_s * 3600
