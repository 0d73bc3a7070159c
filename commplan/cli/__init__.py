"""The command line: a file for each longer command, the rest in `app`.

Exit codes: 0 no errors, 1 errors found (`diff`: a difference; `bench`, `profile`: not all was measured), 2 wrong usage, an
unreadable file or a fault of commplan itself.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

EXIT_UNUSABLE: Final = 2
DEBUG_VARIABLE: Final = "COMMPLAN_DEBUG"

PYTHONS_GC_THRESHOLD: Final = gc.get_threshold()
"""How often Python looks for cycles unless it is told otherwise."""

YOUNG_OBJECTS: Final = 100_000
"""A process of one command keeps most of what it makes to its end: to look for cycles among it as often as Python does takes
a tenth of the time with a large model.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code; no traceback is shown unless COMMPLAN_DEBUG is set.

    Without `arguments` those of the process are read, and a pipe whose reader has left ends it, as is usual: an exit code of
    its own would mean something else.
    """
    if arguments is None:
        gc.set_threshold(YOUNG_OBJECTS)
        if hasattr(signal, "SIGPIPE"):
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")  # a schedule may hold what the terminal cannot show
    try:
        from commplan.cli.app import app

        app(args=arguments, prog_name="commplan")
    except OSError as error:
        print(f"commplan: {error.strerror or error}", file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)
    except Exception as fault:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        text = " ".join(f"{type(fault).__name__}: {fault}".split())
        print(f"commplan: fault in commplan itself: {text[:300]}", file=sys.stderr)
        print(f"commplan: please report it with the command and the schedule; {DEBUG_VARIABLE}=1 shows where", file=sys.stderr)
        sys.exit(EXIT_UNUSABLE)
