"""Reports the critical paths of a trace: a table for people, a dictionary for programs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from coordinator.cli.wrapping import wrapped
from coordinator.cli.writers import WIDTH
from lab.trace.critical_path import MODELS, SHARES, Path
from lab.trace.reading import Process, Trace


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums over all rounds of some texts; times in nanoseconds."""

    wall_ns: int
    shares_ns: dict[str, int]
    beside_ns: dict[str, int]
    num_rounds: int
    num_tokens: int
    num_drafted: int
    num_accepted: int
    num_rolled_back: int

    @classmethod
    def of(cls, paths: Sequence[Path]) -> "Sums":
        """Return the sums over these texts, of which there must be at least one."""
        rounds = [one for path in paths for one in path.rounds]
        return cls(
            wall_ns=sum(path.end_ns - path.start_ns for path in paths),
            shares_ns={name: sum(one.shares_ns[name] for one in rounds) for name in SHARES},
            beside_ns={name: sum(one.beside_ns[name] for one in rounds) for name in MODELS},
            num_rounds=len(rounds),
            num_tokens=sum(one.tokens for one in rounds),
            num_drafted=sum(one.drafted for one in rounds),
            num_accepted=sum(one.accepted for one in rounds),
            num_rolled_back=sum(one.rolled_back for one in rounds),
        )

    @property
    def explained(self) -> float:
        """Return the sum of the shares, divided by the wall time."""
        return sum(self.shares_ns.values()) / max(1, self.wall_ns)


def as_record(trace: Trace, paths: Sequence[Path], overlap: float | None) -> dict[str, Any]:
    """Return everything as a dictionary for JSON, with the rounds of each text."""
    return {
        **_record(Sums.of(paths)),
        "overlap": overlap,
        "machine": trace.about.get("machine"),
        "processes": [process.about for process in trace.processes.values()],
        "texts": [
            {
                "text": path.text,
                "policy": path.policy,
                **_record(Sums.of([path])),
                "rounds": [
                    {
                        "start_ms": one.start_ns / 1e6,
                        "ms": (one.end_ns - one.start_ns) / 1e6,
                        "shares_ms": {name: ns / 1e6 for name, ns in one.shares_ns.items()},
                        "beside_ms": {name: ns / 1e6 for name, ns in one.beside_ns.items()},
                        "tokens": one.tokens,
                        "drafted": one.drafted,
                        "accepted": one.accepted,
                        "rolled_back": one.rolled_back,
                    }
                    for one in path.rounds
                ],
            }
            for path in paths
        ],
    }


def _record(sums: Sums) -> dict[str, Any]:
    """Return the sums as a dictionary for JSON."""
    shares_ms = {name: ns / 1e6 for name, ns in sums.shares_ns.items()}
    return {
        "wall_ms": sums.wall_ns / 1e6,
        "shares_ms": shares_ms,
        "beside_ms": {name: ns / 1e6 for name, ns in sums.beside_ns.items()},
        "shares": {name: ns / max(1, sums.wall_ns) for name, ns in sums.shares_ns.items()},
        "ms_per_round": {name: ms / sums.num_rounds for name, ms in shares_ms.items()},
        "ms_per_token": {name: ms / sums.num_tokens for name, ms in shares_ms.items()},
        "explained": sums.explained,
        "num_rounds": sums.num_rounds,
        "num_tokens": sums.num_tokens,
        "num_drafted": sums.num_drafted,
        "num_accepted": sums.num_accepted,
        "num_rolled_back": sums.num_rolled_back,
    }


