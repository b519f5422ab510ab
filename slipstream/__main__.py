"""`python -m slipstream`: as the command."""

import sys

from slipstream.command import main

if __name__ == "__main__":
    sys.exit(main())
