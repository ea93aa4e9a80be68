"""What was spent: GET /spend, by key, team, model, tag and day, out of the ledger.

    GET /spend?by=team,day&from=2026-11-01&to=2026-12-01&format=csv

An operator's key sees all, another its own requests alone. A request with several tags counts in
each of them. What budgets have left, and what was refused since the start, is beside the rows.
"""

import csv
import datetime
import io
import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headway.core.errors import RequestError
from headway.edge.errors import json_response
from headway.edge.keys import Caller
from headway.edge.principal import owner_of
from headway.gateway.ledger import SPEND_BY, SpendQuery
from headway.gateway.state import GatewayState

DEFAULT_DAYS = 30
DAY_S = 86_400.0
FIRST_S = datetime.datetime.min.replace(tzinfo=datetime.UTC).timestamp()
"""Beginning of the calendar's first day."""
FIGURES = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "dollars")
FORMULA = re.compile(r"(^|;)(?=[=+\-@\t\r＝＋－＠])")
"""Beginning of a cell that a spreadsheet would compute; some divide cells at semicolons."""


async def spend(state: GatewayState, request: Request) -> Response:
    """GET /spend: rows of the caller's own requests, or of all for an operator."""
    caller: Caller = request.scope.get("caller") or state.keyring.anonymous
    owner = None if caller.admin else owner_of(request.scope)
    params = dict(request.query_params)
    query = spend_query(params, owner, state.clock.wall_s())
    rows = await state.ledger.spend(query)
    if params.get("format") == "csv":
        return Response(csv_text(query.by, rows), media_type="text/csv")
    content = {"from": day_of(query.since_s), "to": day_of(query.until_s), "by": query.by}
    return json_response(
        content
        | {"rows": [dict(zip((*query.by, *FIGURES), row, strict=True)) for row in rows]}
        | {"budgets": state.budget_rows(owner), "refusals": state.refusals.rows(owner)}
    )


NAMES = ("by", "from", "to", "key", "format")


def spend_query(params: dict[str, str], owner: str | None, now_s: float) -> SpendQuery:
    """Return the query of `params`; RequestError names the parameter. `owner` None sees all."""
    for name in params:
        if name not in NAMES:
            raise parameter_error(name, f"there is no such parameter; there are {', '.join(NAMES)}")
    by = tuple(name for name in params.get("by", "key,model").split(",") if name)
    for name in by:
        if name not in SPEND_BY or by.count(name) > 1:
            raise parameter_error("by", f"it must be some of {', '.join(SPEND_BY)}, each once")
    if params.get("format", "json") not in ("json", "csv"):
        raise parameter_error("format", "it must be json or csv")
    key = params.get("key")
    if owner is not None and key not in (None, owner):
        raise RequestError(
            "A key sees its own spending; an operator's key sees all.",
            param="key",
            code="permission_denied",
            status=403,
        )
    today_s = now_s // DAY_S * DAY_S
    until_s = time_of(params, "to", today_s + DAY_S)
    since_s = time_of(params, "from", max(FIRST_S, until_s - DEFAULT_DAYS * DAY_S))
    if since_s >= until_s:
        raise parameter_error("from", "it must be before to")
    return SpendQuery(by, since_s, until_s, owner if owner is not None else key)


def parameter_error(name: str, why: str) -> RequestError:
    return RequestError(f"The parameter {name[:40]!r}: {why}.", param=name, code="invalid_value")


def time_of(params: dict[str, str], name: str, otherwise: float) -> float:
    """Return the beginning of a day (UTC) in seconds since 1970."""
    if name not in params:
        return otherwise
    try:
        day = datetime.date.fromisoformat(params[name])
    except ValueError:
        raise parameter_error(name, "it must be a day, as 2026-11-29") from None
    midnight = datetime.datetime.combine(day, datetime.time(), datetime.UTC)
    return midnight.timestamp()


def day_of(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date().isoformat()


def csv_text(by: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return rows as CSV; names that a spreadsheet would compute begin with an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*by, *FIGURES])
    for row in rows:
        writer.writerow([cell(value) for value in row])
    return text.getvalue()


def cell(value: Any) -> Any:
    return FORMULA.sub(r"\1'", value) if isinstance(value, str) else value
