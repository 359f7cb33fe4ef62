"""With this folder on PYTHONPATH, Python imports this file first, in spawned processes too."""

import os
import sys

if os.environ.get("CUDA_VISIBLE_DEVICES") and "resource_tracker" not in str(sys.orig_argv):
    import fake_gpus  # noqa: F401
