"""Shows the account of memory of a pair as a small table, for `--dry-run` and after a refusal."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from coordinator.api.config import PairConfig
from coordinator.api.models.account import Account, Device, Item, account_of
from coordinator.cli.harmless import harmless
from coordinator.cli.wrapping import for_stderr
from coordinator.cli.writers import write_out
from proto.errors import NodeError, SlipstreamError
from proto.system import is_folder

# Words of the lines in which a node refuses a model for lack of memory (`engine/memory.py`).
_LACK = re.compile(r"has [\d.]+ GB|[Nn]ot enough memory|no memory left|out of memory")
_WIDTH = 56


def dry_run(config: PairConfig, *, drafts: bool) -> None:
    """Write the account of a pair to standard output.

    Raises:
        NodeError: what does not fit, and what would.
        ModelError: a model's weights are not here, or a file is damaged.
    """
    account = account_of(config, drafts=drafts)
    write_out("".join(f"{harmless(line)}\n" for line in lines_of(account)))
    if account.refusal:
        raise NodeError(account.refusal)


@contextmanager
def explaining(config: PairConfig, *, drafts: bool) -> Iterator[None]:
    """While inside, a refusal for lack of memory is preceded by the account on standard error."""
    try:
        yield
    except SlipstreamError as error:
        if _LACK.search(str(error)):
            _explain(config, drafts=drafts)
        raise


def _explain(config: PairConfig, *, drafts: bool) -> None:
    try:
        account = account_of(config, drafts=drafts)
    except (SlipstreamError, OSError):
        return  # the error itself says what is wrong
    more = [f"what fits: {account.refusal.partition('what fits: ')[2]}"] if account.refusal else []
    for line in (*lines_of(account), *more):
        typer.echo(for_stderr(harmless(line)), err=True)


def lines_of(account: Account) -> Iterator[str]:
    """Yield the lines of the table."""
    for device in account.devices:
        yield _head(device)
        for item in device.items:
            yield from _of_item(item)
        if device.total is not None:
            yield _row("left", device.total - device.taken)
    if any(item.stated.is_estimate for device in account.devices for item in device.items):
        yield "the cache of this family or head is an estimate"


def _head(device: Device) -> str:
    names = " and ".join(device.names)
    each = "each " if len(device.names) > 1 else ""
    has = "memory not known here" if device.total is None else f"{each}{_gigabytes(device.total)}"
    return f"{names}: {has}"


def _of_item(item: Item) -> Iterator[str]:
    """Yield what a model takes; what is nothing is left out."""
    name = Path(item.name).name if is_folder(item.name) else item.name
    where = ", in the target's process" if item.is_home else ""
    yield f"  {item.role}: {name}{where}"
    texts = "1 text" if item.num_lanes == 1 else f"{item.num_lanes} texts"
    yield _row(f"weights, {item.stated.weights}", item.stated.sizes.weights)
    yield _row(f"cache, {texts} of {item.max_len} tokens", item.cache)
    for words, num_bytes in (
        (f"states of {texts}", item.states),
        ("masks and logits of a prompt", item.passes),
        ("libraries and recordings (an estimate)", item.runtime),
    ):
        if num_bytes:
            yield _row(words, num_bytes)


def _row(words: str, num_bytes: int) -> str:
    return f"    {words:<{_WIDTH}}{_gigabytes(num_bytes):>12}"


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
