"""What the exit code of a run's process says to whoever started it: a scheduler, a launcher, a shell.

=====================  ====  ========================================================================================
name                   code  what is true
=====================  ====  ========================================================================================
(none)                 0     training finished
(none)                 1     an exception ended the run; python's own code
``PREEMPTED``          75    the run was asked to stop and its state is saved: start the same command again
``PREEMPTED_UNSAVED``  76    the same, but nothing new was saved: it goes on from the last periodic checkpoint
``DIVERGED``           77    the loss was bad (not finite, too high, a spike): a restart alone would diverge again
``HUNG``               78    no step was completed within its limit
``PEER_LOST``          79    another rank failed or vanished; that one has the reason
``INTERRUPTED``        130   Ctrl-C, and the state is saved
=====================  ====  ========================================================================================

75 is ``EX_TEMPFAIL`` of BSD's ``sysexits.h`` ("the user is invited to retry"); the others follow it, below the codes
that shells use. 130 is what a shell reports of a process that died of SIGINT.
"""

from __future__ import annotations

PREEMPTED = 75
"""Asked to stop by a signal, and everything trained is saved: start the same command again."""
PREEMPTED_UNSAVED = 76
"""Asked to stop by a signal, and nothing new is saved: it goes on from the last periodic checkpoint."""
DIVERGED = 77
"""The loss was bad: a restart alone would diverge again."""
HUNG = 78
"""No step was completed within its limit."""
PEER_LOST = 79
"""Another rank failed or vanished; that one has the reason."""
INTERRUPTED = 130
"""Ctrl-C, and the state is saved."""

ASKED_TO_END = (PREEMPTED, PREEMPTED_UNSAVED, INTERRUPTED)
"""Those of a process that was asked to end: nothing in it has failed."""

ALL = (*ASKED_TO_END, DIVERGED, HUNG, PEER_LOST)
"""Every code that means something of its own."""
