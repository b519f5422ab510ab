"""Peers in processes of their own: what they write is an answer, or their engine has failed."""

from pathlib import Path

import pytest

from lab.experiments import engines
from lab.experiments.description import Arm, experiment
from lab.experiments.engines import PeerEngine
from proto.errors import ConfigurationError, NodeError

pytestmark = pytest.mark.process

NO_ANSWERS = {
    b"Loading checkpoint shards: 100%": "huggingface wrote a line that is no JSON; `-m tests.lab",
    b"\xff": "huggingface wrote a line that is no JSON; ",
    b"[1]": "huggingface wrote a line that is no answer; ",
    b'{"tokens": [7]}': "huggingface wrote a line that is no answer; ",
}


def babbling(target: str, line: bytes, monkeypatch: pytest.MonkeyPatch) -> Arm:
    """An arm whose peer writes this line where an answer should be."""
    module = "tests.lab.experiments.babbling_peer"
    monkeypatch.setitem(engines.PEERS, "huggingface", (module, ()))
    table = {"peer": "huggingface", "target": target, "drafter": line.hex()}
    (arm,) = experiment({"title": "t", "arms": [table], "baseline": {}}, Path(), {}).arms
    return arm


@pytest.mark.parametrize("line", NO_ANSWERS)
def test_a_line_that_is_no_answer_is_a_failure_of_the_peer_after_which_a_cell_is_tried_again(
    line: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = babbling("late", line, monkeypatch)
    engine = PeerEngine(arm)
    (written,) = engine.write(arm, [(1, 2)], [3])
    assert (written.tokens, written.emitted) == ((7,), ((0.5, 1),))
    with pytest.raises(NodeError, match=f"^{NO_ANSWERS[line]}"):
        engine.write(arm, [(1, 2)], [3])
    assert engine._process.returncode is not None
    engine.close()  # as the runner does


@pytest.mark.parametrize("line", NO_ANSWERS)
def test_so_is_one_before_the_peer_is_ready(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NodeError, match=f"^{NO_ANSWERS[line]}"):
        PeerEngine(babbling("early", line, monkeypatch))


@pytest.mark.parametrize("when", ["early", "late"])
def test_what_a_peer_says_would_fail_again_is_not_tried_again(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = babbling(when, b'{"error": "there is no llama-bench"}', monkeypatch)

    def write_twice() -> None:
        engine = PeerEngine(arm)
        engine.write(arm, [(1, 2)], [3])
        engine.write(arm, [(1, 2)], [3])

    with pytest.raises(ConfigurationError, match=r"^there is no llama-bench$"):
        write_twice()
