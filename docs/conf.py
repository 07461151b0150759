"""Sphinx: the site that `make site` builds from the pages beside this file."""

project = "Mission Control"
author = "the authors of Mission Control"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "Mission Control"
html_static_path = ["pictures"]
# Some pages name pages that are not part of the site; tests/test_docs.py looks at all links.
suppress_warnings = ["myst.xref_missing"]
