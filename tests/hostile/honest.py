"""An honest node that asks all the while, and measures how long it waits for an answer.

Standard input: one line of JSON with its keys. Standard output, at its end: the number of answers,
and the longest pause between two of them in seconds.
"""

import json
import os
import select
import sys
import time

from proto.codec import decode, encode
from proto.links.keys import KeyPair, NodeKeys
from proto.links.transport import Connection
from proto.messages import PROTOCOL_VERSION, Fingerprint, Hello, Role, Welcome
from tests.hostile.besieged import say

NAME = b"drafter-1"
PAUSE_S = 0.01
ASK_AGAIN_S = 0.25


def main() -> None:
    """Ask until standard input ends."""
    given = json.loads(sys.stdin.readline())
    pair = KeyPair(given["public"], given["secret"])
    keys = NodeKeys(pair, given["coordinator"])
    connection = Connection(f"tcp://127.0.0.1:{given['port']}", NAME, keys=keys)
    hello = encode(
        Hello(
            version=PROTOCOL_VERSION,
            role=Role.DRAFTER,
            secret=given["coordinator"],
            fingerprint=Fingerprint(100, "", ()),
            logits_size=100,
            max_model_len=100,
            model="model",
            dtype="float32",
            device="cpu",
            num_parameters=1,
            load_us=1,
            num_lanes=1,
        )
    )
    num_answers, longest_s, last = 0, 0.0, None
    while not select.select([0], [], [], PAUSE_S)[0]:
        connection.send(hello)
        asked = time.monotonic()
        while time.monotonic() < asked + ASK_AGAIN_S:
            frames = list(connection.receive(ASK_AGAIN_S))
            if any(isinstance(decode(frame), Welcome) for frame in frames):
                now = time.monotonic()
                longest_s = longest_s if last is None else max(longest_s, now - last)
                last, num_answers = now, num_answers + 1
                break
        if num_answers == 1:
            say("answered")
    now = time.monotonic()
    longest_s = max(longest_s, now - (last or 0.0))
    say(json.dumps([num_answers, longest_s]))
    os._exit(0)


if __name__ == "__main__":
    main()
