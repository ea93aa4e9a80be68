"""`headway gateway rollout FOLDER --to FILE`: quantize, gate, serve, canary, promote or undo."""

import hashlib
import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.common import GATE_FAILED, folder_stamp, model_folder
from headway.config.options import RolloutOptions
from headway.core.errors import HeadwayError, UsageError

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from headway.gateway.config import Config, GatewayModelRow

POLL_S, PROGRESS_INTERVAL_S, START_TIMEOUT_S, STOP_TIMEOUT_S = 0.5, 30.0, 600.0, 60.0
USAGE = "headway gateway rollout FOLDER --to gateway.yaml"


def rollout(call: "VerbCall") -> int:
    """Run the steps in turn; return 0 when promoted, 5 when refused or rolled back."""
    from headway.gateway.config import read_config
    from headway.spec import read_model_spec

    options: RolloutOptions = call.options[RolloutOptions]
    if len(call.positionals) != 1 or not options.to:
        raise UsageError("rollout takes a folder, and --to the gateway's file.", USAGE)
    folder, file = model_folder(call.positionals[0]), Path(options.to)
    read_model_spec(folder)
    config = read_config(file)
    row = model_row(config, options.model)
    against = options.against or first_url(config, row)
    if "--dry-run" in call.switches:
        print(outline(options, folder, row, against))
        return 0
    gateway = GatewayClient(options)
    gateway.stats()
    signal.signal(signal.SIGTERM, raise_interrupt)
    return RolloutRun(options, folder, file, row.name, gateway).run(against)


def raise_interrupt(number: int, frame: object) -> None:
    """Handle SIGTERM like Ctrl-C: roll back what was started."""
    raise KeyboardInterrupt


def model_row(config: "Config", name: str) -> "GatewayModelRow":
    """Return the model row of that name, or the only one; UsageError where it is ambiguous."""
    rows = [row for row in config.models if name in ("", row.name) and row.name != "*"]
    if len(rows) != 1:
        there = ", ".join(row.name for row in config.models)
        raise UsageError(f"Which model? There is {there}.", "Say --model NAME.")
    return rows[0]


def first_url(config: "Config", row: "GatewayModelRow") -> str:
    """Return the URL of the current version, not that of a running rollout's canary."""
    canaries = {name for each in config.rollouts for name in each.canary}
    urls = {each.name: each.url.removeprefix("dns+") for each in config.upstreams}
    return next(urls[name] for name in row.upstreams if name not in canaries)


def outline(options: RolloutOptions, folder: Path, row: "GatewayModelRow", against: str) -> str:
    """Return the text of `--dry-run`."""
    steps = [
        f"quantize  {folder} to {options.quantize}" if options.quantize != "none" else "",
        f"gate      headway eval against {against}, tolerance {options.tolerance:g}",
        f"serve     {options.canary or 'on a free port'}",
        f"canary    of {row.name} behind {options.gateway}, beside {', '.join(row.upstreams)}",
    ]
    return "\n".join(step for step in steps if step)


