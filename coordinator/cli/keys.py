"""`python -m coordinator keys new DIR`: keys for nodes that are started by hand."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.cli.screens.help import Command, Program
from proto.links.keys import COORDINATOR, PUBLIC, SECRET, write_new
from proto.messages import Role

keys = typer.Typer(
    cls=Program, help="Keys of encrypted links to nodes on other hosts.", no_args_is_help=True
)


@keys.callback()
def root() -> None:
    """Keys of encrypted links to nodes on other hosts."""


@keys.command(cls=Command)
def new(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Made if it is not there.")],
) -> None:
    """Make a key pair for the coordinator and one for each node; nothing is overwritten."""
    write_new(folder)
    typer.echo(f"made keys in {folder}; give each node's host {COORDINATOR}{PUBLIC} and its own:")
    for role in Role:
        typer.echo(f"  {role}{PUBLIC}, {role}{SECRET}")
    typer.echo(f"{COORDINATOR}{SECRET} stays here, with all {PUBLIC} files")
