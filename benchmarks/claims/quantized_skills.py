"""Where quality goes first as bits go: by skill and level, with intervals.

    python benchmarks/claims/quantized_skills.py [FOLDER]

Classification and extraction are said to bear fewer bits than arithmetic and recall. The model
answers the same held-out questions in 16 bits, in int8, and in int4 by groups of 32 and of 128 with
the head in int4; a loss is tested pair by pair (McNemar). Of headway-tiny five minutes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import script

from common import markdown
from headway.evals.questions import Item
from headway.evals.skills.suite import SKILLS
from literature.claim import Claim, Finding, Promise, bootstrap
from literature.subject import Subject

WAYS: dict[str, dict[str, Any]] = {
    "16 bits": {},
    "int8": {"quantization": "int8"},
    "int4 by 32": {"quantization": "int4", "quantization_group": 32},
    "int4 by 128, head in int4": {
        "quantization": "int4",
        "quantization_group": 128,
        "quantization_head": "int4",
    },
}
FIRM, FRAIL = ("classify", "extract"), ("arithmetic", "recall")
QUESTIONS = 30


def losses(before: Sequence[Item], after: Sequence[Item], skills: Sequence[str]) -> list[float]:
    """Of each question of these skills, 1 where it was right and is wrong, -1 the other way."""
    return [
        float(old.right) - float(new.right)
        for old, new in zip(before, after, strict=True)
        if old.skill in skills
    ]


def measure(subject: Subject) -> Finding:
    """The loss of the frail skills over that of the firm ones, in points, with int4."""
    folder, _ = subject.model()
    found = {}
    for way, options in WAYS.items():
        subject.watch(f"questions in {way}")
        found[way] = script.answered(folder, QUESTIONS, **options)
    plain, last = found["16 bits"], list(WAYS)[-1]
    rows, tables = [], []
    for way in list(WAYS)[1:]:
        firm, frail = (losses(plain, found[way], skills) for skills in (FIRM, FRAIL))
        rows.append(
            bootstrap(
                f"{way}: points lost by {' and '.join(FRAIL)} beyond {' and '.join(FIRM)}",
                "",
                [frail, firm],
                lambda p: 100 * float(np.mean(p[0]) - np.mean(p[1])),
            )
        )
    for skill in SKILLS:
        for level in (1, 2, 3):
            tables.append(line(found, skill, level))
    print(markdown(["skill", "level", *WAYS, f"p, {last} is worse"], tables))
    return Finding(
        figures=[rows[-1], *rows[:-1]],
        promise=Promise(low=3.0, none=0.0),
        why=f"{QUESTIONS} questions of each skill and level. What a format loses is told by skill "
        "in the table; a skill that the model hardly has can lose nothing.",
    )


def line(found: dict[str, list[Item]], skill: str, level: int) -> list[object]:
    """One skill at one level: shares right with Wilson's interval, and whether int4 is worse."""
    cells: list[object] = [skill, level]
    mine = {
        way: [item for item in items if (item.skill, item.level) == (skill, level)]
        for way, items in found.items()
    }
    worse = 1.0
    for items in mine.values():
        right, low, high, worse = script.beside(mine["16 bits"], items)
        cells.append(f"{right:.0%} ({100 * low:.0f} … {100 * high:.0f})")
    return [*cells, f"{worse:.2g}"]


CLAIM = Claim(
    key="bits-by-skill",
    family="Quantization",
    says="Fewer bits cost arithmetic and recall before classification and extraction.",
    source="common in serving literature",
    measure=measure,
    needs="folder",
    how="The same held-out questions in four formats, pair by pair.",
)

if __name__ == "__main__":
    script.ask(more=(CLAIM,))
