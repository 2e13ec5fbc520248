"""Asks a server for its health every 50 ms, from a process of its own; prints seconds as JSON.

Run as a program with the server's address; it ends when its standard input is closed. Each time it
opens a connection of its own, as the probes of an orchestrator do.
"""

from __future__ import annotations

import http.client
import json
import select
import sys
import time
from contextlib import closing

_EVERY_S = 0.05
_LIMIT_S = 300.0


def main(address: str) -> None:
    """Probe until nobody wants it any more."""
    taken_s = []
    while not select.select([sys.stdin], [], [], _EVERY_S)[0]:
        began_s = time.perf_counter()
        with closing(http.client.HTTPConnection(address, timeout=_LIMIT_S)) as connection:
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
        taken_s.append(time.perf_counter() - began_s)
    sys.stdout.write(json.dumps(taken_s))


if __name__ == "__main__":
    main(sys.argv[1])
