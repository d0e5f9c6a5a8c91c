"""How Sphinx makes these pages: ``make docs``. Nothing is fetched, and a warning is an error."""

import os
import sys

from lightning_ft import __version__

project = "lightning-ft"
author = "The lightning-ft authors"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.programoutput"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"lightning-ft {release}"

# As GitHub makes them, where the same pages are read too.
myst_heading_anchors = 4

# Names in single backticks are links where there is something to link to, and code where there is not.
default_role = "py:obj"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# The command line whose help is shown is the one beside this Python, and as wide as the page.
os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
os.environ["COLUMNS"] = "100"
os.environ["NO_COLOR"] = "1"
