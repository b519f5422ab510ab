"""What of a device's idle time is the host's, and what is nobody's."""

from lab.synthetic.host_time import Watch


def critical_ms(watch: Watch) -> list[float]:
    return [round(1e3 * one.critical_s, 6) for one in watch.launches]


def test_from_the_end_of_a_forward_to_the_next_launch_the_host_is_late() -> None:
    watch = Watch()
    watch.launched(1.0, 1.005)
    watch.ticked(None)  # the device is busy: nothing can be launched
    watch.heard(1.002)
    watch.ticked(None)
    watch.computed()
    watch.launched(1.0053, 1.010)
    assert critical_ms(watch) == [0.0, 0.3]


def test_while_there_is_nothing_to_launch_nobody_is_late() -> None:
    watch = Watch()
    watch.launched(1.0, 1.005)
    watch.computed()
    watch.ticked(None)
    watch.heard(1.0500)  # a message that changes nothing
    watch.ticked(None)
    watch.heard(1.0600)
    watch.heard(1.0601)
    watch.launched(1.0602, 1.07)
    assert critical_ms(watch) == [0.0, 0.2]


def test_a_deadline_that_the_machine_named_is_a_cause_when_it_has_passed() -> None:
    watch = Watch()
    watch.launched(1.0, 1.005)
    watch.computed()
    watch.ticked(1.0100)
    watch.launched(1.0104, 1.02)
    watch.computed()
    watch.ticked(1.5)
    watch.heard(1.0300)
    watch.launched(1.0301, 1.04)
    assert critical_ms(watch) == [0.0, 0.4, 0.1]


def test_a_forward_that_ends_after_its_device_s_time_leaves_no_idle_time_before_it() -> None:
    watch = Watch()
    watch.launched(1.0, 1.005)
    watch.computed()
    watch.launched(1.005, 1.01)
    assert critical_ms(watch) == [0.0, 0.0]
