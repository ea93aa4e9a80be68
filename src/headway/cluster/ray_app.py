"""Servers that Ray places, restarts and scales, behind a Headway gateway.

    serve run headway.cluster.ray_app:app folder=/models/chat least=1 most=4

Requests do not go through Ray's proxy, which costs milliseconds and breaks a stream when its
replica dies. Each replica of `RayServer` runs `headway serve`; it registers at the gateway, and
deregisters before it stops accepting requests. The one replica of `Gateway` runs `headway gateway`
over them, and continues the streams of a dead server on another one. Ray restarts a server whose
`/health` fails. `scale_policy` sets the number of servers, by predicted attainment (`scale.py`) and
not by utilization.

Ray is imported only inside functions: the extra `ray` installs it.
"""

import json
import logging
import os
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headway.cluster.child import Child
from headway.cluster.scale import ClusterLoad, Scaler, ScaleTarget
from headway.core.clock import SystemClock
from headway.core.errors import HeadwayError, UsageError

log = logging.getLogger(__name__)

KEY_ENV = "HEADWAY_API_KEY"
REGISTER_S, DEREGISTER_TIMEOUT_S = 3.0, 3.0
"""Seconds between registrations of a server, and the time limit of its deregistration."""
FIRST_REGISTRATION_S = 30.0
"""Seconds that a new server waits for its registration, before Ray may end an old one."""
CALL_TIMEOUT_S = 10.0
MEMBER_TIMEOUT_S = 15.0
"""Seconds without a registration after which a server is no member."""
WINDOW_S = 60
"""The window of `/stats` from which attainment is read."""


class RayAppSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The arguments of the application; `flags` are of `headway serve`.

    `port` is the gateway's, which runs on a node with `gateway_resource`, if that is given. A
    server uses `num_cpus` and `num_gpus` of Ray; `lead_s` is the time until a new one is ready.
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


def parse_arguments(arguments: dict[str, Any]) -> RayAppSettings:
    """Parse and check the arguments; raises UsageError."""
    try:
        settings = msgspec.convert(arguments, RayAppSettings, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"The application's arguments: {error}.", str(RayAppSettings.__doc__)
        ) from error
    if not 0 < settings.least <= settings.most:
        raise UsageError(
            f"least is {settings.least} and most {settings.most}.", "Give 1 <= least <= most."
        )
    return settings


def command_of(verb: str, *arguments: str) -> list[str]:
    """Return the command line of a Headway verb in this Python."""
    return [sys.executable, "-m", "headway.cli.main", verb, *arguments]


# ── servers ─────────────────────────────────────────────────────────────────────────────────────


class RayServer:
    """One `headway serve`, as a replica of Ray Serve."""

    def __init__(self, settings: RayAppSettings) -> None:
        """Start it and wait until it is ready and registered. Raises HeadwayError."""
        self.settings = settings
        host = settings.host or own_address()
        command = command_of(
            "serve",
            settings.folder,
            f"--host={host}",
            "--port=0",
            f"--drain-timeout={settings.drain_s:g}",
            *settings.flags,
        )
        self.child = Child(command, drain_s=settings.drain_s, ready_s=settings.ready_s)
        self._ends, self._registered = threading.Event(), threading.Event()
        self._registration = threading.Thread(target=self._keep_registered, daemon=True)
        self._registration.start()
        self._registered.wait(FIRST_REGISTRATION_S)

    def _keep_registered(self) -> None:
        """Register until the server ends; after a restart of the gateway the next one succeeds."""
        while True:
            if self.child.is_alive and self._call_gateway("register", CALL_TIMEOUT_S):
                self._registered.set()
            if self._ends.wait(REGISTER_S):
                break
        self._call_gateway("deregister", DEREGISTER_TIMEOUT_S)

    def _call_gateway(self, method: str, limit_s: float) -> bool:
        """Call this method of the gateway with the server's URL; return whether that succeeded."""
        try:
            getattr(gateway(), method).remote(self.child.url).result(timeout_s=limit_s)
        except Exception as error:  # any error of Ray while the gateway is not running
            log.warning("the gateway did not %s %s: %r", method, self.child.url, error)
            return False
        return True

    def url(self) -> str:
        """The URL at which the server listens."""
        return self.child.url

    def check_health(self) -> None:
        """Called by Ray; raises if the server is not alive, and Ray starts another."""
        if not self.child.is_alive:
            raise HeadwayError("The server has ended.", "Look at its log.")
        fetch(self.child.url + "/health")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray for `scale_policy`, which runs elsewhere: the load, with the target."""
        figures = load_from_stats(json.loads(fetch(self.child.url + "/stats")))
        return figures | {"target": self.settings.attainment, "lead_s": self.settings.lead_s}

    def __del__(self) -> None:
        """Called by Ray to end the replica: it deregisters, and running requests are drained."""
        if hasattr(self, "_registration"):
            self._ends.set()
            self._registration.join(CALL_TIMEOUT_S)
            self.child.stop()


def own_address() -> str:
    """Return the address of this node in the cluster."""
    from ray.util import get_node_ip_address

    address: str = get_node_ip_address()
    return address


def gateway() -> Any:
    """Return the handle of this application's gateway."""
    from ray import serve

    name = serve.get_replica_context().app_name
    return serve.get_deployment_handle("gateway", app_name=name)


