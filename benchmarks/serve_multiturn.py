"""What do multi-turn conversations cost on a server: tokens by source and time to first token, as JSON.

    python benchmarks/serve_multiturn.py http://127.0.0.1:30000 [URL of another server, e.g. cache off] ...

See `hiradix/bench.py`; `hiradix bench` is the same command.
"""

from __future__ import annotations

import sys

from hiradix.bench import main

if __name__ == "__main__":
    sys.exit(main())
