"""``python -m attn_bench``."""

import sys

from attn_bench.cli import main

sys.exit(main())
