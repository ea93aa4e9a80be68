"""Who may ask at which path, where there are keys.

A path that the table does not name is for the operator's keys alone, so a new route is shut until
somebody opens it.
"""

from headway.edge.auth import KEY, OPERATOR, PUBLIC
from headway.server import page

ACCESS: dict[str, str] = {
    "/health": PUBLIC,
    "/ready": PUBLIC,
    **dict.fromkeys(page.PATHS, PUBLIC),
    "/v1/": KEY,
    "/version": KEY,
    "/openapi.json": KEY,
    "/tokenize": KEY,
    "/detokenize": KEY,
    "/apply-template": KEY,
    "/cache/forget": KEY,
    "/metrics": OPERATOR,
    "/stats": OPERATOR,
    "/trace": OPERATOR,
    "/calibration": OPERATOR,
}
"""Who may ask at a path; a name that ends in / holds for all below it."""
PREFIXES = [path for path in ACCESS if path.endswith("/") and path != "/"]


def access(path: str) -> str:
    """/v1/models → KEY, /health → PUBLIC, what the table does not name → OPERATOR."""
    if path in ACCESS:
        return ACCESS[path]
    prefix = next((prefix for prefix in PREFIXES if path.startswith(prefix)), None)
    return OPERATOR if prefix is None else ACCESS[prefix]
