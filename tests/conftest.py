"""One thread each: several tests and their children share two cores, and spinning threads cost more than they give."""

import torch

torch.set_num_threads(1)
