"""python -m torchtuned.lint: for those who have the library without the package's commands."""

import sys

from . import main

sys.exit(main())
