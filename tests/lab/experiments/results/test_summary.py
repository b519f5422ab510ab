"""What is said of an arm: of which rows, and each thing once."""

import csv
import dataclasses
import io
import json
import random

import pytest

from lab.experiments.folder import Header
from lab.experiments.results.report import COLUMNS, device_table, table, to_csv
from lab.experiments.results.summary import RowsOnHost, Summary, overall, summarize
from lab.experiments.rows import Row
from tests.lab.experiments.results.made_up import Truth, arm, figures, header, measured, row

TRUTHS = {"ar": Truth(1), "sync K=4": Truth(1.4, 0.7, 4), "tree": Truth(1.8, 0.8, 8)}
HEADER = header([arm("ar", ""), arm("sync K=4"), arm("tree")])


def by_arm(head: Header, rows: list[Row]) -> dict[str, Summary]:
    return {one.arm: one for one in overall(summarize(head, rows))}


def test_an_arm_is_as_fast_as_it_was_made() -> None:
    found = by_arm(HEADER, measured(TRUTHS, prompts=20))
    assert list(found) == ["ar", "sync K=4", "tree"]
    assert found["ar"].speedup is None
    for name in ("sync K=4", "tree"):
        ratio = found[name].speedup
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        assert ratio.low < TRUTHS[name].speed < ratio.high
        assert (ratio.num_pairs, ratio.num_units) == (40, 20)
        assert (found[name].num_equal, found[name].num_compared) == (40, 40)


def test_void_rows_are_in_no_speed() -> None:
    rows = measured(TRUTHS)
    clean = by_arm(HEADER, rows)
    broken = [
        dataclasses.replace(one, tokens_per_second=1e6, ttft_s=9.0, void="too slow")
        if one.arm == "tree" and one.repetition
        else one
        for one in rows
    ]
    tree = by_arm(HEADER, broken)["tree"]
    first = by_arm(HEADER, [one for one in rows if not one.repetition])["tree"]
    assert (tree.void_share, tree.void) == (0.5, "too slow")
    assert tree.tokens_per_second == first.tokens_per_second
    assert (tree.speedup, tree.ttft_ms) == (first.speedup, first.ttft_ms)
    assert by_arm(HEADER, broken)["sync K=4"] == clean["sync K=4"]


def test_an_arm_that_is_void_has_no_figures_and_says_why() -> None:
    rows = [
        dataclasses.replace(one, void="3 of 90 forwards took longer" if one.arm == "ar" else "")
        for one in measured(TRUTHS)
    ]
    found = by_arm(HEADER, rows)
    plain = found["ar"]
    assert (plain.void_share, plain.void) == (1, "3 of 90 forwards took longer")
    assert plain.tokens_per_second is plain.ttft_ms is plain.busy is plain.tokens_per_pass is None
    # Nothing can be compared with it but its tokens.
    assert found["tree"].speedup is None
    assert found["tree"].tokens_per_second is not None
    assert found["tree"].num_equal == 16
    assert "3 of 90 forwards took longer" in table(summarize(HEADER, rows))


def test_texts_that_were_written_at_once_are_void_together() -> None:
    rows = [row("ar", text=text, num_rows=2, void="late" if text else "") for text in range(2)]
    (found,) = summarize(header([arm("ar", "")]), rows)
    assert (found.void_share, found.tokens_per_second) == (1, None)


def test_rows_of_sweeps_are_no_results() -> None:
    rows = measured(TRUTHS)
    swept = [dataclasses.replace(one, stage="sweep", tokens_per_second=1e6) for one in rows]
    only = [one for one in swept if one.arm == "tree"]
    kept = [one for one in rows if one.arm != "tree"]
    assert list(by_arm(HEADER, kept + only)) == ["ar", "sync K=4"]
    assert summarize(HEADER, rows + swept) == summarize(HEADER, rows)


def test_a_baseline_that_was_swept_is_the_fastest_of_its_settings() -> None:
    arms = [dataclasses.replace(arm(f"sync {k}", ""), swept_from="sync") for k in (2, 4)]
    head = header([*arms, arm("tree", "sync 2")])
    rows = [row(name, prompt) for name in ("sync 4", "tree") for prompt in range(6)]
    found = by_arm(head, rows)["tree"]
    assert found.speedup is not None
    assert (found.speedup.mean, found.num_equal) == (1, 6)


