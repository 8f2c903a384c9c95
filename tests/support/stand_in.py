"""A stand-in for the Python interpreter, for programs that others start by its path: by ssh, srun, a shell script.

The stand-in is a small program that starts in 20 ms. It sends its words, environment and files to a server that has
imported everything. It lasts as long as the fork that the server makes of them, so signals and the exit code pass on.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

from forked import Command, fork, join_host, program, until

CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
signals = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({address!r})
told = [sys.argv[1:], dict(os.environ), os.getcwd(), os.getpid()]
socket.send_fds(server, [json.dumps(told).encode()], [0, 1, 2])
child = int(server.recv(100))
for number in signals:
    signal.signal(number, lambda number, frame: os.kill(child, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
code = int(server.recv(100))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def stand_in(folder: Path) -> Path:
    """Write the stand-in to FOLDER/python and start its server, which ends with the test; return the path."""
    path, address = folder / "python", folder / "python.socket"
    path.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    path.chmod(0o755)
    server = Command(["interpreter", str(path), str(address)], os.environ, folder / "python.log", folder)
    until(address.exists, lambda: server.poll() is None, (folder / "python.log").read_text)
    return path


def serve() -> None:
    """`interpreter PATH ADDRESS`: be the interpreter for every stand-in at PATH that comes to the socket ADDRESS."""
    sys.executable, address = sys.argv[1:]
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for the children that answer.
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)  # The server answers from here on.
        while True:
            client, _ = listener.accept()
            fork(lambda client=client: _answer(client), os.environ)
            client.close()


def _answer(client: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told, files, *_ = socket.recv_fds(client, 1 << 20, 3)
    words, env, cwd, process = json.loads(told)

    def act() -> None:
        join_host(process)
        os.chdir(cwd)
        for number, file in enumerate(files):
            os.dup2(file, number)
        program(words[1:] if words[0] == "-u" else words)

    child = fork(act, env)
    client.send(str(child).encode())
    client.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
