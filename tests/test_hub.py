"""Revisions from a hand-written cache, from a hub on this machine, and from folders."""

import sys

import fake_pretrained
import hub_cache
import pytest

from qkgeom_jax.hub import HubRepository, LocalFolder, RevisionError, require_hub
from qkgeom_jax.series import CATALOGUE, Series, own_series

OWN = Series("tiny", "someone/tiny")
FILES = {"config.json": b"{}", "model.safetensors": b"12345678", "tokenizer.json": b"{}", "README.md": b"x" * 50}


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    fake_pretrained.install(monkeypatch)


@pytest.fixture
def hub(monkeypatch):
    """The client, as without HF_HUB_OFFLINE."""
    client = pytest.importorskip("huggingface_hub", reason="the extra `checkpoints` is not installed")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return client


@pytest.fixture
def online(monkeypatch, hub, tmp_path):
    """A repository of a hub on this machine, asked by the real client."""

    def use(url, series=OWN):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        source = HubRepository(series, tmp_path / "cache")
        return source

    return use


def test_a_hand_written_cache_is_read_offline(hub, tmp_path):
    for step in (0, 1000):
        folder = hub_cache.write_revision(tmp_path, OWN.source, f"step{step}", FILES)
    source = HubRepository(OWN, tmp_path, offline=True)
    assert sorted(source.revisions()) == ["step0", "step1000"]
    located = source.locate("step1000")
    assert located.path == folder and located.commit == hub_cache.commit(OWN.source, "step1000")
    assert (located.path / "model.safetensors").read_bytes() == b"12345678"
    planned = source.plan("step1000")
    assert planned.bytes == planned.here == sum(map(len, FILES.values()))
    with pytest.raises(RevisionError, match="someone/tiny at step7: not in the cache"):
        source.locate("step7")
    with pytest.raises(RevisionError, match="nothing of it is in the cache"):
        HubRepository(Series("other", "someone/other"), tmp_path, offline=True).revisions()


def test_offline_a_series_has_the_revisions_that_the_cache_has(hub, tmp_path):
    series = CATALOGUE["pythia-70m"]
    for revision in ("main", "step0", "step512"):
        hub_cache.write_revision(tmp_path, series.source, revision, FILES)
    assert sorted(HubRepository(series, tmp_path, offline=True).revisions()) == ["step0", "step512"]
    assert len(HubRepository(series, tmp_path).revisions()) == 154


def test_a_catalogue_series_without_known_steps_lists_its_own_pattern_alone(hub, tmp_path):
    series = CATALOGUE["smollm2-135m"]
    for revision in ("main", "step-240000", "step-480000", "step-old"):
        hub_cache.write_revision(tmp_path, series.source, revision, FILES)
    assert sorted(HubRepository(series, tmp_path, offline=True).revisions()) == ["step-240000", "step-480000"]


def test_only_what_is_needed_is_downloaded_and_the_commit_is_known(online, tmp_path):
    with hub_cache.serving({OWN.source: {"step1000": FILES, "main": FILES}}) as (server, url):
        source = online(url)
        assert sorted(source.revisions()) == ["main", "step1000"]
        planned = source.plan("step1000")
        assert planned.bytes == 12 and planned.here == 0 and not (tmp_path / "cache").exists()
        located = source.locate("step1000")
        assert located.commit == hub_cache.commit(OWN.source, "step1000")
        assert sorted(path.name for path in located.path.iterdir()) == [
            "config.json",
            "model.safetensors",
            "tokenizer.json",
        ]
        assert source.plan("step1000").here == 12
        assert not any("README" in path for path in server.asked)
    # What was downloaded serves offline, under the revision's name.
    assert HubRepository(OWN, tmp_path / "cache", offline=True).locate("step1000") == located


@pytest.mark.parametrize(
    "files, message",
    [
        ({OWN.source: {"step1": FILES}}, r"someone/tiny at step9: there is no such revision \(HTTP 404\)"),
        ({}, r"someone/tiny at step9: there is no such repository, or it is private \(HTTP 401\); set HF_TOKEN"),
        ({OWN.source: 403}, r"access is restricted \(HTTP 403\)"),
        ({OWN.source: {"step9": {"config.json": b"{}"}}}, "someone/tiny at step9: it has no weights"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_sentence(online, files, message):
    with hub_cache.serving(files) as (_, url), pytest.raises(RevisionError, match=message) as caught:
        online(url).locate("step9")
    assert "\n" not in str(caught.value)


def test_a_busy_hub_is_told_from_a_missing_one(online):
    with hub_cache.serving({OWN.source: 429}) as (_, url), pytest.raises(RevisionError, match="HTTP 429.*again later"):
        online(url).locate("step9")


def test_a_network_that_is_not_there_is_a_failure_of_the_revision(online):
    with hub_cache.serving({}) as (_, url):
        pass
    with pytest.raises(RevisionError, match="someone/tiny at step9: the hub cannot be reached .*--offline"):
        online(url).locate("step9")


@pytest.mark.slow  # the client tries again, and waits in between
def test_a_cut_download_leaves_no_file_behind(online, tmp_path):
    files = {**FILES, "model.safetensors": b"w" * 5000}
    with hub_cache.serving({OWN.source: {"step1": files}}, cut=["model.safetensors"]) as (server, url):
        source = online(url)
        with pytest.raises(RevisionError, match="someone/tiny at step1"):
            source.locate("step1")
        assert not list((tmp_path / "cache").rglob("snapshots/*/model.safetensors"))
        server.cut.clear()
        assert (source.locate("step1").path / "model.safetensors").read_bytes() == b"w" * 5000


def test_the_tokenizer_of_another_repository_is_fetched(online, hub):
    tokenizers = pytest.importorskip("tokenizers", reason="the extra `checkpoints` is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    series = Series("tiny", "someone/tiny", tokenizer="someone/words")
    with hub_cache.serving({"someone/words": {"main": {"tokenizer.json": words.to_str().encode()}}}) as (_, url):
        assert online(url, series).tokenizer().encode("a").ids == [0]
        assert online(url).tokenizer() is None


def test_without_the_client_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        RevisionError, match=r"need the package huggingface_hub: pip install 'qkgeom_jax\[checkpoints\]'"
    ):
        require_hub()


def test_a_folder_is_one_checkpoint_or_one_in_each_subfolder(tmp_path):
    for name in ("step1", "step2", "notes"):
        (tmp_path / name).mkdir()
    for name in ("step1", "step2"):
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    source = LocalFolder(own_series(str(tmp_path)))
    assert source.revisions() == ["model.gguf", "step1", "step2"]
    assert source.locate("step2").path == tmp_path / "step2" and source.plan("step2").bytes == 2
    alone = LocalFolder(own_series(str(tmp_path / "step1")))
    assert alone.revisions() == ["step1"] and alone.locate("step1").path == tmp_path / "step1"
    file = LocalFolder(own_series(str(tmp_path / "model.gguf")))
    assert file.revisions() == ["model.gguf"] and file.locate("model.gguf").path == tmp_path / "model.gguf"
    for wrong in ("step3", "..", "step1/config.json", "notes/../step1"):
        with pytest.raises(RevisionError, match="has no subfolder"):
            source.locate(wrong)
    with pytest.raises(RevisionError, match="is no checkpoint"):
        LocalFolder(own_series(str(tmp_path / "notes"))).revisions()
