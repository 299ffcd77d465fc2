"""How the two threads of an engine's replica share the interpreter.

The engine's thread needs it for a fraction of a millisecond each step, the event loop's for as long
as there are items to send. Python lets the one that holds it go on for 5 ms before it must give way:
longer than a whole step, with the GPU idle meanwhile.
"""

from __future__ import annotations

import sys

_SWITCH_INTERVAL_S = 2e-4


def let_the_engine_in() -> None:
    """For this process: whoever holds the interpreter gives way soon after another thread asks."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
