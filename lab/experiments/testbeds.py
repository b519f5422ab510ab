"""Makes models in the shape of large ones, for arms with `target = "testbed:llama-3.1-8b"`."""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from lab.experiments.description import TESTBED, Arm
from proto.errors import ConfigurationError
from proto.installation import MODELS, ROOT
from proto.messages import Role

LIMIT_S = 3600.0


def with_models(arms: Sequence[Arm], folder: Path, say: Callable[[str], None]) -> list[Arm]:
    """Return the arms with each `testbed:NAME` replaced by a folder; missing models are made.

    say  called with a line of text before a model is made

    Raises ConfigurationError.
    """
    made: dict[tuple[str, Role, str], str] = {}
    found = []
    for arm in arms:
        update = {}
        for role, name in ((Role.TARGET, arm.pair.target), (Role.DRAFTER, arm.pair.drafter)):
            if name.startswith(TESTBED):
                key = name.removeprefix(TESTBED), role, arm.pair.dtype
                if key not in made:
                    made[key] = _made(*key, folder, say)
                update[role.value] = made[key]
        pair = arm.pair.model_copy(update=update)
        found.append(dataclasses.replace(arm, pair=pair) if update else arm)
    return found


def _made(like: str, role: Role, dtype: str, folder: Path, say: Callable[[str], None]) -> str:
    """Return the folder of one testbed model, which is made if it is not there.

    Raises ConfigurationError.
    """
    path = folder / f"{role}-like-{like}-{dtype}"
    if not (path / "target" / "config.json").exists():
        say(f"making a {role} like {like} in {path}")
        shutil.rmtree(path, ignore_errors=True)
        command = [*(sys.executable, "-m", "coordinator", "testbed", "--out", str(path.absolute()))]
        command += ["--like", like, "--target", str(MODELS / role)]
        command += [] if dtype == "auto" else ["--dtype", dtype]
        try:
            ended = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigurationError(f"{path} was not made in {LIMIT_S:.0f} s") from error
        if ended.returncode:
            shutil.rmtree(path, ignore_errors=True)
            last = ended.stderr.strip().splitlines() or ["no reason was given"]
            raise ConfigurationError(f"{TESTBED}{like}: {last[-1].removeprefix('error: ')}")
    return str(path / "target")
