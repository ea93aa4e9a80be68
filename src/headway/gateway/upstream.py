"""Server behind the gateway: its HTTP client, capabilities, health and load.

An upstream is trusted with its key and the requests, and with nothing else: no redirects, no
cookies, no control over the gateway's headers; its answers are bounded in bytes and in seconds.
"""

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Annotated, Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Meta

from headway.core.clock import Clock
from headway.core.supervision import supervise
from headway.edge.http_client import api_root, dialect_headers, make_session, read_bounded
from headway.edge.relayed import LOAD_HEADER, LOAD_PATH, LoadReport, decode_load
from headway.gateway.breaker import Breaker
from headway.gateway.config import DNS_SCHEME, Config, UpstreamPrice, UpstreamRow, key_of
from headway.gateway.prefix import PageHistory
from headway.gateway.providers import ALL_ENDPOINTS, MESSAGES, PROVIDERS, key_headers, upstream_url
from headway.gateway.speed import Speed

log = logging.getLogger(__name__)

CONNECT_S, SILENCE_S = 3.0, 120.0
TIMEOUT, STREAM_TIMEOUT = (
    aiohttp.ClientTimeout(total=None, connect=None, sock_connect=CONNECT_S, sock_read=silence_s)
    for silence_s in (SILENCE_S, None)
)
"""Streams have no read timeout here: a timer per chunk costs more than one per stream (Silence)."""
HEALTH_CHECK_S, HEALTH_CHECK_TIMEOUT_S = 1.0, 2.0
HOSTED_CHECK_S, HOSTED_RECHECK_S, HOSTED_CHECK_TIMEOUT_S = 60.0, 5.0, 10.0
"""Of hosted providers, which limit the rate of requests: while healthy, and after a failure."""
MAX_FAILED_CHECKS = 3
"""Consecutive failed health checks after which an upstream is down."""
MAX_HEALTH_BYTES = 2**20
LOOK_UP_S, LOOK_UP_TIMEOUT_S = 5.0, 5.0
MAX_ADDRESSES = 256
"""Maximum upstreams of one name; others of its addresses are left out, with a warning."""
MAX_BUFFERED = 256 * 2**20
"""Bytes of whole answers that may be read from one upstream at once."""
FEATURES_BY_KIND: dict[str, frozenset[str]] = {
    "headway": frozenset({"tools", "schemas"}),
    "vllm": frozenset({"tools", "schemas", "images", "embeddings"}),
    "llama": frozenset({"tools", "schemas", "images", "embeddings"}),
    "other": frozenset({"tools", "schemas", "images", "embeddings"}),
}
"""Kind → features it is assumed to support, unless its row lists them."""
OWNERS = {"headway": "headway", "vllm": "vllm", "llamacpp": "llama"}
"""`owned_by` of a model card → the kind of server."""
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError, OverflowError)
"""Exceptions of malformed answers: no JSON, nested too deep, numbers out of range."""
FAILURES = (aiohttp.ClientError, TimeoutError, OSError, *UNREADABLE)


class Card(msgspec.Struct):
    """Model in the answer of `/models`."""

    id: str
    owned_by: str = ""
    max_model_len: Annotated[int, Meta(ge=0, le=2**40)] | None = None


class Cards(msgspec.Struct):
    """Answer of `/models`."""

    data: list[Card]


RECENT_S, MAX_RECENT = 300.0, 2000
"""Attempts that the figures of `/stats` are of: those of the last 5 minutes, at most so many."""
NEUTRAL_OUTCOMES = frozenset(
    ("left", "check", "rejected", "status_400", "status_404", "status_413", "status_422")
)
"""Outcomes that are no failure of the upstream: the client left or was at fault."""


