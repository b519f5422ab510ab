"""The colours of pictures: one colour for one thing."""

from lab import palette
from proto.policies import POLICIES


def test_no_two_things_have_the_same_colour() -> None:
    things = [
        *(palette.ROLES.values()),
        *(palette.VERDICT, palette.PREPARE, palette.MOVE, palette.DECIDE, palette.CODEC),
        *(look.colour for look in (*palette.POLICIES.values(), *palette.PEERS)),
    ]
    assert len(set(things)) == len(things)


def test_every_policy_has_a_look_in_the_order_of_the_table() -> None:
    assert list(palette.POLICIES) == list(POLICIES)


def test_a_pale_colour_is_between_it_and_white() -> None:
    assert palette.pale("#204060", 0) == "#204060"
    assert palette.pale("#204060", 1) == "#ffffff"
    assert palette.pale("#204060") == "#90a0b0"
