"""Reading database_description folders."""

import pytest

from envs.bird.preprocess import descriptions
from envs.bird.preprocess.descriptions import decode, read_descriptions

HEADER = "original_column_name,column_name,column_description,data_format,value_description\n"


def read(tmp_path, raw: bytes, name: str = "T.csv"):
    (tmp_path / name).write_bytes(raw)
    return read_descriptions(tmp_path)


@pytest.mark.parametrize(
    "raw",
    [
        (HEADER + "id,,café “x”,,").encode("utf-8-sig"),
        (HEADER + "id,,café “x”,,").encode(),
        (HEADER + "id,,café “x”,,").encode("cp1252"),
        (HEADER + "id,,café “x”,,").encode("utf-16"),
        (HEADER.replace("\n", "\r\n") + "id ,,café “x”,,\r\n").encode("cp1252"),
        (HEADER.upper() + "\n\n ID,id,café  “x”.,, café “X” \n").encode(),
    ],
)
def test_encodings_and_small_differences(tmp_path, raw):
    found = read(tmp_path, raw)
    assert found.of("t ", "Id") == "café “x”"
    assert found.problems == []


def test_bytes_that_are_not_even_windows_1252_are_latin_1():
    assert decode(b"caf\xe9 \x81") == "café \x81"


def test_what_is_said_twice_is_told_once(tmp_path):
    rows = (
        'a,A,"the\nfirst ",int,"1: yes;\n0: no"\n'
        "b_c,b c,,,\n"
        "d,Dee,Dee,,dee\n"
        ",nobody,nothing,,\n"
        "a,again,again,,\n"
        "e\n"
        "f,eff,,,,,,extra\n"
    )
    found = read(tmp_path, (HEADER + rows).encode())
    assert found.tables["t"] == {"a": "the first; 1: yes; 0: no", "b_c": "", "d": "Dee", "e": "", "f": "eff"}
    assert found.problems == []


def test_missing_columns_but_the_first_are_blank(tmp_path):
    found = read(tmp_path, b"column_description,original_column_name\nlong,a\n")
    assert found.of("T", "a") == "long" and found.problems == []


@pytest.mark.parametrize(
    "raw, reason",
    [
        (b"", "empty"),
        (b"\n\n", "empty"),
        (b"name,description\na,b\n", "no column original_column_name; its columns are ['name', 'description']"),
        (b"\x00\x01\x02\xff", "no column original_column_name"),
        (HEADER.encode() + b'a,,"unclosed', "unexpected end of data"),
        (HEADER.encode() + b"a,," + b"x" * 200_000, "field larger than field limit"),
    ],
)
def test_a_file_that_cannot_be_used_is_reported(tmp_path, raw, reason):
    found = read(tmp_path, raw)
    (problem,) = found.problems
    assert problem[0] == "T.csv" and reason in problem[1]
    assert found.of("t", "a") == ""


def test_what_stands_before_the_damage_is_kept(tmp_path):
    found = read(tmp_path, HEADER.encode() + b'a,,good,,\nb,,"bad" quote,,\nc,,lost,,\n')
    assert found.tables["t"] == {"a": "good"}
    assert found.problems == [("T.csv", "line 3: ',' expected after '\"'; what follows is left out")]


def test_a_folder_that_cannot_be_listed_is_reported(tmp_path, monkeypatch):
    def refuse(folder):
        raise PermissionError(f"no entry: {folder.name}")

    monkeypatch.setattr(descriptions, "description_files", refuse)
    assert read_descriptions(tmp_path).problems == [(tmp_path.name, f"no entry: {tmp_path.name}")]


def test_only_csv_files_are_read(tmp_path):
    (tmp_path / "._T.csv").write_bytes(b"\x00\x05\x16\x07")
    (tmp_path / ".DS_Store").write_bytes(b"\x00")
    (tmp_path / "notes.txt").write_text("a")
    (tmp_path / "folder.csv").mkdir()
    found = read(tmp_path, HEADER.encode() + b"a,,x,,\n", name="T.CSV")
    assert found.of("t", "a") == "x"
    assert [name for name, _ in found.problems] == ["folder.csv"]
    assert read_descriptions(tmp_path / "nowhere").tables == {}
    assert read_descriptions(None).tables == {}
