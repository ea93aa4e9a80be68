"""`headway serve [FOLDER]`: the server, with its engines in processes of their own."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from headway.cli import kv_gate
from headway.cli.build_server import make_classes, make_state
from headway.cli.common import obtain_model, print_settings
from headway.cli.engines import check_pools, count_engines, divide_machine
from headway.config.options import EngineOptions, LogOptions, ServerOptions
from headway.core.errors import UsageError
from headway.core.logs import line_of, set_up_logs, write_in_thread
from headway.core.progress import bytes_bar
from headway.core.service import LIKE_INTERACTIVE, ServiceClass
from headway.core.slo import DEFAULT_CLASS
from headway.spec import read_model_spec
from headway.spec.embedded import EMBEDDED

log = logging.getLogger(__name__)

REAL_MODEL_HINT = "\n  next     headway serve smollm2    # a real chat model, 98 MB"
"""Shown beside the embedded model, which only proves that everything works."""

if TYPE_CHECKING:
    from headway.cli.main import VerbCall
    from headway.server.models import ServerState


def serve(call: "VerbCall") -> int:
    """Serve until a signal; return 0 after a clean drain."""
    if len(call.positionals) > 1:
        raise UsageError("serve takes one model.", "headway serve MODEL")
    folder = obtain_model(call.positionals[0] if call.positionals else None, call)
    engine_options: EngineOptions = call.options[EngineOptions]
    options: ServerOptions = call.options[ServerOptions]
    check_pools(engine_options, options)
    logs: LogOptions = call.options[LogOptions]
    set_up_logs(logs.log_level, logs.log_format)
    if "--dry-run" in call.switches:
        shared = divide_machine(folder, engine_options, count_engines(options))
        print_settings(folder, shared, call.sources, call.deprecated)
        print_objectives(make_classes(options))
        return 0
    check_model(folder, engine_options)
    if not options.allow_unverified_kv:
        kv_gate.check(folder, engine_options)

    from headway.edge import root_path, serving
    from headway.edge.keys import Keyring
    from headway.edge.notify import Notifier
    from headway.server import run

    classes = make_classes(options)
    keyring = Keyring(
        flags=options.api_key,
        file=Path(options.key_file) if options.key_file else None,
        classes=classes,
        share_prefix_cache=options.share_prefix_cache,
    )
    serving.check_place(options, call.sources, has_key=bool(keyring), insecure=options.insecure)
    root_path.check_root_path(options.root_path)
    notifier = Notifier.take(os.environ)
    with serving.open_listener(options) as (listener, url), contextlib.ExitStack() as bar:
        progress = bar.enter_context(loading_progress(folder.name, logs.log_format))
        state = make_state(folder, engine_options, options, logs, keyring, classes, progress)

        def on_ready() -> None:
            bar.close()
            warn_static_batching(engine_options, state.rows[0].info().max_num_seqs)
            with contextlib.suppress(OSError):  # a full disk behind stdout is no reason to end
                text = ready_message(state, url)
                print(line_of(text, logging.INFO, logs.log_format), flush=True)

        with write_in_thread("headway.requests", logs.log_format):
            serving.run(run.serve(state, listener, on_ready, notifier))
    log.info("ended")
    discard_unwritten_output()
    return 0


@contextlib.contextmanager
def loading_progress(name: str, format: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that shows the loading progress; with JSON logs one line at the start."""
    if format == "text":
        with bytes_bar(f"Loading {name}") as progress:
            yield progress
        return
    log.info("loading %s", name)
    yield lambda done, total: None


def print_objectives(classes: dict[str, ServiceClass]) -> None:
    """Print the objectives of the default class for `--dry-run`, before any measurement."""
    default = classes[DEFAULT_CLASS]
    more = "; raised at the start where a single request takes longer"
    why = default.why + more * (default.why == LIKE_INTERACTIVE)
    why += "; queued beyond them where they cannot be met" * default.best_effort
    print(f"{'objectives':<22} {default!s:<14} {why}")


def check_model(folder: Path, options: EngineOptions) -> None:
    """Raise ModelError for a folder that cannot be served, before an engine starts.

    Its weights, safetensors or GGUF, must exist with complete headers.
    """
    from headway.runtime.checkpoint_files import find_files

    read_model_spec(folder)
    if options.load_format != "dummy" and options.executor != "null":
        find_files(folder)


def warn_static_batching(options: EngineOptions, max_num_seqs: int) -> None:
    """Warn that static batching with too few clients waits by design."""
    if options.batching == "static" and max_num_seqs > 1:
        log.warning(
            "--batching static: requests start %d at a time; fewer wait until more come. "
            "Lower --max-num-seqs, or use --batching dynamic.",
            max_num_seqs,
        )


def ready_message(state: "ServerState", url: str) -> str:
    """Return the lines printed when ready: URL, model, key hint, and a curl command."""
    place = url if url.startswith("unix:") else url + "/v1"
    model = state.rows[0]
    key = "$HEADWAY_API_KEY" if state.keyring else "any"
    chat = model.tokenizer is not None and model.tokenizer.template is not None
    path, field = (
        ("chat/completions", '"messages":[{"role":"user","content":"What is 2 + 3?"}]')
        if chat
        else ("completions", '"prompt":"Once upon a time"')
    )
    header = ' -H "Authorization: Bearer $HEADWAY_API_KEY"' if state.keyring else ""
    return (
        f"Headway is ready: {place}\n"
        f"  model    {', '.join(model.names)} (context {model.info().max_model_len} tokens)\n"
        f"  key      {key}\n"
        f"  try      curl {curl_url(url)}/v1/{path}{header} -H 'content-type: application/json' "
        f'-d \'{{"model":"{model.names[0]}",{field}}}\''
        + (REAL_MODEL_HINT if model.names[0] == EMBEDDED else "")
    )


def curl_url(url: str) -> str:
    """Return a URL as curl takes it: unix:/run/s → --unix-socket /run/s http://localhost."""
    path = url.removeprefix("unix:")
    return url if path == url else f"--unix-socket {path} http://localhost"


def discard_unwritten_output() -> None:
    """Discard what stdout and stderr cannot write, else Python exits with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
