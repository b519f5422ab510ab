"""The server on nodes that were started by hand: a target that dies may be started again."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Thread

import pytest

from coordinator.api.config import PairConfig
from coordinator.api.pair import Pair
from coordinator.launching.remote import RemoteNodes
from proto.installation import MODELS
from proto.messages import Role
from tests.process.ray_nodes import free_port, wait_for
from tests.process.served import LIMIT_S, serving
from tests.process.test_joining import joined

pytestmark = [pytest.mark.process, pytest.mark.slow]

TARGET, DRAFTER = str(MODELS / "target"), str(MODELS / "drafter")
ASKED = {"max_tokens": 300, "temperature": 0.8, "seed": 7, "ignore_eos": True}


def test_a_target_that_is_started_again_goes_on_with_the_texts_and_new_ones_get_503_until_then(
    tmp_path: Path,
) -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    config = PairConfig(target=TARGET, drafter=DRAFTER, max_num_seqs=2)
    make = partial(RemoteNodes, endpoint, None, tuple(Role))
    slow = ("--simulate-ms", "30")
    made: list[str] = []
    with ExitStack() as stack:
        first = stack.enter_context(
            joined("target_node", tmp_path / "t1", endpoint, TARGET, *slow, "--max-num-seqs", "2")
        )
        stack.enter_context(
            joined("drafter_node", tmp_path / "d", endpoint, DRAFTER, "--max-num-seqs", "2")
        )
        pair = stack.enter_context(Pair(config, make_launcher=make, awaits_target=True))
        server = stack.enter_context(serving(pair))

        def ask() -> None:
            made.append(server.complete("class Reader:\n", **ASKED)["choices"][0]["text"])

        ask()
        asking = Thread(target=ask)
        asking.start()
        assert wait_for(lambda: server.llm.kv_cache_usage > 0, LIMIT_S)
        first.process.kill()
        first.process.wait()
        assert wait_for(lambda: not pair.is_ready, LIMIT_S)
        response = server.post("/v1/completions", prompt="x", max_tokens=4)
        assert response.status_code == 503
        assert "the target is away" in response.json()["error"]["message"]
        stack.enter_context(
            joined("target_node", tmp_path / "t2", endpoint, TARGET, "--max-num-seqs", "2")
        )
        asking.join(LIMIT_S)
        assert wait_for(lambda: pair.is_ready, LIMIT_S)
        answer = server.complete("class Reader:\n", **ASKED, speculative={"policy": "sync"})
        made.append(answer["choices"][0]["text"])
        assert answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 0
    assert len(made) == 3
    assert made[0] == made[1] == made[2]
