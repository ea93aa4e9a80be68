"""`headway VERB …`: the table of verbs, help, and the printing of errors.

A verb is a row: its help, its option tables, and the function that runs it, imported when it is
called, so that the first line of output comes within 300 ms.
"""

import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from headway.config.options import (
    AgainstOptions,
    BatchOptions,
    BenchOptions,
    CalibrateOptions,
    DistillOptions,
    DoctorOptions,
    DriftOptions,
    EngineOptions,
    EvalOptions,
    GateOptions,
    GatewayOptions,
    KeyOptions,
    LaunchOptions,
    LogOptions,
    PlaceOptions,
    PlanOptions,
    PruneOptions,
    PullOptions,
    QuantizeOptions,
    RolloutOptions,
    SamplingOptions,
    ServerOptions,
    SimulateOptions,
    SpendOptions,
    TraceOptions,
    TuneOptions,
    check_environment,
    help_text,
    read_options,
)
from headway.core.errors import HeadwayError, UsageError

DRY_RUN, CHAT, RAW, YES = "--dry-run", "--chat", "--raw", "--yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """One row of the table; `function` is `module:name`."""

    group: str
    """Heading of the overview under which it is listed."""
    usage: str
    help: str
    tables: tuple[type, ...]
    function: str
    has_passthrough: bool = False
    """Whether arguments after `--` go to another program, in `VerbCall.passthrough`."""
    switches: tuple[str, ...] = (DRY_RUN,)
    """Flags without a value that it takes, besides those of every verb."""


VERBS = {
    "serve": Verb(
        group="serve",
        usage="serve [MODEL]",
        help="Serve a model over the OpenAI API; without one the embedded headway-tiny.",
        tables=(ServerOptions, EngineOptions, LogOptions),
        function="headway.cli.serve:serve",
        switches=(DRY_RUN, YES),
    ),
    "run": Verb(
        group="serve",
        usage="run [MODEL] PROMPT",
        help="Print the answer to a prompt; --raw completes it without a chat template.",
        tables=(SamplingOptions, EngineOptions),
        function="headway.cli.generate:run",
        switches=(DRY_RUN, CHAT, RAW, YES),
    ),
    "chat": Verb(
        group="serve",
        usage="chat [MODEL]",
        help="Talk to a model in the terminal.",
        tables=(SamplingOptions, EngineOptions),
        function="headway.cli.generate:chat",
        switches=(DRY_RUN, YES),
    ),
    "batch": Verb(
        group="serve",
        usage="batch [FOLDER] FILE.jsonl",
        help="Answer a file of requests without a server; resumes after an interruption.",
        tables=(BatchOptions, EngineOptions),
        function="headway.cli.batch:batch",
    ),
    "pull": Verb(
        group="serve",
        usage="pull NAME",
        help="Fetch a model: smollm2, ORG/NAME of the Hugging Face hub, hf.co/USER/REPO:Q4_K_M.",
        tables=(PullOptions,),
        function="headway.cli.names:pull",
        switches=(),
    ),
    "ls": Verb(
        group="serve",
        usage="ls [WORD]",
        help="The models on this machine.",
        tables=(),
        function="headway.cli.hub:ls",
        switches=(),
    ),
    "launch": Verb(
        group="serve",
        usage="launch AGENT [-- …]",
        help="Point codex, claude or opencode at a server; --run starts it.",
        tables=(LaunchOptions,),
        function="headway.cli.launch:launch",
        has_passthrough=True,
        switches=(),
    ),
    "key": Verb(
        group="serve",
        usage="key [revoke] NAME",
        help="Make an API key and its row for a --key-file, or revoke one.",
        tables=(KeyOptions,),
        function="headway.cli.key:key",
        switches=(),
    ),
    "bench": Verb(
        group="measure",
        usage="bench URL | MODEL",
        help="Put load on a server or a model and report; also `bench compare A.json B.json`.",
        tables=(BenchOptions, EngineOptions),
        function="headway.cli.bench:bench",
        switches=(DRY_RUN, YES),
    ),
    "eval": Verb(
        group="measure",
        usage="eval [MODEL | URL]",
        help="Measure the answers of a folder or a server, --against another, with --gate.",
        tables=(EvalOptions, EngineOptions, AgainstOptions),
        function="headway.cli.evaluate:evaluate",
        switches=(DRY_RUN, YES),
    ),
    "doctor": Verb(
        group="measure",
        usage="doctor [WHAT]",
        help="What limits the server at a URL, a bench report, or this machine with a folder.",
        tables=(DoctorOptions, EngineOptions),
        function="headway.cli.doctor:doctor",
        switches=(),
    ),
    "doctor --rules": Verb(
        group="measure",
        usage="doctor --rules",
        help="Print Prometheus rules for the error budgets of a server's classes.",
        tables=(ServerOptions,),
        function="headway.cli.rules:rules",
        switches=(),
    ),
    "doctor --trace": Verb(
        group="measure",
        usage="doctor --trace URL OUT.json",
        help="Write the last seconds of a server as a trace for Perfetto.",
        tables=(TraceOptions,),
        function="headway.cli.trace:trace",
        switches=(),
    ),
    "plan": Verb(
        group="advise",
        usage="plan [FOLDER]",
        help="Which machines serve a traffic, how many, at what cost; what fails first.",
        tables=(PlanOptions, BenchOptions, EngineOptions),
        function="headway.cli.plan:plan",
        switches=(),
    ),
    "plan --place": Verb(
        group="advise",
        usage="plan --place MODELS.yaml",
        help="Say which model goes on which of --machines, at the least price.",
        tables=(PlaceOptions,),
        function="headway.cli.place:place",
        switches=(),
    ),
    "simulate": Verb(
        group="advise",
        usage="simulate [FOLDER]",
        help="Simulate a server: the report that bench would write of it.",
        tables=(SimulateOptions, BenchOptions, EngineOptions),
        function="headway.cli.simulate:simulate",
    ),
    "tune": Verb(
        group="advise",
        usage="tune [FOLDER]",
        help="Find the options that serve a traffic best, by simulation and real runs.",
        tables=(TuneOptions, BenchOptions, EngineOptions),
        function="headway.cli.tune:tune",
    ),
    "quantize": Verb(
        group="compress",
        usage="quantize FOLDER OUT",
        help="Write a model in int4 or int8, calibrated; --gate judges it first.",
        tables=(QuantizeOptions, GateOptions),
        function="headway.cli.quantize:quantize",
    ),
    "prune": Verb(
        group="compress",
        usage="prune FOLDER OUT",
        help="Write a model without some neurons, heads, layers or weights; prints the gain.",
        tables=(PruneOptions, GateOptions),
        function="headway.cli.prune:prune",
    ),
    "distill": Verb(
        group="compress",
        usage="distill TEACHER STUDENT OUT",
        help="Train a student on its teacher's distribution, resumable.",
        tables=(DistillOptions, GateOptions),
        function="headway.cli.distill:distill",
    ),
    "gateway": Verb(
        group="fleet",
        usage="gateway [FILE.yaml]",
        help="One address before many servers: --upstream URL, or a file of them.",
        tables=(GatewayOptions, LogOptions),
        function="headway.cli.gateway:gateway",
    ),
    "gateway --from-litellm": Verb(
        group="fleet",
        usage="gateway --from-litellm CONFIG.yaml",
        help="Print the gateway's file for a LiteLLM proxy's config, and what has no place in it.",
        tables=(),
        switches=(),
        function="headway.cli.from_litellm:from_litellm",
    ),
    "gateway spend": Verb(
        group="fleet",
        usage="gateway spend",
        help="What was spent, by key, team, model, tag and day, out of the ledger.",
        tables=(SpendOptions,),
        switches=(),
        function="headway.cli.spend:spend",
    ),
    "gateway calibrate": Verb(
        group="fleet",
        usage="gateway calibrate FILE.yaml",
        help="Ask both routes of a cascade, and write where the cheap one is good enough.",
        tables=(CalibrateOptions,),
        function="headway.cli.calibrate:calibrate",
    ),
    "gateway drift": Verb(
        group="fleet",
        usage="gateway drift FILE.yaml | URL URL",
        help="Test whether the upstreams of one model still answer alike.",
        tables=(DriftOptions,),
        function="headway.cli.drift:drift",
    ),
    "gateway rollout": Verb(
        group="fleet",
        usage="gateway rollout FOLDER",
        help="Quantize, gate, serve, canary: promote a new version behind a gateway, or undo it.",
        tables=(RolloutOptions,),
        function="headway.cli.rollout:rollout",
    ),
}
"""Verb → its row; a second word is a subcommand, or a flag that selects another function."""
RENAMED_VERBS = {
    "place": "plan --place",
    "rules": "doctor --rules",
    "trace": "doctor --trace",
    "calibrate": "gateway calibrate",
    "drift": "gateway drift",
    "rollout": "gateway rollout",
}
"""Old name of a verb → its new name; the old one works in 0.3, with a warning."""
REMOVED_VERBS = {
    "claims": "make claims, or python benchmarks/claims_page.py, of the source prints that page.",
    "narrow": "Write --kv-layers FILE by hand; headway eval judges it (docs/attention.md).",
    "widen": "python benchmarks/widen.py of the source writes that folder.",
}
"""Removed verb → what to do instead."""
VERBS_OF_OTHERS = {
    "list": "headway ls lists the models on this machine.",
    "show": "headway serve MODEL --dry-run shows a model's shape, memory and options.",
    "rm": "Remove the file or folder that headway ls names; headway keeps nothing else of a model.",
    "ps": "A server has one model: GET /v1/models names it, headway doctor URL says what it does.",
}
"""Verbs of Ollama and others → what to do here."""
VERBOSE = ("-v", "--verbose")
SWITCH_HELP = {
    DRY_RUN: "  --dry-run                          Say what would be done and with what, and stop.",
    CHAT: "  --chat                             Apply the chat template, which must be there.",
    RAW: "  --raw                              Complete the prompt as text, without a template.",
    YES: "  --yes                              Fetch a model that is named and not here yet.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerbCall:
    """A parsed command line."""

    options: dict[type, Any]
    positionals: list[str]
    sources: dict[str, str]
    switches: frozenset[str]
    passthrough: list[str] = field(default_factory=list)
    deprecated: list[str] = field(default_factory=list)
    """A warning for each old option name that was given."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1, 2 usage, 3 model, 4 port, 5 gate, 130."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    verbose = "-v" in arguments or "--verbose" in arguments
    try:
        return dispatch(arguments)
    except HeadwayError as error:
        if verbose:
            traceback.print_exc()
        print_error(error, arguments)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def print_error(error: HeadwayError, arguments: list[str]) -> None:
    """Print the cause and the fix on stderr, as one line of JSON where the log is JSON."""
    from headway.core.logs import escape_line, format_of, line_of

    cause, fix = (
        escape_line(error.cause),
        escape_line(error.fix),
    )  # the text may come from a model's file
    if format_of(arguments, os.environ) == "json":
        print(line_of(f"{cause} {fix}".rstrip(), logging.ERROR, "json"), file=sys.stderr)
        return
    print(f"headway: {cause}", file=sys.stderr)
    if fix:
        print(f"         {fix}", file=sys.stderr)


