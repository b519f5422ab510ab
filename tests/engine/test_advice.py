"""What is advised of a file or a process that the system refuses fits why it refuses."""

import errno
import os
import subprocess
from typing import Any

import pytest

from engine.errors import GET_AGAIN, RankError
from engine.tensor_parallel import group
from engine.tensor_parallel.calls import Start
from proto.system import cannot_read

RIGHTS, LIMIT = "see that you may read it", "raise the limit of open files (ulimit -n)"
START = Start("m", None, "float32", "cpu", 1, 2, "store", 1)


def refused(number: int) -> OSError:
    return OSError(number, os.strerror(number), "a file")


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, RIGHTS),
        (errno.EPERM, RIGHTS),
        (errno.EMFILE, LIMIT),
        (errno.ENFILE, LIMIT),
        (errno.ENOMEM, "end something else: there is no memory left"),
        (errno.EIO, "look after the disk"),
        (errno.ENOENT, "get it again"),
    ],
)
def test_a_file_that_cannot_be_read_has_advice_that_fits(number: int, advice: str) -> None:
    assert cannot_read(refused(number), GET_AGAIN) == f"{os.strerror(number)}; {advice}"


def test_a_file_that_is_damaged_is_to_be_got_again() -> None:
    assert cannot_read(ValueError("header\nis torn"), GET_AGAIN) == "header is torn; get it again"


@pytest.mark.parametrize("where", ["pipe", "Popen"])
@pytest.mark.parametrize(
    ("number", "line"),
    [
        (errno.EMFILE, f"Too many open files; {LIMIT}"),
        (errno.EAGAIN, "unavailable; end other processes, or raise their limit (ulimit -u)"),
        (errno.EACCES, "Permission denied"),
    ],
)
def test_a_rank_that_cannot_be_started_is_one_line_with_advice_that_fits(
    monkeypatch: pytest.MonkeyPatch, where: str, number: int, line: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise refused(number)

    monkeypatch.setattr(os if where == "pipe" else subprocess, where, fail)
    with pytest.raises(RankError) as error:
        group._started("rank 1", START)
    assert str(error.value).startswith("rank 1 cannot be started: ")
    assert str(error.value).endswith(line)
