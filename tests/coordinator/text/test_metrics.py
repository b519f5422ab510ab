"""Acceptance figures in the names that benchmark clients read."""

import dataclasses
import json
from collections import Counter
from dataclasses import replace

import pytest

from coordinator.cli.writers import figures_of_all, summary
from coordinator.text.metrics import Metrics, PassFigures, SessionCounts, SpeculativeDecoding
from proto.messages import EARLIER_SOURCE, HEADS_SOURCE, NGRAM_SOURCE, Hit
from tests.texts import verdict

A_PASS = PassFigures(1, 0, 1, 0, 0, 0, 0, 0, 0, "ready")


def test_histograms_count_the_steps_by_drafts_and_by_accepted_drafts() -> None:
    figures = SpeculativeDecoding.of(Counter({(3, 0): 39, (3, 1): 1, (3, 3): 3, (1, 1): 2}), 3)
    assert figures.acceptance_histogram == [39, 3, 0, 3]
    assert figures.acceptance_histogram_by_draft_length == {1: [0, 2], 3: [39, 1, 0, 3]}
    assert figures.num_spec_steps == 45
    assert figures.num_accepted_draft_tokens == 12
    assert figures.num_draft_tokens == 131
    assert figures.num_spec_tokens == 3
    assert figures.mean_acceptance_length == 1 + 12 / 45
    assert figures.draft_acceptance_rate == 12 / 131


def test_a_text_without_a_single_draft_has_histograms_of_zeros() -> None:
    figures = SpeculativeDecoding.of(Counter(), 2)
    assert figures.acceptance_histogram == [0, 0, 0]
    assert figures.acceptance_histogram_by_draft_length == {}
    assert figures.mean_acceptance_length == 1.0
    assert figures.draft_acceptance_rate == 0.0


def test_metrics_are_json_and_say_nothing_of_speculation_under_ar() -> None:
    counts = SessionCounts(num_passes=2, acceptance=Counter({(2, 1): 1}))
    emitted = [(1.0, 1), (2.0, 2)]
    made = [
        Metrics.of(
            counts,
            started=0.5,
            emitted=emitted,
            drafter_lost_at=None,
            queued_s=0.25,
            num_spec_tokens=k,
        )
        for k in (0, 2)
    ]
    assert made[0].speculative_decoding is None
    record = json.loads(json.dumps(dataclasses.asdict(made[1])))
    assert record["queued_s"] == 0.25
    assert record["speculative_decoding"]["acceptance_histogram_by_draft_length"] == {
        "2": [0, 1, 0]
    }


def test_acceptance_by_position_is_of_all_steps() -> None:
    figures = SpeculativeDecoding.of(Counter({(3, 0): 5, (3, 1): 3, (3, 3): 2}), 3)
    assert figures.acceptance_by_position == [0.5, 0.2, 0.2]


def test_hits_misses_shares_and_times_plain() -> None:
    # Ten passes of 10 ms, of which one is half a wait and half a model's.
    counts = SessionCounts(
        num_passes=10,
        wait_us=30_000,
        model_us=50_000,
        drafter_us=20_000,
        hits=Counter(hit=6, timing=2, content=1, width=1, nobody=5),
        passes=[replace(A_PASS, plain_us=us) for us in (0, 8_000, 10_000, 12_000)],
    )
    made = Metrics.of(
        counts,
        started=1.0,
        emitted=[(1.02, 1), (1.06, 4), (1.1, 4)],
        drafter_lost_at=None,
        queued_s=0.0,
        num_spec_tokens=4,
    )
    assert made.hit_rate == 0.6
    assert made.misses == {"timing": 2, "content": 1, "width": 1}
    assert made.target_busy == pytest.approx(0.5)
    assert made.drafter_busy == pytest.approx(0.2)
    assert made.target_idle == pytest.approx(0.2)
    # Eight tokens in 80 ms after the first; alone they take 10 ms each.
    assert made.speedup == pytest.approx(1.0)
    counts.passes = [A_PASS]
    unknown = Metrics.of(
        counts,
        started=1.0,
        emitted=[(1.02, 1), (1.06, 4)],
        drafter_lost_at=None,
        queued_s=0.0,
        num_spec_tokens=4,
    )
    assert unknown.speedup == 0.0


