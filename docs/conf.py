"""Settings of Sphinx for ``make site``: the pages of docs/, and an API reference from the docstrings."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hpctrain._version import __version__  # noqa: E402

project, author, copyright = "hpctrain", "the hpctrain developers", "2026, the hpctrain developers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
# The source folder is the project, so that links between its pages work here as they do in the repository.
root_doc = "docs/index"
include_patterns = ["docs/**.md", "README.md", "CHANGES.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"]
exclude_patterns = [".*", ".venv*", "build", "dist", "runs", "tests", "**/__pycache__"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
html_theme = "furo"
html_title = f"hpctrain {release}"
html_static_path: list[str] = []
# Nothing is requested from outside: themes and search are part of the pages.
html_use_opensearch = ""
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
nitpicky = False