def fetch(url: str) -> bytes:
    """Return the body of a GET request. Raises HeadwayError."""
    key = os.environ.get(KEY_ENV, "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=CALL_TIMEOUT_S
        ) as answer:
            body: bytes = answer.read()
            return body
    except (OSError, urllib.error.HTTPError) as error:
        raise HeadwayError(f"{url}: {error}.", "Look at the server's log.") from error


# ── the gateway ─────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Members:
    """Membership of servers, and the gateway's configuration file that lists them.

    A server is a member if it has registered within the last MEMBER_TIMEOUT_S seconds. The file is
    rewritten when the members change, but never empty: a gateway needs a server, and the last one
    may come back. `changed` is called after each write.
    """

    file: Path
    changed: Callable[[], None]
    key_env: str = ""
    heard_s: dict[str, float] = field(default_factory=dict)
    written: tuple[str, ...] = ()
    """The URLs in the file."""

    def register(self, url: str, now_s: float) -> None:
        """Register a server, or renew its registration."""
        self.heard_s[url] = now_s
        self.update(now_s)

    def deregister(self, url: str, now_s: float) -> None:
        """Remove a server that is about to end."""
        self.heard_s.pop(url, None)
        self.update(now_s)

    def update(self, now_s: float) -> None:
        """Drop members that are silent, and write the file if the members differ from it."""
        self.heard_s = {
            u: at_s for u, at_s in self.heard_s.items() if now_s - at_s < MEMBER_TIMEOUT_S
        }
        urls = tuple(sorted(self.heard_s))
        if urls and urls != self.written:
            rows = [{"url": f"{url}/v1", "key_env": self.key_env} for url in urls]
            if not self.key_env:
                rows = [{"url": row["url"]} for row in rows]
            new = self.file.with_suffix(".new")
            new.write_bytes(msgspec.yaml.encode({"upstreams": rows}))
            os.replace(new, self.file)
            self.changed()  # if it fails, the next update tries again
            self.written = urls


class Gateway:
    """One `headway gateway` over the registered servers."""

    def __init__(self, settings: RayAppSettings, servers: Any = None) -> None:
        """It starts with the first registered server. `servers` are deployed before it."""
        self.settings, self.servers = settings, servers
        self.child: Child | None = None
        self.clock = SystemClock()
        self._folder = tempfile.TemporaryDirectory(prefix="headway-")
        self._lock = threading.Lock()
        key_env = KEY_ENV if os.environ.get(KEY_ENV) else ""
        self.members = Members(Path(self._folder.name) / "gateway.yaml", self._reload, key_env)

    def register(self, url: str) -> None:
        """Register a server."""
        with self._lock:
            self.members.register(url, self.clock.now_s())

    def deregister(self, url: str) -> None:
        """Deregister a server."""
        with self._lock:
            self.members.deregister(url, self.clock.now_s())

    def _reload(self) -> None:
        """Apply a change of the members."""
        if self.child is not None and self.child.is_alive:
            self.child.hang_up()
            return
        host = self.settings.host or "0.0.0.0"
        flags = [
            f"--host={host}",
            f"--port={self.settings.port}",
            f"--drain-timeout={self.settings.drain_s:g}",
            *self.settings.gateway_flags,
        ]
        command = command_of("gateway", str(self.members.file), *flags)
        self.child = Child(command, drain_s=self.settings.drain_s, ready_s=CALL_TIMEOUT_S * 6)

    def url(self) -> str:
        """The URL for clients; "" before the first server is registered."""
        return self.child.url if self.child is not None else ""

    def member_urls(self) -> list[str]:
        """The servers that the gateway uses."""
        return list(self.members.written)

    def check_health(self) -> None:
        """Called by Ray; raises if the gateway has run and is not alive."""
        with self._lock:
            self.members.update(self.clock.now_s())
        if self.child is not None and not self.child.is_alive:
            raise HeadwayError("The gateway has ended.", "Look at its log.")

    def __del__(self) -> None:
        """Called by Ray to end the replica."""
        child: Child | None = getattr(self, "child", None)
        if child is not None:
            child.stop()


