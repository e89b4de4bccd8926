"""`sglang.launch_server` with the ladder's store and planted copies, in each of its processes.

Those that SGLang spawns import this file as their main module, too, so all of it happens here at the top, and
SGLang's own module is not put in its place (`alter_sys`): they would import that one.
"""

import os
from pathlib import Path

from tests.ladder import planted, store

store.register()
planted.plant(Path(os.environ["HIRADIX_LADDER_FAULT"]))

if __name__ == "__main__":
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__")
