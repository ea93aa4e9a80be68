"""Speed and acceptance of draft tokens: `python benchmarks/speculation.py FOLDER --draft DRAFT`.

One engine without speculation and one with it answer the same requests in turns, in batches of
`--batches`. Kinds of requests: held-out chats of the skills, greedy; copies alone; texts sampled at
temperature 1; with a grammar JSON by a schema, forced tool calls, and records of a schema with long
names; for a published model questions of Spec-Bench and functions of HumanEval. The engine with
speculation runs once for each of `--speculative-method`, and for each of `--fixed` with so many
draft tokens of `auto` in each step whatever they cost. Widen a model of few parameters first
(`widen.py`): a step of it takes as long as Python does.

The table has tokens a second of decoding (steps with a prompt are left out), the median of
`--repeats`, and its ratio to speculation off; tokens a step and sequence; the acceptance rate; the
share of forced tokens; the share of time that drafting took, behind prompts as well; the time of
steps with prompts, times that of speculation off; and whether the tokens were the same. Each repeat
has prompts of its own, the same for all methods, and no prefix cache; proposers forget what they
learned before the next row.
"""

import argparse
import gzip
import json
import os
import statistics
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from common import use_instruction_set
from headway import LLM
from headway.config.speculation_config import METHODS
from headway.core import grammar as grammars
from headway.core.grammar import Grammar
from headway.core.request import Request, SamplingParams
from headway.engine.speculation.adaptive import AdaptiveSpeculator
from headway.engine.speculation.backoff import NoBackoff
from headway.evals.skills.example import Example
from headway.evals.skills.suite import LEVELS, SKILLS, TEST_SEED, examples
from headway.frontend.text.tools.written import OfferedTool, calls_grammar
from headway.perf.model import Prior, StepModel
from headway.server.models import answer_formats

ROOT = Path(__file__).resolve().parents[1]
MAX_TOKENS = 120
GUESSES_PAY = Prior(weights_s=1.0, token_s=1e-9, any_sampled_s=1e-9, sampled_s=1e-9, read_s=1e-9)
"""A machine on which a step takes a second whatever it does: there all guesses are verified."""
KINDS = {"chats": tuple(SKILLS), "copies": ("copy",), "sampled": ("story", "tool", "recall")}
"""Name → skills; the last is drawn at temperature 1."""
BY_GRAMMAR = {"json": ("extract",), "calls": ("tool",), "records": ("extract",)}
"""The same where a grammar rules the answer."""
SPEC_BENCH = ("conversation", "summarization", "rag", "math_reasoning")
"""Categories of Spec-Bench (Xia et al. 2024); `conversation` is its part of MT-Bench."""
CONVERSATION = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem")
CHOICES = [*KINDS, *BY_GRAMMAR, *SPEC_BENCH, "code"]
DATA = Path(os.environ.get("HEADWAY_SHARED") or ROOT / ".." / "shared") / "data"
NAMED = {"type": "string", "maxLength": 12}
RECORD = {
    "type": "object",
    "properties": {
        "customer_name": NAMED,
        "favourite_colour": {"enum": ["red", "green", "blue", "grey", "white", "black"]},
        "city_of_residence": NAMED,
        "number_of_children": {"type": "integer", "minimum": 0, "maximum": 9},
        "is_returning_customer": {"type": "boolean"},
    },
    "additionalProperties": False,
}
RECORD["required"] = list(RECORD["properties"])


