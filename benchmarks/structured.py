"""What structured output costs: `python benchmarks/structured.py [FOLDER] [--schemas FILE]`.

First mask: from asking for a grammar to having it compiled with the mask of its first token, for
each schema of FILE (JSON lines with `data.schema`), new and from the cache; the vocabulary is
loaded before. Step: decode steps of 16 streams with a schema against 16 free ones, alternating, the
same lengths; p50 of whole steps, of the masks, and of what a step waited for them. Milliseconds.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from headway.assemble import assemble, make_grammars
from headway.cli.common import model_folder
from headway.config.options import EngineOptions
from headway.core import grammar as grammars
from headway.core.grammar import Grammar
from headway.core.records import StepRecord
from headway.core.request import Request, SamplingParams
from headway.engine.engine import Engine
from headway.engine.grammar.grammars import Grammars
from headway.planning import plan_settings

SCHEMAS = Path(__file__).parents[2] / "shared" / "data" / "eval" / "jsonschema"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 10_000}
"""An answer that nothing but its length ends."""


def percentile(values: list[float], share: float) -> float:
    """The value that `share` of `values` do not exceed."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def table(rows: list[tuple[str, list[float]]]) -> None:
    """Print p50, p99 and the largest of each, in ms."""
    print(f"{'':34} {'count':>6} {'p50':>9} {'p99':>9} {'max':>9}")
    for name, seconds in rows:
        if seconds:
            figures = (percentile(seconds, 0.5), percentile(seconds, 0.99), max(seconds))
            shown = " ".join(f"{1000 * value:9.3f}" for value in figures)
            print(f"{name:34} {len(seconds):6} {shown}")


# ── first mask ──────────────────────────────────────────────────────────────────────────────


def first_masks(folder: Path, options: EngineOptions, schemas: list[object]) -> None:
    """Compile each schema twice; the second time it is in the cache."""
    spec, settings, _, _ = plan_settings(folder, options)
    made = make_grammars(folder, options, spec, settings)
    if made is None:
        sys.exit(f"{folder} has no tokenizer")
    wait_for(made, grammars.regex("warm", "benchmark"))
    new, again, refused = [], [], []
    for schema in schemas:
        rule = grammars.json_schema(schema, "schema")
        seconds, accepted = wait_for(made, rule)
        (new if accepted else refused).append(seconds)
        if accepted:
            again.append(wait_for(made, rule)[0])
    made.close()
    print(f"first mask, {len(schemas)} schemas, {spec.vocab_size} tokens of vocabulary, ms")
    table([("new", new), ("from the cache", again), ("refused", refused)])


def wait_for(made: Grammars, rule: Grammar) -> tuple[float, bool]:
    """Seconds until `rule` is compiled or refused, and whether it is compiled."""
    started_s = time.perf_counter()
    if made.compile(1, rule) is not None:
        return time.perf_counter() - started_s, True
    made.wait()
    ((_, outcome),) = made.ready()
    return time.perf_counter() - started_s, not isinstance(outcome, Exception)


# ── steps ───────────────────────────────────────────────────────────────────────────────────


@dataclass
class Steps:
    """Seconds of decode steps in which all streams ran."""

    whole: list[float] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)

    def take(self, record: StepRecord) -> None:
        self.whole.append(record.duration_s)
        self.masks.append(record.mask_s)
        self.waited.append(record.mask_wait_s)
        self.sampling.append(record.sample_s)


def decode(
    engine: Engine, num_streams: int, tokens: int, rule: Grammar | None, into: Steps
) -> None:
    """Run `num_streams` answers of `tokens` tokens."""
    sampling = SamplingParams(
        temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True, grammar=rule
    )
    for number in range(num_streams):
        engine.add(Request(number + 1, [5 + number] * 32, sampling))
    while engine.wait_for_work():
        _, record = engine.step()
        if record.num_decode_tokens == record.num_tokens == num_streams:
            into.take(record)
        assert not engine.drain_refusals()


def steps(folder: Path, options: EngineOptions, num_streams: int, tokens: int, rounds: int) -> None:
    """Alternate free and structured rounds; the first of each warms up."""
    engine = assemble(folder, options).engine
    rule = grammars.json_schema(PEOPLE, "schema")
    free, ruled = Steps(), Steps()
    for number in range(rounds + 1):
        one, other = (Steps(), Steps()) if number == 0 else (free, ruled)
        decode(engine, num_streams, tokens, None, one)
        decode(engine, num_streams, tokens, rule, other)
    print(f"\ndecode steps of {num_streams} streams, {folder.name}, ms")
    table(
        [
            ("free", free.whole),
            ("structured", ruled.whole),
            ("masks, beside the model", ruled.masks),
            ("waited for masks", ruled.waited),
            ("sampling, free", free.sampling),
            ("sampling, structured", ruled.sampling),
        ]
    )
    before, after = percentile(free.whole, 0.5), percentile(ruled.whole, 0.5)
    print(f"structure adds {after / before - 1:+.1%} to the p50 of a step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="model folder; the embedded model by default")
    parser.add_argument("--schemas", type=Path, default=SCHEMAS / "schemas_dev_300.jsonl")
    parser.add_argument("--tokenizer", default="", help="folder of another tokenizer")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    folder = model_folder(given.folder)
    options = EngineOptions(
        device=given.device, max_num_seqs=given.streams, tokenizer=given.tokenizer or None
    )
    if given.schemas.exists():
        lines = given.schemas.read_text(encoding="utf-8").splitlines()
        schemas = [json.loads(line)["data"]["schema"] for line in lines]
    else:
        print(f"no {given.schemas}; measuring one schema")
        schemas = [PERSON]
    chosen = EngineOptions(device=given.device, tokenizer=given.tokenizer or None)
    first_masks(folder, chosen, schemas)
    steps(folder, options, given.streams, given.tokens, given.rounds)


if __name__ == "__main__":
    main()
