"""Dropping the questions whose prompt is too long."""

from itertools import batched

from .problems import ProblemKind
from .rows import prompt_of
from .run import Run
from .tokens import TokenCounter
from .workspace import code_state, job_key

_PROMPTS_PER_BATCH = 64


def drop_long(run: Run, texts: dict[str, str], counter: TokenCounter, max_tokens: int) -> None:
    """Drops the questions whose prompt has more than `max_tokens` tokens; `texts` shows each database, by path."""
    journal = run.work.journal("tokens")
    code, state = code_state(), counter.state()
    databases = {path: job_key(code, state, text) for path, text in texts.items()}
    keys = {
        question: job_key(databases[question.db_path], question.question, question.evidence)
        for question in run.questions
    }
    todo = [question for question in run.questions if keys[question] not in journal]
    bar = run.bar(len(keys), len(keys) - len(todo), "prompts counted")
    for batch in batched(todo, _PROMPTS_PER_BATCH):
        counts = counter.count([prompt_of(question, texts[question.db_path]) for question in batch])
        for question, count in zip(batch, counts, strict=True):
            journal.put(keys[question], count)
        bar.update(len(batch))
    bar.close()
    reason = f"the prompts have more than {max_tokens} tokens"
    run.drop(
        ProblemKind.PROMPT_TOO_LONG,
        lambda question: (question.db_id, reason) if journal[keys[question]] > max_tokens else None,
    )
