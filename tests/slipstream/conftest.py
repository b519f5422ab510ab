"""The wheels of the product and of the lab, built once."""

from pathlib import Path

import pytest

from proto.installation import ROOT
from tests.slipstream.environments import build_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="session")
def lab_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("built"), ROOT / "lab")