class Upstream:
    """One upstream: its row and its state."""

    def __init__(self, row: UpstreamRow, clock: Clock) -> None:
        self.row = row
        self.name = row.name
        self.url = api_root(row.address.removeprefix("dns+"))
        self.kind: str = row.kind if row.kind != "auto" else "other"
        self.provider = PROVIDERS.get(self.kind)
        """What is known of a hosted provider; None for a server of one's own."""
        self.context = row.context
        self.served: tuple[str, ...] = ()
        self.max_rows = 0
        self.breaker = Breaker(clock)
        self.speed = Speed(clock)
        self._clock = clock
        self.pages = PageHistory(row.cache)
        self.num_buffered = 0
        """Bytes of whole answers that are being read."""
        self.num_failed_checks = 0
        self.relays = False
        """Whether it accepts a gateway's fields: a Headway server that lists our key as one."""
        self.fingerprint = ""
        """Fingerprint of model and options in its answers, if they have one."""
        self.has_logprobs: bool | None = None
        """Whether its chats include log-probabilities; None while unknown."""
        self.was_reached = False
        """Whether a health check succeeded at least once."""
        self.is_unavailable = False
        """Whether it reported that it serves nothing now: it loads, drains, or restarts."""
        self._recent: deque[tuple[float, str, float | None]] = deque(maxlen=MAX_RECENT)
        """Attempts that ended: when, their outcome, seconds to the first text of a stream."""
        self.on_down: set[Callable[[], None]] = set()
        """Callbacks for the moment it is down: they end requests that wait for a first byte."""
        self._key = key_of(row)
        self._session: aiohttp.ClientSession | None = None
        self._watcher: asyncio.Task[None] | None = None

    # ── properties ──────────────────────────────────────────────────────────────────────────

    @property
    def price(self) -> UpstreamPrice:
        return self.row.price or UpstreamPrice()

    @property
    def can(self) -> frozenset[str]:
        """Return the features it supports; a server of one's own has all endpoints."""
        if self.provider is not None:
            return self.provider.can if self.row.can is None else frozenset(self.row.can)
        row_can = self.row.can
        can = FEATURES_BY_KIND[self.kind] if row_can is None else frozenset(row_can)
        return can | ALL_ENDPOINTS

    @property
    def is_headway(self) -> bool:
        return self.kind == "headway"

    @property
    def speaks(self) -> str | None:
        """Return the path of its chats where it has one dialect alone; None for all dialects."""
        return self.provider.speaks if self.provider is not None else None

    def has_path(self, path: str) -> bool:
        """Return whether it has this path beside those of generation, such as a count of tokens."""
        if self.provider is None or path.startswith(self.provider.speaks + "/"):
            return True
        return "responses" in self.can and path.startswith("/v1/responses/")

    @property
    def continues_text(self) -> bool:
        """Return whether it can go on with the text of an answer that another has begun."""
        return self.provider is None or self.provider.speaks == MESSAGES

    @property
    def is_down(self) -> bool:
        """Return whether the last health checks failed."""
        return self.num_failed_checks >= MAX_FAILED_CHECKS

    @property
    def is_full(self) -> bool:
        most = self.row.max_at_once
        return bool(most) and len(self.speed.flights) >= most

    def model_for(self, requested: str) -> str:
        """Return the model's name at this upstream."""
        if self.row.model:
            return self.row.model
        if requested in self.served or not self.served:
            return requested
        return self.served[0]

    def serves(self, name: str) -> bool:
        """Return whether it serves a model of this name."""
        return name == self.row.model or name in self.served

    # ── requests ────────────────────────────────────────────────────────────────────────────

    def record(self, outcome: str, ttft_s: float | None) -> None:
        """Record an attempt that is over; `ttft_s` is known for streams."""
        self._recent.append((self._clock.now_s(), outcome, ttft_s))

    def recent(self) -> dict[str, Any]:
        """Return attempts, the share that failed and the median TTFT of the last 5 minutes."""
        since_s = self._clock.now_s() - RECENT_S
        rows = [row for row in self._recent if row[0] >= since_s]
        judged = [outcome for _, outcome, _ in rows if outcome not in NEUTRAL_OUTCOMES]
        ttfts = [ttft_s for _, _, ttft_s in rows if ttft_s is not None]
        failed = sum(outcome != "ok" for outcome in judged)
        return {
            "seconds": RECENT_S,
            "attempts": len(rows),
            "error_rate": failed / len(judged) if judged else None,
            "ttft_p50_s": median(ttfts) if ttfts else None,
        }

    def http(self) -> aiohttp.ClientSession:
        """Return the session, which is created in the gateway's event loop."""
        if self._session is None:
            self._session = make_session(self._headers(), TIMEOUT)
        return self._session

    def _headers(self) -> dict[str, str]:
        headers = {
            "content-type": "application/json",
            "accept-encoding": "identity",
        }
        return headers | key_headers(self.kind, self._key)

    def _url(self, path: str) -> str:
        """Return the URL of a path (as /v1/…, or beside the API) at this upstream."""
        if not path.startswith("/v1"):
            return self.url.removesuffix("/v1") + path
        return upstream_url(self.kind, self.url, path, self.row.model, self.row.api_version)

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str], *, stream: bool = False
    ) -> aiohttp.ClientResponse:
        """Send POST `path` (as /v1/…) and return the response's head; raises one of FAILURES.

        With `stream` the caller must detect its silence.
        """
        limits = STREAM_TIMEOUT if stream else TIMEOUT
        headers = {**headers, **dialect_headers(path)}
        return await self.http().post(
            self._url(path), data=body, headers=headers, allow_redirects=False, timeout=limits
        )

    async def request(
        self, method: str, path: str, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """Send a request without a body and return the response's head."""
        return await self.http().request(
            method, self._url(path), headers=headers, allow_redirects=False
        )

    async def read(self, answer: aiohttp.ClientResponse, max_bytes: int) -> bytes:
        """Read a whole answer; ValueError beyond `max_bytes`, or `MAX_BUFFERED` over all reads."""
        data = bytearray()
        try:
            async for chunk in answer.content.iter_any():
                data += chunk
                self.num_buffered += len(chunk)
                if len(data) > max_bytes or self.num_buffered > MAX_BUFFERED:
                    raise ValueError(f"more than {max_bytes} bytes, or too many at once")
        finally:
            self.num_buffered -= len(data)
        return bytes(data)

    @contextlib.contextmanager
    def expire_when_down(self, limit: asyncio.Timeout) -> Iterator[Callable[[], None]]:
        """Expire `limit` when the upstream goes down; calling the yielded function stops that."""
        loop = asyncio.get_running_loop()

        def lost() -> None:
            limit.reschedule(loop.time())

        self.on_down.add(lost)
        try:
            yield lambda: self.on_down.discard(lost)
        finally:
            self.on_down.discard(lost)

    def take_load(self, headers: Mapping[str, str]) -> None:
        """Take the load that a Headway server sends with an answer; raises ValidationError."""
        self.is_unavailable = False
        header = headers.get(LOAD_HEADER.decode())
        if header is not None and self.is_headway:
            self._take(decode_load(header))

    def _take(self, load: LoadReport) -> None:
        if self.speed.take(load):
            self.pages.forget()
        self.context = self.row.context or load.context
        self.max_rows = load.max_rows
        self.fingerprint = load.fingerprint or self.fingerprint
        if load.cache_tokens:
            held = int(load.cache_tokens * self.speed.bytes_per_token)
            self.pages.max_pages = max(1, held // 256)

    # ── health checks ───────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Start a health check per second."""
        self._watcher = supervise("upstream watch", self._watch)

    async def close(self) -> None:
        """Stop the health checks and close the connections; safe to call twice."""
        if self._watcher is not None:
            self._watcher.cancel()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _watch(self) -> None:
        while True:
            await self.check_health()
            pause_s = HEALTH_CHECK_S
            if self.provider is not None:
                pause_s = HOSTED_RECHECK_S if self.num_failed_checks else HOSTED_CHECK_S
            await asyncio.sleep(pause_s)

    async def check_health(self) -> None:
        """Check whether the upstream lives, which models it serves, and its load."""
        try:
            hosted = self.provider is not None
            limit_s = HOSTED_CHECK_TIMEOUT_S if hosted else HEALTH_CHECK_TIMEOUT_S
            async with asyncio.timeout(limit_s):
                await (self._check_hosted() if hosted else self._check_own())
        except FAILURES as error:
            self.num_failed_checks += 1
            if self.num_failed_checks == MAX_FAILED_CHECKS:
                log.warning("upstream %s is down: %s", self.name, error or type(error).__name__)
                for lost in list(self.on_down):
                    lost()
            return
        if self.is_down:
            log.info("upstream %s is up", self.name)
        self.num_failed_checks, self.was_reached, self.is_unavailable = 0, True, False
        self.breaker.allow_trial()

    async def _check_own(self) -> None:
        """Check a server of one's own: its models, and the load of a Headway server."""
        if not self.served:
            await self._check_models()
        if self.is_headway:
            self.relays = await self._check_load()
        if not self.relays:
            await self._check_models()

    async def _check_hosted(self) -> None:
        """Check that a provider takes our key; its models are read where the row states none."""
        assert self.provider is not None
        path = self.provider.models_path
        if not self.row.model:
            await self._check_models(path)
            return
        url, headers = self._url(path), dialect_headers(self.provider.speaks)
        async with self.http().get(url, headers=headers, allow_redirects=False) as answer:
            if answer.status in (401, 403) or answer.status >= 500:
                raise ValueError(f"status {answer.status}")
            answer.close()

    async def _check_load(self) -> bool:
        """Read GET /v1/load; returns False if the server has none, or refuses our key."""
        data = await self._get(LOAD_PATH)
        if data is None:
            return False
        loads = msgspec.json.decode(data, type=dict[str, LoadReport])
        if not loads:
            self.is_unavailable = True
            raise ValueError("it serves nothing yet")
        self._take(loads.get(self.row.model) or next(iter(loads.values())))
        return True

    async def _check_models(self, path: str = "/v1/models") -> None:
        data = await self._get(path)
        if data is None:
            raise ValueError("it tells of no models")
        cards = msgspec.json.decode(data, type=Cards).data
        self.served = tuple(card.id for card in cards if is_name(card.id))
        if self.row.kind == "auto" and cards:
            self.kind = OWNERS.get(cards[0].owned_by, "other")
        lengths = [card.max_model_len for card in cards if card.max_model_len]
        self.context = self.row.context or min(lengths, default=0)

    async def _get(self, path: str) -> bytes | None:
        """Return the body of a 200, None for 403 or 404; raises one of FAILURES."""
        headers = dialect_headers(self.provider.speaks) if self.provider is not None else {}
        async with self.http().get(
            self._url(path), headers=headers, allow_redirects=False
        ) as answer:
            if answer.status in (403, 404):
                return None
            if answer.status != 200:
                raise ValueError(f"status {answer.status}")
            return await read_bounded(answer, MAX_HEALTH_BYTES)

    def snapshot(self) -> dict[str, Any]:
        """Return the upstream's part of `/stats`."""
        return {
            "name": self.name,
            "kind": self.kind,
            "state": "down" if self.is_down else self.breaker.state,
            "models": list(self.served),
            "in_flight": len(self.speed.flights),
            "queue_s": round(self.speed.queue_s, 4),
            "token_s": self.speed.token_s,
            "answer_s": self.speed.answer_s,
            "context": self.context,
            "pages": len(self.pages),
            "opened": self.breaker.num_opened,
            "recent": self.recent(),
        }


def is_name(text: str) -> bool:
    """Return whether the text can be a model's name."""
    return text.isascii() and text.isprintable() and 0 < len(text) <= 200


# ── servers behind one name ─────────────────────────────────────────────────────────────────


class Discovery:
    """Addresses of the names in `dns+http` URLs, and the configuration that they make.

        {name: servers, url: dns+http://headway-servers:8000/v1}

        headway-servers → 10.0.0.7, 10.0.0.9    servers/10.0.0.7  http://10.0.0.7:8000/v1
                                                servers/10.0.0.9  http://10.0.0.9:8000/v1

    A headless Service of Kubernetes and a scaled service of Compose answer with the address of
    each server that is ready. A name without an address keeps those that it had: a resolver that
    fails says nothing of the servers. Before the first answer the name is the upstream's host.
    """

    def __init__(self) -> None:
        self._addresses: dict[str, tuple[str, ...]] = {}
        """By URL of the row."""

    async def look_up(self, config: Config) -> bool:
        """Resolve all names of the configuration; return whether an address came or went."""
        urls = [row.url for row in config.upstreams if has_dns_scheme(row)]
        answers = await asyncio.gather(*(resolve(url) for url in urls))
        is_new = False
        for url, addresses in zip(urls, answers, strict=True):
            if addresses and addresses != self._addresses.get(url):
                self._addresses[url] = addresses
                log.info("%s has %d addresses", url, len(addresses))
                is_new = True
        return is_new

    def expand(self, config: Config) -> Config:
        """Return the configuration with a row for each address, in models and rollouts too."""
        rows = {row.name: self._rows(row) for row in config.upstreams}

        def names(of_file: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(row.name for name in of_file for row in rows[name])

        replace = msgspec.structs.replace
        return replace(
            config,
            upstreams=tuple(row for each in rows.values() for row in each),
            models=tuple(replace(each, upstreams=names(each.upstreams)) for each in config.models),
            rollouts=tuple(replace(each, canary=names(each.canary)) for each in config.rollouts),
        )

    def _rows(self, row: UpstreamRow) -> list[UpstreamRow]:
        addresses = self._addresses.get(row.url) if has_dns_scheme(row) else None
        if not addresses:
            return [row]
        parts = urlsplit(row.url)
        port = parts.port or 80
        return [
            msgspec.structs.replace(
                row,
                name=f"{row.name}/{address}",
                url=f"http://{f'[{address}]' if ':' in address else address}:{port}{parts.path}",
            )
            for address in addresses
        ]


def has_dns_scheme(row: UpstreamRow) -> bool:
    return urlsplit(row.url).scheme == DNS_SCHEME


async def resolve(url: str) -> tuple[str, ...]:
    """Return the addresses of a URL's host in order, at most MAX_ADDRESSES; () where none came."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
            rows = await asyncio.get_running_loop().getaddrinfo(
                parts.hostname, parts.port or 80, type=socket.SOCK_STREAM
            )
    except (OSError, TimeoutError, UnicodeError) as error:
        log.debug("%s was not resolved: %s", url, error or type(error).__name__)
        return ()
    # a server with an address of each family is one server
    family = socket.AF_INET if any(row[0] == socket.AF_INET for row in rows) else socket.AF_INET6
    addresses = sorted({str(row[4][0]) for row in rows if row[0] == family})
    if len(addresses) > MAX_ADDRESSES:
        log.warning("%s has %d addresses, %d are used", url, len(addresses), MAX_ADDRESSES)
    return tuple(addresses[:MAX_ADDRESSES])
