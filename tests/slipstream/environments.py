"""Virtual environments in which Slipstream is installed as its users do, and a folder elsewhere.

What such an environment lacks it finds in that of the tests, whose packages stand behind its own.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from proto.installation import ROOT

LIMIT_S = 60.0
INSTALL_LIMIT_S = 600.0
# What setuptools builds goes to a temporary folder, and not into the checkout.
CONFIG = "[build]\nbuild_base = {0}/build\n[egg_info]\negg_base = {0}\n"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment, and a folder that is neither in it nor in the repository."""

    folder: Path
    elsewhere: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        return self.folder / "lib" / version / "site-packages"

    def run(
        self,
        *command: str,
        limit_s: float = LIMIT_S,
        variables: dict[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, elsewhere; `variables` on top of the tests' own."""
        own = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            [str(self.folder / "bin" / command[0]), *command[1:]],
            cwd=self.elsewhere,
            env={**own, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def says(self, program: str, limit_s: float = LIMIT_S) -> str:
        """What a Python program prints, as a script in the folder elsewhere."""
        script = self.elsewhere / "script.py"
        script.write_text(program)
        done = self.run("python", str(script), limit_s=limit_s)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def install(self, *words: str) -> None:
        """`pip install` with these words."""
        done = self.pip("install", *words)
        assert done.returncode == 0, done.stderr

    def pip(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run pip for this environment; what it builds does not go into the checkout."""
        own = {**os.environ, "PYTHONWARNINGS": "ignore", **_building_in(self.folder)}
        return subprocess.run(
            [self.python, "-m", "pip", *words, "-q", "--disable-pip-version-check"],
            cwd=self.elsewhere,
            env=own,
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
            check=False,
        )


def make_environment(root: Path, name: str, *, sees_ours: bool = True) -> Environment:
    """One in the folder of that name, and a folder elsewhere beside it.

    sees_ours  it finds what it lacks in the environment of the tests; else it has a pip and no more
    """
    made = Environment(root / name, root / "elsewhere")
    venv.EnvBuilder(with_pip=not sees_ours, symlinks=True).create(made.folder)
    if sees_ours:
        own = sysconfig.get_path("purelib")
        (made.packages / "behind.pth").write_text(f"import site; site.addsitedir({own!r})\n")
    made.elsewhere.mkdir()
    return made


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the checkout into the folder."""
    words = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q", "-w", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, str(ROOT)],
        env={**os.environ, **_building_in(folder)},
        capture_output=True,
        text=True,
        timeout=INSTALL_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def _building_in(folder: Path) -> dict[str, str]:
    """The variable with which setuptools builds there."""
    config = folder / "building.cfg"
    config.write_text(CONFIG.format(folder))
    return {"DIST_EXTRA_CONFIG": str(config)}