def show(trace: Trace, paths: Sequence[Path], overlap: float | None, listed: range | None) -> None:
    """Print the sums of all texts, then a table of the first text's `listed` rounds, if any."""
    sums = Sums.of(paths)
    policies = ", ".join(sorted({path.policy for path in paths}))
    machine = trace.about.get("machine") or {}
    texts = "1 text" if len(paths) == 1 else f"{len(paths)} texts"
    typer.echo(
        f"{texts}, {sums.num_tokens} tokens under {policies}, on {machine.get('host', '?')} "
        f"({machine.get('num_cpus', '?')} CPUs)"
    )
    for process in trace.processes.values():
        for line in _troubles(process):
            typer.echo(line)
    typer.echo("")
    console = Console(width=WIDTH)
    console.print(_table(sums))
    words = (
        f"{sums.num_rounds} rounds, {sums.num_tokens / sums.num_rounds:.2f} tokens a pass; "
        f"{sums.num_accepted} of {sums.num_drafted} verified drafts accepted, "
        f"{sums.num_rolled_back} nodes rolled back"
    )
    typer.echo("\n".join(wrapped(words, WIDTH)))
    if overlap is not None:
        typer.echo(f"a drafter's model worked during {overlap:.0%} of the target's model time")
    typer.echo(
        f"check: the shares add up to {sum(sums.shares_ns.values()) / 1e6:.1f} of "
        f"{sums.wall_ns / 1e6:.1f} ms ({sums.explained:.1%}), "
        f"{sums.shares_ns['unexplained'] / max(1, sums.wall_ns):.1%} unexplained"
    )
    if listed is not None:
        console.print(_table_of_rounds(paths[0], listed))


def _table(sums: Sums) -> Table:
    """Return the table of the shares."""
    table = Table(box=None, pad_edge=False)
    table.add_column("critical path")
    for title in ("ms/round", "ms/token", "ms", "%"):
        table.add_column(title, justify="right")
    # This column is a part of the model's share, so it is not added to the sum.
    if has_beside := any(sums.beside_ns.values()):
        table.add_column("host beside it, ms", justify="right")
    rows = {**sums.shares_ns, "together": sum(sums.shares_ns.values())}
    for name, ns in rows.items():
        ms = ns / 1e6
        table.add_row(
            name,
            f"{ms / sums.num_rounds:.3f}",
            f"{ms / sums.num_tokens:.3f}",
            f"{ms:.1f}",
            f"{ns / max(1, sums.wall_ns):.1%}",
            *([f"{beside / 1e6:.1f}" if (beside := sums.beside_ns.get(name)) else ""] * has_beside),
        )
    return table


def _table_of_rounds(path: Path, listed: range) -> Table:
    """Return the table of these rounds of a text."""
    table = Table(box=None, pad_edge=False, title=f"text {path.text}, ms", title_justify="left")
    for title in ("round", "ms", *SHARES[:-1], "unexpl.", "tokens", "accepted"):
        table.add_column(title, justify="right")
    for index in listed:
        one = path.rounds[index]
        shares = [f"{one.shares_ns[name] / 1e6:.2f}" for name in SHARES]
        length = f"{(one.end_ns - one.start_ns) / 1e6:.2f}"
        accepted = f"{one.accepted}/{one.drafted}"
        table.add_row(str(index + 1), length, *shares, str(one.tokens), accepted)
    return table


def _troubles(process: Process) -> list[str]:
    """Return warnings about a process whose record is incomplete or whose clock differs."""
    lines: list[str] = []
    clock = process.about.get("clock") or {}
    if clock.get("unknown"):
        lines.append(f"{process.name}: its clock is not known, so what it did is left out")
    elif not clock.get("is_same", True):
        lines.append(
            f"{process.name} on {process.about.get('host')}: its clock was "
            f"{clock['ahead_us'] / 1e3:.3f} ms ahead, give or take {clock['error_us'] / 1e3:.3f} "
            f"({clock['num_exchanges']} exchanges)"
        )
    missing = process.about.get("num_parts_missing"), process.about.get("num_records_dropped")
    if any(missing):
        lines.append(
            f"{process.name}: {missing[0]} parts of its records never came, and there was no room "
            f"for {missing[1]} records"
        )
    return lines
