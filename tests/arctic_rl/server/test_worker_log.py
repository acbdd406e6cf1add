"""A worker's two logs, written by a process of its own."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta

WORKER = """
import ctypes, logging, os, sys
from integrations.arctic_rl.server.worker_log import open_worker_log

for _ in range(2):
    open_worker_log(sys.argv[1])
ours, other = logging.getLogger("integrations.arctic_rl.server.x"), logging.getLogger("a_library")
ours.info("weights of version %d", 3)
other.info("chatter")
try:
    1 / 0
except ZeroDivisionError:
    other.warning("odd", exc_info=True)
print("printed", flush=True)
os.system("echo of a child >&2")
ctypes.CDLL(None).write(2, b"native line\\n", 12)
"""


def test_records_are_json_lines_and_everything_printed_is_kept(tmp_path):
    log = tmp_path / "workers" / "policy-0.log"
    process = subprocess.run([sys.executable, "-c", WORKER, str(log)], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    lines = [json.loads(line) for line in log.with_suffix(".jsonl").read_text().splitlines()]
    assert [line["message"].split()[0] for line in lines] == ["process", "process", "weights", "odd"]
    told = lines[2]
    assert datetime.now(UTC) - datetime.fromisoformat(told.pop("time")) < timedelta(minutes=5)
    assert told.pop("process_id") > 0
    assert told == {
        "level": "info",
        "worker": "policy-0",
        "logger": "integrations.arctic_rl.server.x",
        "message": "weights of version 3",
    }
    assert lines[3]["level"] == "warning" and "ZeroDivisionError" in lines[3]["error"]
    printed = log.read_text()
    assert (
        all(line in printed for line in ("odd", "printed", "of a child", "native line")) and "chatter" not in printed
    )
