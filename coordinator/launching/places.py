"""How the node processes that a coordinator starts are called (pure).

An identity names one process: `target-1`, and `target-1.1`, `target-1.2` ... those that take its
place one after another. People read the role alone where there is one place of it.
"""

from collections.abc import Collection


def place_of(identity: str) -> str:
    """Return the name of a process's place: "target-1" of "target-1.2"."""
    return identity.partition(".")[0]


def name_among(identity: str, others: Collection[str]) -> str:
    """Return a process's name for people: "target", or "target-2" beside others of its role.

    others  the identities of all processes; its own may be among them
    """
    place, role = place_of(identity), _role_of(identity)
    of_role = {place_of(one) for one in others if _role_of(one) == role}
    return place if of_role - {place} else role


def by_name(pids: dict[str, int]) -> dict[str, int]:
    """Return process ids by the names of processes for people, from those by identity."""
    return {name_among(one, pids): pid for one, pid in pids.items()}


def _role_of(identity: str) -> str:
    return place_of(identity).rpartition("-")[0]
