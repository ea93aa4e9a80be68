"""The size and the language of a source tree, read from its files.

    python -m tests.house_figures [TREE …]

TREE is a checkout of Headway, this one by default; several stand beside each other, so that a tree
before a change is compared with the one after it. Docs are counted without the lab log. Options
are the rows of docs/options.md. A helper module has fewer than 120 lines and one importer in the
package; rows of a table (verbs, model families, backends, proposers, wire types) are none.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTICIPLES = {
    *("told", "said", "left", "came", "beside", "worth", "gained", "asked", "kept", "seen"),
    *("wanted", "dealt", "found", "taken"),
}
"""Words that no name consists of or ends with (CONTRIBUTING.md)."""
WIRE_TYPES = tuple(f"server/{dialect}/" for dialect in ("openai", "responses", "anthropic"))
TABLES = ("cli/", "runtime/models/", "runtime/kernels/", "engine/speculation/proposers/")
MAX_HELPER_LINES = 120


@dataclass(frozen=True, slots=True)
class Module:
    """A file of the package: `name` is its path below src/headway."""

    name: str
    text: str
    tree: ast.Module

    @property
    def num_lines(self) -> int:
        return self.text.count("\n")


def modules(root: Path) -> list[Module]:
    """All files of the package of a checkout."""
    package = root / "src" / "headway"
    paths = sorted(package.rglob("*.py"))
    texts = [(path.relative_to(package).as_posix(), path.read_text()) for path in paths]
    return [Module(name, text, ast.parse(text)) for name, text in texts]


def class_names(files: list[Module]) -> Counter[str]:
    """Class name → definitions, without the wire types of the three dialects."""
    return Counter(
        node.name
        for file in files
        if not file.name.startswith(WIRE_TYPES)
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef)
    )


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Names that a module gives: functions, classes, parameters, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def is_participle(name: str) -> bool:
    """Whether a name consists of, or ends with, a word of the closed list; units are no words."""
    words = re.sub(r"_(ns|us|ms|s|[A-Z]+)$", "", name).lower().strip("_").split("_")
    return words[-1] in PARTICIPLES


def participles(files: list[Module]) -> set[tuple[str, str]]:
    """(file, name) of each name that is a participle."""
    return {
        (file.name, name)
        for file in files
        for name in defined_names(file.tree)
        if is_participle(name)
    }


def imported_names(tree: ast.Module) -> Iterator[str]:
    """Modules that are imported, or may be: `from a import b` names a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def helper_modules(files: list[Module]) -> list[str]:
    """Short modules that one other imports."""
    names = {f"headway.{file.name[:-3].replace('/', '.')}": file for file in files}
    importers: Counter[str] = Counter()
    for file in files:
        importers.update({name for name in imported_names(file.tree) if name in names})
    return [
        file.name
        for name, file in names.items()
        if importers[name] == 1
        and file.num_lines < MAX_HELPER_LINES
        and not file.name.startswith((*TABLES, *WIRE_TYPES))
    ]


def python_lines(folder: Path) -> int:
    """Lines of the Python files below a folder."""
    return sum(path.read_text().count("\n") for path in folder.rglob("*.py"))


def figures(root: Path) -> dict[str, int]:
    """What is counted → its number; rooms first by size."""
    files = modules(root)
    rooms: Counter[str] = Counter()
    for file in files:
        rooms[file.name.split("/")[0] if "/" in file.name else "(root)"] += file.num_lines
    docs = [path for path in (root / "docs").rglob("*.md") if path.name != "lab-log.md"]
    options = (root / "docs" / "options.md").read_text()
    classes = class_names(files)
    return {
        "src, lines": sum(file.num_lines for file in files),
        "src, files": len(files),
        **{f"src/{room}, lines": lines for room, lines in rooms.most_common()},
        "tests, lines": python_lines(root / "tests"),
        "benchmarks, lines": python_lines(root / "benchmarks"),
        "docs, lines without the lab log": sum(path.read_text().count("\n") for path in docs),
        "README, words": len((root / "README.md").read_text().split()),
        "options, rows": len(re.findall(r"^\| `--", options, re.MULTILINE)),
        "class names given more than once": sum(count > 1 for count in classes.values()),
        "names that are participles, by file": len(participles(files)),
        "helper modules with one importer": len(helper_modules(files)),
    }


def main(trees: list[str]) -> None:
    """Print the table of some trees."""
    roots = [Path(tree) for tree in trees] or [ROOT]
    columns = [figures(root) for root in roots]
    print("| | " + " | ".join(root.resolve().name for root in roots) + " |")
    print("| --- |" + " ---: |" * len(roots))
    for row in dict.fromkeys(name for column in columns for name in column):
        print(f"| {row} | " + " | ".join(f"{column.get(row, 0):,}" for column in columns) + " |")


if __name__ == "__main__":
    main(sys.argv[1:])
