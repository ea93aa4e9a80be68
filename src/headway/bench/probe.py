"""What a server accepts, asked before the run with requests of two tokens.

Returns the features (fields beyond OpenAI's first ones that it takes) and, for
prompts of words, how many tokens it makes of one.
"""

from dataclasses import dataclass

from headway.bench.prompts import IdWriter, Made, Prompt, WordWriter
from headway.bench.talk import Dialect
from headway.bench.workload import Turn
from headway.core.errors import UsageError
from headway.measure.client import Client
from headway.measure.record import Exchange

FEATURES = ("stream_options", "ignore_eos", "min_tokens", "return_token_ids")
PROBE_TOKENS = 2
FEW, MANY = 8, 72
"""Words of the two prompts that tell tokens per word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the run would like to use."""

    endpoint: str
    model: str
    prompt_format: str
    needs_text: bool
    seed: int
    vocabulary: int
    ignore_eos: bool
    temperature: float
    service_classes: tuple[str, ...] = ()


async def find_dialect(client: Client, wanted: Wanted) -> Dialect:
    """The dialect with every feature that the server takes; UsageError when it takes nothing."""
    for writer in writers(wanted):
        tried = FEATURES + (("service_class",) if wanted.service_classes else ())
        if not await accepted(client, dialect(wanted, writer, tried), wanted):
            taken = [
                name
                for name in tried
                if await accepted(client, dialect(wanted, writer, (name,)), wanted)
            ]
            tried = tuple(taken)
            if not tried and not await accepted(client, dialect(wanted, writer, ()), wanted):
                continue
        if isinstance(writer, WordWriter):
            writer = await calibrated(client, dialect(wanted, writer, tried), wanted)
        return dialect(wanted, writer, tried)
    x = await ask(client, dialect(wanted, writers(wanted)[-1], ()), (Made("probe", 4),), "")
    raise UsageError(
        f"The server does not answer a request of {PROBE_TOKENS} tokens: {x.error}.",
        x.message or "Look at its log.",
    )


def writers(wanted: Wanted) -> list[IdWriter | WordWriter]:
    """The ways to write prompts, the preferred first."""
    ids, words = IdWriter(wanted.seed, wanted.vocabulary), WordWriter(wanted.seed)
    if wanted.endpoint == "chat" or wanted.needs_text:
        if wanted.prompt_format == "ids":
            why = "chat takes messages" if wanted.endpoint == "chat" else "this workload is text"
            raise UsageError(f"--prompt-format ids: {why}.", "Use --prompt-format text.")
        return [words]
    ways: dict[str, list[IdWriter | WordWriter]] = {
        "auto": [ids, words],
        "ids": [ids],
        "text": [words],
    }
    return ways[wanted.prompt_format]


def dialect(wanted: Wanted, writer: IdWriter | WordWriter, features: tuple[str, ...]) -> Dialect:
    """A dialect with these features."""
    return Dialect(
        endpoint=wanted.endpoint,
        model=wanted.model,
        writer=writer,
        features=frozenset(features),
        ignore_eos=wanted.ignore_eos,
        temperature=wanted.temperature,
    )


async def accepted(client: Client, tried: Dialect, wanted: Wanted) -> bool:
    """Whether a request of this dialect is answered, for each class where classes are told."""
    classes = wanted.service_classes if "service_class" in tried.features else ("",)
    for name in classes:
        x = await ask(client, tried, (Made("probe", 4),), name)
        if x.error in ("refused", "timeout") or x.status in (401, 403, 404):
            raise UsageError(
                f"The server does not answer: {x.error}.", x.message or "Is the URL right?"
            )
        if not x.ok:
            return False
    return True


async def ask(client: Client, tried: Dialect, prompt: Prompt, service_class: str) -> Exchange:
    """One request of two tokens."""
    x = Exchange(
        id=0, scheduled_s=client.now_s(), asked_prompt_tokens=4, asked_output_tokens=PROBE_TOKENS
    )
    said = tried.talk().say(Turn(prompt=prompt, output_tokens=PROBE_TOKENS))
    await client.exchange(x, tried.request(said, PROBE_TOKENS, service_class))
    return x


async def calibrated(client: Client, tried: Dialect, wanted: Wanted) -> WordWriter:
    """A writer that knows the server's tokens per word, from two prompts and their usage.

    8 words that are 19 tokens and 72 that are 95: (95 − 19) / 64 = 1.19 a word, and 9.5 extra.
    """
    counts = []
    for words in (FEW, MANY):
        x = await ask(client, tried, (Made("calibration", words),), "")
        if x.prompt_tokens is None:
            return WordWriter(wanted.seed)
        counts.append(x.prompt_tokens)
    per_word = max((counts[1] - counts[0]) / (MANY - FEW), 0.1)
    return WordWriter(wanted.seed, per_word, max(0.0, counts[0] - FEW * per_word))
