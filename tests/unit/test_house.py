"""The table of rooms, held by reading the source: imports, cycles, torch, forbidden calls.

Imports inside functions count too. A room that does not exist yet has no files and so no faults.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from house_figures import figures

SOURCE = Path(__file__).resolve().parents[2] / "src"
TESTS = Path(__file__).resolve().parents[1]
FILES = sorted((SOURCE / "headway").rglob("*.py"))
SHARED_BY_UNIT = [
    TESTS / f"{name}.py"
    for name in (
        *(
            "fake_model",
            "fakes",
            "engine_world",
            "cached_world",
            "admission_house",
            "grammar_engine",
            "late_world",
            "golden_plans",
            "house_figures",
        ),
        *("batch_runs", "batch_calls", "resolve_cases", "small_tokenizers", "telemetry_cases"),
    )
]

MAY_IMPORT = {
    "": {"core", "llm"},  # headway/__init__.py, late
    "__main__": {"cli"},
    "core": set(),
    "spec": {"core"},
    "config": {"core", "spec"},
    "perf": {"core", "spec"},
    "telemetry": {"core", "config", "spec", "perf"},
    "admit": {"core", "config", "telemetry", "edge"},
    "engine": {"core", "config", "spec", "perf", "telemetry", "admit"},
    "frontend": {"core", "spec", "telemetry", "engine"},
    "edge": {"core"},
    "batches": {"core", "edge"},
    "runtime": {"core", "config", "spec"},
    "planning": {"core", "config", "spec", "runtime", "compress"},
    "assemble": {"core", "config", "spec", "perf", "engine", "runtime", "planning"},
    "llm": {"core", "config", "spec", "frontend", "assemble"},
    "whole_model": {"core", "spec", "llm"},
    "surprisal": {"core", "whole_model"},
    "server": {
        "core",
        "config",
        "spec",
        "telemetry",
        "engine",
        "frontend",
        "edge",
        "admit",
        "batches",
    },
    "gateway": {"core", "config", "telemetry", "edge", "batches"},
    "measure": {"core"},
    "bench": {"core", "config", "perf", "telemetry", "measure"},
    "advise": {
        *(
            "core",
            "config",
            "spec",
            "perf",
            "telemetry",
            "engine",
            "admit",
            "edge",
            "measure",
            "bench",
            "planning",
        ),
    },
    "evals": {"core", "spec", "measure"},
    "compress": {"core", "config", "spec", "frontend", "runtime", "evals"},
    "cluster": {"core", "config", "spec", "assemble", "server", "gateway"},
    "cli": {
        *("", "core", "config", "spec", "telemetry", "engine", "frontend", "runtime"),
        *("planning", "assemble"),
        *("llm", "whole_model", "edge", "admit", "server", "gateway", "measure", "bench", "evals"),
        *("advise", "compress", "cluster", "batches"),
    },
}
VERSION = {"headway", "headway.__version__"}  # any room may say it, and nothing else of the root
TORCH_AT_WILL = {"runtime", "compress"}
TORCH_LATE = {"planning", "assemble", "advise", "cluster"}
UNPICKLING = {
    *("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"),
    "multiprocessing",
}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "torch.jit.load"}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj"}
FORBIDDEN_BUILTINS = {"eval", "exec", "__import__"}
FORBIDDEN_KEYWORDS = {"trust_remote_code", "allow_pickle", "weights_only"}
FORBIDDEN_NAMES = {"util", "utils", "helper", "helpers", "manager", "managers"}


def module_of(path: Path) -> str:
    """…/headway/core/plan.py → headway.core.plan; a package's __init__ is the package."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """headway.core.plan → core; headway → ""."""
    return module.partition(".")[2].partition(".")[0]


