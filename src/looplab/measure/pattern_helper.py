"""Match regular expressions for `looplab.measure.patterns` in a process that may be killed.

Run as a script by an isolated interpreter (`python -I -S pattern_helper.py SECONDS`). Each line of input is JSON: a
pattern and a list of texts. Each line of output is JSON: for each text, a list with the named groups of each match. The
kernel kills the process with SIGVTALRM if a line takes more than SECONDS of CPU time.
"""

from __future__ import annotations

import json
import re
import signal
import sys


def main() -> None:
    limit = float(sys.argv[1])
    for line in sys.stdin.buffer:
        pattern, texts = json.loads(line)
        compiled = re.compile(pattern)
        signal.setitimer(signal.ITIMER_VIRTUAL, limit)
        matches = [[match.groupdict() for match in compiled.finditer(text)] for text in texts]
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        sys.stdout.buffer.write(json.dumps(matches).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
