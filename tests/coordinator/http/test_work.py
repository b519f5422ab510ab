"""Which requests may begin, and when a server that drains has ended."""

from coordinator.http.work import Phase, Work


def test_no_more_begin_than_may_be_in_work() -> None:
    work = Work(2)
    work.begin()
    assert work.refused() is None
    work.begin()
    assert work.refused() == "2 requests are in work already; try again later"
    assert work.retry_after_s(5.0) == 1
    work.leave()
    assert work.refused() is None


def test_while_it_drains_none_begin_and_it_has_drained_when_none_is_left() -> None:
    work = Work(2)
    work.begin()
    assert not work.is_drained(0.0)
    work.drain(10.0, 30.0)
    assert work.refused() is not None
    assert work.retry_after_s(12.5) == 28
    assert not work.is_drained(39.9)
    work.leave()
    assert work.is_drained(12.0)


def test_it_has_drained_when_the_time_is_over_which_a_second_signal_does_not_prolong() -> None:
    work = Work(2)
    work.begin()
    work.drain(10.0, 30.0)
    work.drain(30.0, 30.0)
    assert work.is_drained(40.0)
    assert work.retry_after_s(40.0) == 1


def draining() -> Work:
    work = Work(2)
    work.drain(10.0, 30.0)
    return work


def test_an_end_says_why_and_lets_none_begin() -> None:
    for work in (Work(2), draining()):
        work.end("the models have ended")
        assert work.refused() == work.why == "the models have ended"
        work.drain(20.0, 30.0)
        assert work.phase is Phase.ENDED
        assert work.retry_after_s(20.0) == 1
