"""Who may import whom."""

import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest

import proto
from tests.architecture.imports import (
    KNOWN_ONLY_IN,
    MACHINES,
    MAY_ALSO_IMPORT,
    MAY_IMPORT,
    ROOMS,
    SHELLS,
    forbidden_packages,
    forbidden_rooms,
    impurities,
    is_pure,
    lies_in,
    misplaced_libraries,
)
from tests.architecture.sources import PACKAGES, ROOT, Source, source, sources

PURE_SOURCES = [file for file in sources(*PACKAGES) if is_pure(file)]
PURE_MODULES = {str(file.path).removesuffix(".py").replace("/", ".") for file in PURE_SOURCES}


def found_in(files: Iterable[Source], check: Callable[[Source], list[str]]) -> dict[str, list[str]]:
    """What a check finds in each file in which it finds something.

    One test looks at all files: as a test for each they take longer to be collected than to run.
    """
    return {str(file.path): found for file in files if (found := check(file))}


def test_a_file_imports_only_packages_below_its_own() -> None:
    assert found_in(sources(*PACKAGES), forbidden_packages) == {}


def test_a_room_of_the_coordinator_knows_only_those_before_it() -> None:
    assert found_in(sources("coordinator"), forbidden_rooms) == {}


def test_a_library_is_known_only_where_it_belongs() -> None:
    assert found_in(sources(*PACKAGES), misplaced_libraries) == {}


def test_a_pure_file_knows_nothing_of_the_outside_world() -> None:
    assert found_in(PURE_SOURCES, lambda file: impurities(file, PURE_MODULES)) == {}


def test_every_place_that_the_rules_name_is_there() -> None:
    assert set(MAY_IMPORT) == set(PACKAGES)
    known = [str(file.path) for file in sources(*PACKAGES)]
    places = (*MAY_ALSO_IMPORT, *MACHINES, *SHELLS, *sum(KNOWN_ONLY_IN.values(), ()))
    for place in places:
        assert any(lies_in(path, (place,)) for path in known), place
    rooms = {path.split("/")[1] for path in known if path.startswith("coordinator/")}
    assert {room for room in rooms if not room.endswith(".py")} == set(ROOMS)


def test_what_decides_is_pure_and_what_touches_the_world_is_not() -> None:
    assert len(PURE_SOURCES) > 60
    for path in ("target_node/verifying.py", "proto/tree.py", "rehearsal/world.py"):
        assert is_pure(source(path, ""))
    for path in ("node/loop.py", "proto/links/gate.py", "engine/loading.py"):
        assert not is_pure(source(path, ""))
    assert is_pure(source("lab/anywhere.py", '"""Decides (pure).\n\nMore."""'))
    assert not is_pure(source("lab/anywhere.py", '"""Does.\n\nWhat decides is pure (pure)."""'))


def test_proto_is_ours() -> None:
    assert proto.__file__ == str(ROOT / "proto" / "__init__.py")


