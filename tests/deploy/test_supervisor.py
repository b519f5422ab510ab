"""What holds a node on a host of a Ray cluster, without Ray."""

from pathlib import Path

import pytest

from coordinator.launching.logs import runs, state_folder
from deploy.supervisor import Supervisor
from proto.messages import Role
from proto.node_config import NodeConfig


@pytest.mark.process
def test_a_node_that_is_started_again_and_again_keeps_its_logs_in_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    supervisor = Supervisor()
    try:
        for number in (1, 2, 3):
            config = NodeConfig(Role.DRAFTER, "nowhere", f"drafter-1.{number}", "", "no model")
            assert supervisor.start(config.to_json(), is_alone=False) > 0
            assert supervisor.wait().identity == f"drafter-1.{number}"
        (run,) = runs(state_folder())
        assert len(list(run.glob("drafter-1.*.log"))) == 3
        supervisor.start(config.to_json(), is_alone=True)
    finally:
        supervisor.close()
    assert len(runs(state_folder())) == 2, "a place for itself is another one's"
