"""A small Hugging Face tokenizer in a directory of its own: bytes, a few merges, a chat template.

tokenizer = write_tokenizer(tmp_path / "model")   # what AutoTokenizer.from_pretrained opens
"""

from pathlib import Path
from typing import Any

#: Each turn between markers, as ChatML has it.
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: The same words, with the assistant's marked.
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_MERGES = [("a", "b"), ("t", "h"), ("th", "e"), ("Ġ", "the")]


def write_tokenizer(folder: Path, *, chat_template: str | None = CHATML, opens: bool = False) -> Any:
    """Save a tokenizer of 256 bytes, 4 merges and 4 special tokens in ``folder``; returns it.

    Args:
        chat_template: Jinja.
        opens: Whether ``<s>`` stands before every text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in _MERGES)]
    library = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, _MERGES))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    if opens:
        library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>",
        additional_special_tokens=special[2:], chat_template=chat_template,
    )  # fmt: skip
    tokenizer.save_pretrained(str(folder))
    return tokenizer
