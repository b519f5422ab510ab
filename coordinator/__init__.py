"""The frontend: owns the texts and the node processes, and serves the user. Never imports torch.

The Python API is loaded when it is first used:

    from coordinator import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.api.async_llm import AsyncLLM, RequestOutputKind
    from coordinator.api.llm import LLM
    from coordinator.api.outputs import CompletionOutput, Logprob, RequestOutput
    from coordinator.api.params import SamplingParams
    from coordinator.api.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "coordinator.api.llm",
    "AsyncLLM": "coordinator.api.async_llm",
    "RequestOutputKind": "coordinator.api.async_llm",
    "CompletionOutput": "coordinator.api.outputs",
    "Logprob": "coordinator.api.outputs",
    "RequestOutput": "coordinator.api.outputs",
    "SamplingParams": "coordinator.api.params",
    "StructuredOutputsParams": "coordinator.api.structured",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
