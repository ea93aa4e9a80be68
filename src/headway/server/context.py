"""The field `context`: the documents and the tools' results of a prompt, shortened.

Marked are messages of tools, the field `documents`, and content parts of the type `document`;
nothing else is ever cut. Example, a tool's result of 640 tokens and `{"keep": 0.5}`:

    usage.prompt_tokens_details   cut_tokens 324
    x-headway-context             keep=0.5:surprisal, cut=324/640 tokens, 15/30 units
"""

import msgspec

from headway.core.errors import RequestError
from headway.core.request import check_range
from headway.frontend.shorten.choose import Choice

SURPRISAL, RANDOM = "surprisal", "random"
METHODS = (SURPRISAL, RANDOM)


class ContextAsked(msgspec.Struct, forbid_unknown_fields=True):
    """The field `context`: the share of their tokens that marked parts keep at most, 1: all; chosen
    by surprisal, or at random to compare with."""

    keep: float | None = None
    method: str | None = None


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What of a prompt's marked parts was cut: tokens and units, of how many."""

    keep: float
    method: str
    num_tokens: int = 0
    num_cut: int = 0
    num_duplicate: int = 0
    num_units: int = 0
    num_units_cut: int = 0

    def add(self, choice: Choice, num_tokens: int, num_left: int) -> "Cut":
        """This and a message more, of so many tokens of which so many are left."""
        return msgspec.structs.replace(
            self,
            num_tokens=self.num_tokens + num_tokens,
            num_cut=self.num_cut + num_tokens - num_left,
            num_duplicate=self.num_duplicate + choice.num_duplicate,
            num_units=self.num_units + len(choice.kept),
            num_units_cut=self.num_units_cut + choice.kept.count(False),
        )

    @property
    def told(self) -> str:
        """The header `x-headway-context`."""
        tokens = f"cut={self.num_cut}/{self.num_tokens} tokens"
        twice = f", {self.num_duplicate} said twice" if self.num_duplicate else ""
        units = f"{self.num_units_cut}/{self.num_units} units"
        return f"keep={self.keep:g}:{self.method}, {tokens}{twice}, {units}"


def check(asked: ContextAsked | None, has_scorer: bool) -> None:
    """RequestError for what is out of range, or cannot be done without a drafting model."""
    if asked is None:
        return
    if asked.keep is None:
        raise RequestError(
            "context.keep is required: the share of documents and tool results that is kept.",
            param="context.keep",
            code="missing_required_parameter",
        )
    check_range("context.keep", asked.keep, 0, 1, integer=False, param="context.keep")
    if asked.keep == 0:
        raise RequestError(
            "context.keep is 0; it must be more. Leave the documents out instead.",
            param="context.keep",
            code="decimal_below_min_value",
        )
    if asked.method not in (None, *METHODS):
        raise RequestError(
            f"context.method is {asked.method[:64]!r}; it is one of {', '.join(METHODS)}.",
            param="context.method",
            code="invalid_value",
        )
    if asked.keep < 1 and asked.method != RANDOM and not has_scorer:
        raise RequestError(
            "context.keep needs a drafting model to say what may go, and this server has none. "
            "Start it with --draft-model FOLDER, or leave context out.",
            param="context.keep",
            code="no_draft_model",
        )