MODULES = {module_of(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    """What a file of the source says; parsed by the tests, not where they are collected."""
    return ast.parse(path.read_text(encoding="utf-8"))


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def walk(node: ast.AST, late: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node below `node`, and whether it runs only when a function is called."""
    for child in ast.iter_child_nodes(node):
        inside = late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        inside = inside or is_type_checking(child)
        yield child, inside
        yield from walk(child, inside)


def imports(path: Path, known: dict[str, Path]) -> Iterator[tuple[str, bool, int]]:
    """(imported module, late, line); `from a import b` is a.b when that is a module of ours."""
    module = module_of(path)
    for node, late in walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, late, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if path.name == "__init__.py" else module.rpartition(".")[0]
                for _ in range(node.level - 1):
                    package = package.rpartition(".")[0]
                base = f"{package}.{base}" if base else package
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield (full if full in known or base == "headway" else base), late, node.lineno


def ours(path: Path) -> set[str]:
    """The modules of headway that `path` imports."""
    return {name for name, _, _ in imports(path, MODULES) if name.split(".")[0] == "headway"}


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(SOURCE)}:{line}"


def test_every_room_is_in_the_table():
    assert {room_of(module) for module in MODULES} <= MAY_IMPORT.keys()
    assert len(FILES) > 30, "the source was not found"


def test_rooms_import_what_their_row_names():
    faults = [
        f"{where(path, line)}: {room_of(module_of(path))} imports {name}"
        for path in FILES
        for name, _, line in imports(path, MODULES)
        if name.split(".")[0] == "headway"
        and name not in VERSION
        and room_of(name) not in MAY_IMPORT[room_of(module_of(path))] | {room_of(module_of(path))}
    ]
    assert faults == []


def test_root_gives_its_version_alone():
    """`import headway` must not be a way around the table: headway.LLM would load torch."""
    faults = [
        f"{where(path, node.lineno)}: {ast.unparse(node)}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "headway"
        and node.attr != "__version__"
    ]
    assert faults == []


def test_torch_stays_in_its_rooms():
    faults = []
    for path in FILES:
        room = room_of(module_of(path))
        for name, late, line in imports(path, MODULES):
            if name.split(".")[0] not in ("torch", "torchvision", "triton"):
                continue
            if room not in TORCH_AT_WILL and not (room in TORCH_LATE and late):
                faults.append(f"{where(path, line)}: {room} imports {name}")
    assert faults == []


def test_assemble_loads_the_runtime_late():
    faults = [
        where(path, line)
        for path in FILES
        if room_of(module_of(path)) in TORCH_LATE | {"llm", "cli", ""}
        for name, late, line in imports(path, MODULES)
        if not late and room_of(name) in TORCH_AT_WILL and name.startswith("headway.")
    ]
    assert faults == []


def test_no_import_cycles():
    """No way leads from a module back to itself, not even through imports inside functions."""
    edges = {module: ours(path) - {module} for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, way: list[str]) -> None:
        assert module not in way, " → ".join([*way[way.index(module) :], module])
        if module not in done:
            for target in sorted(edges.get(module, ())):
                visit(target, [*way, module])
            done.add(module)

    for module in MODULES:
        visit(module, [])


LENGTHS = {90: 20, 99: 45}
"""Percentile of all functions → lines that it may have at most."""
MAX_FILE, MAX_CLASS = 600, 400


def test_functions_classes_and_files_stay_small():
    """A reader holds a function at a glance and a file in the head."""
    nodes = [node for tree in map(tree_of, FILES) for node in ast.walk(tree)]
    functions = sorted(
        node.end_lineno - node.lineno + 1
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    for percent, most in LENGTHS.items():
        assert functions[len(functions) * percent // 100] <= most, f"p{percent} of functions"
    lines = {path: num_lines(path) for path in FILES}
    tests = {path: num_lines(path) for path in TESTS.rglob("*.py")}
    assert {path.name: n for path, n in (lines | tests).items() if n > MAX_FILE} == {}
    classes = {c.name: c.end_lineno - c.lineno + 1 for c in nodes if isinstance(c, ast.ClassDef)}
    assert {name: size for name, size in classes.items() if size > MAX_CLASS} == {}


MAX_FIGURES = {
    "class names given more than once": 1,
    "names that are participles, by file": 9,
    "helper modules with one importer": 59,
}
"""What the source has today: each change may lower them, and none raises them."""


def test_the_language_gets_no_worse():
    """`python -m tests.house_figures` prints all; docs/decisions/simplify.md has the aim."""
    found = figures(SOURCE.parent)
    assert {name: found[name] for name, most in MAX_FIGURES.items() if found[name] > most} == {}


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_no_two_test_files_of_one_package_have_one_name():
    """Of two such files one worker of the tests imports the first alone, and the run ends."""
    named: dict[tuple[str, str], list[Path]] = {}
    for path in TESTS.rglob("test_*.py"):
        package = path.parent.name if (path.parent / "__init__.py").exists() else ""
        named.setdefault((package, path.name), []).append(path)
    assert {name for (_, name), paths in named.items() if len(paths) > 1} == set()


def test_every_import_of_ours_exists():
    faults = [
        f"{where(path, line)}: {name}"
        for path in FILES
        for name, late, line in imports(path, MODULES)
        if name.split(".")[0] == "headway" and name not in {*MODULES, *VERSION}
    ]
    assert faults == []


def test_nothing_unpickles():
    faults = [
        f"{where(path, line)}: {name}"
        for path in FILES
        for name, _, line in imports(path, MODULES)
        if name.split(".")[0] in UNPICKLING or name.startswith("torch.multiprocessing")
    ]
    assert faults == []


def forbidden_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of each builtin eval or exec, and of what makes objects of a file's bytes."""
    methods = {name.rpartition(".")[2] for name in FORBIDDEN_CALLS}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = [node.func, *node.args]
            names = {part.id for part in called if isinstance(part, ast.Name)}
            yield from ((node.lineno, name) for name in names & FORBIDDEN_BUILTINS)
            asked = [k for k in node.keywords if k.arg in FORBIDDEN_KEYWORDS]
            yield from ((node.lineno, k.arg) for k in asked if ast.unparse(k.value) != "False")
        if isinstance(node, ast.Attribute) and (
            node.attr in FORBIDDEN_METHODS
            or (node.attr in methods and ast.unparse(node) in FORBIDDEN_CALLS)
        ):
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from ((node.lineno, a.name) for a in node.names if a.name in ("load", "save"))


def test_no_forbidden_calls():
    """No builtin eval or exec, and nothing that makes objects or code from a file's bytes."""
    faults = [
        f"{where(path, line)}: {what}"
        for path in FILES
        for line, what in forbidden_calls(tree_of(path))
    ]
    assert faults == []


FORBIDDEN = """
eval("1")
map(exec, [])
__import__("os")
torch.load("a")
torch.save({}, "a")
torch.jit.load("a")
socket.recv_pyobj()
socket.send_pyobj({})
load(trust_remote_code=True)
load(allow_pickle=asked)
load(weights_only=True)
from torch import load
from torch import save
"""


def test_each_forbidden_call_is_seen():
    """Every line of what may not be is found, and nothing of what may."""
    lines = FORBIDDEN.strip().splitlines()
    found = forbidden_calls(ast.parse("\n".join(lines)))
    assert sorted(line for line, _ in found) == [*range(1, len(lines) + 1)]
    allowed = "a.eval()\nload(allow_pickle=False)\njson.load(f)\nfrom torch import nn\n"
    assert list(forbidden_calls(ast.parse(allowed))) == []


def test_no_file_is_a_drawer():
    """A name says what is inside: no utils, helpers or manager, in the source and in the tests."""
    files = [*FILES, *TESTS.rglob("*.py")]
    parts = {part for path in files for part in path.parts[len(SOURCE.parent.parts) :]}
    words = {word for part in parts for word in Path(part).stem.lower().split("_")}
    assert words & FORBIDDEN_NAMES == set()


def test_unit_tests_stand_in_the_rooms_that_they_test():
    folders = {path.relative_to(TESTS / "unit").parts[0] for path in TESTS.glob("unit/*/test_*.py")}
    assert folders <= MAY_IMPORT.keys()


def test_no_test_imports_another():
    """What two need is in a module of its own; a table written from tests reads them late."""
    faults = [
        (path.name, node.lineno)
        for path in TESTS.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
        if name.rpartition(".")[2].startswith("test_")
    ]
    assert faults == []


def test_unit_tests_never_import_torch():
    files = [*sorted((TESTS / "unit").rglob("*.py")), *SHARED_BY_UNIT]
    assert len(files) > 70
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert "torch" not in {alias.name.split(".")[0] for alias in node.names}, path
            if isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] != "torch", path


def test_deciding_rooms_run_without_torch():
    """A fresh interpreter imports every module of them and has loaded no torch."""
    rooms = (
        "",
        "core",
        "spec",
        "config",
        "perf",
        "telemetry",
        "engine",
        "frontend",
        "assemble",
        "edge",
        "admit",
        "server",
    )
    rooms += ("gateway", "batches", "measure", "bench", "evals")
    names = [module for module in MODULES if room_of(module) in rooms]
    names = [name for name in names if not name.endswith("__main__")]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'transformers', 'triton'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_reader_sees_every_import(tmp_path, monkeypatch):
    """The reader itself: it sees imports in functions, relative ones, and submodules."""
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    path = tmp_path / "headway" / "engine" / "made_up.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from . import scheduler\n"
        "from ..runtime import rope\n"
        "def late():\n    import torch.nn\n    from headway.core import plan\n"
        "async def later():\n    from headway.runtime.layers import Linear\n"
    )
    assert list(imports(path, MODULES)) == [
        ("headway.engine.scheduler", False, 1),
        ("headway.runtime.rope", False, 2),
        ("torch.nn", True, 4),
        ("headway.core.plan", True, 5),
        ("headway.runtime.layers", True, 7),
    ]
