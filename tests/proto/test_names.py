"""Which connection speaks for which node."""

from proto.links.names import MAX_NAMES, NO_LIFE, Claim, Names

ONE, OTHER = Claim(b"drafter-1", "one"), Claim(b"drafter-1", "other")
BEATS = Claim(b"drafter-1", "one", is_answered=False)


def names(*gone: bytes) -> Names:
    """Where all connections are open but these."""
    return Names(lambda connection: connection not in gone)


def test_a_name_is_that_of_the_process_that_comes_first() -> None:
    found = names()
    assert found.introduce(b"a", ONE)
    assert not found.introduce(b"b", OTHER)
    assert found.has(ONE)
    assert not found.has(OTHER)
    assert found.connection(b"drafter-1") == b"a"


def test_another_name_is_another_node() -> None:
    found = names()
    assert found.introduce(b"a", ONE)
    assert found.introduce(b"b", Claim(b"drafter-2", "other"))
    assert found.connection(b"drafter-2") == b"b"
    assert found.connection(b"drafter-3") is None


def test_the_newest_connection_of_a_process_counts() -> None:
    found = names()
    assert found.introduce(b"old", ONE)
    assert found.introduce(b"new", ONE)
    assert found.connection(b"drafter-1") == b"new"


def test_a_connection_that_only_beats_is_never_answered() -> None:
    found = names()
    assert found.introduce(b"a", ONE)
    assert found.introduce(b"beats", BEATS)
    assert found.has(BEATS)
    assert found.connection(b"drafter-1") == b"a"


def test_who_only_beats_has_no_name_yet() -> None:
    found = names()
    assert found.introduce(b"beats", BEATS)
    assert not found.has(BEATS)
    assert found.introduce(b"b", OTHER)
    assert not found.has(BEATS)


def test_the_name_of_a_process_that_has_gone_is_free() -> None:
    found = names(b"a")
    assert found.introduce(b"a", ONE)
    assert found.introduce(b"b", OTHER)
    assert found.connection(b"drafter-1") == b"b"
    assert not found.has(ONE), "the first would be heard again"


def test_heartbeats_take_no_name_from_a_process_that_has_gone() -> None:
    found = names(b"a")
    assert found.introduce(b"a", OTHER)
    assert found.introduce(b"beats", BEATS)
    assert found.has(OTHER)
    assert not found.has(BEATS)


def test_an_older_release_is_a_process_of_its_own() -> None:
    older = Claim(b"drafter-1", NO_LIFE)
    found = names()
    assert found.introduce(b"a", older)
    assert found.introduce(b"beats", older)
    assert found.connection(b"drafter-1") == b"beats"
    assert not found.introduce(b"b", ONE)


def test_there_are_not_more_names_than_nodes_can_have() -> None:
    gone: set[bytes] = set()
    found = Names(lambda connection: connection not in gone)
    for number in range(MAX_NAMES):
        assert found.introduce(b"%d" % number, Claim(b"%d" % number, "one"))
    assert not found.introduce(b"a", ONE)
    gone.add(b"7")
    assert found.introduce(b"a", ONE)
    assert found.connection(b"7") is None
