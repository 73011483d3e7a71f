"""`python -m jobs`, and the file that `spark-submit` runs."""

import sys
from pathlib import Path

if __package__ in (None, ""):
    # Run as a file, this folder leads sys.path and its modules would pose as top-level ones.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from jobs.cli import main

main()
