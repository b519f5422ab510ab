"""Mistakes that were really made once, and that the simulator found: it must find them again."""

from collections.abc import Sequence
from typing import Any

from coordinator.text.session import Session
from coordinator.text.session_events import Fail, Finish
from drafter_node.drafting import Drafting
from drafter_node.frontier import Tip
from node.costs import Prices
from node.economics import WAIT_S_MAX, wait_limit_s
from target_node import deciding
from target_node.waiting import Waiting
from tests.simulation.faults import NO_SPEED, Fault, Patch


def a_full_tree_is_expanded(patch: Patch) -> None:
    def careless(self: Drafting) -> Sequence[Tip]:
        return self.frontier.tips()

    patch.setattr(Drafting, "tips", property(careless))


def a_text_is_closed_with_a_reason_that_is_no_plain_text(patch: Patch) -> None:
    def end(self: Session, last: Finish | Fail) -> Any:
        reason: Any = last.reason if isinstance(last, Finish) else "failed"
        return [last, *self.close(reason)]

    patch.setattr(Session, "_end", end)


def answers_that_come_too_late_are_not_measured(patch: Patch) -> None:
    told = Waiting.told

    def forget(self: Waiting, root: int, now: float) -> None:
        self._told_at.clear()
        told(self, root, now)

    patch.setattr(Waiting, "told", forget)


def a_drafter_that_runs_ahead_is_waited_for_like_any_other(patch: Patch) -> None:
    def patient(wanted: int, prices: Prices, *, is_ahead: bool) -> float:
        del is_ahead
        return min(WAIT_S_MAX, wait_limit_s(wanted, prices, is_ahead=False))

    patch.setattr(deciding, "wait_limit_s", patient)


def the_first_draft_of_a_life_waits_for_company(patch: Patch) -> None:
    send = Drafting.send

    def wait(self: Drafting, now: float) -> Sequence[Any]:
        is_launch_met = len(self._first_chain()) == self._num_awaited_now()
        return send(self, now) if is_launch_met else ()

    patch.setattr(Drafting, "send", wait)


def a_drafter_that_gets_no_answer_says_nothing_again(patch: Patch) -> None:
    patch.setattr(Drafting, "_remind", lambda self, now: ())


def a_step_that_the_cache_has_lost_is_taken_for_fed(patch: Patch) -> None:
    patch.setattr(Drafting, "_forget_steps", lambda self: None)


PAST_FAULTS = (
    Fault(a_step_that_the_cache_has_lost_is_taken_for_fed, "KeyError"),
    Fault(a_full_tree_is_expanded, "no free tree slot", oracle=True),
    Fault(a_text_is_closed_with_a_reason_that_is_no_plain_text, "LocalProtocolError: Close"),
    Fault(answers_that_come_too_late_are_not_measured, NO_SPEED, "sync", oracle=True),
    Fault(a_drafter_that_runs_ahead_is_waited_for_like_any_other, "still missing"),
    Fault(the_first_draft_of_a_life_waits_for_company, NO_SPEED, "sync", oracle=True),
    Fault(
        a_drafter_that_gets_no_answer_says_nothing_again,
        NO_SPEED,
        "sync",
        oracle=True,
        alone=True,
    ),
)
