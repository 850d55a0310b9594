"""Run a command that ends with the process that started this script, even if that process is killed.

The parent holds the other end of this script's standard input. When it closes, the script's process group receives
SIGTERM, and SIGKILL after `GRACE_SECONDS`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

GRACE_SECONDS = 10.0


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # it is for the command; an ignored one would be so there too
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    while True:
        try:
            os._exit(process.wait(1.0))  # without the thread, which reads
        except subprocess.TimeoutExpired:
            continue


if __name__ == "__main__":
    main()
