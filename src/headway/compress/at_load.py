"""Format selection for `--quantization int4`, measured on the model that is loaded.

A sensitivity profile of the folder (16 or 32 bits) is measured on a text of this package and cached
for the user. Each matrix gets int4 in groups of 64, int4 in groups of 32, or int8, so that the
predicted KL divergence is minimal and the size is at most that of llama.cpp's Q4_K_M.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import torch

from headway.compress.rows import RowModel
from headway.compress.search import FormatOption, kl_of, solve
from headway.compress.sensitivity import measure
from headway.core.clock import SystemClock
from headway.core.errors import CheckpointError, HeadwayError
from headway.frontend.text import Tokenizer
from headway.runtime.quantized.profile import MatrixProfile, read_profile, write_profile
from headway.runtime.weight_cache import default_folder
from headway.runtime.weight_key import content_digest, model_files
from headway.spec import ModelSpec
from headway.spec.formats import ROTATED_INT8, Format
from headway.spec.gguf.header import is_gguf
from headway.spec.quantization import q4_k_m_budget

log = logging.getLogger(__name__)

VERSION = 1
"""Incremented when the measurement of a profile changes."""
CANDIDATES = (Format("int4", 64), Format("int4", 32), ROTATED_INT8)
MAX_FLOPS, FLOPS_PER_PARAMETER = 6e12, 12
"""Budget of a measurement (a minute on two cores), and FLOPs per token and parameter: a forward
and a backward pass, and a product for each candidate.
"""
TOKENIZER_FILE = "tokenizer.json"
MIN_TOKENS, MAX_TOKENS, MAX_ROW_TOKENS = 64, 512, 256
TEXT = """\
The harbour master kept two books. In the first he wrote what the sea had brought: the names of \
ships, their captains, the tons of grain and timber and salt. In the second, which nobody asked to \
see, he wrote what it had taken. On the ninth of March 1894 both books had the same line.

Question: A bakery sells 48 loaves in the morning and half as many in the afternoon. Each loaf \
costs $3.25. How much money does the bakery take in one day?
Answer: In the afternoon it sells 48 / 2 = 24 loaves. That makes 48 + 24 = 72 loaves, and \
72 x 3.25 = 234. The bakery takes $234.00.

def merge(left: list[int], right: list[int]) -> list[int]:
    \"\"\"Two sorted lists as one sorted list.\"\"\"
    result, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            result.append(left[i]); i += 1
        else:
            result.append(right[j]); j += 1
    return result + left[i:] + right[j:]

Photosynthesis takes place in the chloroplasts of plant cells, where chlorophyll absorbs light, \
mostly red and blue. The energy splits water into oxygen, protons and electrons; in a second \
stage, the Calvin cycle, carbon dioxide is fixed into sugars. Without it there would be little \
oxygen in the atmosphere, and nearly all food chains would end.

- "Did you read the contract?" Maria asked.
- "Twice," he said. "The second paragraph contradicts the fifth, and neither mentions the deposit."
- "Then we do not sign it today."

{"order": 1207, "items": [{"name": "desk lamp", "price": 39.9, "quantity": 2}], "paid": true}

The committee of the European Parliament voted on Tuesday, by 31 to 12 with four abstentions, to \
delay the regulation until the end of next year. Critics say that small companies need more time; \
supporters of the law answer that the same argument was made three years ago. La séance est levée. \
Am nächsten Morgen regnete es in Berlin, und die Züge fuhren mit Verspätung.

