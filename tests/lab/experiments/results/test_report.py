"""The page: it has everything, needs nothing from elsewhere, and says what is wrong."""

import dataclasses
import re
from html.parser import HTMLParser

from lab.experiments.folder import Header
from lab.experiments.results.report import page
from lab.experiments.results.summary import summarize
from lab.experiments.results.words import answers, warnings
from lab.experiments.rows import Row
from tests.lab.experiments.results.made_up import RUN, Truth, arm, header, measured, row

TRUTHS = {"ar": Truth(1), "sync": Truth(1.3, 0.7, 4), "tree": Truth(1.8, 0.8, 8)}
HEADER = header([arm("ar", ""), arm("sync"), arm("tree")])
PNG = b"\x89PNG not really"


class Parsed(HTMLParser):
    """Its words, its addresses, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.addresses: list[str] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link", "img"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def parsed(head: Header, rows: list[Row], **more: str) -> Parsed:
    made = page(head, rows, summarize(head, rows), {"speedup.png": PNG}, **more)
    assert made.lstrip().startswith("<!doctype html>")
    return Parsed(made)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    rows = measured(TRUTHS, categories=("qa", "rag"))
    made = page(HEADER, rows, summarize(HEADER, rows), {"speedup.png": PNG})
    found = Parsed(made)
    assert found.addresses
    assert all(address.startswith("data:") for address in found.addresses)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r'src="data:[^"]*"', "", made))
    assert "script" not in found.tags
    assert 'name="viewport"' in made


def test_every_arm_and_where_it_ran_are_on_the_page() -> None:
    found = parsed(
        HEADER, measured(TRUTHS), trace_note="The trace is beside it.", command="make it again"
    )
    for words in (
        *TRUTHS,
        "host-1 (16 texts each)",
        "2 cores of a machine",
        "abcdef0",
        "torch 2.13.0",
    ):
        assert words in found.text
    assert "The trace is beside it." in found.text
    assert "make it again" in found.text
    assert HEADER.title in found.text


def test_names_are_no_markup() -> None:
    name = "sync <script>alert(1)</script> & more"
    head = header([arm("ar", ""), arm(name)], title="<b>bold</b>")
    found = parsed(head, measured({"ar": Truth(1), name: Truth(1.3, 0.7, 4)}, prompts=2))
    assert "script" not in found.tags
    assert "b" not in found.tags
    assert name in found.text


def test_an_experiment_without_rows_has_a_page_too() -> None:
    assert "no text that counts was measured" in parsed(HEADER, []).text


def test_the_answer_is_the_fastest_arm_where_no_interval_overlaps_its_own() -> None:
    rows = measured(TRUTHS, prompts=20)
    first, second = answers(HEADER, summarize(HEADER, rows))
    assert re.fullmatch(
        r"tree is the fastest of 2 arms: 1\.\d\d times plain decoding \(95 % interval 1\.\d\d to "
        r"\d\.\d\d\), [\d.]+ tokens/s\.",
        first,
    )
    assert second == "All 80 texts that must be those of the baseline are, token by token."


def first_answer(truths: dict[str, Truth], prompts: int = 20, repetitions: int = 2) -> str:
    """About arms that are all compared with `ar`."""
    head = header([arm("ar", ""), *(arm(name) for name in truths if name != "ar")])
    rows = measured(truths, prompts=prompts, repetitions=repetitions)
    return answers(head, summarize(head, rows))[0]


def test_where_intervals_overlap_the_answer_begins_with_no_difference_shown() -> None:
    two = TRUTHS | {"sync": Truth(1.79, 0.7, 4)}
    said = first_answer(two)
    assert re.match(
        r"No difference is shown between (sync and tree|tree and sync): their intervals overlap\. "
        r"(sync|tree) has the highest mean: 1\.\d\d times plain decoding \(95 % interval ",
        said,
    )
    assert first_answer(two | {"pearl": Truth(1.1, 0.5, 4)}).endswith(" The other 1 is slower.")
    many = {"ar": Truth(1), **{f"sync {k}": Truth(1.5, 0.7, 4) for k in range(14)}}
    assert first_answer(many, 8).startswith("No difference is shown between all 14 arms: ")
    slow = many | {"tree": Truth(1.02, 0.1, 4), "pearl": Truth(1.03, 0.1, 4)}
    said = first_answer(slow, 8)
    assert said.startswith("No difference is shown between 14 of 16 arms: ")
    assert said.endswith(" The other 2 are slower.")
    assert "fastest" not in said


def test_an_interval_around_one_is_no_difference_from_the_baseline() -> None:
    alone = {"ar": Truth(1), "sync": Truth(1.001)}
    said = first_answer(alone)
    assert said.startswith("No difference is shown between sync and plain decoding. sync has ")
    said = first_answer(alone | {"tree": Truth(0.5, 0.1, 8)})
    assert said.startswith(
        "No difference is shown between plain decoding and the best of 2 arms. sync has the "
        "highest mean: 1."
    )


def test_a_single_cell_makes_no_arm_the_fastest() -> None:
    said = first_answer(TRUTHS, prompts=1, repetitions=1)
    assert re.fullmatch(
        r"tree has the highest mean of 2 arms: 1\.\d\d times plain decoding, [\d.]+ tokens/s\. "
        r"It was measured once: nothing is known of the spread\.",
        said,
    )


def test_the_speed_up_is_the_first_figure_of_an_arm() -> None:
    made = page(HEADER, rows := measured(TRUTHS), summarize(HEADER, rows), {})
    head = made.split("<thead>")[1].split("</thead>")[0]
    assert re.findall(r'<th scope="col">([^<]*)</th>', head)[:3] == [
        "arm",
        "times plain decoding (95\N{NO-BREAK SPACE}%)",
        "tokens/s",
    ]


def test_each_baseline_has_an_answer_of_its_own() -> None:
    arms = [arm("ar 1", ""), arm("ar 2", ""), arm("sync 1", "ar 1"), arm("sync 2", "ar 2")]
    truths = {one.name: Truth(1.3, 0.5, 2) if one.baseline else Truth(1) for one in arms}
    found = answers(header(arms), summarize(header(arms), measured(truths)))
    assert [line.split(":")[0] for line in found[:2]] == ["sync 1", "sync 2"]
    assert "times ar 1 (" in found[0]
    assert "times ar 2 (" in found[1]


def test_what_takes_weight_from_the_figures_is_said() -> None:
    rows = measured(TRUTHS)
    assert warnings(HEADER, rows, summarize(HEADER, rows)) == []
    head = header(
        [arm("ar", ""), arm("sync", link="drafter:delay=5ms"), arm("tree"), arm("auto")],
        runs=(RUN, dataclasses.replace(RUN, load=0.7)),
    )
    figures = dict(rows[1].figures or {}, drafter_lost_at=3)
    changed = {
        0: dataclasses.replace(rows[0], load=0.5),
        1: dataclasses.replace(rows[1], tokens=(1,), figures=figures),
        2: dataclasses.replace(rows[2], void="slow"),
        3: row("sync", prompt=77),
    }
    rows = [changed.get(number, one) for number, one in enumerate(rows)]
    found = "\n".join(warnings(head, rows, summarize(head, rows)))
    for words in (
        "1 of 3 arms rehearse other hardware (link)",
        "Not measured yet: auto.",
        "Void texts, which are in no speed: tree (6%; slow).",
        "Texts that are not those of the baseline: sync (1 of 15)",
        "Texts that lost their drafter, and measure the target alone from there on: sync (1 of ",
        "Measurements without a counterpart in the baseline, which are in no speed-up: sync (",
        "During 1 of 48 texts others used more than 0.25 cores, 0.50 at most.",
        f"Before the run of {RUN.at} others used 0.70 cores.",
    ):
        assert words in found


def test_few_prompts_are_told_of() -> None:
    rows = measured(TRUTHS, prompts=1)
    found = "\n".join(warnings(HEADER, rows, summarize(HEADER, rows)))
    assert (
        "with too narrow an interval or none: sync (2 measurements) and tree (2 measurements)."
        in found
    )
    rows = measured(TRUTHS, prompts=3)
    found = "\n".join(warnings(HEADER, rows, summarize(HEADER, rows)))
    assert "Intervals about these prompts and no others" in found


def test_many_arms_with_the_same_flaw_are_counted_in_a_warning() -> None:
    truths = {"ar": Truth(1), **{f"sync {k}": Truth(1.5, 0.7, 4) for k in range(14)}}
    head = header([arm("ar", ""), *(arm(name) for name in truths if name != "ar")])
    rows = measured(truths, prompts=3)
    found = warnings(head, rows, summarize(head, rows))
    assert any(line.endswith("fewer than 5: all 14 arms (6 measurements).") for line in found)
    rows = [one for one in rows if (one.arm, one.prompt) != ("sync 3", 2)]
    found = warnings(head, rows, summarize(head, rows))
    assert any(line.endswith(": 13 arms (6 measurements).") for line in found)
    assert any("none: sync 3 (4 measurements)." in line for line in found)


def test_arms_that_ran_on_the_same_hosts_share_a_row() -> None:
    names = [f"sync {k}" for k in range(17)]
    head = header([arm("ar", ""), *map(arm, names)])
    rows = [
        dataclasses.replace(one, hosts={"target": "host-1"})
        for one in measured({"ar": Truth(1), **dict.fromkeys(names, Truth(1.3, 0.5, 2))}, prompts=2)
    ]
    assert "all 18 arms host-1 (4 texts each)" in parsed(head, rows).text
    moved = [
        dataclasses.replace(one, hosts={"target": "host-9"}) if one.arm == "sync 3" else one
        for one in rows
    ]
    found = parsed(head, moved).text
    assert "ar, sync 0, sync 1 and 14 more host-1 (4 texts each)" in found
    assert "sync 3 host-9 (4 texts)" in found


def test_no_word_of_the_page_is_cell() -> None:
    for prompts, repetitions in ((1, 1), (2, 1), (3, 2), (8, 2)):
        rows = measured(TRUTHS, prompts=prompts, repetitions=repetitions)
        assert not re.search(r"\bcells?\b", parsed(HEADER, rows).text, re.IGNORECASE)
