"""Kill a process at a random moment of its saves."""

import os
import signal
import time


def kill_while_saving(saves, finished, pause):
    """Run the calls `saves` in turn in a forked child; SIGKILL it `pause` seconds after `finished` of them are done.

    The parent waits for word of each finished save, so that a machine under load changes when the kill comes and
    nothing else.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # no import, no pytest: save until killed
        try:
            while True:
                for save in saves:
                    save()
                    os.write(writer, b".")
        finally:
            os._exit(1)
    os.close(writer)
    done = 0
    while done < finished:
        word = os.read(reader, finished - done)
        assert word, "the child ended by itself"
        done += len(word)
    time.sleep(pause)
    os.kill(child, signal.SIGKILL)
    os.close(reader)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