def test_a_text_that_differs_is_counted_where_it_must_not() -> None:
    head = header(
        [arm("ar", ""), arm("sync"), dataclasses.replace(arm("block"), is_same_text=False)]
    )
    rows = [row(name, prompt) for name in ("ar", "sync", "block") for prompt in range(6)]
    rows = [
        dataclasses.replace(one, tokens=(1, 2)) if one.arm != "ar" and one.prompt == 3 else one
        for one in rows
    ]
    found = by_arm(head, rows)
    assert (found["sync"].num_equal, found["sync"].num_different) == (5, 1)
    assert (found["block"].num_compared, found["block"].num_different) == (0, 0)


def test_cells_of_several_texts_count_once() -> None:
    own = [
        row(
            "sync",
            prompt,
            num_rows=2,
            text=text,
            num_cell_tokens=6,
            tokens_per_second=60.0 + prompt,
            num_bytes=600,
        )
        for prompt in range(6)
        for text in range(2)
    ]
    base = [row("ar", prompt, num_bytes=30) for prompt in range(6)]
    found = by_arm(header([arm("ar", ""), arm("sync")]), own + base)["sync"]
    assert found.num_texts == 12
    assert found.speedup is not None
    assert found.speedup.num_pairs == 6
    assert found.bytes_per_token == 100  # 600 bytes a cell, of two texts of three tokens
    assert found.tokens_per_second is not None
    assert found.tokens_per_second.median == 62.5
    # Only one of the two texts has another to be compared with.
    assert found.num_compared == 6


def test_the_bytes_of_each_turn_count() -> None:
    rows = [row("sync", turn=turn, num_rows=2, num_bytes=30 * (turn + 1)) for turn in range(2)]
    (found,) = summarize(header([arm("sync", "")]), rows)
    assert found.bytes_per_token == 90 / 6


def test_positions_are_weighted_by_passes_and_shares_are_whole() -> None:
    draw = random.Random(0)
    texts = [figures(draw, Truth(1, 0.6, k), 1.0, num_tokens=600) for k in (2, 4)]
    rows = [
        row("sync", number, figures=dataclasses.asdict(metrics), accept_lengths=lengths)
        for number, (metrics, lengths) in enumerate(texts)
    ]
    (found,) = summarize(header([arm("sync", "")]), rows)
    passes = [length for _, lengths in texts for length in lengths]
    assert found.drafts is not None
    assert found.drafts.by_position == pytest.approx(
        [sum(length > 1 + position for length in passes) / len(passes) for position in range(4)]
    )
    assert found.tokens_per_pass == pytest.approx(sum(passes) / len(passes))
    assert found.drafts.hit_rate + sum(found.drafts.misses.values()) == pytest.approx(1)
    verified = sum(metrics.num_draft_tokens for metrics, _ in texts)
    accepted = sum(passes) - len(passes)
    assert found.drafts.acceptance_rate == pytest.approx(accepted / verified)


def test_a_peer_has_the_figures_that_it_tells() -> None:
    peer = dataclasses.replace(arm("llamacpp"), settings={"peer": "llamacpp"})
    rows = [row("llamacpp", accept_lengths=(1, 4)), row("ar")]
    found = by_arm(header([arm("ar", ""), peer]), rows)["llamacpp"]
    assert found.tokens_per_pass == 2.5
    assert (found.drafts, found.busy, found.host_ms_per_pass, found.bytes_per_token) == (None,) * 4
    assert found.itl_p99_ms == 40.0


def test_categories_are_summed_up_apart_where_there_are_several() -> None:
    rows = measured(TRUTHS, categories=("qa", "rag"))
    found = summarize(HEADER, rows)
    assert [one.category for one in found if one.arm == "tree"] == ["", "qa", "rag"]
    alone = summarize(HEADER, [one for one in rows if one.category == "rag"])
    rag = next(one for one in found if (one.arm, one.category) == ("tree", "rag"))
    assert rag == dataclasses.replace(alone[-1], category="rag")
    assert {one.category for one in alone} == {""}


