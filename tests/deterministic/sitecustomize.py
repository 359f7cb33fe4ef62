"""Makes every Python program of a GPU test deterministic: PYTHONPATH contains this folder."""

import torch

torch.use_deterministic_algorithms(True)
torch.backends.cudnn.benchmark = False
