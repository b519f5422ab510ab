"""A node beside a GPU that is played: what it computes is hidden until the played GPU has ended.

The host computes a forward at once. Then its logits are turned around, and put back when the played
GPU has ended: whoever reads them earlier chooses other tokens.
"""

import random
import sys
import time
from typing import Any

import torch

from node.starting import start

PASS_S = 0.002
EARLY_OR_LATE = (0.0, 0.5, 1.0, 3.0)  # of that time


class PlayedPoint:
    """In place of `engine.device.Point`, for the point behind a forward."""

    draw = random.Random(1)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.ends_at = time.perf_counter() + PASS_S * self.draw.choice(EARLY_OR_LATE)
        self.tensor, self.kept = tensor, tensor.clone()
        with torch.inference_mode():
            tensor.copy_(self.kept.flip(-1))

    def is_passed(self) -> bool:
        """Whether the played GPU has ended."""
        if time.perf_counter() < self.ends_at:
            return False
        self.wait()
        return True

    def wait(self) -> None:
        """From now on its results are there."""
        with torch.inference_mode():
            self.tensor.copy_(self.kept)


def load_serve() -> Any:
    """Import both workers, and let them believe that a GPU computes."""
    from drafter_node import worker as drafting
    from node import forwards
    from proto.messages import Role
    from target_node import worker as verifying

    class OnPlayedGpu(forwards.Forwards):
        """Forwards whose results come later."""

        def __init__(self, *what: Any, on_gpu: bool) -> None:
            assert not on_gpu, "there is a real one"
            super().__init__(*what, on_gpu=True)

    workers: dict[Role, Any] = {Role.TARGET: verifying, Role.DRAFTER: drafting}
    played: Any = forwards
    played.Point = PlayedPoint
    for worker in workers.values():
        worker.Forwards = OnPlayedGpu

    def serve(config: Any, *what: Any, **how: Any) -> None:
        workers[config.role].serve(config, *what, **how)

    return serve


if __name__ == "__main__":
    sys.exit(start("node", load_serve))
