"""Checks of imports: each takes a file and returns what is wrong with it, one line each."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.architecture.sources import PACKAGES, Source

MAY_IMPORT: dict[str, set[str]] = {
    "proto": set(),
    "engine": set(),
    "drafter_node": {"proto", "engine"},
    "target_node": {"proto", "engine"},
    "coordinator": {"proto"},
    "deploy": {"coordinator", "proto"},
    "models": {"engine"},
}
COMPOSITION_ROOT = "coordinator/__main__.py"
# Where a library is known; a name that ends with a slash is a folder.
KNOWN_ONLY_IN = {
    "zmq": ("proto/transport.py",),
    "msgpack": ("proto/codec.py",),
    "ray": ("deploy/",),
    "torch": ("engine/", "drafter_node/worker.py", "target_node/worker.py", "models/"),
}
PURE = (
    "proto/messages.py",
    "proto/sampling.py",
    "proto/consistency.py",
    "proto/codec.py",
    "proto/tree.py",
    "proto/liveness.py",
    "proto/stopwatch.py",
    "proto/errors.py",
    "engine/lanes.py",
    "engine/ngram.py",
    "engine/slots.py",
    "drafter_node/drafting.py",
    "drafter_node/events.py",
    "drafter_node/reminding.py",
    "target_node/verifying.py",
    "target_node/events.py",
    "target_node/lookup.py",
    "target_node/patience.py",
    "target_node/rate.py",
    "target_node/resting.py",
    "target_node/worth.py",
    "target_node/received.py",
    "target_node/reading.py",
    "target_node/reports.py",
    "target_node/rows.py",
    "target_node/accepting.py",
    "coordinator/session.py",
    "coordinator/counts.py",
    "coordinator/detokenization.py",
    "coordinator/prompt_logprobs.py",
    "coordinator/registry.py",
)
IMPURE = {
    *("time", "datetime", "random", "secrets", "os", "socket", "select", "subprocess", "pathlib"),
    *("threading", "multiprocessing", "asyncio", "logging", "torch", "zmq"),
}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module; `is_lazy`: only when a function runs."""

    module: str
    line: int
    is_lazy: bool

    @property
    def top(self) -> str:
        """The package or library."""
        return self.module.split(".")[0]


def imports(file: Source) -> Iterator[Import]:
    """Everything that a file imports, wherever it stands."""
    lazy = {
        id(node)
        for function in ast.walk(file.tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(file.tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{file.package}.relative" if node.level else str(node.module)]
            if not node.level and node.module in PACKAGES:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif _is_dynamic(node):
            names = ["importlib"]
        for name in names:
            yield Import(name, getattr(node, "lineno", 0), id(node) in lazy)


def _is_dynamic(node: ast.AST) -> bool:
    """Whether it is a call of `__import__`, which would hide a name from these checks."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "__import__"
    )


def forbidden_packages(file: Source) -> list[str]:
    """Packages of the project that this one may not import."""
    allowed = MAY_IMPORT[file.package] | {file.package}
    is_root = str(file.path) == COMPOSITION_ROOT
    return [
        f"{file.path}:{found.line} imports {found.module}"
        for found in imports(file)
        if found.top in {*PACKAGES, "tests"} - allowed
        and not (is_root and found.top == "deploy" and found.is_lazy)
    ]


def misplaced_libraries(file: Source) -> list[str]:
    """Libraries that only some files may know."""
    return [
        f"{file.path}:{found.line} imports {found.top}"
        for found in imports(file)
        if not any(
            str(file.path) == place or (place.endswith("/") and str(file.path).startswith(place))
            for place in KNOWN_ONLY_IN.get(found.top, (str(file.path),))
        )
    ]


def impurities(file: Source) -> list[str]:
    """What a pure file may not import: the outside world, and files that are not pure."""
    pure_modules = {path.removesuffix(".py").replace("/", ".") for path in PURE}
    wrong = []
    for found in imports(file):
        name = ".".join(found.module.split(".")[:2])
        if found.top in IMPURE or (found.top in PACKAGES and name not in pure_modules):
            wrong.append(f"{file.path}:{found.line} imports {found.module}")
    return wrong
