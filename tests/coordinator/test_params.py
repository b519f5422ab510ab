"""What the Python API takes, before any process is started."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

import coordinator
from coordinator import LLM, SamplingParams
from proto.errors import ConfigurationError


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"temperatur": 1.0}, "SamplingParams has no setting 'temperatur'; there are temperature"),
        ({"temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"top_p": 0}, "top_p: Input should be greater than 0 (got 0)"),
        ({"seed": -1}, "seed: "),
        ({"max_tokens": "many"}, "max_tokens: "),
    ],
)
def test_a_bad_sampling_parameter_is_one_line(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        SamplingParams(**values)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"speculative_config": {"method": "magic"}}, "is one of ar, sync, pipelined, not 'magic'"),
        ({"speculative_config": {"K": 3}}, "speculative_config has no 'K'; there are method"),
        ({"speculative_config": {"num_speculative_tokens": 0}}, "num_speculative_tokens: "),
        ({"drafter": "a", "speculative_config": {"model": "b"}}, "named twice"),
        ({"reproducible": True, "speculative_config": {"num_speculative_tokens": 16}}, "is 16"),
        ({"max_model_len": 1}, "max_model_len: "),
        ({"tensor_parallel": 2}, "PairConfig has no setting 'tensor_parallel'"),
    ],
)
def test_a_bad_setting_is_one_line_and_starts_nothing(values: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        LLM("./nowhere", **values)
    assert line in str(caught.value)


def test_sampling_parameters_do_not_change() -> None:
    params = SamplingParams(temperature=0.5)
    with pytest.raises(ValidationError, match="frozen"):
        params.temperature = 1.0  # type: ignore[misc]


def test_the_api_is_loaded_when_it_is_used_and_never_loads_torch() -> None:
    code = (
        "import sys, coordinator\n"
        "assert 'coordinator.llm' not in sys.modules\n"
        "assert 'pydantic' not in sys.modules\n"
        "from coordinator import LLM, SamplingParams\n"
        "import coordinator.__main__\n"
        "heavy = {'torch', 'transformers', 'ray', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_name_of_the_api_is_there_and_no_other() -> None:
    assert all(hasattr(coordinator, name) for name in coordinator.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        coordinator.Llm  # noqa: B018
