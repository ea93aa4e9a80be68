"""Writes the model card, `README.md`, and the loss curve beside it, from what was measured.

It is given the training folder with its logs and evaluations, and the exported folder.
It promises that every figure in the card is read from those files or asked of the model here.
"""

import argparse
import csv
import itertools
import json
import re
from pathlib import Path
from typing import Any

from recipes.tiny.distill import DRAFT, DRAFT_BASE
from recipes.tiny.medusa import FILE
from recipes.tiny.train import BASE, SOURCES, TARGET
from recipes.tiny.tune import SETTLED, TUNED
from safetensors import safe_open

from headway import LLM, SamplingParams
from headway.evals.questions import SkillsReport
from headway.evals.report import read_report
from headway.evals.skills.suite import DEMO, LEVELS, SKILLS
from headway.evals.statistics import wilson
from headway.evals.texts import TextReport
from headway.measure.chart import Panel, chart

WHAT = {
    TARGET: """\
A chat model of {parameters:,} parameters, small enough to travel inside Headway, so that a chat
answers in the first minute without any download, and quality has a number on every machine. It was
trained from nothing by `recipes/tiny` in {minutes:.0f} minutes of two CPU cores or less by its median
pace ({wall:.0f} of wall time, for the cores did other work too); no weights of others are in it. Its tuned weights are mixed with those of the first stage
before and after they settle (`recipes/tiny/README.md`).""",
    DRAFT: """\
A draft for `headway-tiny`: {parameters:,} parameters with the same tokenizer, distilled by `recipes/tiny`
in {minutes:.0f} minutes of two CPU cores or less by its median pace ({wall:.0f} of wall time, for the cores did
other work too) from the two models that `headway-tiny` is a mixture of: from `{base}`, then from
`{settled}`, which has the larger share. It proposes tokens that the target checks; alone it is a weaker model of
the same kind. No weights of others are in it.""",
}
STAGES = {
    TARGET: {BASE: "first", TUNED: "tuned", TARGET: "settled"},
    DRAFT: {DRAFT_BASE: "first", DRAFT: "tuned"},
}
"""The folders of a model's stages, in order, and what the card calls them."""
LOSS = {
    TARGET: "cross-entropy of every book token and of the answers of chats",
    DRAFT: "divergence from the teacher's distribution, on the same tokens",
}

CARD = """\
---
language: en
library_name: transformers
license: apache-2.0
pipeline_tag: text-generation
---

# {name}

{what}

| what | how |
| --- | --- |
| architecture | Llama: hidden {hidden_size}, {num_hidden_layers} layers, {num_attention_heads} heads \
over {num_key_value_heads} key head of {head_dim}, feed-forward {intermediate_size}, tied |
| vocabulary | {vocab_size} entries of byte-level BPE, each digit on its own |
| format | ChatML with Hermes tool calls; an answer ends with `<|im_end|>`; nothing before the text |
{stages}
| optimizer | Muon for the layers' matrices, AdamW for the rest |
| loss | {loss}: books {books:.3f}, chats {chats:.3f} nats (weighted mean, last 200 steps) |
| unseen books | {bits_per_byte:.3f} bits per byte at the end of the last stage |
{heads}
![loss in the last stage](loss.svg)

## Data

Books: public-domain children's and adventure books of Project Gutenberg, headers stripped.
Chats: generated from a seed by the skills in `headway/evals/skills`, so nobody's conversation is
in them; after the first stage also chats with tools and schemas as agent frameworks write them. A
quarter to a sixth of the tokens are books.

## What it can do

Right answers of each skill by level with 95% intervals, asked by `headway eval` of held-out
questions (seed {test_seed}), answered greedily; an answer counts only when the whole of it is right. The
levels are in `docs/skills.md`. A held-out text may ask in other words what training asked too:
"What is 2 + 3?" was never seen, "How much is 2 + 3?" may have been.

| skill | level 1 | level 2 | level 3 |
| --- | --- | --- | --- |
{skills}

{texts}

Held-out chats as agent frameworks write them, asked by `python -m recipes.tiny.ask`: no part of the suite.

| chat | right |
| --- | --- |
{varied}

Prompts to try, all of them kept out of training:

| prompt | reply | |
| --- | --- | --- |
{demo}

## Limits

It knows these skills and little else: other questions get a wrong answer or a polite refusal, and
only the refusals of its training are dependable. Words outside its lists may come back changed, and
tools or schemas of several fields filled in wrongly. Its
prose has the sound of old books and no thread. Beyond {long_length} tokens it was not trained. It
must not be relied on for anything; it is here to show the engine at work and to have its answers
checked.

## Licence

The weights and the generated chats are under the Apache License 2.0, as Headway is; the books are
in the public domain.
"""


