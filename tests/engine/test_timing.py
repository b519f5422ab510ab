"""A set of forms is taken only where no pass is slower for it."""

from engine.timing import COMPARED_ROWS, is_never_slower


def test_a_set_that_is_slower_for_one_number_of_rows_is_slower() -> None:
    usual = dict.fromkeys(COMPARED_ROWS, 1.0)
    assert is_never_slower(usual, usual)
    assert is_never_slower({**usual, 9: 1.04}, usual), "one cannot tell such times apart"
    assert is_never_slower(dict.fromkeys(COMPARED_ROWS, 0.5), usual)
    for num_rows in COMPARED_ROWS:
        assert not is_never_slower({**dict.fromkeys(usual, 0.5), num_rows: 1.1}, usual)
