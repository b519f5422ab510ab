"""Checks of imports: each takes a file and returns what is wrong with it, one line each."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.architecture.sources import PACKAGES, ROOT, Source

# The product: each package and those that it may import. It never imports the lab.
MAY_IMPORT: dict[str, set[str]] = {
    "proto": set(),
    "engine": set(),
    "node": {"proto", "engine"},
    "drafter_node": {"proto", "engine", "node"},
    "target_node": {"proto", "engine", "node"},
    "coordinator": {"proto"},
    # Pure, so of all these only what is pure; but for `lossless/`, which runs a pair.
    "rehearsal": {"proto", "engine", "node", "drafter_node", "target_node", "coordinator"},
    # On another host it finds the rest as any program does.
    "deploy": {"coordinator", "proto", "slipstream"},
    # The door: whoever is outside knows this one alone.
    "slipstream": {"coordinator", "proto"},
    # What measures, trains and explains may look at everything.
    "lab": set(PACKAGES),
}
# Of a package that it does not know otherwise, a package may import these modules.
MAY_IMPORT_MODULES: dict[str, set[str]] = {
    # What a user is told of errors, and the kinds of heads; of messages the engine knows nothing.
    "engine": {"proto.errors", "proto.system", "proto.head_kinds"},
}
# Exceptions, each a file or, with a slash at its end, a folder.
MAY_ALSO_IMPORT = {
    # What a folder must be, as far as it is looked at without torch.
    "coordinator/api/models/folders.py": {"engine"},
    # What models will take in memory, by their files.
    "coordinator/api/models/sizes.py": {"engine"},
    "coordinator/api/models/account.py": {"engine"},
    # What tokens say, in bytes: two tokenizers are compared before anything is loaded.
    "coordinator/api/models/tokenizers.py": {"engine"},
    # Which bytes the tokens of an answer are, where its log-probabilities are wanted.
    "coordinator/api/prompts.py": {"engine"},
    # Grammars are compiled by the same code as on the nodes, which needs no torch either.
    "coordinator/api/compiling.py": {"engine"},
    # The name by which config files of Ray Serve find the application.
    "slipstream/ray_serve.py": {"deploy"},
    # Heads in the target's process are a drafter beside the target.
    "target_node/at_home.py": {"drafter_node"},
    "target_node/home_worker.py": {"drafter_node"},
}
# The folders of `coordinator`: each may import those before it.
ROOMS = ("text", "journal", "launching", "tracing", "cluster", "api", "http", "ingress", "cli")
# Where a library is known; a name that ends with a slash is a folder.
KNOWN_ONLY_IN = {
    "zmq": ("proto/links/",),
    "msgpack": ("proto/codec.py",),
    "ray": ("deploy/",),
    "gguf": ("engine/quantised/gguf_blocks.py", "lab/"),
    "llguidance": ("engine/choice/vocabulary.py",),
    **dict.fromkeys(
        ("fastapi", "starlette", "uvicorn", "prometheus_client"),
        ("coordinator/http/", "coordinator/ingress/"),
    ),
    "torch": (
        *("engine/", "lab/", "node/forwards.py"),
        *("drafter_node/worker.py", "target_node/worker.py"),
    ),
}
# Every file in one of these folders is pure, unless it is a shell: a loop, a socket, a process, or
# what computes with tensors. So is, wherever it lies, a file whose first paragraph says "(pure)".
MACHINES = (
    *("proto/", "engine/layout/", "node/", "drafter_node/", "target_node/", "rehearsal/"),
    *("coordinator/text/", "coordinator/cluster/", "coordinator/tracing/"),
)
SHELLS = (
    *("proto/links/", "proto/system.py", "proto/installation.py"),
    *("node/process.py", "node/joining.py", "node/loop.py", "node/loading.py", "node/forwards.py"),
    *("node/starting.py", "node/ending.py"),
    *("drafter_node/__main__.py", "drafter_node/worker.py"),
    *("target_node/__main__.py", "target_node/worker.py", "target_node/home_worker.py"),
    "target_node/remembering.py",
    *("coordinator/text/stream.py", "coordinator/tracing/writing.py"),
    *("coordinator/cluster/service.py", "coordinator/cluster/simulated_network.py"),
    "coordinator/cluster/status_socket.py",
    *("rehearsal/lossless/command.py", "rehearsal/lossless/checks.py"),
    "rehearsal/lossless/careless_target.py",
)
IMPURE = {
    *("time", "datetime", "random", "secrets", "os", "socket", "select", "subprocess", "pathlib"),
    *("threading", "multiprocessing", "asyncio", "logging", "torch", "zmq"),
}


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, wherever in the file: also one that a function imports."""

    module: str
    line: int

    @property
    def top(self) -> str:
        """The package or library."""
        return self.module.split(".")[0]


