"""The model card of a quantized folder: how it was made, the format of each matrix, its quality."""

from collections import Counter

from headway.compress.produce import QuantizationResult
from headway.config.memory_plan import gib
from headway.spec.formats import Format

CARD = """# {name}

`{source}`, quantized by `headway quantize`: {summary}.

| | |
| --- | --- |
| weights in files | {size} |
| bits of a weight of the layers, scales included | {bits:.2f} |
| calibrated on | {calibration} |
| tokens, and their digest | {tokens:,}, {digest} |
| time taken | {seconds:.0f} s |
"""
LOSSES = """
## Loss by matrix

The share of the squared outputs on the calibration's inputs that rounding loses{searched}.

| matrix | format | loss |{more}
| --- | --- | --- |{line}
"""


def card(plan: QuantizationResult, figures: str = "") -> str:
    """Return the card in Markdown; `figures` is the section of an evaluation."""
    produced = plan.produced
    text = CARD.format(
        name=plan.name,
        source=plan.source,
        summary=plan.recipe.summary,
        size=gib(produced.num_bytes),
        bits=plan.bits,
        calibration="; ".join(plan.calibration.descriptions),
        tokens=plan.calibration.num_tokens,
        digest=plan.calibration.digest,
        seconds=plan.seconds,
    )
    if produced.uncalibrated:
        count = len(produced.uncalibrated)
        text += f"\nNo token reached {count} matrices: they are rounded to the nearest.\n"
    if plan.mixture is not None:
        text += (
            f"\nThe formats were searched: KL {plan.mixture.predicted_kl:.4f} nats a "
            f"token predicted as the sum of the matrices', {plan.mixture.kl:.4f} measured on rows "
            "of the same sources that were not calibrated on.\n"
        )
    return text + figures + losses(plan)


def losses(plan: QuantizationResult) -> str:
    """Return the table of losses, a row for each matrix."""
    searched = plan.mixture is not None
    text = LOSSES.format(
        searched="; nats are the part in the KL of the whole" if searched else "",
        more=" nats | bytes | µs |" if searched else "",
        line=" --- | --- | --- |" if searched else "",
    )
    for name, format, loss in rows(plan):
        line = f"| {name} | {format} | {loss:.5f} |"
        if plan.mixture is not None:
            choice = plan.mixture.chosen[plan.mixture.units[name]]
            line += f" {choice.kl:.5f} | {choice.num_bytes:,} | {choice.seconds * 1e6:.1f} |"
        text += line + "\n"
    return text


def rows(plan: QuantizationResult) -> list[tuple[str, Format, float]]:
    """Return (matrix of the checkpoint, format, share lost) for each rounded matrix."""
    formats = plan.produced.formats
    return [(name, formats[name], loss) for name, loss in plan.produced.losses.items()]


def as_json(plan: QuantizationResult) -> dict[str, object]:
    """Return the content of the folder's `quantize.json`: the card for programs."""
    content: dict[str, object] = {
        "source": plan.source,
        "recipe": plan.recipe.summary,
        "bits": plan.bits,
        "bytes": plan.produced.num_bytes,
        "seconds": plan.seconds,
        "calibration": {
            "sources": plan.calibration.descriptions,
            "tokens": plan.calibration.num_tokens,
            "digest": plan.calibration.digest,
        },
        "unseen": plan.produced.uncalibrated,
        "modules": [
            {"module": name, "format": str(format), "loss": loss}
            for name, format, loss in rows(plan)
        ],
    }
    if plan.mixture is not None:
        content["search"] = {
            "predicted_kl": plan.mixture.predicted_kl,
            "kl": plan.mixture.kl,
            "bound": plan.mixture.allocation.bound,
            "choices": {
                module: {"format": str(c.format), "kl": c.kl, "bytes": c.num_bytes,
                         "seconds": c.seconds}
                for module, c in plan.mixture.chosen.items()
            },
        }  # fmt: skip
    return content


def table(plan: QuantizationResult) -> str:
    """Return the printed summary: matrices by format with their mean loss, then the totals."""
    lines = [f"{plan.name}: {plan.recipe.summary}"]
    counts = Counter(format for _, format, _ in rows(plan))
    for format, count in sorted(counts.items(), key=lambda item: str(item[0])):
        own = [loss for _, other, loss in rows(plan) if other == format]
        mean = sum(own) / count
        lines.append(f"  {count:>5} matrices in {format!s:<22} {mean:.5f} of the outputs lost")
    if plan.mixture is not None:
        lines.append(
            f"  KL {plan.mixture.predicted_kl:.4f} predicted, {plan.mixture.kl:.4f} measured"
        )
    lines.append(
        f"  {plan.bits:.2f} bits a weight of the layers, {gib(plan.produced.num_bytes)}, "
        f"{plan.seconds:.0f} s"
    )
    return "\n".join(lines)
