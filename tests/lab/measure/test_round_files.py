"""Which files a round of speculation crosses, from the notes of its processes."""

from lab.measure.round_files import rounds

NOTES = [
    "10 coordinator/cluster/service.py run",
    "20 target_node/worker.py computed",
    "30 node/loop.py turn",
    "35 proto/codec/frames.py <module>",
    "40 target_node/worker.py computed",
    "50 drafter_node/drafting.py draft",
    "60 target_node/worker.py computed",
]


def test_a_file_counts_in_the_round_in_which_its_function_ran() -> None:
    first, second = rounds(NOTES)
    assert "node/loop.py" in first
    assert "node/loop.py" not in second
    assert "drafter_node/drafting.py" in second
    assert "coordinator/cluster/service.py" not in first | second


def test_what_runs_while_a_module_is_imported_does_not_count() -> None:
    assert all("proto/codec/frames.py" not in one for one in rounds(NOTES))


def test_notes_of_several_processes_may_come_in_any_order_and_be_cut_off() -> None:
    assert rounds([*reversed(NOTES), "55 node/lo"]) == rounds(NOTES)


def test_a_single_verdict_makes_no_round() -> None:
    assert rounds(NOTES[:2]) == []