def warn(text: str, arguments: list[str]) -> None:
    """Print one warning on stderr, as JSON where the log is JSON."""
    from headway.core.logs import format_of, line_of

    is_json = format_of(arguments, os.environ) == "json"
    line = line_of(text, logging.WARNING, "json") if is_json else f"headway: {text}"
    print(line, file=sys.stderr)


def dispatch(arguments: list[str]) -> int:
    """Find the verb and run it."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, *rest = arguments
    if name in ("--version", "version"):
        import headway

        print(headway.__version__)
        return 0
    if name in RENAMED_VERBS:
        warn(
            f"headway {name} is headway {RENAMED_VERBS[name]} now; the old name works in 0.3.", rest
        )
        name, _, job = RENAMED_VERBS[name].partition(" ")
        rest = [job, *rest]
    name, rest = with_subcommand(name, rest)
    verb = VERBS.get(name)
    if verb is None and name in REMOVED_VERBS:
        raise UsageError(f"headway {name} is gone: {REMOVED_VERBS[name]}")
    if verb is None:
        fix = VERBS_OF_OTHERS.get(name, f"There are: {', '.join(VERBS)}.")
        raise UsageError(f"There is no verb {name}.", fix)
    passthrough: list[str] = []
    if verb.has_passthrough and "--" in rest:
        rest, passthrough = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
    topics = [a for a in rest if a in ("-h", "--help") or a.startswith("--help=")]
    if topics:
        print(verb_help(name, topics[0].partition("=")[2]))
        return 0
    switches = frozenset(a for a in rest if a in (*SWITCH_HELP, *VERBOSE))
    if wrong := sorted(switches - {*verb.switches, *VERBOSE}):
        raise UsageError(f"headway {name} has no {wrong[0]}.", f"Leave {wrong[0]} out.")
    rest = [a for a in rest if a not in switches]
    check_environment([table for each in VERBS.values() for table in each.tables], os.environ)
    deprecated: list[str] = []

    def warn_of_old_name(line: str) -> None:
        deprecated.append(line)
        warn(line, arguments)

    options, positionals, sources = read_options(
        verb.tables, rest, os.environ, warn=warn_of_old_name
    )
    call = VerbCall(
        options=options,
        positionals=positionals,
        sources=sources,
        switches=switches,
        passthrough=passthrough,
        deprecated=deprecated,
    )
    module, _, function = verb.function.partition(":")
    run: Callable[[VerbCall], int] = getattr(import_module(module), function)
    return run(call)


def with_subcommand(name: str, words: list[str]) -> tuple[str, list[str]]:
    """Return (the row's name, the other words): a subcommand comes first, a flag anywhere.

    >>> with_job("gateway", ["drift", "a.yaml"]), with_job("doctor", ["--rules"])
    (('gateway drift', ['a.yaml']), ('doctor --rules', []))
    """
    for at, word in enumerate(words):
        if word == "--":
            break
        if f"{name} {word}" in VERBS and (at == 0 or word.startswith("--")):
            return f"{name} {word}", words[:at] + words[at + 1 :]
    return name, words


def overview() -> str:
    """Return the text of `headway --help`: the verbs by group."""
    groups: dict[str, list[str]] = {}
    for verb in VERBS.values():
        groups.setdefault(verb.group, []).append(f"  headway {verb.usage:<33} {verb.help}")
    verbs = "\n\n".join("\n".join([f"{group}:", *rows]) for group, rows in groups.items())
    return (
        f"Headway serves language models.\n\n{verbs}\n\n  headway version\n\n"
        "headway VERB --help shows a verb's common options, --help=all all of them, and\n"
        "--help=WORD those about a word. FOLDER is a Hugging Face model folder, or a name that\n"
        "`headway ls` shows."
    )


def verb_help(name: str, topic: str) -> str:
    """Return the help of a verb; `topic` is "", "all" or a word, UsageError without a match."""
    verb = VERBS[name]
    options = help_text(verb.tables, topic)
    if topic and not options:
        raise UsageError(f"headway {name} has no option about {topic}.", "See --help=all.")
    jobs = [each for key, each in VERBS.items() if key.startswith(f"{name} ")]
    more = [f"  headway {each.usage:<33} {each.help}" for each in jobs]
    lines = [f"headway {verb.usage}", "", verb.help, "", *([*more, ""] if more else []), options]
    if not topic:
        lines += [
            "  --config FILE                      Options from a YAML file.",
            *(SWITCH_HELP[switch] for switch in verb.switches),
            "  -v                                 Tracebacks with errors.",
            "",
            "--help=all shows every option; each is also HEADWAY_NAME in the environment.",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
