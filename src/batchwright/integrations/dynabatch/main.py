"""The names of ``dynabatch.main``: from texts to lengths, batches and loaders."""

from .lengths import compute_lengths as compute_lengths
from .loader import TextDataset as TextDataset
from .loader import build_dynabatch_dataloader as build_dynabatch_dataloader
from .loader import dynabatch_sampler as dynabatch_sampler
