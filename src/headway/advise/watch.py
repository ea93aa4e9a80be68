"""Watch a live server for some seconds: the only file of the doctor that sends requests.

`/stats` is polled twice a second where the server has it, else `/metrics`; the round trip is timed
with `/health`. The result is a reading, or a UsageError that says what is missing.
"""

import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

import msgspec

from headway.advise.from_metrics import parse_scrape, reading_from_metrics
from headway.advise.from_stats import reading_from_stats
from headway.advise.reading import ServerReading
from headway.core.clock import SystemClock
from headway.core.errors import UsageError
from headway.telemetry.snapshot import WINDOWS_S, Snapshot

INTERVAL_S = 0.5
TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 32 * 2**20


class WatchedServer:
    """One address, with a key where one is given."""

    def __init__(self, url: str, api_key: str = "") -> None:
        self.url = base_url(url)
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}

    def get(self, path: str) -> tuple[int, bytes]:
        """Return (status, body); raise UsageError where the server cannot be reached."""
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read(MAX_ANSWER_BYTES)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, b""
        except (OSError, ValueError) as error:
            raise UsageError(
                f"{self.url} cannot be reached: {error}.", "Is the server running?"
            ) from error


def base_url(url: str) -> str:
    """Return the address without a path: http://host:8000/v1/ → http://host:8000."""
    parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise UsageError(f"{url} is no address.", "headway doctor http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}"


def watch(
    url: str,
    *,
    seconds: float,
    api_key: str = "",
    model: str = "",
    price_per_hour: float | None = None,
    on_tick: Callable[[float], None] = lambda passed_s: None,
) -> ServerReading:
    """Watch for `seconds` and return the reading."""
    server = WatchedServer(url, api_key)
    window_s = min(max(round(seconds), 1), max(WINDOWS_S))
    query = urllib.parse.urlencode({"seconds": window_s, **({"model": model} if model else {})})
    status, body = server.get(f"/stats?{query}")
    if status in (401, 403):
        raise UsageError(f"{server.url} needs a key.", "Give it with --api-key.")
    if status == 200 and (first := decode_snapshot(body)) is not None:
        polls = [first]

        def poll_stats() -> None:
            status, body = server.get(f"/stats?{query}")
            snapshot = decode_snapshot(body) if status == 200 else None
            if snapshot is not None:
                polls.append(snapshot)

        transfer_s = poll(server, poll_stats, seconds, on_tick)
        return reading_from_stats(
            server.url,
            polls,
            seconds=seconds,
            transfer_s=transfer_s,
            price_per_hour=price_per_hour,
        )
    return watch_metrics(server, seconds, price_per_hour, on_tick)


def watch_metrics(
    server: WatchedServer,
    seconds: float,
    price_per_hour: float | None,
    on_tick: Callable[[float], None],
) -> ServerReading:
    """Watch a server that has `/metrics` alone."""
    scrapes = []

    def scrape() -> None:
        status, body = server.get("/metrics")
        if status != 200:
            raise UsageError(
                f"{server.url} answers {status} to /stats and /metrics.",
                "The doctor reads Headway's /stats, or metrics with vLLM's names.",
            )
        try:
            scrapes.append(parse_scrape(body.decode("utf-8", "replace")))
        except (ValueError, KeyError) as error:
            raise UsageError(f"{server.url}/metrics is no Prometheus text: {error}.") from error

    clock = SystemClock()
    started_s = clock.now_s()
    scrape()
    if "num_requests_running" not in scrapes[0].values:
        raise UsageError(
            f"{server.url}/metrics has no num_requests_running.",
            "The doctor reads Headway's /stats, or metrics with vLLM's names.",
        )
    transfer_s = poll(server, scrape, seconds, on_tick)
    return reading_from_metrics(
        server.url,
        scrapes,
        seconds=clock.now_s() - started_s,
        transfer_s=transfer_s,
        price_per_hour=price_per_hour,
    )


def poll(
    server: WatchedServer,
    sample: Callable[[], None],
    seconds: float,
    on_tick: Callable[[float], None],
) -> float | None:
    """Call `sample` until `seconds` have passed and once more at their end; return the median round
    trip."""
    clock = SystemClock()
    started_s = clock.now_s()
    trips: list[float] = []
    while (remaining_s := started_s + seconds - clock.now_s()) > 0:
        time.sleep(min(INTERVAL_S, remaining_s))
        before_s = clock.now_s()
        if server.get("/health")[0] < 500:
            trips.append(clock.now_s() - before_s)
        sample()
        on_tick(clock.now_s() - started_s)
    return sorted(trips)[len(trips) // 2] if trips else None


def decode_snapshot(body: bytes) -> Snapshot | None:
    """Return the snapshot, or None when the body is something else."""
    try:
        return msgspec.json.decode(body, type=Snapshot)
    except msgspec.DecodeError:
        return None
