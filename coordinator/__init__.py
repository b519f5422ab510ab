"""Owns sessions: the committed text, the processes, and the person in front. Never imports torch.

The Python API is loaded when it is first used:

    from coordinator import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.config import SamplingParams
    from coordinator.llm import LLM
    from coordinator.outputs import CompletionOutput, Logprob, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "coordinator.llm",
    "CompletionOutput": "coordinator.outputs",
    "Logprob": "coordinator.outputs",
    "RequestOutput": "coordinator.outputs",
    "SamplingParams": "coordinator.config",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
