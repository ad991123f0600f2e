"""`python3 -m torchtuned` is `torchtuned`."""

import sys

from torchtuned.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
