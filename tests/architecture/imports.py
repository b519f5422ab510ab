"""Checks of imports: each takes a file and returns what is wrong with it, one line each."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from tests.architecture.sources import PACKAGES, ROOT, Source

MAY_IMPORT: dict[str, set[str]] = {
    "proto": set(),
    "engine": set(),
    "node": {"proto", "engine"},
    "drafter_node": {"proto", "engine", "node"},
    "target_node": {"proto", "engine", "node"},
    "coordinator": {"proto"},
    # Pure, so of all these only what is pure.
    "rehearsal": {"proto", "engine", "node", "drafter_node", "target_node", "coordinator"},
    "deploy": {"coordinator", "proto", "rehearsal"},
    "models": {"engine"},
    # The door: whoever is outside knows this one alone.
    "slipstream": {"coordinator", "proto"},
}
# Experiments with engines and without nodes, and a command that makes models.
MAY_ALSO_IMPORT = {
    # What a head is called, which the coordinator knows too.
    **{
        f"engine/heads/{name}.py": {"proto"}
        for name in ("eagle_layer", "layouts", "loaded", "loading", "stated")
    },
    # What a folder must be, as far as it is looked at without torch.
    "coordinator/api/models/architectures.py": {"engine"},
    "coordinator/api/models/folders.py": {"engine"},
    # Whether its programs can run here.
    "models/__init__.py": {"proto"},
    # Heads at home are a drafter in the target's process.
    "target_node/home.py": {"drafter_node"},
    "target_node/heads.py": {"drafter_node"},
    "deploy/measurements/gpu.py": {"engine", "models"},
    "deploy/gpu_kit/steps/models.py": {"engine", "models"},
    **{
        f"deploy/gpu_kit/steps/{name}.py": {"engine"}
        for name in ("attention", "choice", "context", "passes", "profile")
    },
    "deploy/outlook/testbed.py": {"models"},
    "deploy/measurements/forwards.py": {"engine"},
    "deploy/measurements/long_context.py": {"engine"},
    "deploy/measurements/ngram_index.py": {"engine"},
    "deploy/measurements/ranks.py": {"engine"},
    "deploy/measurements/tensor_parallel.py": {"engine"},
}
# The folders of `coordinator`: each may import those before it.
ROOMS = ("text", "launching", "tracing", "cluster", "api", "lossless", "cli")
COMPOSITION_ROOT = "coordinator/__main__.py"
# Where a library is known; a name that ends with a slash is a folder.
KNOWN_ONLY_IN = {
    "zmq": ("proto/links/transport.py", "proto/links/gate.py", "proto/links/keys.py"),
    "msgpack": ("proto/codec.py",),
    "ray": ("deploy/",),
    "torch": (
        *("engine/", "node/forwards.py", "drafter_node/worker.py", "target_node/worker.py"),
        "models/",
        *("deploy/measurements/gpu.py", "deploy/measurements/forwards.py"),
        "deploy/measurements/long_context.py",
        "deploy/gpu_kit/steps/",
        "deploy/experiments/peers/",
    ),
}
PURE = (
    "proto/meeting.py",
    "proto/messages.py",
    "proto/fields.py",
    "proto/policies.py",
    "proto/policy.py",
    "proto/sampling.py",
    "proto/consistency.py",
    "proto/codec.py",
    "proto/tree.py",
    "proto/liveness.py",
    "proto/stopwatch.py",
    "proto/errors.py",
    "proto/heads.py",
    "proto/node_config.py",
    "engine/earlier.py",
    "engine/lanes.py",
    "engine/ngram.py",
    "engine/slots.py",
    "engine/tensor_parallel/silence.py",
    "engine/tensor_parallel/layout.py",
    "node/events.py",
    "node/follower.py",
    "node/lanes.py",
    "drafter_node/drafting.py",
    "drafter_node/events.py",
    "drafter_node/given.py",
    "drafter_node/reading.py",
    "drafter_node/frontier.py",
    "drafter_node/known.py",
    "drafter_node/reminding.py",
    "drafter_node/saying.py",
    "drafter_node/scheduling.py",
    "target_node/verifying.py",
    "target_node/events.py",
    "target_node/home.py",
    "target_node/known.py",
    "target_node/not_finite.py",
    "target_node/scheduling.py",
    "target_node/lookup.py",
    "target_node/waiting.py",
    "node/costs.py",
    "node/acceptance.py",
    "node/price.py",
    "node/rows.py",
    "target_node/resting.py",
    "target_node/received.py",
    "target_node/reading.py",
    "target_node/reports.py",
    "target_node/accepting.py",
    "target_node/drafts.py",
    "coordinator/text/session.py",
    "coordinator/text/counts.py",
    "coordinator/text/detokenization.py",
    "coordinator/text/events.py",
    "coordinator/text/metrics.py",
    "coordinator/text/origins.py",
    "coordinator/text/prompt_logprobs.py",
    "coordinator/text/running.py",
    "coordinator/text/simulated.py",
    "coordinator/cluster/events.py",
    "coordinator/cluster/link.py",
    "coordinator/cluster/open_text.py",
    "coordinator/cluster/fitting.py",
    "coordinator/cluster/registry.py",
    "coordinator/cluster/round_trips.py",
    "coordinator/cluster/routing.py",
    "coordinator/cluster/snapshot.py",
    "coordinator/cluster/tally.py",
    "coordinator/cli/chat/conversation.py",
    "coordinator/cli/chat/entries.py",
    "coordinator/launching/restarts.py",
    "coordinator/tracing/arrows.py",
    "coordinator/tracing/chrome.py",
    "coordinator/tracing/clocks.py",
    "coordinator/tracing/critical_path.py",
    "coordinator/tracing/events.py",
    "coordinator/tracing/hops.py",
    "coordinator/tracing/reading.py",
    "coordinator/tracing/tape.py",
    "coordinator/tracing/texts.py",
    "coordinator/tracing/timeline.py",
    "coordinator/tracing/tracks.py",
    "rehearsal/acceptance.py",
    "rehearsal/cache.py",
    "rehearsal/closed_forms.py",
    "rehearsal/host.py",
    "rehearsal/luck.py",
    "rehearsal/node.py",
    "rehearsal/performance.py",
    "rehearsal/planning.py",
    "rehearsal/setting.py",
    "rehearsal/timeline.py",
    "rehearsal/watcher.py",
    "rehearsal/world.py",
    "deploy/records.py",
    "deploy/experiments/results/ratios.py",
    "deploy/gpu_kit/estimates.py",
    "deploy/gpu_kit/plan.py",
    "deploy/gpu_kit/report.py",
    "deploy/gpu_kit/rows.py",
    "deploy/gpu_kit/tables.py",
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
            if not node.level and _is_folder(str(node.module)):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif _is_dynamic(node):
            names = ["importlib"]
        for name in names:
            yield Import(name, getattr(node, "lineno", 0), id(node) in lazy)


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


def forbidden_packages(file: Source) -> list[str]:
    """Packages of the project that this one may not import."""
    allowed = {file.package, *MAY_IMPORT[file.package], *MAY_ALSO_IMPORT.get(str(file.path), ())}
    is_root = str(file.path) == COMPOSITION_ROOT
    return [
        f"{file.path}:{found.line} imports {found.module}"
        for found in imports(file)
        if found.top in {*PACKAGES, "tests"} - allowed
        and not (is_root and found.top == "deploy" and found.is_lazy)
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
        if found.top in IMPURE or (found.top in PACKAGES and found.module not in pure_modules):
            wrong.append(f"{file.path}:{found.line} imports {found.module}")
    return wrong
