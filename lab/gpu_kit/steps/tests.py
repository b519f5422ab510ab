"""Runs the tests that need a GPU, and writes a row for each test when it has ended."""

import sys
import time

import pytest

from lab.gpu_kit.steps.context import Context, run_step
from proto.installation import ROOT

FILES = {
    "engine": ("engine", "sharing"),
    "flex": ("flex", "small_operators", "products"),
    "choices": ("choices",),
    "pair": ("pair",),
}
RAN = {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED}
REASON_LEN = 300


class Watcher:
    """A pytest plugin that writes a row for each test, and skips tests that have passed before."""

    def __init__(self, context: Context) -> None:
        self._record = context.record
        self._started = time.monotonic()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Deselect the tests that have passed before."""
        left = [item for item in items if not self._record.has(_cell(item.nodeid))]
        config.hook.pytest_deselected(items=[item for item in items if item not in left])
        items[:] = left

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Write a row for a test file that cannot be imported or is skipped as a whole."""
        if report.failed:
            self._record.failed(_cell(report.nodeid), _reason(report))
        elif report.skipped:
            self._record.skipped(_cell(report.nodeid), _reason(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write a row with the result of a test."""
        cell = _cell(report.nodeid)
        if report.failed:
            self._record.failed(cell, _reason(report))
        elif report.skipped:
            self._record.skipped(cell, _reason(report))
        elif report.when == "call":
            self._record.measured(cell, result="passed", took_s=report.duration)


def _cell(node_id: str) -> str:
    """Return the name of a test without its file, as words."""
    return node_id.rpartition("::")[2].removeprefix("test_").replace("_", " ")


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return the message of a failed or skipped test in one line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return " ".join(text.split())[-REASON_LEN:]


def measure(context: Context) -> None:
    """Run the test files of this step. Raises ValueError if pytest itself fails."""
    files = [str(ROOT / f"tests/gpu/test_{name}_on_gpu.py") for name in FILES[context.which]]
    status = pytest.main(
        ["-p", "no:cacheprovider", "--rootdir", str(ROOT), *files], plugins=[Watcher(context)]
    )
    if status not in RAN:
        raise ValueError(f"pytest ended with status {int(status)}; log.txt says why")


if __name__ == "__main__":
    sys.exit(run_step(measure))
