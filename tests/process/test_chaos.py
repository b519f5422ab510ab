"""Real processes are killed and stopped while clients read: a short run of `lab.measure.chaos`."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from lab.measure import chaos
from lab.measure.chaos import Answer, Clients, Happened, measured, pauses

pytestmark = [pytest.mark.process, pytest.mark.long]

FAULTS = ("kill coordinator", "kill target", "stop drafter", "cut drafter")


@pytest.fixture
def the_worst(monkeypatch: pytest.MonkeyPatch) -> None:
    """These faults in this order, each of them short."""
    left = iter(fault.split() for fault in FAULTS)
    monkeypatch.setattr(chaos.Chaos, "_drawn", lambda _: tuple(next(left)))
    monkeypatch.setattr(chaos, "LASTS_S", (1.0,))
    monkeypatch.setattr(chaos, "SHARE_BESIDE", 0.0)


@pytest.mark.usefixtures("the_worst")
def test_every_answer_is_that_of_an_undisturbed_run_whatever_dies(tmp_path: Path) -> None:
    clients, done = asyncio.run(
        measured(tmp_path, seconds=100.0, every_s=2.0, seed=1, most=len(FAULTS), say=lambda _: None)
    )
    assert clients.wrong == []
    assert [fault.kind for fault in done.happened] == list(FAULTS)
    assert all(fault.repaired for fault in done.happened)
    assert len(clients.answers) >= clients.number
    assert sum(answer.num_resumed for answer in clients.answers) > 0, "no stream broke"
    said = (tmp_path / "coordinator").read_text()
    assert "that the journal holds" in said, "no text was taken up"
    assert chaos.opened_again(tmp_path) > 0
    assert "KeyError" not in said
    assert "Traceback" not in said


def answer(ids: Sequence[int], arrivals: Sequence[float] = ()) -> Answer:
    made = Answer()
    made.ids[0] += ids
    made.arrivals += arrivals
    return made


def test_an_answer_with_a_token_twice_or_other_logprobs_is_another_one() -> None:
    assert answer([1, 2]).differs(answer([1, 2])) == ""
    assert answer([1, 2, 2]).differs(answer([1, 2])) == "ids"
    one, other = answer([1]), answer([1])
    one.logprobs, other.logprobs = [-0.5], [-0.6]
    assert one.differs(other) == "logprobs"
    other.logprobs = []
    assert one.differs(other) == "logprobs"


def test_a_pause_belongs_to_the_faults_beside_it() -> None:
    happened = [Happened("kill target", 10.0, 14.0), Happened("stop drafter", 30.0, 31.0)]
    answers = [answer([], [1.0, 9.0, 13.0, 29.0]), answer([], [29.9, 32.0, 60.0])]
    found = pauses(answers, happened)
    assert found == {"kill target": 16.0, "stop drafter": pytest.approx(2.1)}
    assert pauses([answer([], [1.0, 2.0])], happened) == {}
    assert Clients("http://x", 8).number == 8
