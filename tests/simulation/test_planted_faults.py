"""The simulator catches the mistakes that it is there for; without them the same seeds hold."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from tests.simulation.device_faults import DEVICE_FAULTS
from tests.simulation.faults import FAULTS, Fault
from tests.simulation.head_faults import HEAD_FAULTS
from tests.simulation.journal_faults import JOURNAL_FAULTS
from tests.simulation.past_faults import PAST_FAULTS
from tests.simulation.routing_faults import ROUTING_FAULTS
from tests.simulation.run import SimulationFailure, simulate
from tests.simulation.scenario import draw
from tests.simulation.scheduling_faults import SCHEDULING_FAULTS
from tests.simulation.translation_faults import TRANSLATION_FAULTS
from tests.simulation.tree_faults import TREE_FAULTS

NUM_SEEDS = 400
# The first seed that catches a mistake, by its name: the search begins there. It goes on where the
# seed catches it no more; store what is found then.
CAUGHT_BY: dict[str, int] = json.loads(Path(__file__).with_name("caught_by.json").read_text())
ALL_FAULTS = (
    *(*FAULTS, *SCHEDULING_FAULTS, *ROUTING_FAULTS, *PAST_FAULTS),
    *(*TREE_FAULTS, *HEAD_FAULTS, *DEVICE_FAULTS, *TRANSLATION_FAULTS),
    *JOURNAL_FAULTS,
)


@cache
def _holds(seed: int, policy: str | None, *, oracle: bool, alone: bool, leaving: bool) -> bool:
    num_texts = len(draw(seed, policy, oracle=oracle, alone=alone, leaving=leaving).texts)
    seen = simulate(seed, policy, oracle=oracle, alone=alone, leaving=leaving)
    return seen["texts"] == num_texts


@pytest.mark.parametrize("fault", ALL_FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    said, caught_by = "nothing", None
    how = {"oracle": fault.oracle, "alone": fault.alone, "leaving": fault.leaving}
    first = CAUGHT_BY.get(fault.name, 0)
    with monkeypatch.context() as patch:
        fault.plant(patch)
        for seed in range(first, first + NUM_SEEDS):
            try:
                simulate(seed, fault.policy, **how)
            except SimulationFailure as failure:
                said, caught_by = str(failure).split("\n", 1)[0], seed
                break
    assert caught_by is not None, f"{NUM_SEEDS} seeds did not see it"
    assert re.search(fault.symptom, said), said
    assert _holds(caught_by, fault.policy, **how), "the seed fails without the fault too"


def test_no_seed_is_stored_for_a_mistake_that_is_gone() -> None:
    assert CAUGHT_BY.keys() <= {fault.name for fault in ALL_FAULTS}
