"""Models on a device whose memory is counted."""

import weakref

import pytest

from batchwright.step.inference import _keeping, _windows

from . import shapes
from .ledger import Ledger


@pytest.fixture
def counted(monkeypatch):
    """Return what makes a model on a device of so many bytes, and records the rows of every prompt."""
    make_cache, make_block = _windows.Filling._empty_like, _keeping.Block.__init__

    def make(name, total_bytes):
        ledger, model, reads = Ledger(total_bytes), shapes.make(name), []

        def empty_like(self, states):
            made = make_cache(self, states)
            if self._cut is None:
                ledger.take(made.nbytes)
                weakref.finalize(made, ledger.give, made.nbytes)
            return made

        def block(self, num_bytes, device):
            ledger.take(num_bytes)
            weakref.finalize(self, ledger.give, num_bytes)
            make_block(self, num_bytes, device)

        class Counted(type(model)):
            def forward(self, *args, past_key_values=None, **kwargs):
                ids = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs["decoder_input_ids"]
                read = past_key_values.get_seq_length()
                mask = kwargs["attention_mask"]
                is_prompt = isinstance(read, int) and read == 0
                taken = 600 * mask.numel() + 400 * len(ids) if is_prompt else 300 * len(ids)
                ledger.take(taken)
                ledger.give(taken)
                if is_prompt:
                    reads.append(len(ids))
                return super().forward(*args, past_key_values=past_key_values, **kwargs)

        monkeypatch.setattr(_windows.Filling, "_empty_like", empty_like)
        monkeypatch.setattr(_keeping.Block, "__init__", block)
        model.__class__ = Counted
        return model, ledger, reads

    return make
