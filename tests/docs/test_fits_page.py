"""docs/choosing.md says what fits on which GPUs as the account of memory says it today."""

import re

from lab.pictures import fits


def test_the_table_of_what_fits_is_the_accounts_of_today() -> None:
    text = fits.PAGE.read_text("utf-8")
    assert fits.page(text) == text, "run `python -m lab.pictures.fits`"
    rows = re.findall(r"^\| \d x \d\d GB .*$", text, re.MULTILINE)
    assert len(rows) > 20
    refused = [row for row in rows if "too much" in row]
    assert 0 < len(refused) < len(rows)
    for machine in fits.MACHINES:
        assert any(machine.name in row for row in set(rows) - set(refused)), "something runs"


def test_speeds_are_those_of_the_formula() -> None:
    # One draft that is right seven times in ten, at a tenth of the cost of a pass.
    one = (1 + 0.7) / (1 + 0.1)
    eight = sum(0.7**i for i in range(9)) / (1 + 8 * 0.1)
    assert fits._drafted(1.0, 0.1) > max(one, eight)
    assert abs(fits._drafted(1.0, 1.0) - 1.7 / 2) < 1e-9, (
        "one draft is best where steps cost a pass"
    )
