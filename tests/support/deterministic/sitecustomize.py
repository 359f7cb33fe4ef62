"""Makes every Python program of a test on GPUs deterministic: its folder is on PYTHONPATH."""

import torch

torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = False
