"""Servers that Ray places, restarts and scales; the gateway carries the traffic.

    serve run headway.cluster.ray_app:app folder=/models/chat least=1 most=4

A request does not go through Ray: its proxy costs milliseconds, and a stream is broken when its
replica dies. Each replica of `Server` runs `headway serve` and tells the gateway that it is there,
and that it ends before it takes no more requests; the one replica of `Gateway` runs `headway
gateway` over those, and streams go on in another one.
Ray starts a server again whose `/health` fails. How many there are `scale_policy` says, by the
attainment that is predicted (`scale.py`), not by how busy they are.

Ray is imported where it is needed alone: the extra `ray` installs it.
"""

import json
import logging
import os
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from headway.cluster.child import Child
from headway.cluster.members import Members
from headway.cluster.scale import Load, Scaler, Target
from headway.core.clock import SystemClock
from headway.core.errors import HeadwayError, UsageError

log = logging.getLogger(__name__)

KEY_ENV = "HEADWAY_API_KEY"
TELL_S, LEAVE_S = 3.0, 3.0
"""How often a server says that it is there, and how long it says that it ends."""
TOLD_S = 30.0
"""So long a new server waits for the gateway to know it: then Ray ends an old one."""
TIMEOUT_S = 10.0
MINUTE = 60
"""The window of `/stats` that attainment is read from."""


