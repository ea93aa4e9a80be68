"""Probe of a server before the run, with requests of two tokens: the features that it accepts.

Features are fields beyond OpenAI's first ones. For prompts of words the probe also measures the
number of tokens per word.
"""

from dataclasses import dataclass

from headway.bench.prompts import GeneratedPiece, IdWriter, Prompt, WordWriter
from headway.bench.talk import BenchDialect
from headway.bench.workload import Turn
from headway.core.errors import UsageError
from headway.measure.client import Client
from headway.measure.record import Exchange

FEATURES = ("stream_options", "ignore_eos", "min_tokens", "return_token_ids")
PROBE_TOKENS = 2
FEW_WORDS, MANY_WORDS = 8, 72
"""Words of the two prompts that give the tokens per word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """The fields and features that the run would use."""

    endpoint: str
    model: str
    prompt_format: str
    needs_text: bool
    seed: int
    vocabulary: int
    ignore_eos: bool
    temperature: float
    service_classes: tuple[str, ...] = ()


async def find_dialect(client: Client, spec: ProbeSpec) -> BenchDialect:
    """Return the dialect with every feature that the server accepts; UsageError when it accepts
    none."""
    for writer in writers(spec):
        tried = FEATURES + (("service_class",) if spec.service_classes else ())
        if not await is_accepted(client, build_dialect(spec, writer, tried), spec):
            accepted = [
                name
                for name in tried
                if await is_accepted(client, build_dialect(spec, writer, (name,)), spec)
            ]
            tried = tuple(accepted)
            if not tried and not await is_accepted(client, build_dialect(spec, writer, ()), spec):
                continue
        if isinstance(writer, WordWriter):
            writer = await calibrate_writer(client, build_dialect(spec, writer, tried), spec)
        return build_dialect(spec, writer, tried)
    x = await ask(
        client, build_dialect(spec, writers(spec)[-1], ()), (GeneratedPiece("probe", 4),), ""
    )
    raise UsageError(
        f"The server does not answer a request of {PROBE_TOKENS} tokens: {x.error}.",
        x.message or "Look at its log.",
    )


def writers(spec: ProbeSpec) -> list[IdWriter | WordWriter]:
    """Return the ways to write prompts, the preferred first."""
    ids, words = IdWriter(spec.seed, spec.vocabulary), WordWriter(spec.seed)
    if spec.endpoint == "chat" or spec.needs_text:
        if spec.prompt_format == "ids":
            why = "chat takes messages" if spec.endpoint == "chat" else "this workload is text"
            raise UsageError(f"--prompt-format ids: {why}.", "Use --prompt-format text.")
        return [words]
    ways: dict[str, list[IdWriter | WordWriter]] = {
        "auto": [ids, words],
        "ids": [ids],
        "text": [words],
    }
    return ways[spec.prompt_format]


def build_dialect(
    spec: ProbeSpec, writer: IdWriter | WordWriter, features: tuple[str, ...]
) -> BenchDialect:
    """Return a dialect with these features."""
    return BenchDialect(
        endpoint=spec.endpoint,
        model=spec.model,
        writer=writer,
        features=frozenset(features),
        ignore_eos=spec.ignore_eos,
        temperature=spec.temperature,
    )


async def is_accepted(client: Client, tried: BenchDialect, spec: ProbeSpec) -> bool:
    """Return whether a request of this dialect is answered, for each service class that is sent."""
    classes = spec.service_classes if "service_class" in tried.features else ("",)
    for name in classes:
        x = await ask(client, tried, (GeneratedPiece("probe", 4),), name)
        if x.error in ("refused", "timeout") or x.status in (401, 403, 404):
            raise UsageError(
                f"The server does not answer: {x.error}.", x.message or "Is the URL right?"
            )
        if not x.ok:
            return False
    return True


async def ask(client: Client, tried: BenchDialect, prompt: Prompt, service_class: str) -> Exchange:
    """Send one request of two tokens."""
    x = Exchange(
        id=0, scheduled_s=client.now_s(), asked_prompt_tokens=4, asked_output_tokens=PROBE_TOKENS
    )
    prompt_json = tried.talk().add_turn(Turn(prompt=prompt, output_tokens=PROBE_TOKENS))
    await client.exchange(x, tried.request(prompt_json, PROBE_TOKENS, service_class))
    return x


async def calibrate_writer(client: Client, tried: BenchDialect, spec: ProbeSpec) -> WordWriter:
    """Return a writer that knows the server's tokens per word, from two prompts and their usage.

    8 words that are 19 tokens and 72 that are 95: (95 − 19) / 64 = 1.19 a word, and 9.5 extra.
    """
    counts = []
    for words in (FEW_WORDS, MANY_WORDS):
        x = await ask(client, tried, (GeneratedPiece("calibration", words),), "")
        if x.prompt_tokens is None:
            return WordWriter(spec.seed)
        counts.append(x.prompt_tokens)
    per_word = max((counts[1] - counts[0]) / (MANY_WORDS - FEW_WORDS), 0.1)
    return WordWriter(spec.seed, per_word, max(0.0, counts[0] - FEW_WORDS * per_word))
