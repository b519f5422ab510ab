"""Each process has a life of its own, by which the coordinator tells it from others of its name."""

import os

from proto.links.transport import own_life


def test_a_process_keeps_its_life_and_one_that_is_forked_from_it_has_another() -> None:
    mine = own_life()
    assert own_life() == mine
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, own_life().encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(reading, 100).decode()
    os.close(reading)
    os.close(writing)
    assert len(theirs) == len(mine) > 8
    assert theirs != mine
