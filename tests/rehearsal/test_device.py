"""A device in virtual time does all in order, and says what its host has done wrong."""

from typing import Any

import pytest

from engine.layout.slots import Feed, Move
from rehearsal.cache import CacheError, VirtualCache, fold
from rehearsal.device import Device, DeviceError, Digests, Handle
from rehearsal.timeline import Timeline

PASS_S = 2.0


class Rig:
    """A device with two lanes of eight slots, and when its forwards have ended."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.lanes = [VirtualCache(8), VirtualCache(8)]
        self.ended: list[float] = []
        self.device = Device(self.lanes, self.timeline, self._note)

    def _note(self) -> None:
        self.ended.append(self.timeline.now)

    def launch(self, *feeds: Feed, host_s: float = 0.0) -> Handle:
        """A forward whose result is what its last row has seen."""
        return self.device.launch(feeds, last_of, PASS_S, host_s)


def last_of(seen: Digests) -> int:
    return seen[-1][-1]


def chunk(*tokens: int, start: int = 0, lane: int = 0) -> Feed:
    """A prefill."""
    where = tuple(range(start, start + len(tokens)))
    return Feed(tokens, where, where, start, None, lane)


def draft(token: int, slot: int) -> Feed:
    """A draft behind two committed tokens."""
    return Feed((token,), (2,), (slot,), 2, (1 << (slot - 2),), before=(1,))


def digest_of(*tokens: int) -> int:
    digest = 0
    for token in tokens:
        digest = fold(digest, token)
    return digest


def tokens_of(cache: VirtualCache) -> list[int | None]:
    return [row and row.token for row in cache.rows]


def test_a_forward_writes_the_cache_when_it_ends_and_not_when_it_is_launched() -> None:
    rig = Rig()
    handle = rig.launch(chunk(5, 6))
    assert not handle.is_ready
    assert tokens_of(rig.lanes[0]) == [None] * 8
    rig.timeline.step()
    assert handle.is_ready
    assert handle.result() == digest_of(5, 6)
    assert tokens_of(rig.lanes[0])[:3] == [5, 6, None]
    assert rig.ended == [PASS_S]


def test_forwards_follow_each_other_and_the_host_takes_its_time_before_each() -> None:
    rig = Rig()
    first = rig.launch(chunk(5), host_s=0.5)
    second = rig.launch(chunk(6, start=1), host_s=0.25)
    assert (first.began, first.ends_at) == (0.5, 2.5)
    assert (second.began, second.ends_at) == (2.75, 4.75)
    rig.timeline.step()
    assert tokens_of(rig.lanes[0])[:2] == [5, None]
    rig.timeline.step()
    assert rig.ended == [2.5, 4.75]
    assert second.result() == digest_of(5, 6)


def test_a_device_that_was_idle_begins_at_once() -> None:
    rig = Rig()
    rig.timeline.at(7.0, lambda: None)
    rig.timeline.step()
    assert rig.launch(chunk(5)).began == 7.0


def test_what_is_ordered_during_a_forward_waits_for_its_end_and_what_is_not_is_done_at_once() -> (
    None
):
    rig = Rig()
    rig.launch(chunk(5, 6, 7))
    rig.device.copy(0, 1, 2)
    rig.device.move(Move((2,), (4,)))
    rig.device.wipe(0, 2)
    assert tokens_of(rig.lanes[1]) == [None] * 8
    rig.timeline.step()
    assert tokens_of(rig.lanes[0]) == [5, 6] + [None] * 6
    assert tokens_of(rig.lanes[1])[:3] == [5, 6, None]
    rig.device.wipe(1, 1)
    assert tokens_of(rig.lanes[1])[:2] == [5, None]


def test_a_move_between_two_launches_comes_before_the_second_forward() -> None:
    rig = Rig()
    rig.launch(chunk(5, 6), draft(7, slot=4))
    rig.device.move(Move((4,), (2,)))
    handle = rig.launch(chunk(8, start=3))
    rig.timeline.step()
    assert tokens_of(rig.lanes[0])[:4] == [5, 6, 7, None]
    rig.timeline.step()
    assert handle.result() == digest_of(5, 6, 7, 8)


def test_a_move_behind_the_launch_that_needs_it_comes_too_late() -> None:
    rig = Rig()
    rig.launch(chunk(5, 6), draft(7, slot=4))
    rig.launch(chunk(8, start=3))
    rig.device.move(Move((4,), (2,)))
    rig.timeline.step()
    with pytest.raises(CacheError, match="a hole at 2"):
        rig.timeline.step()


def test_a_result_is_not_read_before_it_is_ready() -> None:
    handle = Rig().launch(chunk(5))
    with pytest.raises(DeviceError, match="before it is ready"):
        handle.result()


def test_a_result_is_not_read_after_the_next_launch() -> None:
    rig = Rig()
    first = rig.launch(chunk(5))
    rig.timeline.step()
    assert first.result() == digest_of(5)
    rig.launch(chunk(6, start=1))
    assert first.is_ready
    with pytest.raises(DeviceError, match="overwritten"):
        first.result()


def test_what_a_forward_was_given_does_not_change_after_its_launch() -> None:
    rig = Rig()
    feed: Any = chunk(5)
    rig.launch(feed)
    object.__setattr__(feed, "tokens", (6,))
    with pytest.raises(DeviceError, match="changed since its launch"):
        rig.timeline.step()


def test_nothing_happens_on_a_device_whose_process_has_died() -> None:
    rig = Rig()
    rig.launch(chunk(5))
    rig.device.wipe(0, 0)
    rig.device.stop()
    rig.timeline.step()
    assert tokens_of(rig.lanes[0]) == [None] * 8
    assert rig.ended == []
