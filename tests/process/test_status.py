"""A coordinator with nodes is asked while it works, then interrupted; its logs stay."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.generate import WAITS
from tests.process.test_faults import ROOT

pytestmark = [pytest.mark.process, pytest.mark.long]

PROMPTS = ("def zanzibar_one(path):", "def zanzibar_two(path):", "def zanzibar_three(path):")
LIMIT_S = 60.0


def asked(environment: Mapping[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    """What `status` says."""
    command = [sys.executable, "-m", "coordinator", "status", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def waited_for(
    environment: Mapping[str, str], process: "subprocess.Popen[str]", wanted: Any
) -> dict[str, Any]:
    """The coordinator's answer, once it is as it is wanted."""
    pid, found = process.pid, []
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"it has ended: {process.communicate()[1]}"
        every = json.loads(asked(environment, "--json").stdout)["coordinators"]
        found = [one for one in every if one["pid"] == pid]  # other tests have some, too
        if found and "form" in found[0] and wanted(found[0]):
            answer: dict[str, Any] = found[0]
            return answer
        time.sleep(0.2)
    raise AssertionError(f"it never was as it is wanted: {found}")


def test_a_coordinator_tells_how_it_is_and_its_logs_stay_without_the_text(tmp_path: Path) -> None:
    # One that is asked from elsewhere: with other temporary files, and the same home.
    elsewhere = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    (tmp_path / "tmp").mkdir()
    lengths = ("--max-tokens", "900", "--ignore-eos", "--max-num-seqs", "2", "--json")
    slowly = ("--simulate-target-ms", "50", "--prompt-file", str(prompts))
    process = subprocess.Popen(
        [sys.executable, "-m", "coordinator", "generate", *lengths, *slowly],
        cwd=ROOT,
        env={**elsewhere, "TMPDIR": str(tmp_path / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        answer = waited_for(elsewhere, process, lambda one: one["open"] == 2)
        assert answer["pid"] == process.pid
        assert {node["role"] for node in answer["nodes"]} == {"target", "drafter"}
        (drafter,) = [node["pid"] for node in answer["nodes"] if node["role"] == "drafter"]
        os.kill(drafter, signal.SIGKILL)
        again = {"restarts": {"drafter": 1}, "open": 2}
        waited_for(elsewhere, process, lambda one: again.items() <= one.items())
        shown = asked(elsewhere, str(process.pid))
        assert shown.returncode == 0, shown.stderr
        lines = [line for line in shown.stdout.splitlines() if not line.startswith("logs: ")]
        assert max(map(len, lines)) <= 80
        process.send_signal(signal.SIGINT)
        text, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert WAITS.format("2 texts") in errors.splitlines()
    assert errors.splitlines()[-1] == "interrupted"
    records = [json.loads(line) for line in text.splitlines()]
    assert [record["prompt"] for record in records] == list(PROMPTS[:2])
    assert {len(record["token_ids"]) for record in records} == {900}
    assert asked(elsewhere, str(process.pid)).returncode == 1
    afterwards = asked(elsewhere)
    if afterwards.returncode:  # no other test has a coordinator at this moment
        assert f"the last logs are in {answer['logs']}" in afterwards.stderr
    check_logs(Path(answer["logs"]), [record["text"] for record in records])


def check_logs(folder: Path, texts: list[str]) -> None:
    """They say what happened, and nothing of prompt or text."""
    logs = {file.name: file.read_text() for file in folder.iterdir()}
    assert {"coordinator.log", "target-1.log", "drafter-1.log", "drafter-1.1.log"} <= set(logs)
    own = logs["coordinator.log"]
    assert "the drafter process was ended by signal 9" in own
    assert "the drafter is started again" in own
    assert own.count("complete (length): 900 tokens") == 2
    assert own.endswith(" the coordinator ends: interrupted\n")
    for log in logs.values():
        assert "zanzibar" not in log
        words = [word for text in texts for word in text.split() if len(word) > 8]
        assert not [word for word in words if word in log]