def test_passes_without_drafts_count_in_tokens_per_pass_alone() -> None:
    # Eight passes, three of which had drafts: 2, 2 and 1 of them were right.
    steps = Counter({(4, 2): 2, (3, 1): 1})
    counts = SessionCounts(num_passes=8, num_accepted=5, num_drafted=11, acceptance=steps)
    made = Metrics.of(
        counts,
        started=0.5,
        emitted=[(1.0, 1), (2.0, 12)],
        drafter_lost_at=None,
        queued_s=0.0,
        num_spec_tokens=4,
    )
    assert made.tokens_per_pass == 1 + 5 / 8 == made.num_tokens / made.num_target_passes
    assert made.speculative_decoding is not None
    assert made.speculative_decoding.mean_acceptance_length == 1 + 5 / 3
    record = dataclasses.asdict(made)
    assert "mean_acceptance_length" not in record, "one name, one meaning"
    assert "1.62 tokens a pass" in summary(made, policy="auto", seed=None, verbose=True)


def test_texts_that_lost_their_drafter_are_counted_over_all() -> None:
    def text(drafter_lost_at: int | None) -> Metrics:
        return Metrics.of(
            SessionCounts(num_passes=2),
            started=0.5,
            emitted=[(1.0, 1), (2.0, 2)],
            drafter_lost_at=drafter_lost_at,
            queued_s=0.0,
            num_spec_tokens=2,
        )

    whole = figures_of_all([text(None)], policy="sync")
    assert "lost" not in whole
    some = figures_of_all([text(None), text(0), text(2)], policy="sync")
    assert "the drafter was lost: 2 texts were without it" in some.splitlines()[1]


def by_source(*figures: PassFigures) -> SessionCounts:
    """The counts of some passes."""
    counts = SessionCounts()
    for one in figures:
        counts.count(one)
    return counts


def test_what_each_source_brought_is_counted_and_cut_with_the_text() -> None:
    said = verdict((1, 2), 3, 4, 5, num_drafted=4, num_accepted=3)
    copied = replace(said, sources=(HEADS_SOURCE, HEADS_SOURCE, NGRAM_SOURCE))
    counts = by_source(
        PassFigures.of(said, 3, 3),
        PassFigures.of(copied, 3, 3),
        # Its first token was known already, and the text ends with the one after that.
        PassFigures.of(replace(said, sources=(EARLIER_SOURCE, 3, 3)), 1, 1, num_known=1),
        PassFigures.of(verdict((1, 2), 3, hit=Hit.NOBODY), 1, 0),
    )
    assert counts.accepted_by == {"model": 3, "heads": 2, "ngram": 1, "3": 1}
    assert counts.hits_by == {"model": 1, "heads": 1, "earlier": 1}
    cut = counts.until(4)
    assert cut.accepted_by == {"model": 3, "heads": 1}
    assert cut.num_accepted == sum(cut.accepted_by.values())


def test_sources_are_told_in_the_figures_and_in_a_line_unless_all_are_the_models() -> None:
    def text(*accepted: str) -> Metrics:
        one = replace(A_PASS, num_tokens=4, num_accepted=len(accepted), num_drafted=4, hit="hit")
        first = accepted[0] if accepted else ""
        return Metrics.of(
            by_source(replace(one, sources=accepted, hit_by=first)),
            started=0.5,
            emitted=[(1.0, 1), (2.0, 3)],
            drafter_lost_at=None,
            queued_s=0.0,
            num_spec_tokens=4,
        )

    mixed = text("ngram", "heads", "heads")
    record = json.loads(json.dumps(dataclasses.asdict(mixed)))
    assert record["accepted_by_source"] == {"ngram": 1, "heads": 2}
    assert record["hits_by_source"] == {"ngram": 1}
    line = "accepted drafts by source: heads 2 (0 hits), n-gram 1 (1 hits)"
    assert line in summary(mixed, policy="auto", seed=None, verbose=True).splitlines()
    together = figures_of_all([mixed, text("earlier")], policy="auto", verbose=True).splitlines()
    assert f"{line}, earlier text 1 (1 hits)" in " ".join(" ".join(together).split())
    assert max(map(len, together)) <= 80
    for alone in (text("model"), text()):
        assert "by source" not in summary(alone, policy="auto", seed=None, verbose=True)
