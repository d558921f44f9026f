"""Small real tokenizers of transformers, made on the spot: one fast, one slow."""

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

WORDS = "the quick brown fox jumps over lazy dogs and sleeps in a warm green field of tall grass".split()


def make_fast():
    """Return a word-level fast tokenizer that ends every text with a special token."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )


class SlowTokenizer(PreTrainedTokenizer):
    """Characters as tokens, without offsets."""

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - as the base class has it

    def __init__(self, **options):
        super().__init__(pad_token="<pad>", unk_token="<unk>", **options)

    @property
    def vocab_size(self):
        return 256

    def get_vocab(self):
        return {chr(number): number for number in range(256)}

    def _tokenize(self, text, **options):
        return list(text)

    def _convert_token_to_id(self, token):
        return ord(token) % 256

    def _convert_id_to_token(self, index):
        return chr(index)

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)
