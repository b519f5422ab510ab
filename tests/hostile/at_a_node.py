"""`python -m tests.hostile.at_a_node [FRAMES] [SEED]`: mutated frames at the socket of a drafter.

A made-up coordinator sends damaged messages to a drafter (its real socket, loop and machine; its
model is a rule). Each frame is dropped, obeyed, or closes the connection, and then the drafter
joins anew. In between an honest text must get the drafts that the rule says.
"""

import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from drafter_node.compute import Action, Children, Compute, Proposed
from drafter_node.drafting import Drafting
from drafter_node.known import Known
from drafter_node.scheduling import Schedule
from engine.layout.slots import NUM_TREE_SLOTS
from node.costs import Passes
from node.dispatcher import Dispatcher
from node.lanes import Lanes
from node.loop import Loop
from node.turns import Ended, Launched
from proto.codec import decode, encode
from proto.errors import SlipstreamError
from proto.links.transport import Connection, Listener
from proto.messages import Close, Draft, Proposal, Welcome
from proto.stopwatch import Stopwatch
from tests.hostile.sessions import FRAMES, garbled
from tests.policies import pipelined
from tests.proto.test_codec import EXAMPLES
from tests.texts import opening

NAME = b"drafter-1"
BETWEEN = 500  # mutated frames between two honest texts
LIMIT_S = 20.0  # until an honest text has its drafts
MAX_LEN = 200


def follows(token: int) -> int:
    """Return the token that the drafter's model says after a token."""
    return (7 * token + 3) % 90


def _launch(action: Compute) -> Launched[Proposed]:
    made = []
    for part in action.parts:
        asked = part.feed.tokens[len(part.feed.tokens) - part.num_asked :]
        made.append(
            tuple(
                Children((follows(token),), (-0.1,), (Proposal((follows(token),), (1.0,)),))
                for token in asked
            )
        )
    return Ended(Proposed(action.ticket, tuple(made), 10))


class Counted(Connection):
    """A connection that counts the frames that it has received."""

    num_received = 0

    def receive(self, timeout_s: float, *, exact: bool = False) -> Iterator[bytes]:
        """Yield the frames that have arrived, as `Connection` does."""
        for frame in super().receive(timeout_s, exact=exact):
            self.num_received += 1
            yield frame


class Node:
    """A drafter in a thread of its own.

    error     what has ended its loop
    hello     the first frame that it sends; each node's is another one
    num_sent  number of frames that were sent to it
    """

    def __init__(self, endpoint: str, number: int) -> None:
        self.error: BaseException | None = None
        self.hello = encode(Close(number, "here"))
        self.num_sent = 0
        self._connection: Counted | None = None
        self._endpoint = endpoint
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        connection = self._connection = Counted(self._endpoint, NAME)
        lanes = Lanes(4, MAX_LEN + NUM_TREE_SLOTS)
        schedule = Schedule(lanes, Known(max_len=MAX_LEN, steps=Passes({})), num_per_pass=4)
        dispatcher: Dispatcher[Drafting, Proposed, Action] = Dispatcher(lanes, schedule)
        nothing = SimpleNamespace(
            fixed_rows=None,
            move=lambda *moves: None,
            copy_prefix=lambda *where: None,
            wipe=lambda *where: None,
        )
        heart = SimpleNamespace(
            watch=Stopwatch(lambda: 0), marks=(), heard=lambda message: None, ends=lambda: None
        )
        loop = Loop(connection, cast(Any, heart), cast(Any, nothing), dispatcher, _launch)
        try:
            connection.send(self.hello)
            loop.run(has_lifeline=False)
        except BaseException as error:  # noqa: BLE001 (the campaign says what it was)
            self.error = error
        finally:
            connection.close()

    def wait_until_read(self) -> None:
        """Wait until it has received all frames, or has ended."""
        deadline = time.monotonic() + LIMIT_S
        while not self.has_ended and time.monotonic() < deadline:
            if self._connection is not None and self._connection.num_received >= self.num_sent:
                return
            time.sleep(0.0002)
        assert self.has_ended, "the drafter has stopped reading"

    @property
    def has_ended(self) -> bool:
        """True if its loop has ended, and its connection is closed."""
        return not self._thread.is_alive()


class Coordinator:
    """Sends mutated frames and honest texts to a drafter; `seen` counts what became of them."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        self._draw = random.Random(seed)
        self._listener = Listener(endpoint)
        self._session = 1 << 40  # of honest texts; mutated frames speak of others
        self._num_nodes = 0
        self._join()

    def _join(self) -> None:
        self._num_nodes += 1
        self._node = Node(self._listener.endpoint, self._num_nodes)
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if self._node.hello in [frame for _, frame in self._listener.receive(0.1)]:
                return
        raise TimeoutError("the drafter does not join")

    def _rejoin(self) -> None:
        error = self._node.error
        if not isinstance(error, SlipstreamError):
            raise AssertionError(f"the drafter broke: {error!r}") from error
        self.seen[f"closed: {type(error).__name__}"] += 1
        self._join()

    def _send(self, frame: bytes) -> None:
        self._listener.send(NAME, frame)
        self._node.num_sent += 1

    def mutate(self) -> None:
        """Send one damaged frame; a drafter whose connection it has closed joins anew."""
        if self._node.has_ended:
            self._rejoin()
        # An empty frame is no message but the sign of a new connection, and is not handed on.
        self._send(garbled(self._draw, self._draw.choice(FRAMES)) or b"?")
        self._node.wait_until_read()
        self.seen["read"] += 1
        if self.seen["read"] % 16 == 0:
            self.seen["answers"] += sum(1 for _ in self._listener.receive(0.0))

    def check(self) -> None:
        """Ask for the drafts of an honest text. Raises AssertionError if they are not right."""
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            # Lanes may be full of texts that damaged frames have opened: a Welcome ends them all.
            if self._node.has_ended:
                self._rejoin()
            self._session += 1
            self._send(encode(WELCOME))
            self._send(encode(opening(5, 6, policy=pipelined(8, 16), session=self._session)))
            if self._has_drafts(time.monotonic() + 2.0):
                self.seen["honest texts"] += 1
                return
        raise AssertionError("an honest text gets no drafts")

    def _has_drafts(self, until: float) -> bool:
        while time.monotonic() < until and not self._node.has_ended:
            for _, frame in self._listener.receive(0.05):
                message = decode(frame)
                if isinstance(message, Draft) and message.session == self._session:
                    expected = follows(6)
                    for token in message.tokens:
                        assert token == expected, f"{message} is not what the model says"
                        expected = follows(token)
                    return True
        return False

    def close(self) -> None:
        """Close the socket."""
        self._listener.close()


WELCOME = next(example for example in EXAMPLES if isinstance(example, Welcome))


def campaign(num_frames: int, seed: int) -> Counter[str]:
    """Send so many mutated frames; return what became of them. Raises AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Coordinator(f"ipc://{Path(folder) / 's'}", seed)
        try:
            coordinator.check()
            for number in range(num_frames):
                coordinator.mutate()
                if number % BETWEEN == BETWEEN - 1:
                    coordinator.check()
            coordinator.check()
        finally:
            coordinator.close()
        return coordinator.seen


def main(num_frames: int = 100_000, seed: int = 1) -> int:
    """Run the campaign and print what became of the frames; returns the exit status."""
    began = time.monotonic()
    for name, number in sorted(campaign(num_frames, seed).items()):
        sys.stdout.write(f"  {name:30} {number}\n")
    sys.stdout.write(f"as it should be, in {time.monotonic() - began:.0f} s\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
