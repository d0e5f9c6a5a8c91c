"""What this package says to a terminal can be told from what others say: each message of ours begins with its name.

Where the user has set up logging, it goes there, as the logger `lightning_ft` and its children say it, and nothing is
added. Where not, Python would print warnings as bare text among the lines of everybody else.
"""

from __future__ import annotations

import logging
import sys

from lightning.pytorch.utilities import rank_zero_info

NAME = "lightning_ft"


class _Console(logging.Handler):
    """Warnings go to standard error, as long as nobody else takes them."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.root.handlers or logging.getLogger(NAME).handlers != [self]:
            return
        try:
            print(self.format(record), file=sys.stderr)
        except Exception:
            self.handleError(record)


def install() -> None:
    """Warnings of this package have its name, where nobody has set up logging. Once for each process."""
    logger = logging.getLogger(NAME)
    if not logger.handlers:
        console = _Console(logging.WARNING)
        console.setFormatter(logging.Formatter(f"{NAME}: %(message)s"))
        logger.addHandler(console)


def tell(text: str) -> None:
    """`text`, which is no warning, is beside Lightning's own lines on what it does, which are shown. Ranks: zero."""
    rank_zero_info(f"{NAME}: {text}")
