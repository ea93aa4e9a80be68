"""How much of a model can go without loss: nine tenths, says the lottery ticket.

    python benchmarks/claims/pruned_skills.py [FOLDER] [--runs 9]

Single weights become zero (`headway prune --sparsity`, by SparseGPT, no training afterwards), and
the model answers the same held-out questions as before; a loss is sure where exact McNemar, one
side, says so at 5%. The ticket's authors train the rest again, from its first weights: that is not
done here, nor is `headway distill`, which gives part of it back (docs/prune.md). Ten minutes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import script

from common import markdown
from headway.claims.caching import lines
from headway.claims.claim import Claim, Figure, Finding, Promise
from headway.claims.subject import Subject
from headway.evals.questions import Item, ask
from headway.evals.skills.suite import TEST_SEED
from headway.evals.statistics import mcnemar_worse, wilson
from headway.whole_model import FolderModel

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
QUESTIONS = 20
SURE = 0.05


def answered(folder: Path) -> list[Item]:
    """All skills at all levels."""
    model = FolderModel(folder, kv_memory="256MiB", dtype="bfloat16")
    return ask(model, questions=QUESTIONS, seed=TEST_SEED).items


def pruned(folder: Path, out: Path, share: float) -> Path:
    """The folder with so many of its weights zero."""
    command = [sys.executable, "-m", "headway.cli.main", "prune", str(folder), str(out)]
    subprocess.run([*command, f"--sparsity={share}"], check=True, stdout=subprocess.DEVNULL)
    return out


def measure(subject: Subject) -> Finding:
    """The largest share of zeros, up from the smallest, whose loss is not sure."""
    folder, _ = subject.model()
    whole = answered(folder)
    rows, kept, curve = [], 0.0, [100 * share_right(whole)]
    sure = False
    with tempfile.TemporaryDirectory(prefix="headway-claims-") as name:
        for share in SHARES:
            subject.watch(f"{share:.0%} of the weights are zero")
            items = answered(pruned(folder, Path(name) / f"{share}", share))
            pairs = [(old.right, new.right) for old, new in zip(whole, items, strict=True)]
            p = mcnemar_worse(pairs.count((True, False)), pairs.count((False, True)))
            low, high = wilson(sum(new for _, new in pairs), len(pairs))
            curve.append(100 * share_right(items))
            rows.append([f"{share:.0%}", f"{curve[-1]:.1f}%",
                         f"{100 * low:.1f} … {100 * high:.1f}", f"{p:.2g}"])  # fmt: skip
            sure = sure or p < SURE
            kept = kept if sure else share
    print(markdown(["zeros", "right", "95%", "p, it is worse"], rows))
    return Finding(
        figures=[
            Figure(name="of the weights are zero without a sure loss", value=100 * kept, unit="%"),
            Figure(name="right before", value=curve[0], unit="%"),
            Figure(name="right with 90% zeros", value=curve[-1], unit="%"),
        ],
        promise=Promise(low=90.0, none=20.0),
        why="A model of three million parameters that was trained for what it is asked has little "
        "to spare, and nothing was trained afterwards; the ticket was found by training anew.",
        picture=lines(
            [0, *(round(100 * share) for share in SHARES)],
            {"right": curve},
            "% of weights that are zero",
            "% right",
        ),
    )


def share_right(items: list[Item]) -> float:
    """Of all questions."""
    return float(np.mean([item.right for item in items]))


CLAIM = Claim(
    key="lottery",
    family="Pruning",
    says="Nine tenths of the weights can go without loss.",
    source="Frankle and Carbin, The Lottery Ticket Hypothesis (2019)",
    measure=measure,
    needs="folder",
    how="headway prune at seven shares, the same held-out questions as before.",
)

if __name__ == "__main__":
    script.ask(more=(CLAIM,))
