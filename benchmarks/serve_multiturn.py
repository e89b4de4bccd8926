"""What do multi-turn conversations cost on a server: tokens by source and time to first token.

    make bench-serve URL=http://127.0.0.1:30000
    python benchmarks/serve_multiturn.py [--quick] http://127.0.0.1:30000 [URL of another, e.g. cache off] ...

See `hiradix/apps/bench/main.py`; `hiradix bench --table` is the same command. Writes build/bench/serve.json.
"""

from __future__ import annotations

import sys

from hiradix.apps.bench.main import main

if __name__ == "__main__":
    sys.exit(main(["--table", *sys.argv[1:]]))
