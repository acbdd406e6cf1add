"""A tokenizer that spawned processes can import."""

import os


class WordTokenizer:
    """Stands for a transformers tokenizer: one token a word, and remembers in which process it ran."""

    def __init__(self):
        self.process_ids = set()

    def apply_chat_template(self, messages, add_generation_prompt, return_dict, tokenize, thinks=True):
        assert tokenize and add_generation_prompt and not return_dict
        self.process_ids.add(os.getpid())
        return [word for message in messages for word in message["content"].split()] + [
            "assistant",
            *([] if thinks else ["<think>", "</think>"]),
        ]
