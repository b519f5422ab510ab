"""The project's Python files, parsed once."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "proto",
    "engine",
    "node",
    "drafter_node",
    "target_node",
    "coordinator",
    "rehearsal",
    "deploy",
    "lab",
    "slipstream",
)


@dataclass(frozen=True, slots=True)
class Source:
    """One file: its path from the root, its text, its syntax tree and all nodes of that."""

    path: PurePosixPath
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]

    @property
    def package(self) -> str:
        """The top folder."""
        return self.path.parts[0]


def source(path: str, text: str) -> Source:
    """A file that need not exist."""
    tree = ast.parse(text)
    return Source(PurePosixPath(path), text, tree, tuple(ast.walk(tree)))


@cache
def _parsed(file: Path) -> Source:
    return source(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))


@cache
def sources(*folders: str) -> tuple[Source, ...]:
    """Every Python file below these folders of the repository."""
    files = sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return tuple(_parsed(file) for file in files)
