"""Recent traffic and the settings of the server: with a calibration, the input of a simulation.

Lengths and times only: no text, no ids, no names. Example: at 2.0 s a prompt of 900 tokens arrived,
800 of them cached, with an answer of 50; at 2.5 s a request was refused, so the length of its
answer is unknown:

    [2.0, 900, 800, 50, 1, 256, "default"]    [2.5, 300, 0, null, 1, 256, "default"]
"""

import msgspec

from headway.config.resolve import Settings
from headway.core.service import ServiceClass
from headway.spec import ModelSpec
from headway.telemetry.goodput import DISCONNECTED, INVALID, MOVED, OK, REFUSED
from headway.telemetry.live import Telemetry
from headway.telemetry.snapshot import WINDOWS_S


class TrafficRequest(msgspec.Struct, array_like=True):
    """One request of the traffic, as a list in this order.

    `at_s` is the time since the first request; `cached` of the `prompt` tokens were in the prefix
    cache; `answer` is the number of tokens of each of `n` sequences, None if it did not end.
    `prompt` is 0 for a request refused before its tokens were counted.
    """

    at_s: float
    prompt: int
    cached: int
    answer: int | None
    n: int = 1
    limit: int | None = None
    service_class: str = ""


class Origin(msgspec.Struct, kw_only=True):
    """Settings of a server that a simulation of it needs."""

    spec: ModelSpec
    settings: Settings
    classes: dict[str, ServiceClass]
    replicas: int = 1
    max_queue: int | None = None
    max_queue_wait_s: float | None = None


def take_traffic(
    telemetry: Telemetry, since_s: float = 0.0
) -> tuple[list[TrafficRequest], float | None]:
    """Return (ended requests that arrived since `since_s`, in order; arrival of the first or None).

    Of the last seconds only the short requests have ended.
    """
    requests = [*early_rejections(telemetry, since_s)]
    for timeline in telemetry.finished:
        ended = timeline.ended
        if timeline.arrived_s < since_s or ended is None or ended.outcome in (INVALID, MOVED):
            continue
        choices = max(len(timeline.times), 1)
        answer = ended.output_tokens // choices if ended.outcome in (OK, DISCONNECTED) else None
        requests.append(
            TrafficRequest(
                timeline.arrived_s,
                timeline.num_prompt,
                min(timeline.cached_tokens, timeline.num_prompt),
                answer or None,
                choices,
                timeline.max_tokens,
                timeline.service_class.name,
            )
        )
    requests.sort(key=lambda request: request.at_s)
    begin_s = requests[0].at_s if requests else None
    for request in requests:
        request.at_s = round(request.at_s - (begin_s or 0.0), 6)
    return requests, begin_s


def early_rejections(telemetry: Telemetry, since_s: float) -> list[TrafficRequest]:
    """Return the requests refused before more than their class was known."""
    slots, _ = telemetry.slots.last(max(WINDOWS_S), telemetry.clock.now_s())
    return [
        TrafficRequest(ended.ended_s, 0, 0, None, service_class=ended.service_class)
        for slot in slots
        for ended in slot.ended
        if ended.outcome == REFUSED and not ended.prompt_tokens and ended.ended_s >= since_s
    ]
