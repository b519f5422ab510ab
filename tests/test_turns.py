"""A test that must be alone waits for the others, and the others wait for it."""

import threading
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.turns import Turns


@pytest.fixture
def workers() -> Iterator[list[Turns]]:
    """Three workers of one run."""
    run = uuid.uuid4().hex
    made = [Turns(run) for _ in range(3)]
    yield made
    for turns in made:
        turns.close()


def test_usual_tests_run_side_by_side_and_one_that_must_be_alone_alone(
    workers: list[Turns],
) -> None:
    running, seen = [0], list[tuple[bool, int]]()
    lock = threading.Lock()

    def work(turns: Turns, number: int) -> None:
        for index in range(20):
            is_alone = (index + number) % 5 == 0
            with turns.turn(is_alone=is_alone):
                with lock:
                    running[0] += 1
                time.sleep(0.002)
                with lock:
                    seen.append((is_alone, running[0]))
                    running[0] -= 1

    threads = [
        threading.Thread(target=work, args=(turns, number)) for number, turns in enumerate(workers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(seen) == 60
    assert {count for is_alone, count in seen if is_alone} == {1}
    assert max(count for is_alone, count in seen if not is_alone) > 1


def test_nobody_overtakes_a_test_that_waits_to_be_alone(workers: list[Turns]) -> None:
    order: list[str] = []
    first, alone, later = workers

    def run_alone() -> None:
        with alone.turn(is_alone=True):
            order.append("alone")

    def run_later() -> None:
        with later.turn(is_alone=False):
            order.append("later")

    threads = [threading.Thread(target=run_alone), threading.Thread(target=run_later)]
    with first.turn(is_alone=False):
        for thread in threads:
            thread.start()
            time.sleep(0.3)
        order.append("first")
    for thread in threads:
        thread.join(10.0)
    assert order == ["first", "alone", "later"]


def test_a_single_worker_waits_for_nobody() -> None:
    with Turns("").turn(is_alone=True), Turns("").turn(is_alone=True):
        pass
    assert not Turns("")._locks
