"""A clock chooses within one order of sums, and no set of forms by which a pass is slower."""

import pytest

from engine.timing import COMPARED_ROWS, Form, as_timed, choose, is_never_slower, quickest


def test_a_clock_chooses_within_one_order_of_sums_where_it_is_not_told_otherwise() -> None:
    forms = [Form(name, order, list) for name, order in (("a", "x"), ("b", "x"), ("c", "y"))]
    assert quickest(forms[:2], as_timed) in ("a", "b")
    with pytest.raises(ValueError, match="may not choose among orders of sums: x, y"):
        quickest(forms, as_timed)
    assert quickest(forms, as_timed, any_order=True) in ("a", "b", "c")
    assert choose(dict(zip(forms, (3.0, 2.0, 1.0), strict=True)), any_order=True) is forms[2]


def test_a_set_that_is_slower_for_one_number_of_rows_is_slower() -> None:
    usual = dict.fromkeys(COMPARED_ROWS, 1.0)
    assert is_never_slower(usual, usual)
    assert is_never_slower({**usual, 9: 1.04}, usual), "one cannot tell such times apart"
    assert is_never_slower(dict.fromkeys(COMPARED_ROWS, 0.5), usual)
    for num_rows in COMPARED_ROWS:
        assert not is_never_slower({**dict.fromkeys(usual, 0.5), num_rows: 1.1}, usual)
