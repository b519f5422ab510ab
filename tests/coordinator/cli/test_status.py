"""`status`: what it shows, what it says where nobody runs, and a service that is asked."""

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from coordinator.cli import status as command
from coordinator.cli.status import FORM, WIDTH, ask, folders, lines_of, status
from coordinator.cluster.service import Service
from coordinator.launching.launcher import Launcher
from coordinator.launching.logs import Logs
from coordinator.launching.remote import RemoteNodes
from proto.errors import NodeError
from proto.messages import Role


@pytest.fixture(autouse=True)
def _of_others_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pair that other tests of this process share may run."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


NODE = {
    "role": "target",
    "name": "target-1",
    "health": "ready",
    "doing": "ready",
    "host": "a-host-with-a-long-name.example.org",
    "device": "cuda:0-3",
    "backend": "graphs",
    "dtype": "bfloat16",
    "model": "/models/Some-Model-With-A-Long-Name-70B-Instruct",
    "pid": 4242,
    "texts": 9,
    "max_texts": 64,
    "forwards": 123456,
    "bad_frames": 3,
    "ready_s": 40.0,
    "silent_s": 0.1,
    "round_trip_ms": 20.5,
    "round_trip_at_start_ms": 0.4,
}
TEXT = {
    "number": 17,
    "prompt_tokens": 32000,
    "tokens": 100,
    "max_tokens": 4096,
    "running_s": 125.0,
    "tokens_per_s": 31.46,
    "policy": "auto",
    "acceptance_rate": 0.634,
    "without_drafter": True,
}
ANSWER: dict[str, Any] = {
    "pid": 4200,
    "host": "head",
    "started": 1000.0,
    "nodes_started": "by hand",
    "listens": "tcp://10.0.0.1:5570",
    "logs": "/home/somebody/.local/state/slipstream/logs/20260301-120000-4200",
    "hung": False,
    "form": FORM,
    "nodes": [
        NODE,
        {**NODE, "name": "drafter-1", "role": "drafter", "health": "silent", "silent_s": 7.0},
    ],
    "texts": [TEXT] * 9,
    "open": 9,
    "queued": 3,
    "complete": 40,
    "cancelled": 0,
    "failed": 1,
    "restarts": {"drafter": 2},
    "refusals": {"the drafter speaks protocol version 10, this coordinator 11; " * 3: 4},
}


def test_a_coordinator_is_shown_in_eighty_columns() -> None:
    lines = lines_of(ANSWER, ["2026-03-01T12:00:00.000Z " + "x" * 200], now=1000.0 + 3 * 3600)
    assert max(map(len, lines)) <= WIDTH
    shown = "\n".join(lines)
    assert lines[0] == "coordinator 4200 on head, for 3 h 0 min"
    assert lines[1] == "nodes: by hand, listens at tcp://10.0.0.1:5570"
    assert "texts: 9 open, 3 queued, 40 complete, 1 failed" in lines
    assert "and 1 more" in lines
    assert "restarts: drafter 2" in lines
    assert "refusals: 4" in lines
    assert "  4 x the drafter speaks protocol version 10" in shown
    assert "nothing heard for 7 s" in shown
    assert "round trip at the start 0.4 ms" in " ".join(shown.split())
    row = "17 100 4096 32000 2 min 5 s 31.5 63% auto (no drafter)"
    assert row in [" ".join(line.split()) for line in lines]


def test_beside_several_targets_a_text_is_shown_with_its_own() -> None:
    targets = [{**NODE, "name": f"target-{number}", "role": "target"} for number in (1, 2)]
    one = {**TEXT, "without_drafter": False}
    texts = [{**one, "target": "target-2"}, {**one, "target": ""}]
    lines = lines_of({**ANSWER, "nodes": targets, "texts": texts}, [], now=4000.0)
    assert max(map(len, lines)) <= WIDTH
    rows = [" ".join(line.split()) for line in lines]
    assert "TEXT TOKENS OF PROMPT FOR TOKENS/S ACCEPTED TARGET POLICY" in rows
    at = [row.removeprefix("17 100 4096 32000 2 min 5 s 31.5 63% ") for row in rows]
    assert "target-2 auto" in at
    assert "none auto" in at


def test_where_no_coordinator_runs_it_says_where_the_last_logs_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(command, "folders", list)
    with pytest.raises(NodeError, match=r"no coordinator .* there are no logs in"):
        status(None)
    logs = Logs(tmp_path)
    logs.note("a line")
    logs.close()
    with pytest.raises(NodeError, match=f"the last logs are in {logs.folder}"):
        status(None)
    with pytest.raises(NodeError, match="with process id 5 "):
        status(5)
    with pytest.raises(NodeError):
        status(None, as_json=True)
    record = json.loads(capsys.readouterr().out)
    assert record == {"coordinators": [], "last_logs": str(logs.folder)}


def test_a_service_without_nodes_is_found_and_shown_and_a_second_one_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    services = [Service(Launcher()) for _ in range(2)]
    for service in services:
        service.start()
    found = [(one, ask(one)) for one in folders()]
    mine = {one for one, said in found if said is not None and said.pid == os.getpid()}
    assert len(mine) == 2
    try:
        status(os.getpid())
        shown = capsys.readouterr().out
        assert shown.count(f"coordinator {os.getpid()} on ") == 2
        assert shown.count("no node has been started") == 2
        status(os.getpid(), as_json=True)
        record = json.loads(capsys.readouterr().out)
        assert [one["trouble"] for one in record["coordinators"]] == ["", ""]
    finally:
        for service in services:
            service.close()
    assert not mine & set(folders())


def test_a_service_whose_loop_hangs_is_said_to_hang(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(Launcher())
    goes_on = threading.Event()
    monkeypatch.setattr(service, "_on_timer", lambda now: goes_on.wait(20))
    service.start()
    try:
        with pytest.raises(typer.Exit) as ended:
            status(os.getpid())
        assert ended.value.exit_code == 1
        assert "its loop hangs" in capsys.readouterr().out
    finally:
        goes_on.set()
        service.close()


def test_a_coordinator_whose_nodes_are_started_by_hand_says_where_it_listens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    service = Service(RemoteNodes("tcp://127.0.0.1:*", None, list(Role)))
    service.start()
    try:
        status(os.getpid())
        assert f"nodes: by hand, listens at {service.endpoint}" in capsys.readouterr().out
    finally:
        service.close()


def test_how_far_a_prompt_was_read_and_a_pass_that_takes_long_are_shown() -> None:
    reading = {**TEXT, "prompt_tokens": 8000, "prompt_read": 3072, "tokens": 0}
    target = {**NODE, "pass_rows": 256, "pass_s": 7.4, "pass_expected_s": 3.25}
    lines = lines_of({**ANSWER, "nodes": [target], "texts": [reading]}, [], now=2000.0)
    assert max(map(len, lines)) <= WIDTH
    shown = " ".join(" ".join(lines).split())
    assert "17 0 4096 3,072 of 8,000 2 min 5 s" in shown
    assert "in a pass of 256 rows for 7 s, usually 3.2 s" in shown
    usual = {**target, "pass_s": 0.2}
    lines = lines_of({**ANSWER, "nodes": [usual], "texts": [reading]}, [], now=2000.0)
    assert "in a pass" not in " ".join(lines), "of every pass it would be noise"
