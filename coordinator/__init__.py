"""The frontend: owns the texts and the node processes, and serves the user. Never imports torch.

The Python API is loaded when it is first used:

    from coordinator import LLM, SamplingParams
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.api.async_llm import AsyncLLM, AsyncLLMEngine
    from coordinator.api.llm import LLM
    from coordinator.api.outputs import CompletionOutput, Logprob, RequestOutput
    from coordinator.api.params import RequestOutputKind, SamplingParams
    from coordinator.api.structured import StructuredOutputsParams
    from coordinator.api.vllm import AsyncEngineArgs, EngineArgs
    from coordinator.api.vllm_metrics import Counter, Gauge, Histogram, Vector

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "Counter",
    "EngineArgs",
    "Gauge",
    "Histogram",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "Vector",
]

_HOMES = {
    "LLM": "coordinator.api.llm",
    **dict.fromkeys(("AsyncLLM", "AsyncLLMEngine"), "coordinator.api.async_llm"),
    "RequestOutputKind": "coordinator.api.params",
    "CompletionOutput": "coordinator.api.outputs",
    "Logprob": "coordinator.api.outputs",
    "RequestOutput": "coordinator.api.outputs",
    "SamplingParams": "coordinator.api.params",
    "StructuredOutputsParams": "coordinator.api.structured",
    **dict.fromkeys(("AsyncEngineArgs", "EngineArgs"), "coordinator.api.vllm"),
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Vector"), "coordinator.api.vllm_metrics"),
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