@dataclass(slots=True)
class Run:
    """What one batch of requests took, counted over the steps that only decode, and what a drafter
    took in those that end a prompt."""

    tokens: int = 0
    rows: int = 0
    seconds: float = 0.0
    guessed: int = 0
    kept: int = 0
    forced: int = 0
    draft_s: float = 0.0
    prompts_s: float = 0.0
    """Of the steps that compute prompts."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


Prompt = tuple[list[int], Grammar | None]


def grammar_of(llm: LLM, kind: str, example: Example) -> Grammar | None:
    """What the answer must be: what the question shows as its schema or tools, or `RECORD`."""
    if kind == "records":
        return grammars.json_schema(RECORD, "schema")
    if kind == "json":
        begin = example.prompt.index("{")
        return grammars.json_schema(
            json.JSONDecoder().raw_decode(example.prompt, begin)[0], "schema"
        )
    if kind != "calls":
        return None
    found, _ = answer_formats(llm.needs_tokenizer(), "auto")
    assert found is not None
    lines = [line for line in example.system.splitlines() if line.startswith('{"type"')]
    functions = [json.loads(line)["function"] for line in lines]
    offered = [OfferedTool(name=f["name"], schema=f["parameters"]) for f in functions]
    text = calls_grammar(found.written, offered, forced=True, several=False)
    return Grammar(kind="structural", text=text, param="tools")


def skill_prompts(llm: LLM, kind: str, most: int) -> list[Prompt]:
    """At least `most` held-out chats of a kind's skills, each with its grammar."""
    skills = (KINDS | BY_GRAMMAR)[kind]
    each = -(-most // (len(skills) * len(LEVELS)))
    found: list[Prompt] = []
    for skill in skills:
        for level in LEVELS:
            for example in islice(examples(skill, level, TEST_SEED), each):
                ids = llm.needs_tokenizer().chat_ids(example.messages)
                if len(ids) + MAX_TOKENS < llm.settings.max_model_len:
                    found.append((ids, grammar_of(llm, kind, example)))
    return found


def published_questions(kind: str) -> list[str]:
    """First turns of a category of Spec-Bench, or functions of HumanEval to complete."""
    if kind == "code":
        with gzip.open(DATA / "eval" / "humaneval" / "HumanEval.jsonl.gz", "rt") as opened:
            functions = [json.loads(line)["prompt"] for line in opened]
        return [f"Complete this function:\n\n```python\n{text}```" for text in functions]
    categories = CONVERSATION if kind == "conversation" else (kind,)
    lines = (DATA / "eval" / "spec-bench" / "question.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["turns"][0] for row in rows if row["category"] in categories]


def question_prompts(llm: LLM, kind: str, most: int) -> list[Prompt]:
    """At most `most` questions that fit into the context, as chats."""
    tokenizer = llm.needs_tokenizer()
    chats = ([{"role": "user", "content": text}] for text in published_questions(kind))
    prompts = (tokenizer.chat_ids(messages) for messages in chats)
    fitting = (ids for ids in prompts if len(ids) + MAX_TOKENS < llm.settings.max_model_len)
    return [(ids, None) for ids in islice(fitting, most)]


def make_prompts(llm: LLM, kind: str, repeats: int, most: int) -> list[list[Prompt]]:
    """For each repeat up to `most` prompts that no other has, each with its grammar."""
    published = kind == "code" or kind in SPEC_BENCH
    found = (question_prompts if published else skill_prompts)(llm, kind, repeats * most)
    spread = [each for start in range(repeats) for each in found[start::repeats]]
    size = len(spread) // repeats
    return [spread[at * size : (at + 1) * size][:most] for at in range(repeats)]


def requests_of(prompts: list[Prompt], first: int, temperature: float) -> list[Request]:
    """Prompts as requests, numbered from `first` on."""
    return [
        Request(
            first + at,
            token_ids,
            SamplingParams(
                temperature=temperature, seed=at, max_tokens=MAX_TOKENS, grammar=grammar
            ),
        )
        for at, (token_ids, grammar) in enumerate(prompts)
    ]


def answer(llm: LLM, requests: list[Request]) -> tuple[Run, dict[tuple[int, int], list[int]]]:
    """Run them together; what it took, and the tokens of each."""
    engine, run = llm.engine, Run()
    answers: dict[tuple[int, int], list[int]] = {}
    for request in requests:
        engine.add(request)
    engine.flush()
    while engine.wait_for_work():
        updates, record = engine.step()
        for update in updates:
            answers.setdefault((update.request_id, update.index), []).extend(update.token_ids)
        if record.num_prefill_tokens:
            run.seconds += record.draft_s
            run.draft_s += record.draft_s
            run.prompts_s += record.duration_s
        if record.num_tokens and not record.num_prefill_tokens:
            run.tokens += sum(len(update.token_ids) for update in updates)
            run.rows += record.num_sampled - record.num_drafts
            run.seconds += record.duration_s
            run.guessed += record.num_drafts
            run.kept += record.num_kept_drafts
            run.forced += record.num_forced
            run.draft_s += record.draft_s
    return run, answers


def speculators_of(
    llm: LLM, names: list[str], fixed: list[int]
) -> dict[str, AdaptiveSpeculator | None]:
    """By name one speculator each, with a memory of its own; "off" has none."""
    config, cost = llm.settings.speculation, llm.engine.cost
    found: dict[str, AdaptiveSpeculator | None] = {"off": None}
    for name in names:
        sources = config.sources
        if name != "auto":
            sources = tuple(METHODS[method] for method in name.split(","))
        found[name] = AdaptiveSpeculator(replace(config, sources=sources), cost)
    for count in fixed:
        always = replace(config, num_speculative_tokens=count)
        found[f"always {count}"] = fixed = AdaptiveSpeculator(always, StepModel(GUESSES_PAY))
        fixed.backoff = NoBackoff()
    return found


def given_options() -> argparse.Namespace:
    """What is measured, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--draft", type=Path, help="drafting model, for draft and auto")
    parser.add_argument("--speculative-method", nargs="+", default=["draft", "ngram", "auto"])
    parser.add_argument("--fixed", type=int, nargs="+", default=[], help="guesses in each step")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=CHOICES)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--num-speculative-tokens", type=int, default=8)
    parser.add_argument("--draft-vocab-size", type=int, help="tokens that a drafter guesses among")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=6, help="of each repeat at batch 1")
    parser.add_argument("--instruction-set", default="", help="avx2, avx512 …; the best if not")
    return parser.parse_args()


def main() -> None:
    """Measure and print the table."""
    chosen = given_options()
    use_instruction_set(chosen.instruction_set)

    given = {"max_model_len": chosen.max_model_len, "max_num_seqs": max(chosen.batches)}
    given |= {"kv_memory": "512MiB"}
    given |= {"quantization": chosen.quantization, "prefix_cache": False}
    drafting = {
        "draft_vocab_size": chosen.draft_vocab_size,
        "num_speculative_tokens": chosen.num_speculative_tokens,
    }
    drafting |= {"draft_model": str(chosen.draft)} if chosen.draft else {}
    plain = LLM(chosen.folder, **given)
    guessing = LLM(chosen.folder, speculative_method="auto", **drafting, **given)
    heads = "batch,kind,source,tok/s,x off,tokens a step,kept,forced,drafting,prompts,same"
    heads = heads.split(",")
    print("|", " | ".join(heads), "|")
    print("|", " | ".join(["---"] * len(heads)), "|")
    first = 0
    for batch in chosen.batches:
        for kind in chosen.kinds:
            sets = make_prompts(plain, kind, chosen.repeats, max(batch, chosen.requests))
            speculators = speculators_of(guessing, chosen.speculative_method, chosen.fixed)
            runs: dict[str, list[Run]] = {name: [] for name in speculators}
            same = dict.fromkeys(speculators, True)
            for prompts in sets:
                temperature = 1.0 if kind == "sampled" else 0.0
                parts = [prompts[at : at + batch] for at in range(0, len(prompts), batch)]
                expected: dict[tuple[int, int], list[int]] = {}
                for name, speculator in speculators.items():
                    llm = plain if speculator is None else guessing
                    llm.engine.scheduler.drafts.speculator = speculator
                    total, told = Run(), {}
                    for number, part in enumerate(parts):
                        requests = requests_of(part, first + 1000 * number, temperature)
                        run, answers = answer(llm, requests)
                        told |= answers
                        for field in Run.__slots__:
                            setattr(total, field, getattr(total, field) + getattr(run, field))
                    runs[name].append(total)
                    expected = expected or told
                    same[name] = same[name] and told == expected
                first += 100_000
            base = statistics.median(run.rate for run in runs["off"])
            prompts_s = sum(run.prompts_s for run in runs["off"])
            for name, found in runs.items():
                rate = statistics.median(run.rate for run in found)
                whole = {f: sum(getattr(run, f) for run in found) for f in Run.__slots__}
                print(
                    f"| {batch} | {kind} | {name} | {rate:.1f} | {rate / base:.2f} | "
                    f"{whole['tokens'] / max(whole['rows'], 1):.2f} | "
                    f"{whole['kept'] / max(whole['guessed'], 1):.0%} of {whole['guessed']} | "
                    f"{whole['forced'] / max(whole['tokens'], 1):.0%} | "
                    f"{whole['draft_s'] / whole['seconds']:.0%} | "
                    f"{whole['prompts_s'] / prompts_s if prompts_s else 1:.2f} | "
                    f"{'yes' if same[name] else 'NO'} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