class Wanted(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What the application is started with; `flags` are of `headway serve`.

    `port` is the gateway's, which runs on a node that has `gateway_resource`, where that is named.
    A server takes `num_cpus` and `num_gpus` of Ray's; `lead_s` is what one needs until it is ready.
    """

    folder: str
    flags: list[str] = []
    gateway_flags: list[str] = []
    host: str = ""
    port: int = 8080
    least: int = 1
    most: int = 4
    attainment: float = 0.95
    lead_s: float = 60.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    gateway_resource: str = ""
    drain_s: float = 30.0
    ready_s: float = 900.0


def wanted_of(arguments: dict[str, Any]) -> Wanted:
    """The arguments, checked; raises UsageError."""
    try:
        wanted = msgspec.convert(arguments, Wanted, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"The application's arguments: {error}.", str(Wanted.__doc__)) from error
    if not 0 < wanted.least <= wanted.most:
        raise UsageError(
            f"least is {wanted.least} and most {wanted.most}.", "Give 1 <= least <= most."
        )
    return wanted


def command_of(verb: str, *arguments: str) -> list[str]:
    """A verb of ours in this Python."""
    return [sys.executable, "-m", "headway.cli.main", verb, *arguments]


# ── servers ─────────────────────────────────────────────────────────────────────────────────────


class Server:
    """One `headway serve`, as a replica of Ray Serve."""

    def __init__(self, wanted: Wanted) -> None:
        """Start it and wait until it is ready and the gateway knows it. Raises HeadwayError."""
        self.wanted = wanted
        host = wanted.host or own_address()
        command = command_of(
            "serve",
            wanted.folder,
            f"--host={host}",
            "--port=0",
            f"--drain-timeout={wanted.drain_s:g}",
            *wanted.flags,
        )
        self.child = Child(command, drain_s=wanted.drain_s, ready_s=wanted.ready_s)
        self._ends, self._told = threading.Event(), threading.Event()
        self._teller = threading.Thread(target=self._tell_on, daemon=True)
        self._teller.start()
        self._told.wait(TOLD_S)

    def _tell_on(self) -> None:
        """Say that it is there until it ends; a gateway that is being started again hears later."""
        while True:
            if self.child.is_alive and self._tell("hear", TIMEOUT_S):
                self._told.set()
            if self._ends.wait(TELL_S):
                break
        self._tell("leave", LEAVE_S)

    def _tell(self, what: str, limit_s: float) -> bool:
        """Whether this method of the gateway could be called with its URL."""
        try:
            getattr(gateway(), what).remote(self.child.url).result(timeout_s=limit_s)
        except Exception as error:  # whatever Ray raises while the gateway is not there
            log.warning("the gateway was not told to %s %s: %r", what, self.child.url, error)
            return False
        return True

    def url(self) -> str:
        """Where it listens."""
        return self.child.url

    def check_health(self) -> None:
        """Called by Ray; raises where the server is not alive, and Ray starts another."""
        if not self.child.is_alive:
            raise HeadwayError("The server has ended.", "Look at its log.")
        fetch(self.child.url + "/health")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray for `scale_policy`, which runs elsewhere: the target goes with the load."""
        told = told_by(json.loads(fetch(self.child.url + "/stats")))
        return told | {"target": self.wanted.attainment, "lead_s": self.wanted.lead_s}

    def __del__(self) -> None:
        """Called by Ray when the replica is to end: nobody asks it any more, and answers that run
        are drained."""
        if hasattr(self, "_teller"):
            self._ends.set()
            self._teller.join(TIMEOUT_S)
            self.child.stop()


def own_address() -> str:
    """The address of this node in the cluster."""
    from ray.util import get_node_ip_address

    address: str = get_node_ip_address()
    return address


def gateway() -> Any:
    """The handle of the gateway of this application."""
    from ray import serve

    name = serve.get_replica_context().app_name
    return serve.get_deployment_handle("gateway", app_name=name)


def fetch(url: str) -> bytes:
    """The body of a GET. Raises HeadwayError."""
    key = os.environ.get(KEY_ENV, "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S
        ) as answer:
            body: bytes = answer.read()
            return body
    except (OSError, urllib.error.HTTPError) as error:
        raise HeadwayError(f"{url}: {error}.", "Look at the server's log.") from error


# ── the gateway ─────────────────────────────────────────────────────────────────────────────────


class Gateway:
    """One `headway gateway` over the servers that say they are there."""

    def __init__(self, wanted: Wanted, servers: Any = None) -> None:
        """It is started when the first server is heard of. `servers` are started before it."""
        self.wanted, self.servers = wanted, servers
        self.child: Child | None = None
        self.clock = SystemClock()
        self._folder = tempfile.TemporaryDirectory(prefix="headway-")
        self._lock = threading.Lock()
        key_env = KEY_ENV if os.environ.get(KEY_ENV) else ""
        self.members = Members(Path(self._folder.name) / "gateway.yaml", self._reload, key_env)

    def hear(self, url: str) -> None:
        """A server is there."""
        with self._lock:
            self.members.hear(url, self.clock.now_s())

    def leave(self, url: str) -> None:
        """A server ends."""
        with self._lock:
            self.members.leave(url, self.clock.now_s())

    def _reload(self) -> None:
        """Who is there has changed."""
        if self.child is not None and self.child.is_alive:
            self.child.hang_up()
            return
        host = self.wanted.host or "0.0.0.0"
        flags = [
            f"--host={host}",
            f"--port={self.wanted.port}",
            f"--drain-timeout={self.wanted.drain_s:g}",
            *self.wanted.gateway_flags,
        ]
        command = command_of("gateway", str(self.members.file), *flags)
        self.child = Child(command, drain_s=self.wanted.drain_s, ready_s=TIMEOUT_S * 6)

    def url(self) -> str:
        """Where clients ask; "" before any server was there."""
        return self.child.url if self.child is not None else ""

    def there(self) -> list[str]:
        """The servers that it sends requests to."""
        return list(self.members.written)

    def check_health(self) -> None:
        """Called by Ray; raises where the gateway was there and is no more."""
        with self._lock:
            self.members.look(self.clock.now_s())
        if self.child is not None and not self.child.is_alive:
            raise HeadwayError("The gateway has ended.", "Look at its log.")

    def __del__(self) -> None:
        """Called by Ray when the replica is to end."""
        child: Child | None = getattr(self, "child", None)
        if child is not None:
            child.stop()


# ── how many ────────────────────────────────────────────────────────────────────────────────────


def told_by(stats: dict[str, Any]) -> dict[str, float]:
    """What `/stats` of a server says of its load: figures alone, for Ray passes no others on.

    `judged` requests of the last minute, of which `met` met their objectives.
    """
    window = next(each for each in stats["windows"] if each["seconds"] == MINUTE)
    return {
        "asked": float(sum(stats["now"]["engines_asked"])),
        "in_progress": float(stats["now"]["num_requests"]),
        "judged": float(sum(each["num_judged"] for each in window["classes"])),
        "met": float(sum(each["num_met"] for each in window["classes"])),
        "engines": float(max(len(stats.get("engines") or []), 1)),
    }


def load_of(told: dict[str, dict[Any, float]], servers: int) -> Load:
    """The load of all servers, from {figure: {replica: value}}."""
    total = {name: sum(values.values()) for name, values in told.items()}
    judged = total.get("judged", 0.0)
    return Load(
        asked=total.get("asked", 0.0),
        in_progress=total.get("in_progress", 0.0),
        servers=servers,
        attainment=total.get("met", 0.0) / judged if judged else None,
    )


def most_of(told: dict[str, dict[Any, float]], name: str, usual: float) -> float:
    """The largest that a replica told of a figure."""
    return max(told.get(name, {}).values(), default=usual)


def scale_policy(context: Any) -> tuple[int, dict[str, Any]]:
    """How many servers Ray is to run, and what is remembered until it asks again.

    `context` is its AutoscalingContext.
    """
    state: dict[str, Any] = dict(context.policy_state or {})
    told = context.aggregated_metrics or {}
    usual = Target()
    scaler = state.get("scaler") or Scaler(usual)
    scaler.target = Target(
        attainment=most_of(told, "target", usual.attainment),
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
        engines=round(most_of(told, "engines", usual.engines)),
        lead_s=most_of(told, "lead_s", usual.lead_s),
    )
    decision = scaler.decide(SystemClock().now_s(), load_of(told, context.current_num_replicas))
    if decision.servers != context.current_num_replicas:
        log.info(
            "%d servers, %.1f%% predicted: %s",
            *(decision.servers, 100 * decision.predicted, decision.why),
        )
    return decision.servers, {**state, "scaler": scaler}


def options_of(wanted: Wanted) -> dict[str, Any]:
    """What Ray is told of the servers."""
    return {
        "name": "server",
        "autoscaling_config": {
            "min_replicas": wanted.least,
            "max_replicas": wanted.most,
            "metrics_interval_s": TELL_S,
            "look_back_period_s": 2 * TELL_S,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {"policy_function": "headway.cluster.ray_app:scale_policy"},
        },
        "ray_actor_options": {"num_cpus": wanted.num_cpus, "num_gpus": wanted.num_gpus},
        "health_check_period_s": TELL_S,
        "health_check_timeout_s": 3 * TIMEOUT_S,
        "graceful_shutdown_timeout_s": wanted.drain_s + 2 * TIMEOUT_S,
    }


def app(arguments: dict[str, Any]) -> Any:
    """The application for `serve run` and for a RayService; raises UsageError."""
    from ray import serve

    wanted = wanted_of(arguments)
    servers = serve.deployment(Server).options(**options_of(wanted)).bind(wanted)
    takes: dict[str, Any] = {"num_cpus": 0.1}
    if wanted.gateway_resource:
        takes["resources"] = {wanted.gateway_resource: 0.001}
    own = {
        "name": "gateway",
        "num_replicas": 1,
        "ray_actor_options": takes,
        "graceful_shutdown_timeout_s": wanted.drain_s + 2 * TIMEOUT_S,
    }
    return serve.deployment(Gateway).options(**own).bind(wanted, servers)