def last_losses(rows: list[dict[str, str]], num_rows: int = 20) -> dict[str, float]:
    """The means over the end of the log, one line of which is ten steps."""
    end = rows[-num_rows:]
    return {name: sum(float(r[f"{name}_loss"]) for r in end) / len(end) for name in SOURCES}


def schedule(peak_lr: float, sittings: list[list[int]]) -> str:
    """Names every change of plan: [[0, 5600], [4000, 4600]] was cut short at step 4000."""
    changes = [
        f"; planned anew at step {now[0]:,} to end at {now[1]:,}"
        for before, now in itertools.pairwise(sittings)
        if now[1] != before[1]
    ]
    return f"peak {peak_lr}, warm-up and cosine over {sittings[0][1]:,} steps" + "".join(changes)


def curves(name: str, rows: list[dict[str, str]]) -> str:
    """The losses and the bits per byte of unseen books over the tokens seen, as SVG."""
    millions = [float(row["tokens"]) / 1e6 for row in rows]
    unseen = [
        (tokens, float(row["unseen_bits_per_byte"]))
        for tokens, row in zip(millions, rows, strict=True)
        if row["unseen_bits_per_byte"]
    ]
    losses = {
        source: list(zip(millions, (float(row[f"{source}_loss"]) for row in rows), strict=True))
        for source in SOURCES
    }
    return chart(
        [
            Panel(title=f"{name}: loss", x="million tokens", y="nats a token", lines=losses),
            Panel(
                title="unseen books",
                x="million tokens",
                y="bits per byte",
                lines={"unseen": unseen},
            ),
        ]
    )


def demo_rows(model: Path) -> str:
    """The replies to what a newcomer may ask, with their marks."""
    llm = LLM(model, dtype="float32")
    chats = [[{"role": "user", "content": prompt}] for prompt in DEMO]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)
    rows = []
    for (prompt, pattern), output in zip(DEMO.items(), outputs, strict=True):
        reply = output.outputs[0].text.strip()
        mark = "right" if re.fullmatch(pattern, reply, re.DOTALL) else "wrong"
        rows.append(f"| {line(prompt)} | {line(reply)} | {mark} |")
    return "\n".join(rows)


def line(text: str) -> str:
    """A text in a cell of a table."""
    return text.replace("\n", "<br>").replace("|", "\\|")


