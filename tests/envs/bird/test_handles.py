import os
import sqlite3
import threading
from pathlib import Path

import pytest

from envs.bird import execute
from envs.bird.database import PendingChangesError
from envs.bird.execute import DatabaseChangedError, ExecutionLimits, run_query
from envs.bird.handles import HANDLES, HandleCache, file_identity
from envs.bird.outcome import Outcome

LIMITS = ExecutionLimits(timeout_s=10.0, max_kept_rows=10)


def write_database(path, value):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE t(a)")
    connection.execute("INSERT INTO t VALUES (?)", (value,))
    connection.commit()
    connection.close()


@pytest.fixture
def opened(monkeypatch):
    """The paths that were really opened."""
    from envs.bird import handles

    paths = []

    def counting(db_path):
        paths.append(db_path)
        return open_read_only(db_path)

    open_read_only = handles.open_read_only
    monkeypatch.setattr(handles, "open_read_only", counting)
    return paths


def test_queries_share_one_connection_and_failures_get_a_new_one(shop_db, opened):
    for _ in range(5):
        assert run_query(shop_db, "SELECT 1", LIMITS).outcome is Outcome.OK
    assert len(opened) == 1 and len(HANDLES) == 1
    for sql in ("SELECT nothing FROM t", "SELECT load_extension('x')"):
        run_query(shop_db, sql, LIMITS)
        assert len(HANDLES) == 0
        run_query(shop_db, "SELECT 1", LIMITS)
    assert len(opened) == 3


def test_connections_are_bounded_least_recently_used_first(tmp_path, opened):
    handles = HandleCache(max_idle=2)
    for name in ("a", "b", "c"):
        write_database(tmp_path / name, name)
    for name in ("a", "b", "a", "c", "a", "b"):
        with handles.borrow(tmp_path / name) as handle:
            assert handle.connection.execute("SELECT a FROM t").fetchone() == (name,)
            handle.reusable = True
    assert [path.name for path in opened] == ["a", "b", "c", "b"]
    assert len(handles) == 2
    handles.clear()
    assert len(handles) == 0


def test_two_borrowers_at_a_time_have_two_connections(shop_db):
    handles = HandleCache()
    with handles.borrow(shop_db) as one, handles.borrow(shop_db) as other:
        assert one.connection is not other.connection
        one.reusable = other.reusable = True
    assert len(handles) == 2


def test_a_replaced_file_is_opened_anew_and_its_old_connection_closed(tmp_path, opened):
    path = tmp_path / "d.sqlite"
    write_database(path, "one")
    assert run_query(path, "SELECT a FROM t", LIMITS).rows == (("one",),)
    write_database(tmp_path / "new", "two")
    os.replace(tmp_path / "new", path)
    assert run_query(path, "SELECT a FROM t", LIMITS).rows == (("two",),)
    assert len(opened) == 2 and len(HANDLES) == 1


def test_a_file_written_to_in_place_is_read_anew(tmp_path):
    path = tmp_path / "d.sqlite"
    write_database(path, "one")
    assert run_query(path, "SELECT a FROM t", LIMITS).rows == (("one",),)
    before = file_identity(path)
    status = path.stat()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE t SET a = 'two'")
    connection.commit()
    connection.close()
    # Same size, and a modification time set back: the time of the last status change still tells.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size and file_identity(path) != before
    assert run_query(path, "SELECT a FROM t", LIMITS).rows == (("two",),)


def test_changes_that_wait_in_a_log_are_seen_on_an_open_connection_too(tmp_path):
    path = tmp_path / "d.sqlite"
    write_database(path, "one")
    assert run_query(path, "SELECT a FROM t", LIMITS).outcome is Outcome.OK
    assert len(HANDLES) == 1
    writer = sqlite3.connect(path)
    writer.execute("PRAGMA journal_mode = WAL")
    writer.execute("UPDATE t SET a = 'two'")
    writer.commit()
    with pytest.raises(PendingChangesError, match="changes waiting"):
        run_query(path, "SELECT a FROM t", LIMITS)
    writer.close()