def test_hosts_and_lost_drafters_are_counted() -> None:
    metrics, _ = figures(random.Random(0), Truth(1, 0.5, 2), 1.0)
    lost = dataclasses.asdict(dataclasses.replace(metrics, drafter_lost_at=7))
    rows = [
        row("sync", 0, figures=lost, hosts={"target": "a", "drafter": "b"}),
        row("sync", 1, figures=dataclasses.asdict(metrics), hosts={"target": "a", "drafter": "c"}),
    ]
    (found,) = summarize(header([arm("sync", "")]), rows)
    assert found.num_drafters_lost == 1
    assert found.hosts == (
        RowsOnHost("drafter", "b", 1),
        RowsOnHost("drafter", "c", 1),
        RowsOnHost("target", "a", 2),
    )


def test_the_csv_file_reads_back_as_it_was() -> None:
    found = summarize(HEADER, measured(TRUTHS, categories=("qa, short", 'the "rag"')))
    lines = list(csv.DictReader(io.StringIO(to_csv(found))))
    assert len(lines) == len(found) == 9
    assert list(lines[0]) == list(COLUMNS)
    assert [line["category"] for line in lines[3:6]] == ["", "qa, short", 'the "rag"']
    for line, one in zip(lines, found, strict=True):
        assert line["arm"] == one.arm
        assert one.tokens_per_second is not None
        assert float(line["tokens_per_second"]) == pytest.approx(one.tokens_per_second.median, 1e-5)
        if one.speedup is None:
            assert line["speedup"] == line["speedup_low"] == ""
        else:
            assert float(line["speedup"]) == pytest.approx(one.speedup.mean, 1e-5)
        if one.drafts is not None:
            positions = json.loads(line["acceptance_by_position"])
            assert positions == pytest.approx(one.drafts.by_position, abs=1e-4)
            assert json.loads(line["accepted_by_source"]) == one.drafts.by_source


def test_the_table_fits_a_terminal() -> None:
    long = "sync num_speculative_tokens=4 temperature=0.8 dtype=bfloat16 link=drafter:delay=5ms"
    head = header([arm("ar", ""), arm(long)])
    lines = table(summarize(head, measured({"ar": Truth(1), long: Truth(1.4, 0.7, 4)}))).split("\n")
    assert max(map(len, lines)) <= 80
    assert [line.split()[-1] for line in lines[:3]] == ["texts", "equal", "-"]
    assert lines[1].count("ms") == 3, "units"
    assert lines[3] == "sync K=4 T=0.8 dtype=bfloat16 delay=5ms", "folded: its figures are below"
    assert lines[4].startswith("     ")
    assert lines[4].endswith("16/16")
    assert len(lines) == 5


def test_why_an_arm_is_void_is_wrapped_beside_its_name() -> None:
    why = "3 of 90 forwards took longer than was simulated, by 12 ms at most, " * 2
    rows = [dataclasses.replace(one, void=why) for one in measured(TRUTHS)]
    lines = table(summarize(HEADER, rows)).split("\n")
    assert max(map(len, lines)) <= 80
    assert " ".join(why.split()) in " ".join(" ".join(lines).split())


def test_what_is_brought_to_each_device_is_compared_with_replicas_and_with_all_for_the_target() -> (
    None
):
    truths = {"ar": Truth(1), "all": Truth(1.25), "tree": Truth(1.8, 0.8, 8)}
    arms = [
        arm("ar", ""),
        dataclasses.replace(arm("all"), num_devices=2),
        dataclasses.replace(arm("tree"), num_devices=2, all_devices="all"),
    ]
    head = header(arms)
    found = by_arm(head, measured(truths, prompts=20))
    tree = found["tree"]
    assert tree.speedup is not None
    assert tree.over_replicas == pytest.approx(tree.speedup.mean / 2)
    assert tree.over_all_devices is not None
    assert tree.over_all_devices.mean == pytest.approx(1.8 / 1.25, rel=0.1)
    assert tree.tokens_per_second is not None
    assert tree.per_device == pytest.approx(tree.tokens_per_second.median / 2)
    assert found["ar"].over_replicas is None
    lines = device_table(list(found.values())).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["ar", "all", "tree"]
    assert device_table(summarize(HEADER, measured(TRUTHS, prompts=5))) == ""
