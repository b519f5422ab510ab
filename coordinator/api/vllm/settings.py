"""Settings of vLLM's `LLM`: which are ours under another name, and what to do about the others."""

from collections.abc import Mapping
from typing import Any

from proto.errors import ConfigurationError, shown

# Theirs: ours.
ALIASES = {"model": "target", "revision": "target_revision"}
DTYPES = {"half": "float16", "float": "float32"}
# Theirs that we have not: values that ask for nothing, and what there is in its place.
NOTHING = (None, False)
NOT_OURS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "gpu_memory_utilization": ((None,), "max_model_len and max_num_seqs say what memory is for"),
    "trust_remote_code": (NOTHING, "code that comes with a checkpoint is never run"),
    "enforce_eager": (NOTHING, 'backend="fused" runs without CUDA graphs'),
    "seed": ((None, 0), "SamplingParams(seed=...) is of a text"),
    "tokenizer": ((None,), "the target's own is used"),
    "tokenizer_mode": (("auto",), "the target's tokenizer.json is used"),
    "tokenizer_revision": ((None,), "it is that of the target, revision"),
    "skip_tokenizer_init": (NOTHING, "prompts and answers may be token ids alone as it is"),
    "quantization": ((None,), "the checkpoint says how it is quantised (docs/quantised.md)"),
    "kv_cache_dtype": (("auto", None), "the cache has the number type of the model"),
    "pipeline_parallel_size": ((1, None), "tensor_parallel_size shares a model among GPUs"),
    "download_dir": ((None,), "the variable HF_HOME says where models are kept"),
    "swap_space": ((None, 0), "everything stays on its device"),
    "cpu_offload_gb": ((None, 0), "everything stays on its device"),
    "enable_prefix_caching": ((None, True, False), "what texts begin alike is read once"),
    "enable_chunked_prefill": ((None, True, False), "long prompts are read in parts"),
    "disable_log_stats": ((None, True, False), "each output has its metrics"),
}


def in_our_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a `PairConfig`, without those that ask for nothing.

    given  what the caller said, and nothing else

    Raises ConfigurationError for what is said twice, and for what we have not, with what there is.
    """
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name in NOT_OURS:
            accepted, instead = NOT_OURS[name]
            if not any(type(value) is type(one) and value == one for one in accepted):
                raise ConfigurationError(f"{name}={shown(value)} is not a setting here: {instead}")
            continue
        ours = ALIASES.get(name, name)
        if ours in values:
            raise ConfigurationError(
                f"{_theirs(ours)} and {ours} are one setting; give one of them"
            )
        values[ours] = value
    if isinstance(dtype := values.get("dtype"), str):
        values["dtype"] = DTYPES.get(dtype, dtype)
    return values


def as_given(given: Mapping[str, Any]) -> dict[str, str]:
    """How the caller has called our settings, of those that he has called otherwise."""
    return {ALIASES[name]: name for name in given if name in ALIASES}


def _theirs(ours: str) -> str:
    return next(name for name, other in ALIASES.items() if other == ours)
