"""Writes settings as the flags from which another command reads them."""

from collections.abc import Collection
from typing import Any

from pydantic import BaseModel

LISTS_OF_IDS = ("stop_token_ids", "allowed_token_ids")  # one flag, with commas; others are repeated


def words_of(config: BaseModel, but: Collection[str] = ()) -> list[str]:
    """Return flags for every field that differs from its default, but for those in `but`.

    The command line reads the same config from them (`flags.py`).
    """
    words: list[str] = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if name not in but and value != field.get_default(call_default_factory=True):
            words += _written(name, value)
    return words


def _written(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    if isinstance(value, dict):
        mark = ":" if name == "logit_bias" else "="
        return [flag, ",".join(f"{key}{mark}{one}" for key, one in value.items())]
    if isinstance(value, tuple) and name in LISTS_OF_IDS:
        return [flag, ",".join(map(str, value))]
    if isinstance(value, tuple):
        return [word for one in value for word in (flag, str(one))]
    return [flag, str(value)]