def test_the_coordinator_starts_without_the_libraries_of_the_nodes() -> None:
    program = (
        "import sys, coordinator.__main__; from coordinator.cli import app, plugins; "
        "assert all(map(callable, plugins.commands())), plugins.commands(); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert {"coordinator", "lab", "rehearsal"} <= loaded
    of_nodes = {"torch", "transformers", "engine", "node", "drafter_node", "target_node"}
    assert not loaded & {*of_nodes, "ray"}


def test_what_the_coordinator_asks_of_the_engine_needs_no_torch() -> None:
    program = (
        "import sys; from coordinator.api.models import folders, heads; "
        "target = folders.find('models/target', None); target.check_weights(); "
        "folders.packed(folders.read_tokenizer(target.folder).tokenizer); "
        "head = folders.find('models/eagle3', None, is_head=True); head.check_weights(); "
        "heads.check_head(head, heads.kind_of('models/eagle3', None), target); "
        "from coordinator.api.grammars import Grammars; "
        "from coordinator.api.config import PairConfig; "
        "from coordinator.api.models.account import account_of; account_of(PairConfig()); "
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "engine" in loaded
    assert not loaded & {"torch", "transformers", "huggingface_hub"}


@pytest.mark.parametrize("node", ["target_node", "drafter_node"])
def test_a_node_holds_its_lifeline_before_it_loads_what_takes_seconds(node: str) -> None:
    program = (
        "import runpy, sys; from node import process; "
        "process.read_config = lambda: (print(*sys.modules), sys.exit()); "
        f"runpy.run_module('{node}', run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "node" in loaded
    assert not loaded & {"torch", "transformers", "numpy"}


def test_a_follower_holds_its_lifeline_before_it_loads_what_takes_seconds() -> None:
    program = "import sys, engine.tensor_parallel.__main__; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "engine" in loaded
    assert not loaded & {"torch", "transformers", "numpy"}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("proto/tree.py", "import engine.layout.slots"),
        ("proto/tree.py", "def later():\n    from coordinator.text import session"),
        ("engine/checkpoint/model.py", "from proto.messages import Open"),
        ("engine/checkpoint/model.py", "from proto import messages"),
        ("node/loop.py", "from target_node import errors"),
        ("drafter_node/drafting.py", "from target_node.verifying import Verifying"),
        ("target_node/worker.py", "import drafter_node"),
        ("node/loop.py", "from drafter_node.worker import Worker"),
        ("proto/node_config.py", "from node.process import Heart"),
        ("coordinator/launching/launcher.py", "from node.process import run_node"),
        ("coordinator/cluster/service.py", "from engine import slots"),
        ("coordinator/cluster/service.py", "def later():\n    import deploy.ray_launcher"),
        ("coordinator/__main__.py", "import deploy.ray_launcher"),
        ("coordinator/__main__.py", "def later():\n    import deploy.ray_launcher"),
        ("coordinator/__main__.py", "def later():\n    from lab.plan.command import plan"),
        ("coordinator/__main__.py", "def later():\n    from slipstream import __version__"),
        ("coordinator/__main__.py", "def later():\n    from rehearsal.lossless import command"),
        ("coordinator/cli/plugins.py", "import lab"),
        ("rehearsal/lossless/command.py", "from lab.pair import stages"),
        ("deploy/ray_launcher.py", "import target_node.worker"),
        ("rehearsal/world.py", "from lab.plan import command"),
        ("coordinator/api/pair.py", "from lab.experiments import runner"),
        ("coordinator/cli/app.py", "from tests import tiny_models"),
    ],
)
def test_a_forbidden_package_is_found(path: str, text: str) -> None:
    assert len(forbidden_packages(source(path, text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "from coordinator.cluster.service import Service",
        "from coordinator.cluster import service",
        "from coordinator import LLM",
        "def later():\n    import coordinator.api.llm",
    ],
)
def test_a_forbidden_room_is_found(text: str) -> None:
    assert len(forbidden_rooms(source("coordinator/text/session.py", text))) == 1
    assert forbidden_rooms(source("coordinator/__main__.py", text)) == []


def test_an_allowed_room_is_not_found() -> None:
    text = "from coordinator.text import session\nfrom coordinator.text.stream import Stream"
    assert forbidden_rooms(source("coordinator/text/session.py", text)) == []
    assert forbidden_rooms(source("coordinator/cluster/service.py", text)) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("drafter_node/worker.py", "from engine import slots\nfrom node import loop"),
        ("node/loop.py", "from engine import slots\nfrom proto.messages import Open"),
        ("engine/checkpoint/model.py", "from proto.errors import ModelError\nimport proto.system"),
        (
            "deploy/ray_launcher.py",
            "from coordinator.launching.launcher import Launcher\nimport proto",
        ),
    ],
)
def test_an_allowed_package_is_not_found(path: str, text: str) -> None:
    assert forbidden_packages(source(path, text)) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("node/process.py", "import zmq"),
        ("coordinator/cluster/service.py", "from zmq.utils import z85"),
        ("proto/links/transport.py", "import msgpack"),
        ("coordinator/launching/launcher.py", "def later():\n    import ray"),
        ("target_node/verifying.py", "import torch"),
        ("coordinator/cli/app.py", "from torch import nn"),
    ],
)
def test_a_misplaced_library_is_found(path: str, text: str) -> None:
    assert len(misplaced_libraries(source(path, text))) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("proto/links/transport.py", "import zmq"),
        ("engine/checkpoint/model.py", "import torch.nn"),
        ("drafter_node/worker.py", "import torch"),
        ("deploy/ray_launcher.py", "import ray"),
    ],
)
def test_a_library_in_its_place_is_not_found(path: str, text: str) -> None:
    assert misplaced_libraries(source(path, text)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import time",
        "from random import Random",
        "import os.path",
        "def later():\n    import logging",
        "from proto.links import transport",
        "from proto.system import check_spare",
        "import torch",
    ],
)
def test_an_impurity_is_found(text: str) -> None:
    assert len(impurities(source("proto/tree.py", text), PURE_MODULES)) == 1


def test_a_pure_import_is_not_found() -> None:
    text = "from proto import messages\nfrom proto.tree import path_hash\nimport math"
    assert impurities(source("coordinator/text/session.py", text), PURE_MODULES) == []
