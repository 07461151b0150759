"""Sphinx: the site that `make site` builds from the pages beside this file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

project = "Mission Control"
author = "the authors of Mission Control"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Mission Control"
html_static_path = ["pictures"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
# Some pages name pages that are not part of the site; tests/test_docs.py looks at all links.
suppress_warnings = ["myst.xref_missing"]
