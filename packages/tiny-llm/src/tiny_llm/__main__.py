"""`python -m tiny_llm` is the command `tiny-llm`."""

import sys

from tiny_llm.cli import main

if __name__ == "__main__":
    sys.exit(main())
