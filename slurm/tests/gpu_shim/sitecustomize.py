"""Python imports this file at startup, in spawned processes too, if its folder is on PYTHONPATH."""

import os
import sys

if os.environ.get("CUDA_VISIBLE_DEVICES") and "resource_tracker" not in str(sys.orig_argv):
    import fake_gpus  # noqa: F401
