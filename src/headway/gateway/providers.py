"""Hosted providers as upstreams: their URLs, the header of their key, and what they serve.

    kind       base URL                                 POST /v1/chat/completions goes to
    openai     https://api.openai.com/v1                {base}/chat/completions
    anthropic  https://api.anthropic.com/v1             {base}/messages, translated
    azure      https://NAME.openai.azure.com            {base}/openai/deployments/{model}/chat/…
    bedrock    https://bedrock-….amazonaws.com/openai/v1  {base}/chat/completions

Each is asked at its own URL alone, with its own key in its own header.
"""

from dataclasses import dataclass
from urllib.parse import quote, unquote, urlsplit

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ENDPOINT_FEATURES = {"/v1/completions": "completions", "/v1/responses": "responses"}
"""Path → the feature of an upstream that serves it; the other paths are translated."""
ALL_ENDPOINTS = frozenset(ENDPOINT_FEATURES.values())
COMMON = frozenset({"tools", "schemas", "images"})


@dataclass(frozen=True, slots=True)
class Provider:
    """Kind of hosted upstream. `key_header` is the one header that carries its key."""

    key_header: str
    can: frozenset[str]
    base: str = ""
    """URL of an upstream that names none."""
    speaks: str = CHAT
    """The path that its chats are sent to."""
    needs_model: bool = False
    """Whether a row must state `model`."""
    models_path: str = "/v1/models"


PROVIDERS: dict[str, Provider] = {
    "openai": Provider(
        "authorization", COMMON | {"embeddings"} | ALL_ENDPOINTS, "https://api.openai.com/v1"
    ),
    "anthropic": Provider(
        *("x-api-key", COMMON, "https://api.anthropic.com/v1", MESSAGES),
        models_path="/v1/models?limit=1000",
    ),
    "azure": Provider("api-key", COMMON | {"embeddings", "responses"}, needs_model=True),
    "bedrock": Provider("authorization", COMMON, needs_model=True),
}


def check_provider(kind: str, url: str, model: str, api_version: str) -> None:
    """Raise ValueError where a row's kind needs a field that is not there, or has no such one."""
    provider = PROVIDERS.get(kind)
    if provider is not None and provider.needs_model and not model:
        raise ValueError(f"kind {kind} needs model: the deployment or model to ask there")
    is_versioned = url.rstrip("/").endswith("/openai/v1")
    if kind == "azure" and not (api_version or is_versioned):
        raise ValueError(
            "kind azure needs api_version, such as 2024-10-21, or a url that ends in /openai/v1"
        )
    if api_version and kind != "azure":
        raise ValueError("api_version is a field of kind azure")


def endpoint_need(path: str) -> frozenset[str]:
    """Return the feature that an upstream needs to be asked at this path."""
    return frozenset({ENDPOINT_FEATURES[path]} if path in ENDPOINT_FEATURES else ())


def key_headers(kind: str, key: str) -> dict[str, str]:
    """Return the headers of an upstream's key; servers of one's own accept either form."""
    bearer = {"authorization": f"Bearer {key}"}
    if not key:
        return {}
    provider = PROVIDERS.get(kind)
    if provider is None:
        return bearer | {"x-api-key": key}
    return bearer if provider.key_header == "authorization" else {provider.key_header: key}


def upstream_url(kind: str, base: str, path: str, model: str, api_version: str) -> str:
    """Return the URL of a path (as /v1/…) at an upstream; `model` is the operator's deployment.

    Azure's older API has a path for each deployment, and its newer one, below /openai/v1, has not.
    Its `api-version` is the row's, never a client's.
    """
    if kind != "azure":
        return base + path.removeprefix("/v1")
    if urlsplit(base).path.rstrip("/").endswith("/openai/v1"):
        url = base + path.removeprefix("/v1")
    else:
        root = base.removesuffix("/v1").removesuffix("/openai") + "/openai"
        place = path.removeprefix("/v1")
        per_model = place.startswith(("/chat/completions", "/completions", "/embeddings"))
        url = root + (f"/deployments/{quote(model, safe='')}" if per_model else "") + place
    url, _, query = url.partition("?")
    fields = [
        each for each in query.split("&") if each and "api-version" not in unquote(each).lower()
    ]
    if api_version:
        fields.append(f"api-version={quote(api_version, safe='')}")
    return "?".join([url, *(["&".join(fields)] if fields else [])])
