"""The lab's wheel: an environment with the product alone, and one with both.

Everything runs outside of the checkout.
"""

import json
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from coordinator.cli.plugins import COMMANDS, LAB
from slipstream import __version__
from tests.slipstream.environments import Environment, make_environment, tracked

pytestmark = [pytest.mark.process, pytest.mark.long]

INSIDE = "slipstream/_root"
OF_LAB = [name for name, brought_by in COMMANDS.items() if brought_by == LAB]
LIMIT_S = 300.0
# What says how the lab is installed.
NOT_INSIDE = {"lab/setup.py", "lab/pyproject.toml", "lab/LICENSE", "lab/NOTICE"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    made = make_environment(tmp_path_factory.mktemp("machine"), "environment")
    made.install("--no-deps", "--no-index", str(wheel))
    return made


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, wheel: Path, lab_wheel: Path) -> Environment:
    made = make_environment(tmp_path_factory.mktemp("machine"), "environment")
    made.install("--no-deps", "--no-index", str(wheel), str(lab_wheel))
    return made


# -- what is in it ---------------------------------------------------------------------------------


def test_every_file_of_the_lab_that_a_program_reads_is_in_its_wheel(lab_wheel: Path) -> None:
    files = {name for name in tracked() if name.startswith("lab/")} - NOT_INSIDE
    if not files:
        pytest.skip("this is no checkout of git")
    with zipfile.ZipFile(lab_wheel) as packed:
        names = set(packed.namelist())
    about = {name for name in names if name.startswith(f"slipstream_lab-{__version__}.dist-info/")}
    assert names - about == {f"{INSIDE}/{name}" for name in files}
    assert {PurePosixPath(name).name for name in about} >= {"LICENSE", "NOTICE", "METADATA"}


# -- without it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_LAB)
def test_without_the_lab_its_command_says_in_one_line_what_brings_it(
    alone: Environment, name: str
) -> None:
    done = alone.run("slipstream", name, "--help")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: `{name}` comes with slipstream-lab, which is not here; "
        f"run `{alone.python} -m pip install 'WHEEL'` "
        f"(WHEEL: the path of the wheel of slipstream-lab {__version__})\n"
    )


def test_without_the_lab_the_product_is_whole(alone: Environment) -> None:
    usage = alone.run("slipstream", "verify-lossless", "--help")
    assert usage.returncode == 0, usage.stderr
    assert "Usage: slipstream verify-lossless" in usage.stdout
    usage = alone.run("slipstream", "--help")
    assert usage.returncode == 0, usage.stderr
    assert "More commands come with slipstream-lab: experiment, profile, " in usage.stdout


# -- with it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OF_LAB)
def test_with_the_lab_each_of_its_commands_is_there(both: Environment, name: str) -> None:
    usage = both.run("slipstream", name, "--help")
    assert usage.returncode == 0, usage.stderr
    assert f"Usage: slipstream {name}" in usage.stdout


def test_a_command_of_the_lab_runs_and_draws(both: Environment) -> None:
    costs = ("--target-ms", "30", "--draft-ms", "2", "--num-tokens", "64")
    done = both.run("slipstream", "plan", *costs, "--plot", "plan.png", limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "x plain decoding" in done.stdout
    assert (both.elsewhere / "plan.png").stat().st_size > 10_000


@pytest.mark.slow
def test_an_experiment_that_ships_runs_by_its_name(both: Environment) -> None:
    short = ("--limit", "1", "--repetitions", "1", "--set", "max_tokens=4", "--out", "results")
    done = both.run("slipstream", "experiment", "policies", *short, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    header = json.loads((both.elsewhere / "results" / "experiment.json").read_text())
    assert header["runs"][0]["commit"] == ""
    assert (both.elsewhere / "results" / "summary.csv").exists()


def test_without_it_again_the_product_goes_on(tmp_path: Path, wheel: Path, lab_wheel: Path) -> None:
    made = make_environment(tmp_path, "environment")
    made.install("--no-deps", "--no-index", str(wheel), str(lab_wheel))
    done = made.pip("uninstall", "-y", "slipstream-lab")
    assert done.returncode == 0, done.stderr
    assert not (made.packages / INSIDE / "lab").exists()
    assert (made.packages / INSIDE / "engine").is_dir()
    assert "comes with slipstream-lab" in made.run("slipstream", "measure").stderr
