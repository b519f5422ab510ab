"""A target that breaks the terms of its texts (`hostile_node`)."""

import sys

from proto.messages import Role
from tests.process.hostile_node import main

if __name__ == "__main__":
    sys.exit(main(Role.TARGET))
