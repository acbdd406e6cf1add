import json

from integrations.arctic_rl.step_log import StepLog


def test_one_line_a_step_with_the_mini_batch_it_applied(tmp_path):
    log = StepLog(tmp_path / "logs" / "steps.jsonl")
    for index in range(3):
        log.mini_batch({"avg_loss": float(index), "metrics": {"pg_clipfrac": 0.5}}, num_tokens=7, num_rows=2)
        log.optimizer_step({"lr": 0.1 * index, "grad_norm": None})
    lines = [json.loads(line) for line in (tmp_path / "logs" / "steps.jsonl").read_text().splitlines()]
    assert [line["optimizer_step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == [0.0, 1.0, 2.0]
    assert lines[2] == {
        "optimizer_step": 3,
        "lr": 0.2,
        "grad_norm": None,
        "loss": 2.0,
        "num_tokens": 7,
        "num_rows": 2,
        "pg_clipfrac": 0.5,
    }
