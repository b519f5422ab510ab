"""`python -m coordinator keys`: makes encryption keys for nodes that are started by hand."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.help import Command, Program
from proto.links.keys import COORDINATOR, PUBLIC, SECRET, add_node, write_new
from proto.messages import Role
from proto.node_config import MAX_NODES

keys = typer.Typer(
    cls=Program, help="Make keys for encrypted links to nodes on other hosts.", no_args_is_help=True
)


@keys.callback()
def root() -> None:
    """Make keys for encrypted links to nodes on other hosts."""


@keys.command(cls=Command)
def new(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder for the keys. It is made if it does not exist."),
    ],
    drafters: Annotated[
        int,
        typer.Option(min=1, max=MAX_NODES[Role.DRAFTER], help="How many drafters may take part."),
    ] = 1,
    targets: Annotated[
        int,
        typer.Option(min=1, max=MAX_NODES[Role.TARGET], help="How many targets may take part."),
    ] = 1,
) -> None:
    """Make a key pair for the coordinator and one for each node. Nothing is overwritten."""
    made = write_new(folder, drafters, targets)
    typer.echo(f"made keys in {folder}; give each node's host {COORDINATOR}{PUBLIC} and its own:")
    _show_pairs([file for file in made if file.stem != COORDINATOR])
    typer.echo(f"{COORDINATOR}{SECRET} stays here, with all {PUBLIC} files")


@keys.command(cls=Command)
def add(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `keys new` has made.")],
    target: Annotated[bool, typer.Option("--target", help="One more target instead.")] = False,
) -> None:
    """Make a key pair for one more drafter. A running coordinator does not know it."""
    role = Role.TARGET if target else Role.DRAFTER
    made = add_node(folder, role)
    typer.echo(f"made keys in {folder}; give the {role}'s host {COORDINATOR}{PUBLIC} and its own:")
    _show_pairs(made)


def _show_pairs(files: list[Path]) -> None:
    for public, secret in zip(files[::2], files[1::2], strict=True):
        typer.echo(f"  {public.name}, {secret.name}")