# ── how many ────────────────────────────────────────────────────────────────────────────────────


def load_from_stats(stats: dict[str, Any]) -> dict[str, float]:
    """Return the load in `/stats` of a server, as numbers only, as Ray requires.

    Of the `judged` requests of the last minute, `met` met their objectives.
    """
    window = next(each for each in stats["windows"] if each["seconds"] == WINDOW_S)
    return {
        "asked": float(sum(stats["now"]["engines_asked"])),
        "in_progress": float(stats["now"]["num_requests"]),
        "judged": float(sum(each["num_judged"] for each in window["classes"])),
        "met": float(sum(each["num_met"] for each in window["classes"])),
        "engines": float(max(len(stats.get("engines") or []), 1)),
    }


def load_of(figures: dict[str, dict[Any, float]], servers: int) -> ClusterLoad:
    """Sum the load of all servers, from {figure: {replica: value}}."""
    total = {name: sum(values.values()) for name, values in figures.items()}
    judged = total.get("judged", 0.0)
    return ClusterLoad(
        engines_needed=total.get("asked", 0.0),
        in_progress=total.get("in_progress", 0.0),
        servers=servers,
        attainment=total.get("met", 0.0) / judged if judged else None,
    )


def max_of(figures: dict[str, dict[Any, float]], name: str, default: float) -> float:
    """Return the largest value of a figure over the replicas."""
    return max(figures.get(name, {}).values(), default=default)


def scale_policy(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the number of servers for Ray, and the state for the next call.

    `context` is Ray's AutoscalingContext.
    """
    state: dict[str, Any] = dict(context.policy_state or {})
    figures = context.aggregated_metrics or {}
    default = ScaleTarget()
    scaler = state.get("scaler") or Scaler(default)
    scaler.target = ScaleTarget(
        attainment=max_of(figures, "target", default.attainment),
        least=context.capacity_adjusted_min_replicas,
        most=context.capacity_adjusted_max_replicas,
        engines=round(max_of(figures, "engines", default.engines)),
        lead_s=max_of(figures, "lead_s", default.lead_s),
    )
    decision = scaler.decide(SystemClock().now_s(), load_of(figures, context.current_num_replicas))
    if decision.servers != context.current_num_replicas:
        log.info(
            "%d servers, %.1f%% predicted: %s",
            *(decision.servers, 100 * decision.predicted, decision.why),
        )
    return decision.servers, {**state, "scaler": scaler}


def options_of(settings: RayAppSettings) -> dict[str, Any]:
    """Return Ray's deployment options of the servers."""
    return {
        "name": "server",
        "autoscaling_config": {
            "min_replicas": settings.least,
            "max_replicas": settings.most,
            "metrics_interval_s": REGISTER_S,
            "look_back_period_s": 2 * REGISTER_S,
            "upscale_delay_s": 0.0,
            "downscale_delay_s": 0.0,
            "policy": {"policy_function": "headway.cluster.ray_app:scale_policy"},
        },
        "ray_actor_options": {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
        "health_check_period_s": REGISTER_S,
        "health_check_timeout_s": 3 * CALL_TIMEOUT_S,
        "graceful_shutdown_timeout_s": settings.drain_s + 2 * CALL_TIMEOUT_S,
    }


def app(arguments: dict[str, Any]) -> Any:
    """Return the application for `serve run` and for a RayService; raises UsageError."""
    from ray import serve

    settings = parse_arguments(arguments)
    servers = serve.deployment(RayServer).options(**options_of(settings)).bind(settings)
    actor_options: dict[str, Any] = {"num_cpus": 0.1}
    if settings.gateway_resource:
        actor_options["resources"] = {settings.gateway_resource: 0.001}
    gateway_options = {
        "name": "gateway",
        "num_replicas": 1,
        "ray_actor_options": actor_options,
        "graceful_shutdown_timeout_s": settings.drain_s + 2 * CALL_TIMEOUT_S,
    }
    return serve.deployment(Gateway).options(**gateway_options).bind(settings, servers)
