"""`python -m jobs`, and the file that `spark-submit` runs."""

import sys
from pathlib import Path

if __package__ in (None, ""):
    # When this runs as a file, its folder comes first in sys.path, and its modules would be found as top-level ones.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from jobs.cli import main

main()
