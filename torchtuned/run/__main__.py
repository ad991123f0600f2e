"""torchtuned-run, as `python3 -m torchtuned.run`."""

import sys

from torchtuned.run.main import main

sys.exit(main())
