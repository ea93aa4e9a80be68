"""How much of a model can go without loss: nine tenths, says the lottery ticket.

    python benchmarks/claims/pruned_skills.py [FOLDER] [--runs 9]

Single weights become zero (`headway prune --sparsity`, by SparseGPT, no training afterwards), and
the model answers the same held-out questions as before; a loss is sure where exact McNemar, one
side, says so at 5%. The ticket's authors train the rest again, from its first weights: that is not
done here, nor is `headway distill`, which gives part of it back (docs/prune.md). Of headway-tiny
three minutes.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import script

from common import markdown
from literature.caching import lines
from literature.claim import Claim, Figure, Finding, Promise
from literature.subject import Subject

SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
QUESTIONS = 20
SURE = 0.05


def pruned(folder: Path, out: Path, share: float) -> Path:
    """The folder with so many of its weights zero."""
    command = [sys.executable, "-m", "headway.cli.main", "prune", str(folder), str(out)]
    subprocess.run([*command, f"--sparsity={share}"], check=True, stdout=subprocess.DEVNULL)
    return out


def measure(subject: Subject) -> Finding:
    """The largest share of zeros, up from the smallest, whose loss is not sure."""
    folder, _ = subject.model()
    whole = script.answered(folder, QUESTIONS)
    rows, kept, curve = [], 0.0, [100 * script.beside(whole, whole)[0]]
    sure = False
    with tempfile.TemporaryDirectory(prefix="headway-claims-") as name:
        for share in SHARES:
            subject.watch(f"{share:.0%} of the weights are zero")
            items = script.answered(pruned(folder, Path(name) / f"{share}", share), QUESTIONS)
            right, low, high, p = script.beside(whole, items)
            curve.append(100 * right)
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
