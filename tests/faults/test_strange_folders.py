"""Results folders and checkpoints made by somebody else: nothing outside them is touched, and nothing in them is believed."""

import itertools
import json
import os
import shutil

import faulty
import numpy as np
import pretrained_models as models
import pytest

from qkgeom_jax import results, series_study
from qkgeom_jax.cli import grid
from qkgeom_jax.cli_checkpoints import checkpoints
from qkgeom_jax.cli_export import export

GROUP = f"groups/{faulty.GROUPS[1]}"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Drawing takes most of a command's time."""

    def save(figure, path):
        for kind in ("png", "pdf"):
            results.write_bytes(path.with_name(f"{path.name}.{kind}"), b"a drawing")

    monkeypatch.setattr("qkgeom_jax.figures.save", save)


def end(command, words, capsys):
    """A command's status and what it said; it raises nothing but SystemExit."""
    capsys.readouterr()
    try:
        status = command(words)
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    assert "Traceback" not in said.err and "\x1b" not in said.out + said.err and "\x07" not in said.out + said.err
    return status, said.out + said.err


def enough(*_):
    raise RuntimeError("it would train now")


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious.txt"
    path.write_text("mine")
    return path


@pytest.fixture
def copy(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "out", ignore=shutil.ignore_patterns("checkpoints", "*.png", "*.pdf"))
    shutil.rmtree(tmp_path / "out" / "groups" / faulty.GROUPS[0])
    return tmp_path / "out"


def reseal(path, **changes):
    path.write_text(json.dumps(results.seal(json.loads(path.read_text()) | changes)))


def believe(out):
    """Takes the digests away: then whatever stands in the files is believed."""
    for folder in (out, out / GROUP):
        reseal(folder / "manifest.json", digests={})


ELSEWHERE = ["../../../precious.txt", "PRECIOUS", "params/../../../../precious.txt", "linked/precious.txt"]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_manifest_that_names_files_elsewhere_moves_none(name, copy, corpus, precious, tmp_path, capsys, monkeypatch):
    """What a manifest says is damaged is moved to quarantine."""
    group = copy / GROUP
    (group / "checkpoints/8").mkdir(parents=True)
    (group / "linked").symlink_to(tmp_path)
    reseal(group / "manifest.json", digests={name.replace("PRECIOUS", str(precious)): "0" * 64})
    status, said = end(grid, ["--verify", str(copy)], capsys)
    assert status == 1 and "manifest.json is damaged: its digests are not of files beside it" in said
    monkeypatch.setattr("qkgeom_jax.study._run_group", enough)
    end(grid, faulty.arguments(corpus, copy, inits="independent"), capsys)
    assert precious.read_text() == "mine"


def test_a_linked_folder_of_tables_is_refused(copy, tmp_path, capsys):
    believe(copy)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/table3.csv").write_text("mine")
    shutil.rmtree(copy / "tables")
    (copy / "tables").symlink_to(tmp_path / "elsewhere")
    status, said = end(grid, ["--figures", f"--out={copy}"], capsys)
    assert status == 2 and f"{copy / 'tables'} is a link" in said
    assert (tmp_path / "elsewhere/table3.csv").read_text() == "mine" and len(list((tmp_path / "elsewhere").iterdir())) == 1


NESTED = json.loads("[" * 600 + "]" * 600)
HOSTILE = (None, -1, 1e999, 10**400, NESTED, "x\x1b[31m\n\x07", "../../x", [], {}, [[]], {"a": {}}, True)
MISSING = object()


def places(value, path=()):
    """Every node of a JSON value; of a list the first."""
    yield path
    for key in value if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def put(value, path, new):
    """`value` with another node at `path`, or without it."""
    if not path:
        return new
    value = value.copy()
    if len(path) == 1 and new is MISSING:
        del value[path[0]]
    else:
        value[path[0]] = put(value[path[0]], path[1:], new)
    return value


def hostile_versions(path, stride):
    """The JSON file with something else at each of its nodes, sealed again where it was; every `stride`-th of them."""
    value = json.loads(path.read_text())
    sealed = "sha256" in value and results.seal(value) == value
    cases = itertools.product((place for place in places(value) if place), (*HOSTILE, MISSING))
    for place, new in itertools.islice(cases, 0, None, stride):
        changed = put(value, place, new)
        if sealed:
            try:
                changed = results.seal(changed)
            except ValueError:  # JSON has no infinity
                continue
        yield place, new, json.dumps(changed)


def try_versions(path, stride, commands, capsys):
    tried, whole = 0, path.read_text()
    for place, new, text in hostile_versions(path, stride):
        path.write_text(text)
        for command, words in commands:
            status, said = end(command, words, capsys)
            assert status in (0, 1, 2), (place, new, words, status, said)
            tried += 1
    path.write_text(whole)
    return tried


JSON_FILES = ["config.json", "manifest.json", f"{GROUP}/config.json", f"{GROUP}/status.json", f"{GROUP}/manifest.json"]


