"""`python -m coordinator`: the command line in a process of its own.

Slow imports are made only when they are needed. So from the beginning a signal, or lack of memory,
ends the process with one line.
"""

import sys

from coordinator.cli import first_line, process
from proto.installation import COORDINATOR, EXIT_UNUSABLE, may_run


def main(program: str = "coordinator") -> int:
    """Run the command line in its own process; return the exit status.

    program  the name after `python -m`, or of the command
    """
    process.end_at_once_on_signals()
    with process.lack_of_memory_said():
        if not may_run(program, COORDINATOR):
            return EXIT_UNUSABLE
        first_line.show(sys.argv[1:])
        from coordinator.cli import plugins
        from coordinator.cli.app import main as run

        status = run(plugins.connect_ray, plugins.commands(), plugins.version())
    if status > process.SIGNALLED:
        process.leave(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
