"""The progress bar of `generate` and `chat`, where one is asked for."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeAlias

from coordinator.api.request import Step
from proto.errors import ConfigurationError, shown

# Whether there is a bar, or what makes one of `total` and `desc`, as `tqdm.tqdm` does.
UseTqdm: TypeAlias = bool | Callable[..., Any]


class Bar(AbstractContextManager["Bar"]):
    """Counts prompts whose texts are all complete, and says how many tokens came in a second."""

    def __init__(self, total: int, use_tqdm: UseTqdm) -> None:
        self._num_tokens, self._since = 0, time.monotonic()
        self._bar: Any = None
        if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
            raise ConfigurationError(
                f"use_tqdm: expected true, false or a function, got {shown(use_tqdm)}"
            )
        if use_tqdm:
            self._bar = _maker(use_tqdm)(total=total, desc="prompts")

    def show(self, step: Step) -> None:
        """One more step of the call."""
        if self._bar is None:
            return
        self._num_tokens += len(step.part.outputs[0].token_ids)
        if step.request.is_complete:
            per_second = self._num_tokens / (time.monotonic() - self._since)
            self._bar.set_postfix_str(f"{per_second:.1f} tokens/s", refresh=False)
            self._bar.update(1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _maker(use_tqdm: UseTqdm) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm import tqdm

    return tqdm  # type: ignore[no-any-return]