def check_study(name, copy, corpus, tmp_path, capsys, monkeypatch, stride):
    if not name.endswith("manifest.json"):
        believe(copy)
    monkeypatch.setattr("qkgeom_jax.study._run_group", enough)
    commands = [
        (grid, ["--status", f"--out={copy}"]), (grid, ["--verify", str(copy)]), (grid, ["--figures", f"--out={copy}"]),
        (export, [str(copy), f"--to={tmp_path / 'exported'}"]),
        (grid, faulty.arguments(corpus, copy, inits="independent")),
    ]  # fmt: skip
    return try_versions(copy / name, stride, commands, capsys)


@pytest.mark.parametrize("name", JSON_FILES)
def test_any_value_may_be_of_another_kind(name, copy, corpus, tmp_path, capsys, monkeypatch):
    assert check_study(name, copy, corpus, tmp_path, capsys, monkeypatch, stride=89)


@pytest.mark.faults
@pytest.mark.parametrize("name", JSON_FILES)
def test_every_value_may_be_of_another_kind(name, copy, corpus, tmp_path, capsys, monkeypatch):
    assert check_study(name, copy, corpus, tmp_path, capsys, monkeypatch, stride=1)


def record():
    """A revision as it is written."""
    rows = ({name: 1.0 for name in series_study.LAYER_COLUMNS},)
    made = series_study.Record(
        "run", "/run", "step1", "own gpt2", status="done", weights_sha256="0" * 64, tokens=60, context=20, loss=4.0,
        rows=rows, seconds={"fetch": 0.1, "measure": 0.2}, reading=("a note",),
    )  # fmt: skip
    prints = {"layers.0.query": np.arange(66.0)}
    return made, {"participation_ratio_q": np.zeros((1, 2), np.float32)}, prints


@pytest.fixture
def measured(tmp_path):
    out = tmp_path / "measured"
    results.write_json(out / "config.json", {
        "command": "checkpoints", "series": {},
        "measured_on": {"kind": "token ids", "name": "ids.npy", "sha256": "0" * 64, "tokens": 60, "context": 20},
    })  # fmt: skip
    series_study.write_record(out, *record())
    assert checkpoints(["--figures", f"--out={out}"]) == 0
    return out


@pytest.mark.parametrize("name", ["config.json", "manifest.json", "revisions/run/step1.json"])
def test_any_value_of_a_measured_series_may_be_of_another_kind(name, measured, capsys):
    commands = [(checkpoints, ["--verify", str(measured)]), (checkpoints, ["--figures", f"--out={measured}"])]
    assert try_versions(measured / name, 7, commands, capsys)


def test_fingerprints_of_another_kind_are_refused(measured, capsys):
    made, heads, _ = record()
    for prints in (np.zeros((2, 2)), np.zeros(66, "U3"), np.zeros(1), np.zeros(66, "M8[s]")):
        series_study.write_record(measured, made, heads, {"layers.0.query": prints})
        status, said = end(checkpoints, ["--figures", f"--out={measured}"], capsys)
        assert status == 2 and "step1.json is no record of a revision" in said


@pytest.mark.parametrize("text", ["log:²", "log:" + "9" * 5000, "²", "1.." + "9" * 5000, "9" * 5000])
def test_numbers_that_are_none_in_a_selection(text, tmp_path, capsys):
    models.make(tmp_path / "run" / "step1", "gpt2")
    np.save(tmp_path / "ids.npy", models.ids())
    given = [f"--model={tmp_path / 'run'}", f"--token-ids={tmp_path / 'ids.npy'}", f"--out={tmp_path / 'out'}", "--plan"]
    status, said = end(checkpoints, [*given, f"--revisions={text}"], capsys)
    assert status in (1, 2) and "invalid" not in said and said.count("\n") <= 4


def pipe(path):
    """A named pipe that nobody writes to in the place of a file: whoever opens it waits for ever."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["config.json", f"{GROUP}/config.json", f"{GROUP}/status.json", f"{GROUP}/metrics.csv"])
def test_a_pipe_in_a_results_folder_is_not_waited_for(name, copy, capsys):
    believe(copy)
    pipe(copy / name)
    status, said = end(grid, ["--figures", f"--out={copy}"], capsys)
    assert status == 2 and "no regular file" in said


def test_a_table_with_numbers_beyond_64_bits_or_endless_columns(copy, capsys):
    path = copy / GROUP / "metrics.csv"
    text = path.read_text()
    believe(copy)
    for changed in (
        text.replace("\n3,0,", f"\n{'9' * 30},0,", 1),
        text.replace("\n3,0,", f"\n{'9' * 5000},0,", 1),
        ",".join(f"c{n}" for n in range(10**5)) + "\n",
        "seed," * 10**5 + "\n",
    ):
        assert changed != text
        path.write_text(changed)
        status, said = end(grid, ["--figures", f"--out={copy}"], capsys)
        assert status == 2 and "metrics.csv" in said and len(said) < 600
