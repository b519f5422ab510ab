"""The wheel, installed beside `ray[default]`, whose proto-plus is imported as `proto` as well.

Its environment sees the packages of the tests' own, and has what `ray[default]` brings besides, in
the versions of the lock file. Everything runs outside of the checkout.
"""

import json
import re
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from proto.installation import ROOT
from slipstream import __version__
from tests.process.ray_nodes import ray_cluster
from tests.slipstream.environments import Environment, tracked, with_wheel

pytestmark = [pytest.mark.process, pytest.mark.long]

INSIDE = "slipstream/_root"
NOT_INSIDE = ("tests/", "docs/", "slipstream/", "requirements/", ".ci/", "lab/")
LIMIT_S = 300.0


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    return with_wheel(tmp_path_factory.mktemp("machine"), wheel, "ray[default]")


# -- what is in it ---------------------------------------------------------------------------------


def test_every_file_that_a_program_reads_is_in_the_wheel(wheel: Path) -> None:
    """Of the folders of code and models only pages for people and the Dockerfile are missing."""
    files = [name for name in tracked() if "/" in name and not name.startswith(NOT_INSIDE)]
    if not files:
        pytest.skip("this is no checkout of git")
    with zipfile.ZipFile(wheel) as packed:
        inside = {name for name in packed.namelist() if name.startswith(f"{INSIDE}/")}
    missing = {name for name in files if f"{INSIDE}/{name}" not in inside} - {"deploy/Dockerfile"}
    assert {PurePosixPath(name).suffix for name in missing} <= {".md"}
    assert not {name for name in missing if name.startswith("models/")}
    assert not {name for name in inside if name.startswith(f"{INSIDE}/lab/")}
    assert inside <= {f"{INSIDE}/{name}" for name in tracked()}, "files that git does not know"


def test_the_wheel_has_one_name_at_the_top_and_its_size_is_that_of_its_models(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        tops = {name.split("/")[0] for name in packed.namelist()}
    assert tops == {"slipstream", f"slipstream-{__version__}.dist-info"}
    assert 55 < wheel.stat().st_size / 1e6 < 70


# -- what it does ----------------------------------------------------------------------------------


def test_nothing_but_slipstream_is_seen_and_nodes_start_in_it(environment: Environment) -> None:
    said = environment.says(
        "import importlib.util as util, os\n"
        "import proto\nprint(proto.Message.__name__, 'site-packages' in proto.__file__)\n"
        "names = ('coordinator', 'engine', 'models', 'tests', 'deploy', 'lab')\n"
        "print([name for name in names if util.find_spec(name)])\n"
        "from slipstream.finding import ROOT\nprint(ROOT)\n"
    )
    assert said.split("\n") == ["Message True", "[]", str(environment.packages / INSIDE)]


def test_the_command_says_its_version_and_runs_the_demo(environment: Environment) -> None:
    version = environment.run("slipstream", "--version")
    assert (version.returncode, version.stdout) == (0, f"slipstream {__version__}\n")
    done = environment.run("slipstream", "demo", "--max-tokens", "16", limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "text identical" in done.stdout


def test_the_example_of_the_readme_runs_as_it_stands(environment: Environment) -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    said = environment.says(example, limit_s=LIMIT_S)
    assert said.count("tokens per target pass") == 2


def test_a_text_is_written_by_nodes_on_a_ray_cluster(environment: Environment) -> None:
    """Ray's agent, which needs the other `proto`, runs beside them."""
    with ray_cluster(("target+drafter",), environment.python) as cluster:
        done = environment.run(
            *("slipstream", "generate", "--ray", "auto", "--max-tokens", "8", "--json", "def f("),
            limit_s=LIMIT_S,
            variables={**cluster.env, "RAY_ADDRESS": cluster.address},
        )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 8
