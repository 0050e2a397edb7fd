"""What stands in `python`'s place where an interpreter's fork runs a script: `forkedpython.py SOCKET SCRIPT …`.

It hands its arguments, environment, folder and streams over, passes signals on, and ends as the fork does; if it is
killed, so is the fork. It imports little: it is there to save time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

PASSED_ON = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT


def main() -> None:
    path, *arguments = sys.argv[1:]
    command = arguments[arguments[:1] == ["-u"] :]  # forks write unbuffered
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        request = {"command": command, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])

        def pass_on(number: int, _: FrameType | None) -> None:
            with suppress(ConnectionError):  # the fork has ended
                server.send(bytes([number]))

        for number in PASSED_ON:
            signal.signal(number, pass_on)
        answer = server.recv(16)
    code = int(answer or 1)  # none: the server has ended, and so has the fork
    if -code in PASSED_ON:
        signal.signal(-code, signal.SIG_DFL)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