def test_a_file_that_changes_during_a_query_gives_no_result(tmp_path, monkeypatch):
    path = tmp_path / "d.sqlite"
    write_database(path, "one")
    expected = file_identity(path)
    assert run_query(path, "SELECT a FROM t", LIMITS, expected=expected).outcome is Outcome.OK

    def release(connection):
        write_database(tmp_path / "new", "two")
        os.replace(tmp_path / "new", path)
        return kept(connection)

    kept = execute._release
    monkeypatch.setattr(execute, "_release", release)
    with pytest.raises(DatabaseChangedError, match="during a query"):
        run_query(path, "SELECT a FROM t", LIMITS)
    monkeypatch.undo()
    assert len(HANDLES) == 0
    with pytest.raises(DatabaseChangedError, match="replaced"):
        run_query(path, "SELECT a FROM t", LIMITS, expected=expected)


def settings_of(path):
    with HANDLES.borrow(path) as handle:
        connection = handle.connection
        handle.reusable = True
        pragmas = (
            "cache_size",
            "case_sensitive_like",
            "query_only",
            "temp_store",
            "automatic_index",
            "trusted_schema",
        )
        values = [connection.execute(f"PRAGMA {name}").fetchall() for name in pragmas]
        limits = [connection.getlimit(number) for number in range(11)]
        return values, limits, connection.total_changes, connection.in_transaction


LEAVERS = [
    "SELECT * FROM t a, t b LIMIT 3",
    "SELECT zeroblob(90000000)",
    "SELECT value FROM json_each('[1, 2]')",
    "SELECT name FROM pragma_table_info('t')",
    "PRAGMA encoding",
    "PRAGMA table_info(t)",
    "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 50000) SELECT count(*) FROM c",
    "SELECT x FROM t ORDER BY random() LIMIT 1",
    "EXPLAIN SELECT 1",
    "SELECT 1 WHERE 0",
]


def test_no_query_leaves_anything_on_its_connection(shop_db):
    """What one query does must not show in the next: same settings, no transaction, no open statement, same rows."""
    check = "SELECT count(*), total_changes(), last_insert_rowid() FROM t"
    run_query(shop_db, check, LIMITS)
    before, rows = settings_of(shop_db), run_query(shop_db, check, LIMITS).rows
    for sql in LEAVERS:
        assert run_query(shop_db, sql, LIMITS).outcome is Outcome.OK, sql
        assert settings_of(shop_db) == before, sql
        assert run_query(shop_db, "SELECT 1 FROM sqlite_stmt", LIMITS).outcome is not Outcome.OK
        assert run_query(shop_db, check, LIMITS).rows == rows
    with HANDLES.borrow(shop_db) as handle:
        if handle.connection.execute("SELECT sqlite_compileoption_used('ENABLE_STMTVTAB')").fetchone() == (1,):
            # itself
            assert handle.connection.execute("SELECT count(*) FROM sqlite_stmt").fetchone() == (1,)


def test_a_virtual_table_connected_for_one_query_opens_nothing_to_the_next(shop_db):
    assert run_query(shop_db, "SELECT name FROM pragma_table_info('t')", LIMITS).outcome is Outcome.OK
    for sql in ("SELECT * FROM pragma_database_list", "SELECT * FROM pragma_function_list", "SELECT * FROM dbstat"):
        assert run_query(shop_db, sql, LIMITS).outcome is not Outcome.OK, sql
    assert len(HANDLES) == 0


def test_threads_do_not_share_a_connection_at_a_time(shop_db):
    failures = []

    def work(number):
        try:
            for i in range(30):
                rows = run_query(shop_db, f"SELECT id FROM t WHERE id % 97 = {i} AND {number} > 0", LIMITS).rows
                assert rows[0] == (i,)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == [] and 1 <= len(HANDLES) <= 4


@pytest.mark.slow
def test_memory_of_a_query_is_given_back(shop_db):
    """SQLite's heap is shared by all queries of a process: what one leaves there, the next ones lack."""

    def heap_bytes():
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return int(next(line for line in status.splitlines() if line.startswith("VmData")).split()[1])

    run_query(shop_db, "SELECT count(*) FROM t", LIMITS)
    before = heap_bytes()
    for _ in range(3):
        run_query(shop_db, "SELECT a.x, b.x FROM t a, t b WHERE a.id < 20 ORDER BY b.x, a.x", LIMITS)
    assert heap_bytes() - before < 40_000
