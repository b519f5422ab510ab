"""What peers do with an arm's sampling parameters: they draw from the distribution of a pair."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lab.experiments.peers import huggingface
from lab.experiments.peers.huggingface import Peer
from proto.installation import MODELS

PROMPT = list(range(40, 52))
SAMPLED = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3}
REQUEST = {"mode": "plain", "prompt": PROMPT, "max_tokens": 16, "setting": None, **SAMPLED}


@pytest.fixture(scope="module")
def embedded() -> Peer:
    return Peer(str(MODELS / "target"), str(MODELS / "drafter"), "float32", "cpu")


def written(peer: Peer, **changes: Any) -> list[int]:
    tokens: list[int] = peer.answer({**REQUEST, **changes})["tokens"]
    return tokens


@pytest.mark.parametrize("mode", ["plain", "assisted", "lookup"])
@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
def test_hugging_face_with_a_filter_that_leaves_one_token_writes_the_greedy_text(
    embedded: Peer, mode: str, cut: dict[str, float]
) -> None:
    greedy = written(embedded, mode=mode, temperature=0.0)
    assert written(embedded, mode=mode) != greedy
    assert written(embedded, mode=mode, **cut) == greedy


@pytest.mark.parametrize("mode", ["plain", "assisted", "lookup"])
def test_hugging_face_writes_the_same_text_for_the_same_seed_only(
    embedded: Peer, mode: str
) -> None:
    first = written(embedded, mode=mode)
    torch.rand(5)  # somebody else draws in between
    assert written(embedded, mode=mode) == first
    assert written(embedded, mode=mode, seed=4) != first


def test_the_filters_in_a_model_s_own_configuration_do_not_count(
    embedded: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = written(embedded)
    for name, value in {"top_p": 1e-6, "top_k": 1, "min_p": 1.0}.items():
        monkeypatch.setattr(embedded.target.generation_config, name, value)
    assert written(embedded) == first


def test_hugging_face_warms_up_with_a_whole_request(embedded: Peer) -> None:
    assert len(embedded.answer(huggingface.WARM_UP)["tokens"]) == 8


class _Engine:
    """An engine of vLLM that takes one request and writes two tokens in two steps."""

    def __init__(self) -> None:
        self.params: Any = None
        self._left = [[5], [5, 6]]

    def add_request(self, _name: str, _prompt: object, params: object) -> None:
        self.params = params

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Any]:
        ids = self._left.pop(0)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)])]


@pytest.mark.parametrize(("top_k", "passed_on"), [(20, 20), (0, -1)])
def test_vllm_is_given_every_filter_and_the_seed(
    top_k: int, passed_on: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lab.experiments.peers import vllm

    engine = _Engine()
    package = ModuleType("vllm")
    monkeypatch.setattr(
        package, "LLM", lambda **_: SimpleNamespace(llm_engine=engine), raising=False
    )
    monkeypatch.setattr(package, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setitem(sys.modules, "vllm", package)
    peer = vllm.Peer("target", "drafter", "float32", "plain", 5)
    filters = {"top_k": top_k, "top_p": 0.9, "min_p": 0.1}
    assert peer.answer({**REQUEST, **filters})["tokens"] == [5, 6]
    given = vars(engine.params)
    assert {name: given[name] for name in (*SAMPLED, "max_tokens")} == {
        **SAMPLED,
        **filters,
        "top_k": passed_on,
        "max_tokens": 16,
    }
