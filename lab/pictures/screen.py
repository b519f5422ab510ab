"""Records what a command shows on a terminal, and draws it as an SVG."""

import io
import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from lab.palette import DRAFTER, TARGET, VERDICT, pale
from proto.errors import ConfigurationError

COLUMNS, LINES = 80, 40
READ_SIZE = 1 << 16


def _parts(colour: str) -> tuple[int, int, int]:
    """Return red, green and blue (0..255) of `#rrggbb`."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


# Dark, as most terminals are. What the target writes, what is accepted of the drafter and what is
# rejected have the colours that they have in every picture, lighter on this ground.
COLOURS = [
    _parts(colour)
    for colour in (
        *("#1a1a1a", pale(VERDICT, 0.25), pale(DRAFTER, 0.25), "#d8b94a"),
        *(pale(TARGET, 0.3), "#b07cc6", "#5fb3c4", "#d0d0d0"),
    )
]
THEME = TerminalTheme(_parts("#1a1a1a"), _parts("#d0d0d0"), COLOURS, COLOURS)
# As rich's own, but for fonts that every reader's machine has: nothing is fetched.
SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def record(
    command: Sequence[str],
    folder: Path,
    limit_s: float,
    columns: int = COLUMNS,
    *,
    may_fail: bool = False,
) -> str:
    """Run a command on a terminal of so many columns; return what it writes, colour codes included.

    Raises ConfigurationError if it fails (unless `may_fail`), or takes longer than `limit_s`.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (LINES, columns))
    surroundings = os.environ | {"COLUMNS": str(columns), "TERM": "xterm-256color"}
    surroundings.pop("NO_COLOR", None)
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=surroundings
    ) as process:
        os.close(theirs)
        try:
            said = _read(ours, process, time.monotonic() + limit_s)
        finally:
            os.close(ours)
            if process.poll() is None:
                process.terminate()
    if process.returncode and not may_fail:
        last = said.strip().splitlines()[-1:] or ["it said nothing"]
        raise ConfigurationError(f"{' '.join(command[1:])}: {last[0]}")
    return said


def _read(ours: int, process: subprocess.Popen[bytes], until: float) -> str:
    """Read the terminal until the process ends. Raises ConfigurationError at the time `until`."""
    said = bytearray()
    while time.monotonic() < until:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                read = os.read(ours, READ_SIZE)
            except OSError:  # on Linux: all processes have closed the other end of the terminal
                read = b""
            if not read:
                process.wait(timeout=30)
                break
            said += read
        elif process.poll() is not None:
            break
    else:
        raise ConfigurationError(f"{' '.join(process.args[1:])} takes too long")  # type: ignore
    return said.decode(errors="replace").replace("\r\n", "\n")


def after(said: str, words: str) -> str:
    """Return the text from the line that begins with `words` on; the whole text if none does."""
    lines = said.split("\n")
    plain = [Text.from_ansi(line).plain for line in lines]
    first = next((i for i, line in enumerate(plain) if line.startswith(words)), 0)
    return "\n".join(lines[first:])


def as_svg(said: str, title: str, columns: int = COLUMNS) -> str:
    """Return a drawing of what a terminal shows, in the colours of THEME. Deterministic."""
    console = Console(
        record=True, width=columns, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(Text.from_ansi(said.strip("\n")))
    return console.export_svg(title=title, theme=THEME, code_format=SVG, unique_id="slipstream")
