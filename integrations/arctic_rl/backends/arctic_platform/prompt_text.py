"""Prompts as text that a server's tokenizer turns into the very tokens again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ArcticError, ConfigError, UnsupportedError

__all__ = ["PromptTexts", "check_prompt_seen", "check_prompts"]

_KEPT = 4096
"""Most texts that are remembered: the rollouts of a prompt ask for the same one."""


class PromptTexts:
    """Texts of token ids.

    The server's engine tokenizes a text as ``tokenizer(text)`` does, special tokens of its own added.

    Args:
        tokenizer: the model's, from the folder that the server loads.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._added = list(tokenizer("").input_ids)
        self._texts: dict[tuple[int, ...], str] = {}

    def text(self, token_ids: Sequence[int]) -> str:
        """A text whose tokens are ``token_ids``.

        Raises:
            UnsupportedError: neither the decoded ids nor what is behind the tokenizer's own first tokens is one.
        """
        key = tuple(token_ids)
        if key not in self._texts:
            if len(self._texts) >= _KEPT:
                self._texts.clear()
            self._texts[key] = self._find(list(key))
        return self._texts[key]

    def _find(self, token_ids: list[int]) -> str:
        number = len(self._added)
        tails = [token_ids[number:]] if number and token_ids[:number] == self._added else []
        for tail in [*tails, token_ids]:
            text = self._tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if list(self._tokenizer(text).input_ids) == token_ids:
                return text
        raise UnsupportedError(
            f"trainer.arctic_rl.backend='arctic-platform': its sampling call takes a prompt as text, and the text "
            f"of this prompt has other tokens than its {len(token_ids)} ids ({_shown(token_ids)}): write another "
            "prompt, or trainer.arctic_rl.backend=builtin"
        )


def check_prompts(
    dataset: Any, tokenizer: Any, *, chat_template_kwargs: Mapping[str, Any] | None, setting: str
) -> None:
    """Look for the text of every prompt of a data set, before a run starts; an environment may still change one.

    Args:
        dataset: SkyRL's ``PromptDataset``.
        tokenizer: the model's.
        chat_template_kwargs: with which rollouts make their prompts.
        setting: of the data's files.

    Raises:
        ConfigError: prompts have none, the first ten, a line each.
    """
    texts, problems = PromptTexts(tokenizer), []
    kwargs = {} if chat_template_kwargs is None else chat_template_kwargs
    for number, messages in enumerate(dataset.dataframe[dataset.prompt_key]):
        token_ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False, tokenize=True, **kwargs
        )
        try:
            texts.text(token_ids)
        except UnsupportedError as error:
            problems.append(f"{setting}, row {number}: {error}")
            if len(problems) == 10:
                break
    if problems:
        raise ConfigError("\n".join(problems))


def check_prompt_seen(token_ids: Sequence[int], answer: Mapping[str, Any], *, whole: bool) -> None:
    """Compare the prompt that an engine saw with the one that was meant.

    Args:
        token_ids: the prompt.
        answer: the server's, with ``prompt_len`` in newer releases.
        whole: whether ``prompt_logprobs`` was asked for, which name every token but the first.

    Raises:
        ArcticError: it was another prompt, or the answer does not tell.
    """
    number = answer.get("prompt_len")
    if number is not None and number != len(token_ids):
        raise _other_prompt(f"{number} tokens", f"{len(token_ids)}")
    if not whole:
        return
    positions = answer.get("prompt_logprobs")
    if not positions:
        raise ArcticError(
            "arctic-platform's server returns no prompt_logprobs, which were asked for to see that it tokenizes "
            "prompts as the recipe does: serve with a release of arctic-inference that returns them"
        )
    seen = [int(next(iter(position))) for position in positions[1:]]
    if seen != list(token_ids[1:]):
        raise _other_prompt(_shown(seen), _shown(token_ids[1:]))


def _other_prompt(seen: str, meant: str) -> ArcticError:
    return ArcticError(
        f"the server's engine saw another prompt than the recipe's: {seen} for {meant}. Its tokenizer is another one: "
        "let the server load trainer.policy.model.path as it is here"
    )


def _shown(token_ids: Sequence[int]) -> str:
    first = ", ".join(map(str, token_ids[:12]))
    return f"{first}, ..." if len(token_ids) > 12 else first
