"""Counting the tokens of prompts as SkyRL's dataset does: chat template applied, generation prompt included."""

import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from .settings import SettingError


class TokenCounter:
    """Counts with one tokenizer. Making one imports transformers."""

    def __init__(self, name: str) -> None:
        """`name`: a folder or the name of a Hugging Face repository.

        Raises SettingError if it cannot be loaded or has no chat template.
        """
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError) as error:
            raise SettingError(f"--tokenizer={name} cannot be loaded: {error}") from error
        if not self._tokenizer.chat_template:
            raise SettingError(f"--tokenizer={name} has no chat template; give the one of an instruction-tuned model")

    def state(self) -> str:
        """Returns a digest of all that decides a count."""
        digest = blake2b(str(self._tokenizer.chat_template).encode(), digest_size=16)
        if self._tokenizer.is_fast:
            digest.update(self._tokenizer.backend_tokenizer.to_str().encode())
        else:
            # nothing is known of its rules, so that no other process may take its counts over
            digest.update(f"{os.getpid()} {os.times().elapsed}".encode())
        return digest.hexdigest()

    def count(self, conversations: Sequence[list[dict[str, str]]]) -> list[int]:
        """Returns the number of tokens of each conversation."""
        ids = self._tokenizer.apply_chat_template(
            list(conversations), add_generation_prompt=True, return_dict=False, tokenize=True
        )
        return [len(one) for one in ids]
