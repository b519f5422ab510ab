"""Which server a request goes to, and when one counts as lost."""

from coordinator.ingress.servers import MAX_HOMES, MORE_AT_HOME, NUM_SILENT, Servers, State


def three() -> Servers:
    servers = Servers.at(("a", "b", "c"))
    for server in servers.all:
        servers.probed(server, is_well=True)
    return servers


def test_none_is_asked_before_it_said_that_it_is_well() -> None:
    servers = Servers.at(("a", "b"))
    assert servers.choose() is None
    servers.probed(servers.all[1], is_well=True)
    assert servers.choose() is servers.all[1]
    assert servers.num_ready == 1


def test_the_least_busy_one_is_asked() -> None:
    servers = three()
    first, second, third = servers.all
    first.num_running, second.num_running, third.num_running = 2, 1, 3
    assert servers.choose() is second
    assert servers.choose({second}) is first
    assert servers.choose(set(servers.all)) is None


def test_what_begins_alike_goes_to_one_unless_that_is_far_busier() -> None:
    servers = three()
    first, second, _ = servers.all
    first.num_running = 1
    assert servers.choose(beginning="x") is second
    second.num_running = MORE_AT_HOME
    assert servers.choose(beginning="x") is second
    second.num_running = MORE_AT_HOME + 1
    assert servers.choose(beginning="x") is not second
    servers.broke(second)
    assert servers.choose(beginning="y") is not second


def test_old_beginnings_are_forgotten() -> None:
    servers = three()
    home = servers.choose(beginning="x")
    assert home is servers.all[0]
    home.num_running = 1
    assert servers.choose(beginning="x") is home
    for number in range(MAX_HOMES):
        servers.choose(beginning=number)
    assert servers.choose(beginning="x") is not home


def test_a_server_that_drains_gets_no_requests_and_keeps_its_streams() -> None:
    servers = three()
    first = servers.all[0]
    servers.probed(first, is_well=False)
    assert (first.state, first.num_lives) == (State.BUSY, 0)
    assert servers.choose() is not first


def test_a_server_that_answers_nothing_is_lost_after_some_questions() -> None:
    servers = three()
    first = servers.all[0]
    for _ in range(NUM_SILENT - 1):
        servers.probed(first, is_well=None)
    assert (first.state, first.num_lives) == (State.READY, 0)
    servers.probed(first, is_well=True)
    for _ in range(NUM_SILENT):
        servers.probed(first, is_well=None)
    assert (first.state, first.num_lives) == (State.LOST, 1)
    servers.probed(first, is_well=None)
    assert first.num_lives == 1
    servers.probed(first, is_well=True)
    assert first.state is State.READY


def test_a_connection_that_breaks_makes_it_lost_at_once() -> None:
    servers = three()
    servers.broke(servers.all[0])
    assert (servers.all[0].state, servers.all[0].num_lives) == (State.LOST, 1)
