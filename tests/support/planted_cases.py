"""Loops of a nightly run that fail as planted. No torch here, so that processes start quickly."""

import os
from multiprocessing.connection import Connection


def serve_planted(connection: Connection) -> None:
    """Serve as the nightly run does: the loop of seed 2 is wrong, that of seed 3 ends the process."""
    connection.send(None)
    while (seed := connection.recv()) is not None:
        if seed == 3:
            os._exit(7)
        connection.send((seed != 2, "wrong" if seed == 2 else "1 transferred"))