def imports(file: Source) -> Iterator[Import]:
    """Everything that a file imports, wherever it stands."""
    for node in file.nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{file.package}.relative" if node.level else str(node.module)]
            if not node.level and _is_folder(str(node.module)):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif _is_dynamic(node):
            names = ["importlib"]
        for name in names:
            yield Import(name, getattr(node, "lineno", 0))


def _is_folder(module: str) -> bool:
    """Whether what is imported from it are modules of the project."""
    return module.split(".")[0] in PACKAGES and (ROOT / module.replace(".", "/")).is_dir()


def _is_dynamic(node: ast.AST) -> bool:
    """Whether it is a call of `__import__`, which would hide a name from these checks."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "__import__"
    )


def lies_in(path: str, places: tuple[str, ...]) -> bool:
    """Whether a file is one of these, or lies in one of them that is a folder."""
    return any(path == place or (place[-1] == "/" and path.startswith(place)) for place in places)


def is_pure(file: Source) -> bool:
    """Whether it must not know the outside world."""
    path = str(file.path)
    if lies_in(path, MACHINES) and file.path.name != "__init__.py":
        return not lies_in(path, SHELLS)
    return "(pure)" in (ast.get_docstring(file.tree) or "").split("\n\n")[0]


def forbidden_packages(file: Source) -> list[str]:
    """Packages of the project that this one may not import."""
    path = str(file.path)
    allowed = {file.package, *MAY_IMPORT[file.package]}
    for place, packages in MAY_ALSO_IMPORT.items():
        if lies_in(path, (place,)):
            allowed |= packages
    return [
        f"{file.path}:{found.line} imports {found.module}"
        for found in imports(file)
        if found.top in {*PACKAGES, "tests"} - allowed
        and found.module not in MAY_IMPORT_MODULES.get(file.package, ())
    ]


def forbidden_rooms(file: Source) -> list[str]:
    """Rooms of the coordinator that this one may not import."""
    room = file.path.parts[1]
    if file.package != "coordinator" or room not in ROOMS:
        return []
    allowed = ROOMS[: ROOMS.index(room) + 1]
    return [
        f"{file.path}:{found.line} imports {found.module}"
        for found in imports(file)
        if found.top == "coordinator" and found.module.split(".")[1] not in allowed
    ]


def misplaced_libraries(file: Source) -> list[str]:
    """Libraries that only some files may know."""
    return [
        f"{file.path}:{found.line} imports {found.top}"
        for found in imports(file)
        if found.top in KNOWN_ONLY_IN and not lies_in(str(file.path), KNOWN_ONLY_IN[found.top])
    ]


def impurities(file: Source, pure_modules: set[str]) -> list[str]:
    """What a pure file may not import: the outside world, and files that are not pure."""
    wrong = []
    for found in imports(file):
        if found.top in IMPURE or (found.top in PACKAGES and found.module not in pure_modules):
            wrong.append(f"{file.path}:{found.line} imports {found.module}")
    return wrong
