"""The report of made-up rows: complete, in 80 columns, and safe to open."""

import re
from dataclasses import replace
from html.parser import HTMLParser

from lab.gpu_kit.report import WIDTH, as_page, as_text, number, sections
from lab.gpu_kit.rows import KitRow
from tests.lab.gpu_kit.made_up import MACHINE, RUN, row


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_the_text_fits_eighty_columns_whatever_is_in_the_rows() -> None:
    wide = {f"figure_{number}_ms": 123456.789 for number in range(20)}
    rows: list[KitRow] = [
        *RUN,
        row("texts", "an arm with a very long name " * 5, **wide),
        row("engine-tests", "x" * 200, "failed", "y" * 300),
    ]
    text = as_text(rows)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "figure_19_ms" in text


def test_estimates_stand_beside_what_was_measured() -> None:
    text = as_text(RUN)
    assert line_of(text, "target pass, 9 rows").split()[-4:] == ["5.40", "8.10", "ms", "1.50"]
    assert line_of(text, "plain decoding, a token").split()[-4:] == [
        "5.60-6.20",
        "5.90",
        "ms",
        "1.00",
    ]
    assert line_of(text, "draft step").split()[-3:] == ["-", "ms", "-"]
    assert "On an RTX 4090" in text
    assert "On an RTX 4090" in as_page(RUN)


def test_cells_of_two_dimensions_make_a_table_for_each_figure() -> None:
    steps = next(one for one in sections(RUN) if "Draft steps" in one.title)
    later, first = steps.tables
    assert later.columns == ("", "1 row", "4 rows", "8 rows")
    assert later.lines == (("graphs 200", "8", "7", "-"), ("graphs 4000", "200", "-", "198"))
    assert first.lines[0][1:] == ("401", "400", "-")
    assert steps.notes == ("graphs 200 8 rows and 1 more failed: CUDA out of memory",)


def test_every_step_says_where_it_stands() -> None:
    said = {one.title: one.said for one in sections(RUN)}
    assert said["1. Versions and state of the machine"] == "done in 12.3 s"
    assert said["2. Draft steps"].startswith("failed: ended after its 150 s")
    assert said["3. Texts: drafter on the GPU, on the CPU"] == "begun, not ended"
    assert said["3. Texts: both nodes on one GPU under MPS"].startswith("skipped: nvidia-cuda-mps")
    assert said["4. Tests of the pair on the GPU"] == "not run yet"


class Tags(HTMLParser):
    """Those that were opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_fetches_nothing_and_shows_what_rows_say_as_text() -> None:
    page = as_page(
        [*RUN, row("engine-tests", "<b>x</b>", "failed", "1 < 2 & <script>alert()</script>")]
    )
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen.isdisjoint({"script", "link", "img", "b"})
    assert "http" not in page
    assert MACHINE in page
    assert re.search(r"<td>8\.10</td>", page)


def test_a_report_of_nothing_says_so() -> None:
    text = as_text([])
    assert "nothing was measured yet" in text
    assert text.count("not run yet") == len(sections([]))


def test_a_rehearsal_says_so_and_compares_nothing() -> None:
    rows = [replace(one, machine="2 cores, torch 2.13.0") for one in RUN]
    for report in (as_text(rows), as_page(rows)):
        assert "A rehearsal on a CPU" in report
        assert "draft step (said" not in report
    assert "A rehearsal" not in as_text(RUN)


def test_a_number_has_three_digits_that_say_something() -> None:
    assert [
        number(value) for value in (12345.6, 123.4, 12.34, 1.234, 0.01234, 0.000123, 8.0, "x")
    ] == [*("12,346", "123", "12.3", "1.23", "0.012", "1.2e-04", "8", "x")]
