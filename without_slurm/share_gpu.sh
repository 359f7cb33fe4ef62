#!/bin/bash
# Start a rank on GPU 0, which it shares with the others: one_gpu.md, beside this file, says how.
LOCAL_RANK=0 NCCL_HOSTID=$RANK exec python -u "$@"
