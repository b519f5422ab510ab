"""A node that breaks the terms of its texts, in the way that SLIPSTREAM_TEST_HOSTILE names.

    outside N FOLDER  sends N hostile messages with each draft or verdict, and writes to a file of
                      its own in FOLDER how many of each kind and field it has sent
    repeat N          sends each draft N times
    again N           the same with new numbers, so that no two frames are equal

`hostile_drafter` and `hostile_target` run it.
"""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.starting import start
from proto.codec import decode, encode, kind_of
from proto.links.transport import Connection
from proto.messages import Draft, Role, Verdict
from tests.hostile.outside import ALL_FIELDS, Attacker

NUM_IDS = 1 << 16  # more than the embedded pair's logits
WRITE_S = 0.2

Send = Callable[[Connection, bytes], bool]


def outside(role: Role, most: int, folder: Path) -> Send:
    """Hostile messages before each draft or verdict."""
    file = folder / f"{role}-{os.getpid()}.json"
    send, attacker = Connection.send, Attacker(role, NUM_IDS, os.getpid())
    written_at = 0.0

    def attacking(self: Connection, frame: bytes) -> bool:
        nonlocal written_at
        attacker.saw(b"", decode(frame))
        if kind_of(frame) not in (Draft, Verdict):
            return send(self, frame)
        for _ in range(most):
            if (made := attacker.next(b"")) is not None:
                send(self, encode(made))
        if time.monotonic() - written_at > WRITE_S:
            written_at = time.monotonic()
            keys = ALL_FIELDS - attacker.impossible
            counts = {f"{kind}.{'.'.join(path)}": attacker.made[kind, path] for kind, path in keys}
            file.with_suffix(".new").write_text(json.dumps(counts))
            file.with_suffix(".new").replace(file)
        return send(self, frame)

    return attacking


def repeated(number: int, *, is_renumbered: bool) -> Send:
    """Each draft so many times."""
    send = Connection.send

    def attacking(self: Connection, frame: bytes) -> bool:
        if kind_of(frame) is not Draft:
            return send(self, frame)
        draft: Any = decode(frame)
        for copy in range(number - 1):
            if is_renumbered:
                frame = encode(replace(draft, number=draft.number * number + copy))
            send(self, frame)
        return send(self, frame)

    return attacking


def main(role: Role) -> int:
    """Run the node."""
    way, number, *rest = os.environ["SLIPSTREAM_TEST_HOSTILE"].split(maxsplit=2)
    if way == "outside":
        Connection.send = outside(role, int(number), Path(rest[0]))  # type: ignore[method-assign]
    else:
        is_renumbered = way == "again"
        Connection.send = repeated(int(number), is_renumbered=is_renumbered)  # type: ignore[method-assign]
    if role is Role.DRAFTER:
        from drafter_node.__main__ import load_serve as serve_drafter

        return start(role, serve_drafter)
    from target_node.__main__ import load_serve as serve_target

    return start(role, serve_target)