1. Heat the oven to 200 degrees. 2. Mix the flour, a pinch of salt and the cold butter. 3. Add two \
spoons of water and let the dough rest for thirty minutes. 4. Bake until golden, then serve warm.
"""


@dataclass(frozen=True, slots=True)
class FormatChoice:
    """A model spec, with the chosen formats if there are any, and the reason."""

    spec: ModelSpec
    why: str


def choose_formats(folder: Path, spec: ModelSpec, tokenizer: Path) -> FormatChoice:
    """Return the spec with a format for each matrix, and the profile for the rounding of its int4.

    `tokenizer` is the tokenizer's folder; without one the text is random tokens. If no profile can
    be measured, the spec is unchanged: one format for all matrices.
    """
    refusal = refusal_reason(folder, spec)
    if refusal:
        return FormatChoice(spec, refusal)
    cache = default_folder()
    if cache is None:
        return FormatChoice(spec, "plain: there is no cache folder for a profile")
    try:
        path = profile_path(folder, tokenizer, cache)
        profile = cached_profile(path)
        if profile is None:
            write_profile(path, measure_profile(folder, spec, tokenizer))
            profile = read_profile(path)
    except (HeadwayError, OSError) as error:
        return FormatChoice(spec, f"plain: no profile was measured ({error})")
    if not all(isfinite(loss) for one in profile.values() for loss in one.losses.values()):
        return FormatChoice(
            spec, "plain: the model's numbers are not finite on the text it is measured on"
        )
    allocation = allocate(spec, profile)
    formats = tuple((profile[name].place, choice.format) for name, choice in allocation.items())
    kl = sum(choice.kl for choice in allocation.values())
    bits = (
        8 * sum(c.num_bytes for c in allocation.values()) / sum(map(num_weights, profile.values()))
    )
    why = f"measured: {bits:.2f} bits a weight in layers, KL of about {kl:.3f} nats a token"
    return FormatChoice(replace(spec, formats=formats, profile=str(path)), why)


def refusal_reason(folder: Path, spec: ModelSpec) -> str:
    """Return why no profile can be measured for this model; "" if one can."""
    if spec.formats or is_gguf(folder):
        return "plain: the rest of a quantized checkpoint has one format"
    if spec.experts is not None:
        return "plain: a short text visits few experts, which are not measured"
    return ""


def cached_profile(path: Path) -> dict[str, MatrixProfile] | None:
    """Return the profile in the cache; None if it is missing or unreadable."""
    if not path.is_file():
        return None
    try:
        return read_profile(path)
    except CheckpointError as error:
        log.warning("measuring again: %s", error)
        return None


def profile_path(folder: Path, tokenizer: Path, cache: Path) -> Path:
    """Return the cache path of this model's profile with this tokenizer; raises OSError."""
    cache.mkdir(parents=True, exist_ok=True, mode=0o700)
    clock, vocabulary = SystemClock(), tokenizer / TOKENIZER_FILE
    files = [*model_files(folder), *([vocabulary] if vocabulary.is_file() else [])]
    digests = [content_digest(path, cache / "digests", clock) for path in files]
    key = repr((VERSION, CANDIDATES, MAX_TOKENS, digests))
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return cache.parent / "profiles" / f"{name}.safetensors"


def measure_profile(folder: Path, spec: ModelSpec, tokenizer: Path) -> dict[str, MatrixProfile]:
    """Measure a profile, and log progress."""
    model = RowModel(folder)
    tokens = num_tokens(spec)
    log.info("measuring on %d tokens which matrices int4 costs most, once for this model", tokens)
    clock, done = SystemClock(), 0
    began_s = logged_s = clock.now_s()

    def advance() -> None:
        nonlocal done, logged_s
        done += 1
        now_s, total = clock.now_s(), 2 * spec.num_layers
        if now_s - logged_s > 10:
            logged_s = now_s
            rest_s = (now_s - began_s) / done * (total - done)
            log.info("measured %d of %d, some %.0f s to go", done, total, rest_s)

    profile = measure(model, text_rows(spec, tokenizer, tokens), CANDIDATES, advance)
    log.info("measured in %.1f s", clock.now_s() - began_s)
    return profile


def num_tokens(spec: ModelSpec) -> int:
    """Return the number of tokens that MAX_FLOPS allows."""
    allowed = int(MAX_FLOPS / (FLOPS_PER_PARAMETER * spec.num_parameters))
    return max(MIN_TOKENS, min(allowed, MAX_TOKENS, spec.max_len))


def text_rows(spec: ModelSpec, tokenizer: Path, tokens: int) -> list[list[int]]:
    """Return rows of up to MAX_ROW_TOKENS tokens, of TEXT or random."""
    token_ids: list[int] = []
    try:
        token_ids = Tokenizer(tokenizer).encode(TEXT)[:tokens]
    except HeadwayError as error:
        log.warning("measuring on random tokens: %s", error)
    token_ids = [token for token in token_ids if token < spec.vocab_size]
    if len(token_ids) < MIN_TOKENS:
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randint(spec.vocab_size, (tokens,), generator=generator).tolist()
    length = min(MAX_ROW_TOKENS, spec.max_len)
    return [token_ids[begin : begin + length] for begin in range(0, len(token_ids), length)]


def allocate(spec: ModelSpec, profile: Mapping[str, MatrixProfile]) -> Mapping[str, FormatOption]:
    """Return the format of each matrix that minimizes predicted KL within the bytes of Q4_K_M."""
    choices = {
        name: [
            FormatOption(format=format, kl=loss, num_bytes=format.num_bytes(*one.shape))
            for format, loss in one.losses.items()
        ]
        for name, one in profile.items()
    }
    cheapest = sum(min(choice.num_bytes for choice in each) for each in choices.values())
    parts = [(one.module, one.part, one.shape) for one in profile.values()]
    budget = max(q4_k_m_budget(spec, parts), cheapest)
    allocation = solve(choices, value=kl_of, cost=lambda choice: choice.num_bytes, budget=budget)
    return allocation.chosen


def num_weights(one: MatrixProfile) -> int:
    """Return the number of weights of a matrix."""
    return one.shape[0] * one.shape[1]
