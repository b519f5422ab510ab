"""In place of a node: it starts a process, which is stopped, and is stopped itself if told so."""

import os
import signal
import subprocess
import sys
import time

config = sys.stdin.readline()
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
os.kill(child.pid, signal.SIGSTOP)
sys.stdout.write(f"{child.pid}\n")
sys.stdout.flush()
if "stopped" in config:
    os.kill(os.getpid(), signal.SIGSTOP)
sys.stdin.read()
time.sleep(600 if "busy" in config else 0)
