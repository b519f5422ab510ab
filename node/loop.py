"""The loop of a node: drain the messages, then let the machine decide, for ever."""

from collections.abc import Callable
from typing import NoReturn

from engine.prepare import Prepared
from node.process import BadFrames
from proto.messages import PROTOCOL_VERSION, Fingerprint, Hello, Message
from proto.node_config import NodeConfig
from proto.stopwatch import Phase, Stopwatch
from proto.transport import Connection


def hello_of(config: NodeConfig, prepared: Prepared) -> Hello:
    """What the coordinator must know about a node with this config, once it is loaded."""
    loaded = prepared.loaded
    return Hello(
        version=PROTOCOL_VERSION,
        role=config.role,
        secret=config.secret,
        fingerprint=Fingerprint(prepared.vocab_size, prepared.digest, loaded.eos_token_ids),
        logits_size=loaded.vocab_size,
        max_model_len=prepared.max_len,
        model=config.model,
        dtype=str(loaded.dtype).removeprefix("torch."),
        device=config.device,
        num_parameters=loaded.num_parameters,
        load_us=round(prepared.load_s * 1e6),
    )


def serve(
    connection: Connection,
    watch: Stopwatch,
    on_message: Callable[[Message], None],
    on_drained: Callable[[], float],
) -> NoReturn:
    """Hand over all messages that are there, then call `on_drained`, for ever.

    `on_drained` returns for how many seconds the loop may sleep if no message comes. Raises
    RemoteProtocolError when too many garbled frames have come; the lifeline ends the process.
    """
    bad_frames = BadFrames()
    timeout_s = 0.0
    while True:
        watch.enter(Phase.WAIT)
        for frame in connection.receive(timeout_s):
            watch.enter(Phase.DECODE)
            message = bad_frames.decode(frame)
            watch.enter(Phase.DECIDE)
            if message is not None:
                on_message(message)
            watch.enter(Phase.WAIT)
        watch.enter(Phase.DECIDE)
        timeout_s = on_drained()
