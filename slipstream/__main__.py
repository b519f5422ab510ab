"""`python -m slipstream`: the same as the command `slipstream`."""

import sys

from slipstream.command import main

if __name__ == "__main__":
    sys.exit(main())
