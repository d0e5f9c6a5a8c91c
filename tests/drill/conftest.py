"""The program in this process, as the tests of the command line have it."""

from tests.cli.conftest import ft as ft
