"""``python -m prebook_bench``."""

import sys

from prebook_bench.cli import main

sys.exit(main(sys.argv[1:]))
