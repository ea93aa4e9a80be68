"""The field `context`: shortens the documents and tool results of a prompt.

Marked parts are messages of tools, the field `documents`, and content parts of type `document`;
nothing else is cut. Example, a tool result of 640 tokens and `{"keep": 0.5}`:

    usage.prompt_tokens_details   cut_tokens 324
    x-headway-context             keep=0.5:surprisal, cut=324/640 tokens, 15/30 units
"""

import msgspec

from headway.core.errors import RequestError
from headway.core.request import check_range
from headway.frontend.shorten.choose import UnitChoice

SURPRISAL, RANDOM = "surprisal", "random"
METHODS = (SURPRISAL, RANDOM)


class ContextAsked(msgspec.Struct, forbid_unknown_fields=True):
    """The field `context`: `keep` is the largest share of their tokens that marked parts keep.

    Units are chosen by surprisal, or at random for comparison.
    """

    keep: float | None = None
    method: str | None = None


class ContextCut(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of the tokens and units that were cut from the marked parts of a prompt."""

    keep: float
    method: str
    num_tokens: int = 0
    num_cut: int = 0
    num_duplicate: int = 0
    num_units: int = 0
    num_units_cut: int = 0

    def add(self, choice: UnitChoice, num_tokens: int, num_remaining: int) -> "ContextCut":
        """Return the counts with a group of `num_tokens` more, of which `num_remaining` remain."""
        return msgspec.structs.replace(
            self,
            num_tokens=self.num_tokens + num_tokens,
            num_cut=self.num_cut + num_tokens - num_remaining,
            num_duplicate=self.num_duplicate + choice.num_duplicate,
            num_units=self.num_units + len(choice.mask),
            num_units_cut=self.num_units_cut + choice.mask.count(False),
        )

    @property
    def header_value(self) -> str:
        """Value of the header `x-headway-context`."""
        tokens = f"cut={self.num_cut}/{self.num_tokens} tokens"
        twice = f", {self.num_duplicate} said twice" if self.num_duplicate else ""
        units = f"{self.num_units_cut}/{self.num_units} units"
        return f"keep={self.keep:g}:{self.method}, {tokens}{twice}, {units}"


def check(field: ContextAsked | None, has_scorer: bool) -> None:
    """Raise RequestError for a value out of range, or where a draft model is missing."""
    if field is None:
        return
    if field.keep is None:
        raise RequestError(
            "context.keep is required: the share of documents and tool results that is kept.",
            param="context.keep",
            code="missing_required_parameter",
        )
    check_range("context.keep", field.keep, 0, 1, integer=False, param="context.keep")
    if field.keep == 0:
        raise RequestError(
            "context.keep is 0; it must be more. Leave the documents out instead.",
            param="context.keep",
            code="decimal_below_min_value",
        )
    if field.method not in (None, *METHODS):
        raise RequestError(
            f"context.method is {field.method[:64]!r}; it is one of {', '.join(METHODS)}.",
            param="context.method",
            code="invalid_value",
        )
    if field.keep < 1 and field.method != RANDOM and not has_scorer:
        raise RequestError(
            "context.keep needs a draft model to score the text, and this server has none. "
            "Start it with --draft-model FOLDER, or leave context out.",
            param="context.keep",
            code="no_draft_model",
        )
