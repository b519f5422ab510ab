"""Mistakes about the coordinator's death and its journal that the simulator must catch."""

from typing import Any

from coordinator.journal.ledger import KeptText
from coordinator.text.session import Session
from coordinator.text.session_events import Emit
from tests.simulation.deaths import MortalHost
from tests.simulation.faults import Fault, Patch


def a_client_that_comes_back_is_told_all_from_the_beginning(patch: Patch) -> None:
    behind = KeptText.behind

    def everything(self: KeptText, num_told: int) -> Emit | None:
        return behind(self, 0 if num_told < len(self.tokens) else num_told)

    patch.setattr(KeptText, "behind", everything)


def a_request_that_is_repeated_is_written_again(patch: Patch) -> None:
    patch.setattr(MortalHost, "is_known", lambda self, number: False)


def tokens_that_another_run_would_not_write_are_told_before_they_are_synced(patch: Patch) -> None:
    patch.setattr(MortalHost, "waits_for_the_disk", False)


def tokens_of_a_text_that_is_taken_up_count_as_its_prompt(patch: Patch) -> None:
    init = Session.__init__

    def as_prompt(
        self: Session, number: int, key: bytes, prompt: tuple[int, ...], **more: Any
    ) -> None:
        written = more.pop("written", ())
        init(self, number, key, prompt + written, **more)

    patch.setattr(Session, "__init__", as_prompt)


JOURNAL_FAULTS = (
    Fault(
        a_client_that_comes_back_is_told_all_from_the_beginning,
        "a token is told twice|what is emitted is not the target's text",
    ),
    Fault(a_request_that_is_repeated_is_written_again, "a text is opened twice"),
    Fault(
        tokens_that_another_run_would_not_write_are_told_before_they_are_synced,
        "what was told is not in the journal",
    ),
    Fault(
        tokens_of_a_text_that_is_taken_up_count_as_its_prompt, "written tokens count as the prompt"
    ),
)
