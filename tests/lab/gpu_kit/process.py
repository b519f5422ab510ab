"""A step for tests: it hangs with a child of its own, or fails."""

import subprocess
import sys
import time
from pathlib import Path

from lab.gpu_kit.recorder import FILE, Recorder


def main() -> None:
    """As the first argument says."""
    mode, out = sys.argv[1], Path(sys.argv[sys.argv.index("--out") + 1])
    if mode == "fail":
        sys.stderr.write("this is why\n")
        sys.exit(1)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Recorder(out / FILE, mode).measured("child", pid=float(child.pid))
    time.sleep(600)


if __name__ == "__main__":
    main()
