"""What a recording says of forwards, hosts and messages."""

import pytest

from coordinator.tracing.spans import Forward, Hop, Span, Track
from coordinator.tracing.timeline import SAME, Process, Timeline
from lab.pair.timing import Sample, curve, samples_of, share_beside, share_stalled, ways_of
from proto.messages import Role
from proto.stopwatch import Phase

US = 1_000


def process(role: Role, track: Track) -> Process:
    return Process(role, role.encode(), role, "", "", "", SAME, track)


def on_host(start_us: int, rows: int, model_us: int) -> tuple[list[Span], Forward]:
    """A forward that the host computes: 2 us to prepare, the model, 1 us to choose."""
    ends = [start_us, start_us + 2, start_us + 2 + model_us, start_us + 3 + model_us]
    phases = (Phase.PREPARE, Phase.MODEL, Phase.CHOOSE)
    spans = [
        Span(ends[index] * US, ends[index + 1] * US, phase) for index, phase in enumerate(phases)
    ]
    return spans, Forward(ends[0] * US, ends[3] * US, rows, rows)


def track_of(*forwards: tuple[list[Span], Forward]) -> Track:
    return Track([span for spans, _ in forwards for span in spans], [each for _, each in forwards])


def samples(num_rows: int, *milliseconds: float) -> list[Sample]:
    return [Sample(num_rows, each / 1e3, 1.0) for each in milliseconds]


def test_of_each_forward_it_is_known_how_much_of_it_the_other_model_ran() -> None:
    target = track_of(on_host(0, 3, 99), on_host(200, 3, 99))
    drafter = track_of(on_host(98, 1, 9), on_host(202, 1, 80))
    timeline = Timeline([process(Role.TARGET, target), process(Role.DRAFTER, drafter)], [], {}, 0)
    first, second = samples_of(timeline, Role.TARGET).forwards
    assert (first.num_rows, first.seconds) == (3, pytest.approx(100e-6))
    assert (first.beside, second.beside) == pytest.approx((0.02, 0.81))
    assert share_beside([first, second]) == pytest.approx(0.415)
    assert samples_of(timeline, Role.TARGET).host_s == pytest.approx(4e-6)


def test_prompts_do_not_count_and_a_device_leaves_its_host_free() -> None:
    track = Track(
        spans=[Span(0, 4 * US, Phase.DECIDE), Span(8 * US, 30 * US, Phase.SEND)],
        forwards=[
            Forward(5 * US, 25 * US, 2, 2, on_device=True),
            Forward(40 * US, 60 * US, 256, 0, on_device=True),
            Forward(60 * US, 70 * US, 9, 1, on_device=True),
        ],
    )
    found = samples_of(Timeline([process(Role.TARGET, track)], [], {}, 0), Role.TARGET)
    assert found.forwards == (Sample(2, 20e-6, 0.0),)
    assert found.num_forwards == 3
    assert found.host_s == pytest.approx((4 + 5) * 1e-6)


def test_the_way_of_a_draft_is_from_the_drafter_to_the_target() -> None:
    hops = [
        Hop(1, "Draft", b"drafter", False, 9, None, 10 * US, 30 * US),
        Hop(1, "Draft", b"target", True, 9, None, 32 * US, 50 * US),
        Hop(2, "Verdict", b"target", False, 9, None, 60 * US, 70 * US),
        Hop(2, "Verdict", b"drafter", True, 9, None, 70 * US, 90 * US),
        Hop(3, "Draft", b"drafter", False, 9, None, 95 * US, None),
    ]
    assert ways_of(hops) == [pytest.approx(40e-6)]


def test_more_rows_never_take_less_time_and_rare_numbers_do_not_count() -> None:
    found = curve(
        samples(1, 2, 2, 2) + samples(2, 5, 5, 5) + samples(4, 3, 3, 3) + samples(8, 1) * 2,
        0.0,
    )
    assert found is not None
    assert [(rows, round(s * 1e3, 6)) for rows, s in found.known] == [(1, 2.0), (2, 4.0), (4, 4.0)]
    assert found.row_s == pytest.approx(2e-3 / 3)
    assert curve(samples(1, 2, 2), 0.0) is None


def test_costs_add_up_to_what_the_forwards_took_and_stalls_are_spread_over_all_of_them() -> None:
    usual = samples(1, 2, 2, 2, 4) + samples(5, 6, 8, 10)
    found = curve(usual, 0.0)
    assert found is not None
    assert 4 * found.of(1) + 3 * found.of(5) == pytest.approx(34e-3)
    assert share_stalled([usual]) == 0.0
    with_stall = [*usual, *samples(1, 900)]
    assert curve(with_stall, 0.0) == found
    spread = curve(with_stall, 0.5)
    assert spread is not None
    assert spread.of(5) == pytest.approx(2 * found.of(5))
    assert share_stalled([usual, with_stall]) == pytest.approx(0.898 / (0.9 + 2 * 0.034))
