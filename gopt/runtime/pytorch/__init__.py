"""Engine ``torch``: a rank's computation and calls by PyTorch. The rest of the runtime does not import torch."""