class GatewayClient:
    """Client of the running gateway, with an operator's key."""

    def __init__(self, options: RolloutOptions) -> None:
        self._url = options.gateway.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"}
        if options.api_key:
            self._headers["authorization"] = f"Bearer {options.api_key}"

    def stats(self) -> dict[str, Any]:
        return self._ask("/stats", None)

    def reload(self) -> None:
        self._ask("/reload", {})

    def take_back(self, name: str, reason: str) -> None:
        self._ask(f"/rollouts/{name}", {"action": "take_back", "reason": reason})

    def _ask(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                content: Any = json.load(answer)
            if not isinstance(content, dict):
                raise ValueError("it answers with something else")
            return content
        except urllib.error.HTTPError as error:
            text = error.read()[:500].decode("utf-8", "replace")
            raise HeadwayError(
                f"The gateway answered {path} with {error.code}: {text}", "Check --api-key."
            ) from error
        except (OSError, HTTPException, ValueError) as error:  # no HTTP, or no JSON
            raise HeadwayError(
                f"The gateway at {self._url} cannot be asked: {error}.", "Is it up? --gateway URL"
            ) from error


class RolloutRun:
    """The steps of one rollout; a rollback ends what was started."""

    def __init__(
        self, options: RolloutOptions, folder: Path, file: Path, model: str, gateway: GatewayClient
    ) -> None:
        self._options = options
        self._folder = folder
        self._file = file
        self._model = model
        self._gateway = gateway
        self._server: subprocess.Popen[bytes] | None = None
        self._log = ""
        self._name = options.name or folder.name

    def run(self, against: str) -> int:
        """Quantize, gate, serve, canary; SIGINT and SIGTERM roll back."""
        options = self._options
        if options.quantize != "none":
            out = self._folder.with_name(f"{self._folder.name}-{options.quantize}")
            print(f"1 quantize: {out}", flush=True)
            if verb("quantize", self._folder, out, f"--format={options.quantize}") != 0:
                return 1
            self._folder, self._name = out, options.name or out.name
        print(f"2 gate: {self._folder} against {against}", flush=True)
        gate = [f"--against={against}", f"--questions={options.questions}", "--gate"]
        if options.kl_tolerance is not None:
            gate.append(f"--kl-tolerance={options.kl_tolerance}")
        if options.allow_unclear:
            gate.append("--allow-unclear")
        status = verb("eval", self._folder, *gate, f"--tolerance={options.tolerance}")
        if status != 0:
            verdict = "refused by the gate" if status == GATE_FAILED else "not evaluated"
            print(f"{verdict}. The gateway was not touched.", flush=True)
            return status
        try:
            url = options.canary or self._serve()
            self._begin(url)
            state = self._follow()
        except BaseException:
            self._end("the command has ended")
            raise
        if state == "promoted":
            self._print_promoted()
            return 0
        self._end("")
        return GATE_FAILED

    def _serve(self) -> str:
        """Start a server of the folder and return its URL; HeadwayError where it does not start."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with tempfile.NamedTemporaryFile(prefix="headway-", suffix=".log", delete=False) as log:
            self._log = log.name
            command = [sys.executable, "-m", "headway.cli.main", "serve", str(self._folder)]
            flags = [f"--port={port}", f"--served-model-name={self._model}"]
            self._server = subprocess.Popen(
                [*command, *flags], stdout=log, stderr=log, start_new_session=True
            )
        url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + START_TIMEOUT_S
        print(f"3 serve: {url}, process {self._server.pid}, log {self._log}", flush=True)
        while not is_ready(url):
            if self._server.poll() is not None or time.monotonic() > until_s:
                raise HeadwayError("The server of the new version does not start.", self._log)
            time.sleep(POLL_S)
        return f"{url}/v1"

    def _begin(self, url: str) -> None:
        """Write the canary to the overlay of the gateway's file, and reload the gateway."""
        from headway.gateway import overlay
        from headway.gateway.config import read_config

        options = self._options
        before = {each.name: each for each in read_config(self._file).upstreams}
        price = next((each.price for each in before.values() if each.price is not None), None)
        upstream: dict[str, Any] = {"name": f"canary-{self._name}", "url": url}
        if price is not None:
            given = {name: getattr(price, name) for name in price.__struct_fields__}
            upstream["price"] = {name: value for name, value in given.items() if value is not None}
        row = {
            **{"name": self._name, "model": self._model, "canary": [upstream["name"]]},
            "version": options.version or digest(folder_stamp(self._folder)),
            "requests": options.requests,
            "shadow": options.shadow,
            "slo": options.slo,
        }
        row |= {"steps": options.steps} if options.steps else {}
        overlay.add(self._file, upstream, row)
        read_config(self._file)
        self._gateway.reload()
        print(f"4 canary: {self._name} of {self._model}, {overlay.overlay_path(self._file)}")

    def _follow(self) -> str:
        """Print each change, and the progress twice a minute, until the rollout has ended."""
        printed, printed_s = "", 0.0
        while True:
            rollouts = [r for r in self._gateway.stats()["rollouts"] if r["name"] == self._name]
            if not rollouts:
                raise HeadwayError(f"The gateway has no rollout {self._name} any more.")
            now = rollouts[0]
            line = f"  {now['state']}, {now['share']:.0%} of the requests"
            line += f": {now['reason']}" if now["reason"] else ""
            if line != printed or time.monotonic() - printed_s > PROGRESS_INTERVAL_S:
                printed, printed_s = line, time.monotonic()
                known = now["guards"]["errors"]
                counts = f"{known['canary'][1]} at the canary, {known['control'][1]} beside it"
                waits = f"; waits for {', '.join(now['waits_for'])}" if now["waits_for"] else ""
                print(f"{line} ({counts}{waits})", flush=True)
            if now["state"] in ("promoted", "rolled back"):
                return str(now["state"])
            time.sleep(POLL_S)

    def _end(self, reason: str) -> None:
        """Remove the canary from the gateway, then end its server."""
        from headway.gateway import overlay

        overlay.remove(self._file, self._name)
        with suppress(HeadwayError):  # a gateway that is down reads the file when it starts
            if reason:
                self._gateway.take_back(self._name, reason)
        with suppress(HeadwayError):
            self._gateway.reload()
        if self._server is not None:
            self._server.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._server.wait(STOP_TIMEOUT_S)
        print("the current version answers all requests", flush=True)

    def _print_promoted(self) -> None:
        from headway.gateway import overlay

        print(f"promoted: {self._name} answers all requests of {self._model}", flush=True)
        if self._server is not None:
            print(f"its server runs on as process {self._server.pid}, log {self._log}")
        print(f"{overlay.overlay_path(self._file)} holds its row; move it into {self._file}.")


def digest(stamp: str) -> str:
    """Return a short hash of a folder's stamp."""
    return hashlib.sha256(stamp.encode()).hexdigest()[:12]


def verb(name: str, *words: str | Path) -> int:
    """Run another verb and return its exit status."""
    command = [sys.executable, "-m", "headway.cli.main", name, *map(str, words)]
    return subprocess.run(command, check=False).returncode


def is_ready(url: str) -> bool:
    """Whether a server is ready."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
