"""How often a document is rightly called used, or not, by the words of an answer.

    python benchmarks/documents_used.py [FOLDER] [--questions 40]

Lookups, extractions and refusals are asked of four documents, of which one has what is asked for:
the others are stories, or texts of other questions of the same kind. Of the right answers it counts
the document that was needed and is called used, and the others that are not; then the same of an
answer that is a whole document, word for word, among stories. About a minute on two cores.
"""

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from common import markdown
from headway.core.embedded import model_folder
from headway.evals.questions import most_tokens
from headway.evals.shortened import SKILLS, parted
from headway.evals.skills.example import Example
from headway.evals.skills.reading import filler
from headway.evals.skills.suite import LEVELS, examples
from headway.evals.statistics import wilson
from headway.telemetry.documents import telling_words, used
from headway.whole_model import FolderModel

AMONG = ("stories", "texts of the same kind")
DOCUMENTS = 4
NO_ANSWER = "does not say"


class Case(NamedTuple):
    """A question beside four documents; `needed` is None where none has the answer."""

    among: str
    skill: str
    example: Example
    before: str
    documents: list[str]
    behind: str
    needed: int | None

    @property
    def chat(self) -> list[dict[str, str]]:
        """All of it in a message."""
        parts = (self.before, *self.documents, self.behind)
        return [{"role": "user", "content": "\n".join(part for part in parts if part)}]


def main() -> int:
    """Ask, and print what was called used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default="headway-tiny")
    parser.add_argument("--questions", type=int, default=40, help="of each skill at each level")
    given = parser.parse_args()
    model = FolderModel(model_folder(given.folder), kv_memory="256MiB", dtype="bfloat16")
    cases = list(cases_of(given.questions))
    counted: dict[tuple[str, str], Counter[str]] = {}
    for skill in SKILLS:
        mine = [case for case in cases if case.skill == skill]
        replies = model.generate([case.chat for case in mine], max_tokens=most_tokens(skill))
        for case, reply in zip(mine, replies, strict=True):
            if reply is not None and case.example.accepts(reply):
                tell(counted.setdefault((case.among, "a right answer"), Counter()), case, reply)
    for case in cases:
        if case.among == AMONG[0] and case.needed is not None:
            whole = counted.setdefault((case.among, "the whole document"), Counter())
            tell(whole, case, case.documents[case.needed])
    rows = [
        [among, says, *(share(count[f"{kind} seen"], count[kind]) for kind in ("needed", "other"))]
        for (among, says), count in counted.items()
    ]
    print(markdown(["among", "the answer is", "needed, called used", "others, not used"], rows))
    return 0


def cases_of(questions: int) -> Iterator[Case]:
    """All questions, among both kinds of documents."""
    for among in AMONG:
        for skill in SKILLS:
            for level in LEVELS:
                rng = random.Random(f"{among} {skill} {level}")
                asked = (e for e in examples(skill, level, 11) if not e.before)
                drawn = [(e, *parted(e, skill)) for e in islice(asked, DOCUMENTS * questions)]
                for i in range(questions):
                    example, before, text, behind = drawn[i]
                    more = drawn[questions + 3 * i : questions + 3 * i + 3]
                    others = [other[2] for other in more]
                    if among == AMONG[0]:
                        others = [filler(rng, rng.randint(80, 250)) for _ in others]
                    place = rng.randrange(DOCUMENTS)
                    documents = [*others[:place], text, *others[place:]]
                    needed = None if NO_ANSWER in example.answer else place
                    yield Case(among, skill, example, before, documents, behind, needed)


def tell(count: Counter[str], case: Case, answer: str) -> None:
    """Count what one answer is said to have used."""
    telling = telling_words(case.documents, [case.before, case.behind])
    for place, is_used in enumerate(used(telling, [answer])):
        kind = "needed" if place == case.needed else "other"
        count[kind] += 1
        count[f"{kind} seen"] += is_used == (place == case.needed)


def share(some: int, all_: int) -> str:
    """Of so many, with Wilson's 95%."""
    low, high = wilson(some, all_)
    return f"{some} of {all_}, {some / max(all_, 1):.0%} ({100 * low:.0f} to {100 * high:.0f})"


if __name__ == "__main__":
    sys.exit(main())