def num_parameters(path: Path) -> int:
    with safe_open(path, "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118


def heads_row(path: Path) -> str:
    """One line of the Medusa heads, where the model has some."""
    if not path.exists():
        return ""
    with safe_open(path, "pt") as file:
        told = file.metadata()
    right = ", ".join(told["right"].split())
    return (
        f"| Medusa heads | {told['medusa_num_heads']} in `{path.name}`, of {num_parameters(path):,} "
        f"parameters, for `--speculative-method medusa`: {int(told['steps']):,} steps on "
        f"{int(told['answers']):,} of its own greedy answers; the likeliest token of each is right "
        f"at {right} of the positions of unseen answers |\n"
    )


def skill_rows(skills: SkillsReport) -> str:
    """One line a skill: "100 of 100 (96–100%)" for each level."""
    rows = []
    for skill in SKILLS:
        cells = []
        for level in LEVELS:
            share = skills.find(skill, level)
            assert share is not None
            span = f"{100 * share.low:.0f}–{100 * share.high:.0f}%"
            cells.append(f"{share.right} of {share.total} ({span})")
        rows.append(f"| {skill} | {' | '.join(cells)} |")
    return "\n".join(rows)


def text_rows(text: TextReport) -> str:
    """One line a figure of the suite `text`, with its interval."""
    rows = [
        f"| {f.name} | {f.value:.3f} {f.unit} | {f.low:.3f} to {f.high:.3f} | {f.items:,} |"
        for f in text.figures
    ]
    head = ["| text | figure | 95% interval | passages |", "| --- | --- | --- | --- |"]
    return "\n".join([*head, *rows])


CHATS = {
    "called": "one of some tools is to be called",
    "uncalled": "none of the tools helps",
    "instructed": "a plain question after a system message",
    "answered": "a tool's result is told, or the next tool called",
    "unseen": "JSON without a schema in the prompt, the values right",
    "shown": "JSON for a schema in the prompt",
    "final": "a structured answer as a tool's arguments",
    "far": "up to 12,000 characters before the question",
}


def varied_rows(found: dict[str, list[int]]) -> str:
    """One line a kind of chat: "92 of 100 (85–96%)"."""
    rows = []
    for kind, (right, asked) in found.items():
        low, high = wilson(right, asked)
        rows.append(f"| {CHATS[kind]} | {right} of {asked} ({100 * low:.0f}–{100 * high:.0f}%) |")
    return "\n".join(rows)


def stage_row(label: str, training: dict[str, Any]) -> str:
    """One stage: how many tokens it saw, in rows of which lengths, at which rates."""
    plan = training["plan"]
    tokens = plan["steps"] * plan["step_tokens"]
    lengths = f"{plan['length']}, one step in {plan['long_every']} of {plan['long_length']:,}"
    planned = schedule(plan["peak_lr"], training["sittings"])
    steps = f"{plan['steps']:,} steps of {plan['step_tokens']:,} tokens, {tokens:,} in all"
    return f"| {label} | {steps}; rows of {lengths}; {planned} |"


def card(folder: Path, model: Path) -> str:
    """The card of one model; UsageError when its evaluation is missing."""
    stages = {
        label: json.loads((folder.parent / name / "training.json").read_text())
        for name, label in STAGES[model.name].items()
    }
    training = stages[STAGES[model.name][model.name]]
    evals = read_report(str(folder / "evals.json"))
    assert evals.skills is not None and evals.text is not None, "evaluate with --suite all"
    with (folder / "loss.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    (model / "loss.svg").write_text(curves(model.name, rows))
    told = {
        **training["plan"],
        **training["shape"],
        **last_losses(rows),
        "parameters": num_parameters(model / "model.safetensors"),
        "minutes": sum(stage["minutes"][0] for stage in stages.values()),
        "wall": sum(stage["minutes"][1] for stage in stages.values()),
        "base": BASE,
        "settled": SETTLED,
    }
    return CARD.format(
        **told,
        name=model.name,
        what=WHAT[model.name].format(**told),
        stages="\n".join(stage_row(label, stage) for label, stage in stages.items()),
        loss=LOSS[model.name],
        bits_per_byte=float(rows[-1]["unseen_bits_per_byte"]),
        test_seed=evals.skills.seed,
        skills=skill_rows(evals.skills),
        texts=text_rows(evals.text),
        varied=varied_rows(json.loads((folder / "varied.json").read_text())),
        demo=demo_rows(model),
        heads=heads_row(model / FILE),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    args = parser.parse_args()
    (args.model / "README.md").write_text(card(args.out / args.model.name, args.model))


if __name__ == "__main__":
    main()
