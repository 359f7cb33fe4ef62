#!/bin/bash
# Start a rank on GPU 0, which it shares with the other ranks; one_gpu.md in this folder says how.
LOCAL_RANK=0 NCCL_HOSTID=$RANK exec python -u "$@"
