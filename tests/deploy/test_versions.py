"""A host of a Ray cluster uses its own Slipstream, which must be the coordinator's version."""

import sys

import pytest

import slipstream
from deploy.supervisor import root_on
from proto.installation import ROOT


def test_the_root_is_that_of_this_hosts_own_package() -> None:
    assert root_on("here", slipstream.__version__) == str(ROOT)


def test_an_older_package_without_a_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(slipstream, "__version__")
    with pytest.raises(RuntimeError, match="slipstream on there is of an older version, and the"):
        root_on("there", "0.1.0")


def test_a_host_without_slipstream_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "slipstream", None)  # an import of it fails
    with pytest.raises(RuntimeError, match="on there cannot import slipstream") as refused:
        root_on("there", "0.1.0")
    assert str(refused.value).endswith("; install version 0.1.0 there")
    assert len(str(refused.value).splitlines()) == 1
