"""Files that are whole or not there."""

import contextlib
import os


def write_whole(path, write):
    """Writes a file that appears under its name only when it is complete, and is on the disk by then.

    Args:
        path (str): in a folder that exists.
        write (callable): is given the open binary file.
    """
    temporary = f"{path}.tmp{os.getpid()}"
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.remove(temporary)  # is there only when something failed
