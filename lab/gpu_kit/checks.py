"""Script C: runs the tests that need a GPU, those that never ran on one first; a row for each."""

import sys

import pytest

from lab.gpu_kit.kit import Kit, run
from proto.installation import ROOT

# In the order in which they are most worth their time.
FILES = ("engine", "choices", "pair", "products", "small_operators", "flex", "sharing")
REASON_LEN = 300
RAN = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}


class Watcher:
    """A pytest plugin that writes a row for each test, and begins none when the time is up."""

    def __init__(self, kit: Kit) -> None:
        self._kit = kit

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a test for which no time is left."""
        del item
        if self._kit.left_s < 0:
            pytest.skip("the time is up")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write a row for a file that cannot be imported, or is skipped as a whole."""
        if report.outcome != "passed":
            self._kit.row(report.nodeid, result=report.outcome, why=reason(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a row with the result of a test."""
        name = report.nodeid.rpartition("/")[2]
        if report.outcome != "passed":
            self._kit.row(name, result=report.outcome, why=reason(report))
        elif report.when == "call":
            self._kit.row(name, result="passed", seconds=report.duration)


def reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return why a test failed or was skipped, in one line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(text.split())[-REASON_LEN:]


def measure(kit: Kit) -> None:
    """Run the tests. Raises ValueError if pytest itself fails."""
    files = [str(ROOT / f"tests/gpu/test_{name}_on_gpu.py") for name in FILES]
    given = [
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:terminal",
        "--rootdir",
        str(ROOT),
        *files,
    ]
    if (status := pytest.main(given, plugins=[Watcher(kit)])) not in RAN:
        raise ValueError(f"pytest ended with status {int(status)}")
    if status == pytest.ExitCode.TESTS_FAILED:
        raise ValueError("some tests have failed; their rows say why")


if __name__ == "__main__":
    sys.exit(run("checks", measure))
